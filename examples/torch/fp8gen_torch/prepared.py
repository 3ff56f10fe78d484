"""C calls prepared once: an args struct and the structs that it points to, in one piece of memory.

    layout = Layout(abi.FpropArgs, x=abi.Tensor, y=abi.Tensor)
    words, pointer = layout.make(x=abi.Tensor(...), y=abi.Tensor(...))
    words[layout.word("x", "data")] = x.data_ptr()
    function(handle, pointer)

Not obvious: setting a dozen fields through ctypes costs the host more than a launch does, and in
the threads of autograd, where everything is cold, twice that. So what does not change is written
once, pointers between the structs included, and what does is stored as a 64-bit word of an array.
"""

import array
import ctypes


class Layout:
    """Where the structs of a call lie, one behind the other; all of them are whole words."""

    def __init__(self, args, **parts):
        self.args, self.parts, self.starts = args, parts, {}
        self.size = ctypes.sizeof(args)
        for name, kind in parts.items():
            self.starts[name] = self.size
            self.size += ctypes.sizeof(kind)
        self.call = args.call.offset // 8  # workspace, its bytes, stream, flags, state

    def word(self, part, field):
        """Index of a field of 8 bytes."""
        return (self.starts[part] + getattr(self.parts[part], field).offset) // 8

    def make(self, values, **parts):
        """(words, what ctypes passes) of a call. values: of the args struct's own fields; parts:
        the structs; None: not given."""
        words = array.array("Q", bytes(self.size))
        address = words.buffer_info()[0]
        args = self.args.from_buffer(words)
        args.size = ctypes.sizeof(self.args)
        for field, value in values.items():
            setattr(args, field, value)
        for name, part in parts.items():
            if part is not None:
                start = self.starts[name]
                ctypes.memmove(address + start, ctypes.addressof(part), ctypes.sizeof(part))
                setattr(args, name, address + start)
        return words, ctypes.byref(args)
