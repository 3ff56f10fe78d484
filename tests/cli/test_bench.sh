#!/usr/bin/env bash
# The flow and the rows of the benchmarks, on a preloaded GPU that is none. Skipped without NVRTC (a bundle
# for a GPU has compiled kernels) and without a C compiler.
. tests/cli/harness.sh
command -v cc >/dev/null || { echo "skip: no C compiler for the preloaded library"; exit 77; }
"$FP8GEN" doctor | grep -q '^NVRTC.*not found' && { echo "skip: no NVRTC"; exit 77; }
cc -std=c11 -D_GNU_SOURCE -shared -fPIC -O1 -I. -o "$T/fake.so" tests/cli/preload/fake_gpu.c -ldl || exit 1
preload=$T/fake.so
# a program with a sanitizer wants its library first
asan=$(ldd "$FP8GEN" | sed -n 's/.*libasan.* => \([^ ]*\).*/\1/p')
[ -z "$asan" ] || preload=$asan:$preload
bench() { run env LD_PRELOAD="$preload" "$FP8GEN" bench "$@" --rounds 3; }
rows_are() { # python expression over header and rows
    command -v python3 >/dev/null || return
    python3 - "$out" "$1" <<'CHECK' || fail "rows expected: $1"
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
header, rows = lines[0], lines[1:]
keys = {"bench", "case", "M", "N", "K", "pass", "recipe", "value", "unit", "baseline", "baseline_name", "ratio"}
assert {"gpu", "driver", "cuda", "cublaslt", "nccl", "source_hash"} <= header.keys(), header
for row in rows:
    assert keys <= row.keys(), row
    assert row["value"] > 0, row
    assert row["ratio"] is None or row["ratio"] > 0, row
assert eval(sys.argv[2]), rows
CHECK
}

case_of "bench layer: the whole layer and its parts"
bench layer --json --source-hash abc --shape 64,48,32 --shape 50,37,33
expect_code 0
expect_err ''
rows_are 'header["source_hash"] == "abc" and header["cublaslt"] == "13.1.0" and len(rows) == 16'
rows_are '[row["pass"] for row in rows[:8]] == ["all", "all", "weight", "x", "quantize_dy", "fprop", "wgrad", "dgrad"]'
rows_are '"best of 2, 2, 2 cuBLASLt" in rows[0]["baseline_name"] and (rows[8]["M"], rows[8]["N"], rows[8]["K"]) == (50, 37, 33)'

case_of "bench layer for people, dw in fp32"
bench layer --shape 16,16,16 --grad-weight fp32
expect_code 0
expect_out_has "forward + backward, dw fp32"
expect_out_has "copy of the same bytes"

case_of "bench quantize"
bench quantize --json --shape 64,48
expect_code 0
rows_are '[row["case"] for row in rows] == ["bf16 -> e4m3", "bf16 -> e5m2", "bf16 -> e5m2 + dbias"]'

case_of "bench host"
bench host --json --shape 16,16,16
expect_code 0
rows_are '[row["launches"] for row in rows] == [2, 3, 2, 1, 1] and rows[0]["unit"] == "us"'
finish
