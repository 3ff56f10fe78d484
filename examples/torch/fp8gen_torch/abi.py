"""The C ABI of libfp8 and libfp8gen as ctypes: structs, prototypes, the two libraries, errors.

Knows nothing of torch but where its packages lie (to find the NVRTC that came with it). The structs
mirror runtime/fp8.h, fp8_jit.h, fp8_primitives.h and fp8_model.h field by field; tests/torch
compares every size and offset with what a C compiler says. The libraries are looked for in
FP8GEN_LIBRARY_DIR, in build/lib of the tree that this file lies in, and then where the loader
looks.

Not obvious: the pointers inside structs are plain addresses (ctypes.addressof), a fifth of the cost
of ctypes.pointer. Whoever fills one keeps what it points to until the call returns.
"""

import ctypes
import glob
import os
import sys
from ctypes import POINTER, c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32
from ctypes import c_uint64, c_void_p

NONE, E4M3, E5M2, BF16, FP32, UINT32, UINT8, FP16 = range(8)  # fp8_dtype
ROLE_X, ROLE_W, ROLE_DY = 1, 2, 3
ROW, TRANSPOSED, BOTH = 1, 2, 3  # FP8_COPY_*
BY_TENSOR, BY_ROW, BY_BLOCK, BY_TILE, NO_COPY = range(5)  # fp8_scaling
DEFAULT, ON, OFF = range(3)  # fp8_switch
CALL_EVALUATE = 1
PASS_WEIGHT, PASS_FPROP, PASS_QUANTIZE_DY, PASS_WGRAD, PASS_DGRAD = range(5)
BYTES_WORKSPACE = 0
HOST = -1


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("ld", c_int64),
        ("dtype", c_int),
        ("reserved", c_uint32),
    ]


class Operand(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("role", c_int),
        ("data", c_void_p),
        ("bytes", c_size_t),
        ("dtype", c_int),
        ("copies", c_uint32),
        ("row_scaling", c_int),
        ("transposed_scaling", c_int),
        ("rows", c_int64),
        ("cols", c_int64),
        ("version", c_uint64),
        ("evaluated", c_uint64),
        ("scales", c_void_p),
        ("reserved", c_uint64 * 2),
    ]


class OperandView(ctypes.Structure):
    _fields_ = [
        ("scales", c_void_p),
        ("row", c_void_p),
        ("row_ld", c_int64),
        ("transposed", c_void_p),
        ("transposed_ld", c_int64),
        ("row_scales", c_void_p),
        ("row_scales_ld", c_int64),
        ("transposed_scales", c_void_p),
        ("transposed_scales_ld", c_int64),
    ]


LOG_CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class ContextOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("device", c_int32),
        ("max_sms", c_int32),
        ("threads", c_int32),
        ("log", LOG_CALLBACK),
        ("log_user", c_void_p),
        ("log_levels", c_uint32),
        ("reserved0", c_uint32),
        ("reserved", c_uint64 * 4),
    ]


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("device", c_int32),
        ("sms", c_int32),
        ("arch", c_int32),
        ("driver_version", c_int32),
        ("is_stuck", c_int32),
        ("cublaslt_version", c_uint64),
        ("memory_bytes", c_uint64),
        ("name", c_char * 128),
        ("reserved", c_uint64 * 4),
    ]


class LayerInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("has_bias", c_uint32),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("tokens", c_int64),
        ("max_tokens", c_int64),
        ("x_dtype", c_int),
        ("w_dtype", c_int),
        ("y_dtype", c_int),
        ("dy_dtype", c_int),
        ("dx_dtype", c_int),
        ("dw_dtype", c_int),
        ("bias_dtype", c_int),
        ("dbias_dtype", c_int),
        ("x_format", c_int),
        ("w_format", c_int),
        ("dy_format", c_int),
        ("reserved0", c_uint32),
        ("name", c_char_p),
        ("recipe", c_char_p),
        ("reserved", c_uint64 * 4),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("stream", c_void_p),
        ("max_sms", c_int32),
        ("flags", c_uint32),
        ("state", c_void_p),
        ("state_layer", c_int32),
        ("reserved", c_uint32),
    ]


class FpropArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("reserved0", c_uint32),
        ("x", c_void_p),
        ("x_quantized", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("saved", c_void_p),
        ("found_inf", c_void_p),
        ("w", c_void_p),
        ("call", Call),
        ("reserved", c_uint64 * 4),
    ]


class QuantizeDyArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("copies", c_uint32),
        ("dy", c_void_p),
        ("saved", c_void_p),
        ("grad", c_void_p),
        ("dbias", c_void_p),
        ("accumulate_dbias", c_uint32),
        ("reserved0", c_uint32),
        ("found_inf", c_void_p),
        ("call", Call),
        ("reserved", c_uint64 * 4),
    ]


class WgradArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("accumulate", c_uint32),
        ("saved", c_void_p),
        ("grad", c_void_p),
        ("dw", c_void_p),
        ("x", c_void_p),
        ("dy", c_void_p),
        ("call", Call),
        ("reserved", c_uint64 * 4),
    ]


class DgradArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("stale_ok", c_uint32),
        ("grad", c_void_p),
        ("weight", c_void_p),
        ("dx", c_void_p),
        ("dy", c_void_p),
        ("w", c_void_p),
        ("call", Call),
        ("reserved", c_uint64 * 4),
    ]


class BackwardArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("accumulate_dw", c_uint32),
        ("accumulate_dbias", c_uint32),
        ("stale_ok", c_uint32),
        ("dy", c_void_p),
        ("saved", c_void_p),
        ("weight", c_void_p),
        ("grad", c_void_p),
        ("dbias", c_void_p),
        ("dw", c_void_p),
        ("dx", c_void_p),
        ("found_inf", c_void_p),
        ("x", c_void_p),
        ("w", c_void_p),
        ("call", Call),
        ("reserved", c_uint64 * 4),
    ]


class QuantizeArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("role", c_int),
        ("copies", c_uint32),
        ("reserved0", c_uint32),
        ("source", c_void_p),
        ("operand", c_void_p),
        ("found_inf", c_void_p),
        ("amax", c_void_p),
        ("call", Call),
        ("reserved", c_uint64 * 4),
    ]


class DequantizeArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("reserved0", c_uint32),
        ("operand", c_void_p),
        ("target", c_void_p),
        ("call", Call),
        ("reserved", c_uint64 * 4),
    ]


class Sharding(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("kind", c_int),
        ("rank", c_int32),
        ("ranks", c_int32),
        ("transposed", c_uint32),
        ("reserved0", c_uint32),
        ("reserved", c_uint64 * 1),
    ]


class ShardArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("reserved0", c_uint32),
        ("count", c_int64),
        ("sharding", c_void_p),
        ("source", c_void_p),
        ("amax", c_void_p),
        ("shard", c_void_p),
        ("shard_bytes", c_size_t),
        ("found_inf", c_void_p),
        ("call", Call),
        ("reserved", c_uint64 * 4),
    ]


class TransposeArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("reserved0", c_uint32),
        ("operand", c_void_p),
        ("call", Call),
        ("reserved", c_uint64 * 4),
    ]


class Dispatch(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("launches", c_uint32),
        ("backend", c_char_p),
        ("kernel", c_char_p),
        ("dtype", c_char_p),
        ("reason", c_char_p),
        ("reserved", c_uint64 * 4),
    ]


class LayerDescription(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("has_bias", c_uint32),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("tokens", c_int64),
        ("max_tokens", c_int64),
        ("w_dtype", c_int),
        ("y_dtype", c_int),
        ("dx_dtype", c_int),
        ("dw_dtype", c_int),
        ("fprop", c_int),
        ("dgrad", c_int),
        ("wgrad", c_int),
        ("power_of_two", c_int),
        ("recipe", c_char_p),
        ("format", c_char_p),
        ("compute", c_char_p),
        ("history_length", c_int64),
        ("algo", c_char_p),
        ("margin", c_int32),
        ("calibrate", c_uint32),
        ("spec", c_char_p),
        ("layer", c_char_p),
        ("arch", c_int32),
        ("shards", c_uint32),
        ("stream", c_void_p),
        ("reserved", c_uint64 * 4),
    ]


# C name -> struct; the test of sizes reads it.
STRUCTS = {
    "fp8_tensor": Tensor,
    "fp8_operand": Operand,
    "fp8_operand_view": OperandView,
    "fp8_context_options": ContextOptions,
    "fp8_device_info": DeviceInfo,
    "fp8_layer_info": LayerInfo,
    "fp8_call": Call,
    "fp8_fprop_args": FpropArgs,
    "fp8_quantize_dy_args": QuantizeDyArgs,
    "fp8_wgrad_args": WgradArgs,
    "fp8_dgrad_args": DgradArgs,
    "fp8_backward_args": BackwardArgs,
    "fp8_quantize_args": QuantizeArgs,
    "fp8_dequantize_args": DequantizeArgs,
    "fp8_sharding": Sharding,
    "fp8_shard_args": ShardArgs,
    "fp8_transpose_args": TransposeArgs,
    "fp8_dispatch": Dispatch,
    "fp8_layer_description": LayerDescription,
}

_RUNTIME = {
    "fp8_context_create": [POINTER(ContextOptions), POINTER(c_void_p)],
    "fp8_context_info": [c_void_p, POINTER(DeviceInfo)],
    "fp8_context_set_provider": [c_void_p, c_void_p, c_void_p],
    "fp8_context_layer": [c_void_p, POINTER(LayerDescription), POINTER(c_void_p)],
    "fp8_context_prepare": [c_void_p, POINTER(LayerDescription), c_size_t],
    "fp8_layer_describe": [c_void_p, POINTER(LayerInfo)],
    "fp8_layer_bytes": [c_void_p, c_int64, c_int, POINTER(c_size_t)],
    "fp8_layer_dispatch": [c_void_p, c_int, c_int64, POINTER(Dispatch)],
    "fp8_operand_parts": [POINTER(Operand), POINTER(OperandView)],
    "fp8_layer_fprop": [c_void_p, POINTER(FpropArgs)],
    "fp8_layer_quantize_dy": [c_void_p, POINTER(QuantizeDyArgs)],
    "fp8_layer_wgrad": [c_void_p, POINTER(WgradArgs)],
    "fp8_layer_dgrad": [c_void_p, POINTER(DgradArgs)],
    "fp8_layer_backward": [c_void_p, POINTER(BackwardArgs)],
    "fp8_quantize": [c_void_p, POINTER(QuantizeArgs)],
    "fp8_dequantize": [c_void_p, POINTER(DequantizeArgs)],
    "fp8_shard_range": [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int64)],
    "fp8_shard_bytes": [c_void_p, c_void_p, POINTER(c_size_t)],
    "fp8_shard_amax": [c_void_p, POINTER(ShardArgs)],
    "fp8_shard_quantize": [c_void_p, POINTER(ShardArgs)],
    "fp8_transpose": [c_void_p, POINTER(TransposeArgs)],
    "fp8_state_create": [POINTER(c_void_p), c_int32, POINTER(c_void_p)],
    "fp8_state_advance": [c_void_p, c_void_p],
    "fp8_state_running": [c_void_p, POINTER(c_void_p), POINTER(c_int64)],
    "fp8_state_bytes": [c_void_p, POINTER(c_size_t)],
    "fp8_state_save": [c_void_p, c_void_p, c_size_t, c_void_p],
    "fp8_state_load": [c_void_p, c_void_p, c_size_t, c_void_p],
}


class Fp8Error(RuntimeError):
    """A call of the library was refused; `status` is its fp8_status."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


def _open(name):
    """lib<name>.so from the first place that has it; the tree's own build before the system."""
    soname = f"lib{name}.so"
    here = os.path.dirname(os.path.abspath(__file__))
    folders = [
        os.environ.get("FP8GEN_LIBRARY_DIR"),
        os.path.normpath(os.path.join(here, "..", "..", "..", "build", "lib")),
    ]
    for folder in folders:
        path = folder and os.path.join(folder, soname)
        if path and os.path.exists(path):
            return ctypes.CDLL(path)
    for candidate in (soname, soname + ".0"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise ImportError(
        f"{soname} is not in FP8GEN_LIBRARY_DIR ({folders[0] or 'not set'}), not in "
        f"{folders[1]} and not where the loader looks; build the project (cmake -B build && "
        "cmake --build build) or set FP8GEN_LIBRARY_DIR to the folder that holds it"
    )


def _declare(library, prototypes, restype):
    for name, arguments in prototypes.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, restype


def _preload_nvrtc():
    """NVRTC as it came with torch: the generator uses that copy where no other is named."""
    if os.environ.get("FP8_NVRTC_PATH"):
        return
    for folder in sys.path:
        found = glob.glob(os.path.join(folder, "nvidia", "*", "lib", "libnvrtc.so.*"))
        for path in sorted(p for p in found if "alt" not in os.path.basename(p)):
            try:
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
                return
            except OSError:
                continue


runtime = _open("fp8")
_declare(runtime, _RUNTIME, c_int)
for _name, _arguments, _result in (
    ("fp8_last_error", [], c_char_p),
    ("fp8_version", [], c_char_p),
    ("fp8_status_name", [c_int], c_char_p),
    ("fp8_status_remedy", [c_int], c_char_p),
    ("fp8_state_destroy", [c_void_p], None),
):
    getattr(runtime, _name).argtypes = _arguments
    getattr(runtime, _name).restype = _result

_generator = None


def generator():
    """libfp8gen, opened when the first bundle is wanted."""
    global _generator
    if _generator is None:
        library = _open("fp8gen")
        _preload_nvrtc()
        _generator = library
    return _generator


def check(status):
    """Raises Fp8Error with the library's own sentence if status is not FP8_OK."""
    if status:
        sentence = runtime.fp8_last_error().decode()
        name = runtime.fp8_status_name(status).decode()
        remedy = runtime.fp8_status_remedy(status).decode()
        raise Fp8Error(status, f"{sentence} ({name}: {remedy})")
