"""abi.py against the headers: every struct's size and offsets as a C compiler has them."""

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import unittest

import rig
from fp8gen_torch import abi

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))


class Abi(unittest.TestCase):
    def test_structs(self):
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if not compiler:
            self.skipTest("no C compiler")
        lines, expected = [], []
        for name, struct in abi.STRUCTS.items():
            lines.append(f'printf("%zu\\n", sizeof({name}));')
            expected.append((name, ctypes.sizeof(struct)))
            for field, *_ in struct._fields_:
                lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
                expected.append((f"{name}.{field}", getattr(struct, field).offset))
        program = (
            '#include <stdio.h>\n#include "runtime/fp8_jit.h"\n#include "runtime/fp8_model.h"\n'
            '#include "runtime/fp8_primitives.h"\n#include "gen/fp8gen.h"\n'
            "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            source, binary = os.path.join(folder, "sizes.c"), os.path.join(folder, "sizes")
            with open(source, "w") as file:
                file.write(program)
            subprocess.run([compiler, "-I", ROOT, source, "-o", binary], check=True)
            got = subprocess.run(
                [binary], capture_output=True, text=True, check=True
            ).stdout.split()
        self.assertEqual(len(got), len(expected))
        for (name, value), word in zip(expected, got):
            self.assertEqual(value, int(word), name)

    def test_constants(self):
        with open(os.path.join(ROOT, "runtime", "fp8.h")) as file:
            header = file.read()
        for ours, theirs in (
            ("E4M3", "FP8_DTYPE_E4M3"),
            ("E5M2", "FP8_DTYPE_E5M2"),
            ("BF16", "FP8_DTYPE_BF16"),
            ("FP32", "FP8_DTYPE_FP32"),
            ("UINT8", "FP8_DTYPE_UINT8"),
            ("ROLE_X", "FP8_ROLE_X"),
            ("ROLE_W", "FP8_ROLE_W"),
            ("ROLE_DY", "FP8_ROLE_DY"),
            ("ROW", "FP8_COPY_ROW"),
            ("TRANSPOSED", "FP8_COPY_TRANSPOSED"),
            ("PASS_FPROP", "FP8_PASS_FPROP"),
            ("PASS_WGRAD", "FP8_PASS_WGRAD"),
            ("PASS_DGRAD", "FP8_PASS_DGRAD"),
            ("BYTES_WORKSPACE", "FP8_BYTES_WORKSPACE"),
        ):
            value = re.search(rf"\b{theirs} = (\d+)", header)
            self.assertIsNotNone(value, theirs)
            self.assertEqual(getattr(abi, ours), int(value.group(1)), theirs)

    def test_operand_sizes(self):
        from fp8gen_torch import calls, operand

        by_tensor = abi.BY_TENSOR, abi.BY_TENSOR

        for rows, cols, copies in ((0, 40, 3), (1, 1, 1), (17, 300, 2), (129, 128, 3)):
            data = operand.empty(rows, cols, copies, rig.DEVICE)
            struct = calls._operand(abi.ROLE_X, abi.E4M3, rows, cols, copies, by_tensor)
            struct.data = data.data_ptr()
            view = abi.OperandView()
            abi.check(abi.runtime.fp8_operand_parts(struct, view))  # says if the bytes are too few
            base, both = data.data_ptr(), copies & abi.ROW
            if copies & abi.ROW and rows:
                self.assertEqual(view.row - base, operand.HEADER)
            if copies & abi.TRANSPOSED and rows:
                before = operand.HEADER + (operand.copy_bytes(rows, cols) if both else 0)
                self.assertEqual(view.transposed - base, before)


if __name__ == "__main__":
    rig.main()
