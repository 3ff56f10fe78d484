#!/usr/bin/env bash
# fp8gen run on the host: reports, tokens, dumps recomputed with other tools, nothing left behind.
. tests/cli/harness.sh
spec=specs/debug_vocab2556.lua
export TMPDIR=$T/tmp
mkdir "$TMPDIR"
left_behind() { find "$TMPDIR" -mindepth 1 | head -n 3; }

case_of "every pass of every layer is within its bounds"
run fp8gen run $spec --device host
expect_code 0
expect_err ''
for word in weight fprop quantize_dy "wgrad +=" dgrad bit-equal "0 failed" "e5m2 x e4m3 -> fp32"; do
    expect_out_has "$word"
done
[ -z "$(left_behind)" ] || fail "TMPDIR empty expected"

case_of "without a GPU, auto says that it runs on the host"
if "$FP8GEN" doctor | grep -q '^GPU '; then
    skip_case "there is a GPU"
else
    run fp8gen run $spec --layer gate
    expect_code 0
    expect_err_has "running on the host"
    run fp8gen run $spec --layer gate -q
    expect_err ''
fi

case_of "any number of tokens up to max_tokens, 0 among them"
for tokens in 0 1 17 1024; do
    run fp8gen run $spec --device host --tokens $tokens --layer head
    expect_code 0
    expect_out_has "$tokens x 2556 x 512"
done
run fp8gen run $spec --device host --tokens 1025
expect_code 2
expect_err_has "at most 1024 tokens"
expect_err_has "max_tokens"

case_of "a large layer is cut on the host, which is said; --tokens is not cut"
cat >"$T/large.lua" <<'SPEC'
return model "large" { layers = { linear "wide" { in_features = 2048, out_features = 4096 } } }
SPEC
run fp8gen run "$T/large.lua" --device host
expect_code 0
expect_err_has "of 8192 tokens on the host"
expect_out_has "(of 8192) x 4096 x 2048"
run fp8gen run "$T/large.lua" --device host --tokens 64
expect_code 0
expect_err ''
expect_out_has "64 x 4096 x 2048"

spec_of() { # M N K and fields of the model
    echo "return model 'small' { tokens = $1, $4 layers = { linear 'a' { in_features = $3, out_features = $2 } } }"
}

case_of "layers of a few outputs or of little depth pass: no average is asked of them"
small() { # M N K, fields, seeds
    spec_of "$1" "$2" "$3" "$4" >"$T/small.lua"
    for seed in $5; do
        run fp8gen run "$T/small.lua" --device host --seed "$seed"
        expect_code 0
        expect_out_has "(each)"
        expect_out_has "6 passes"
    done
}
for shape in "1 1 1" "2 1 1" "5 1 2" "1 7 1" "4 3 2" "1000 1 1"; do
    small $shape "bias = true," "0 3 5 15"
    small $shape "" "3 5 15"
    small $shape "grad_weight = 'bf16', output = 'fp16'," "1 2"
    small $shape "grad_weight = 'fp16', accumulation = { fprop = 'split' }," "1"
done
# many outputs of few quantised numbers: SQNR is no average either
small 100 120 1 "" 15
small 120 2 100 "" 7

case_of "fast accumulation deeper than its bound is not judged, and that is said"
spec_of 16 100 30000 "" >"$T/deep.lua"
run fp8gen run "$T/deep.lua" --device host
expect_code 0
expect_out_has "not judged"
expect_out_has "0 failed, 1 not judged"
spec_of 16 100 30000 "accumulation = { fprop = 'split' }," >"$T/deep.lua"
run fp8gen run "$T/deep.lua" --device host
expect_code 0
expect_out_lacks "not judged"
run fp8gen help run
expect_out_has "28,672"

case_of "wgrad adds to dw in every dtype"
for dtype in bf16 fp16 fp32; do
    spec_of 64 48 200 "grad_weight = '$dtype'," >"$T/add.lua"
    run fp8gen run "$T/add.lua" --device host --json
    expect_code 0
    expect_out_has '"pass":"wgrad +="'
done

case_of "the seed decides the data"
run fp8gen run $spec --device host --layer gate --json --seed 5
first=$(sed 's/"seconds":[^,]*//; s/"gbytes_per_s":[^,]*//; s/"tflops":[^,]*//' "$out")
run fp8gen run $spec --device host --layer gate --json --seed 5
[ "$first" = "$(sed 's/"seconds":[^,]*//; s/"gbytes_per_s":[^,]*//; s/"tflops":[^,]*//' "$out")" ] ||
    fail "the same seed, the same numbers"
run fp8gen run $spec --device host --layer gate --json --seed 6
[ "$first" != "$(sed 's/"seconds":[^,]*//; s/"gbytes_per_s":[^,]*//; s/"tflops":[^,]*//' "$out")" ] ||
    fail "another seed, other numbers"

case_of "one JSON object per row"
run fp8gen run $spec --device host --layer head --json
expect_code 0
[ "$(wc -l <"$out")" = 6 ] || fail "6 lines expected"
if command -v python3 >/dev/null; then
    python3 - "$out" <<'CHECK' || fail "rows with their keys expected"
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
assert [row["pass"] for row in rows] == ["weight", "fprop", "quantize_dy", "wgrad", "wgrad +=", "dgrad"]
for row in rows:
    assert row["verdict"] == "ok" and row["layer"] == "head" and row["N"] == 2556 and row["kernel"] and row["dtype"]
assert rows[1]["error"] <= rows[1]["error_bound"] and rows[1]["sqnr_db"] >= rows[1]["sqnr_bound_db"] == 28
assert rows[3]["sqnr_bound_db"] == 24 and rows[0]["bit_equal"] is True
assert rows[4]["judged"] == "average" and rows[4]["error_bound"] == 0.002 and "bf16" in rows[4]["dtype"]
CHECK
fi

case_of "an unknown layer names the nearest, before anything is written"
run fp8gen run $spec --device host --layer hed --dump "$T/none"
expect_code 2
expect_err_has "did you mean 'head'?"
expect_no_file "$T/none"

case_of "a dump is whole, replaces only a dump, and never half"
run fp8gen run $spec --device host -q --dump "$T/dump"
expect_code 0
expect_file "$T/dump/index.json"
expect_file "$T/dump/00_qkv/x_transposed.npy"
run fp8gen run $spec --device host -q --dump "$T/dump" --layer gate
expect_code 0
expect_no_file "$T/dump/00_qkv"
expect_file "$T/dump/00_gate/dw.npy"
mkdir "$T/mine" && echo mine >"$T/mine/file"
run fp8gen run $spec --device host --dump "$T/mine"
expect_code 2
expect_err_has "exists and is not a dump"
expect_file "$T/mine/file"
run fp8gen run examples/shard_scale.lua --layer down --device host --dump "$T/ranks"
expect_code 2
expect_err_has "--fsdp 1 runs and dumps the layers"
expect_no_file "$T/ranks"
run fp8gen run examples/shard_scale.lua --layer down --fsdp 1 --device host -q --dump "$T/ranks"
expect_code 0
expect_file "$T/ranks/index.json"
run fp8gen run $spec --device host --dump "$T/no/such/folder"
expect_code 3
[ -z "$(find "$T" -name '.fp8gen-dump*')" ] || fail "no temporary folder expected"

case_of "the dump recomputed with numpy and ml_dtypes"
if python3 -c 'import numpy, ml_dtypes' 2>/dev/null; then
    for tokens in 0 17 384; do
        run fp8gen run $spec --device host -q --dump "$T/dump" --tokens $tokens
        run python3 tests/oracle/check_dump.py "$T/dump"
        expect_code 0
        expect_out_has "6 layers, 0 differences"
    done
    # one flipped bit in a byte of a quantised tensor is found
    python3 - "$T/dump/00_qkv/w_row.npy" <<'FLIP'
import sys
data = bytearray(open(sys.argv[1], "rb").read())
data[1000] ^= 1
open(sys.argv[1], "wb").write(data)
FLIP
    run python3 tests/oracle/check_dump.py "$T/dump"
    expect_code 1
    expect_out_has "1 differ"
    run python3 tests/oracle/check_dump.py "$T"
    expect_code 2
else
    skip_case "numpy and ml_dtypes are not installed"
fi

case_of "a signal leaves no temporary folder"
"$FP8GEN" run specs/llama3_8b.lua --device host --dump "$T/killed" >"$out" 2>"$err" &
child=$!
for _ in $(seq 100); do
    [ -n "$(find "$T" -maxdepth 1 -name '.fp8gen-dump*')" ] && break
    sleep 0.1
done
kill -TERM $child
wait $child 2>/dev/null
code=$?
command_line="run --dump, then SIGTERM"
expect_code 143
expect_no_file "$T/killed"
[ -z "$(find "$T" -maxdepth 1 -name '.fp8gen-dump*')" ] || fail "no temporary folder expected"
[ -z "$(left_behind)" ] || fail "TMPDIR empty expected"

if command -v cc >/dev/null; then
    cc -std=c11 -D_GNU_SOURCE -shared -fPIC -O1 -o "$T/slow.so" tests/cli/preload/slow_folder.c -ldl ||
        fail "the preloaded library compiles"
    asan=$(ldd "$FP8GEN" | sed -n 's/.*libasan.* => \([^ ]*\).*/\1/p')
    # SIGNAL SLOW PATTERN COMMAND...: sends the signal once a folder in $T has such a name
    interrupt() {
        local signal=$1 slow=$2 pattern=$3
        shift 3
        command_line="$*, then SIG$signal"
        env --default-signal LD_PRELOAD="${asan:+$asan:}$T/slow.so" SLOW="$slow" "$FP8GEN" "$@" \
            >"$out" 2>"$err" </dev/null &
        local child=$!
        for _ in $(seq 300); do
            [ -n "$(find "$T" -maxdepth 1 -name "$pattern")" ] && break
            sleep 0.1
        done
        kill -$signal $child
        wait $child 2>/dev/null
        code=$?
    }
    for signal in INT:130 TERM:143 HUP:129; do
        case_of "SIG${signal%:*} in a build leaves nothing"
        interrupt ${signal%:*} sync '.made.*' build $spec --arch none -o "$T/made"
        expect_code ${signal#*:}
        expect_err ''
        expect_no_file "$T/made"
        [ -z "$(find "$T" -maxdepth 1 -name '.made.*')" ] || fail "no temporary folder expected"
    done

    case_of "a signal in a build that replaces a bundle leaves the old one"
    run fp8gen build $spec --arch none -o "$T/made"
    expect_code 0
    cp "$T/made/manifest.json" "$T/manifest.json"
    interrupt TERM sync '.made.*' build $spec --arch none --gemm cublaslt -o "$T/made"
    expect_code 143
    cmp -s "$T/made/manifest.json" "$T/manifest.json" || fail "the manifest as it was expected"
    [ -z "$(find "$T" -maxdepth 1 -name '.made.*')" ] || fail "no temporary folder expected"

    case_of "what fails because of a signal is not reported"
    interrupt TERM remove '.fp8gen-dump*' run specs/llama3_8b.lua --device host --tokens 8 \
        --dump "$T/killed"
    expect_code 143
    expect_err ''
    expect_no_file "$T/killed"
fi

case_of "a wrong result is found and gives exit code 4"
if command -v cc >/dev/null; then
    cc -std=c11 -D_GNU_SOURCE -shared -fPIC -O1 -I. -o "$T/broken.so" tests/cli/preload/broken_passes.c -ldl ||
        fail "the preloaded library compiles"
    asan=$(ldd "$FP8GEN" | sed -n 's/.*libasan.* => \([^ ]*\).*/\1/p')
    broken() { run env LD_PRELOAD="${asan:+$asan:}$T/broken.so" BROKEN="$1" "$FP8GEN" run $spec --device host --layer qkv --tokens 40; }
    broken none
    expect_code 0
    broken byte
    expect_code 4
    expect_out_has "FAILED: 1 FP8 bytes differ"
    expect_err_has "layer 'qkv', weight: 1 FP8 bytes differ from the rules"
    broken skip
    expect_code 4
    expect_out_has "are inf or NaN"
    broken scale
    expect_code 4
    expect_out_has "FAILED: relative error"
    expect_err_has "1 result is out of bounds"
    # one wrong number among few, by two units in the last place
    spec_of 3 2 2 "" >"$T/few.lua"
    run env LD_PRELOAD="${asan:+$asan:}$T/broken.so" BROKEN=ulp "$FP8GEN" run "$T/few.lua" --device host
    expect_code 4
    expect_out_has "FAILED: "
    # rounded before the sum and after it
    spec_of 64 48 200 "grad_weight = 'bf16'," >"$T/add.lua"
    for fault in none twice; do
        run env LD_PRELOAD="${asan:+$asan:}$T/broken.so" BROKEN=$fault "$FP8GEN" run "$T/add.lua" --device host
        expect_code $([ $fault = none ] && echo 0 || echo 4)
    done
    expect_out_has "bound 2.0e-03"
    expect_err_has "wgrad +="
else
    skip_case "no C compiler for the preloaded library"
fi

case_of "no space for the bundle"
run env TMPDIR=/nonexistent "$FP8GEN" run $spec --device host
expect_code 3
expect_err_has "/nonexistent"
finish
