#!/usr/bin/env bash
# The flow and the rows of the benchmarks, on a preloaded GPU that is none. Skipped without NVRTC (a
# bundle for a GPU has compiled kernels) and without a C compiler.
. tests/cli/harness.sh
command -v cc >/dev/null || { echo "skip: no C compiler for the preloaded library"; exit 77; }
"$FP8GEN" doctor | grep -q '^NVRTC.*not found' && { echo "skip: no NVRTC"; exit 77; }
cc -std=c11 -D_GNU_SOURCE -shared -fPIC -O2 -I. -o "$T/fake.so" tests/cli/preload/fake_gpu.c -ldl -lm || exit 1
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
bench quantize --json --shape 64,48 --recipe current --recipe block
expect_code 0
rows_are '[(row["recipe"], row["case"]) for row in rows] == [(r, c) for r in ("current", "block") for c in ("x", "dy", "dy + dbias")]'

case_of "bench host"
bench host --json --shape 16,16,16
expect_code 0
rows_are '[row["launches"] for row in rows] == [1, 2, 1, 1, 1, 1] and rows[0]["unit"] == "us"'
rows_are 'rows[1]["baseline_name"] == rows[3]["baseline_name"] == rows[5]["case"].removeprefix("host time of ")'

case_of "bench host: a framework beside it, and the start of a model"
echo 'return model "tiny" { tokens = 16, layers = { linear "a" { in_features = 16, out_features = 16, compute = "bf16" } } }' >"$T/start.lua"
cat >"$T/python" <<'FAKE'
#!/bin/sh
echo is A framework; echo 24.5
FAKE
chmod +x "$T/python"
run env LD_PRELOAD="$preload" FP8GEN_PYTHON="$T/python" "$FP8GEN" bench host "$T/start.lua" --json --rounds 1 --shape 16,16,16
expect_code 0
rows_are 'rows[1]["baseline"] == 24.5 and rows[1]["baseline_name"] == "A framework bf16 linear"'
rows_are '[(row["pass"], row["unit"]) for row in rows[6:]] == [("build", "ms"), ("open", "ms"), ("prepare", "ms"), ("layer", "us")]'

# one configuration of each accumulation keeps the compiler's work small
few=pp128x128c1s6g8,co128x128c1s6p2g8

case_of "bench gemm: every case, checked against cuBLASLt that multiplies"
bench gemm --json --source-hash abc --shape 64,48,32 --candidates $few
expect_code 0
expect_err_has "tensor_split"
rows_are 'header["source_hash"] == "abc" and [(row["case"], row["pass"]) for row in rows] == [("tensor_fast", "fprop"), ("tensor_fast", "dgrad"), ("tensor_split", "fprop"), ("tensor_split", "dgrad"), ("wgrad_split", "wgrad"), ("wgrad_fast", "wgrad")]'
rows_are 'all(row["bench"] == "gemm" and row["unit"] == "TFLOP/s" and row["ratio"] for row in rows)'
rows_are 'all(row["kernel"].startswith("gemm_" + ("e4m3" if row["pass"] == "fprop" else "e5m2") + "_e4m3_") for row in rows)'
rows_are 'all("_fp32_add_" in row["kernel"] for row in rows[4:])'
rows_are '[row["accumulate"] for row in rows] == [False] * 4 + [True] * 2'
rows_are 'all("best of 1 algorithms" in row["baseline_name"] for row in rows)' # the idle one is found wrong
rows_are 'all(0 < row["error"] < (1e-2 if "bf16" in row["formats"] else 1e-3) for row in rows)'
rows_are 'all(row["bf16"] > 0 and row["plan_value"] > 0 and row["plan_value"] <= 1.001 * row["value"] for row in rows)'

case_of "bench gemm: an odd N against its neighbour"
bench gemm --json --shape 50,44,33 --case odd_n --candidates plan
expect_code 0
rows_are '[row["pass"] for row in rows] == ["fprop", "dgrad", "wgrad"] and rows[0]["baseline_name"] == "generated, N 48"'

case_of "bench gemm for people"
bench gemm --shape 32,32,32 --case wgrad_split --candidates plan --seconds 0.01
expect_code 0
expect_out_has "wgrad_split  wgrad"
expect_out_has "geo. mean"

case_of "bench layer with forced GEMMs"
bench layer --json --shape 16,16,16 --gemm co128x128c1s6p2g8
expect_code 0
rows_are 'len(rows) == 8'

cat >"$T/tiny.lua" <<'SPEC'
return model "tiny" { tokens = 48, max_tokens = 80, layers = {
    linear "a" { in_features = 32, out_features = 48, count = 3 },
    linear "b" { in_features = 32, out_features = 48, bias = true, max_tokens = 100 },
    linear "c" { in_features = 20, out_features = 36, grad_weight = "bf16" },
} }
SPEC
tune() { run env LD_PRELOAD="$preload" "$FP8GEN" tune "$@" --candidates $few; }
file_is() { # python expression over the tuning file
    command -v python3 >/dev/null || return
    python3 - "$T/tuning.json" "$1" <<'CHECK' || fail "tuning file expected: $1"
import json, sys
tuning = json.load(open(sys.argv[1]))
entries = tuning["entries"]
assert eval(sys.argv[2]), tuning
CHECK
}

case_of "tune: every range of every GEMM, equal ones once"
tune "$T/tiny.lua" -o "$T/tuning.json"
expect_code 0
expect_out_has "wgrad +="
expect_no_file "$T/tuning.json.tmp"
file_is '(tuning["format"], tuning["format_version"], tuning["gpu"], tuning["cublaslt_version"]) == ("fp8gen-tuning", 1, "fake GPU", 130100)'
file_is 'len(entries) == 24 and sorted({(e["N"], e["K"]) for e in entries}) == [(36, 20), (48, 32)]'
file_is 'sorted({(e["min_tokens"], e["max_tokens"], e["measured_tokens"]) for e in entries if e["N"] == 48}) == [(1, 16, 16), (17, 64, 48), (65, 100, 80)]'
file_is '{(e["pass"], e["accumulate"]) for e in entries} == {("fprop", False), ("dgrad", False), ("wgrad", False), ("wgrad", True)}'
file_is 'all("cublaslt_2" not in [m["name"] for m in e["measured"]] for e in entries)'

case_of "what tune writes, plan takes"
run fp8gen plan "$T/tiny.lua" --tuning "$T/tuning.json"
expect_code 0
expect_err ''
expect_out_has "tuned"
run fp8gen plan "$T/tiny.lua" --tuning "$T/tuning.json" --json
expect_out_lacks '"tuning_hash": null'

case_of "tune: one layer, one number of tokens; run takes the file"
tune "$T/tiny.lua" -o "$T/tuning.json" --layer c --tokens 48
expect_code 0
file_is '[(e["N"], e["min_tokens"], e["measured_tokens"]) for e in entries] == [(36, 17, 48)] * 4'
run fp8gen run "$T/tiny.lua" --device host --tuning "$T/tuning.json"
expect_code 0

case_of "a tuning file that is none"
echo '{ "format": "shopping" }' >"$T/tuning.json"
run fp8gen build "$T/tiny.lua" -o "$T/bundle" --tuning "$T/tuning.json"
expect_code 1
expect_err_has "tuning.json"
expect_no_file "$T/bundle"
finish
