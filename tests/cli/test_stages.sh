#!/usr/bin/env bash
# check, plan, expand and build on real specs and on wrong ones.
. tests/cli/harness.sh
spec=specs/debug_vocab2556.lua

case_of "check says nothing about right specs"
run fp8gen check specs/*.lua
expect_code 0
expect_out ''
expect_err ''

cat >"$T/bad.lua" <<'SPEC'
return model "bad" {
  layers = {
    linear "a" { in_features = 64, out_features = 0 },
    linear "b" { in_featurs = 64, out_features = 64 },
  },
}
SPEC

case_of "check reports all errors, of all specs, and leaves nothing"
run fp8gen check "$T/bad.lua" $spec "$T/none.lua"
expect_code 3
expect_out ''
expect_err_has "bad.lua:3:"
expect_err_has "bad.lua:4:"
expect_err_has "in_features"
expect_err_has "none.lua"
run fp8gen check "$T/bad.lua"
expect_code 1

case_of "a wrong spec stops every command before anything is written"
for command in "plan" "expand -o $T/x" "build -o $T/x" "run --device host --dump $T/x"; do
    # shellcheck disable=SC2086
    run fp8gen $command "$T/bad.lua"
    expect_code 1
    expect_out ''
    expect_err_has "bad.lua:3:"
    expect_no_file "$T/x"
done

case_of "plan for people"
run fp8gen plan $spec
expect_code 0
expect_err ''
for word in weight fprop quantize_dy wgrad dgrad quantize_bf16_e4m3 "e5m2 x e4m3" "384 x 2556 x 512" \
    predicted FLOPs "debug_vocab2556: 18 layers"; do
    expect_out_has "$word"
done
! grep -q ' $' "$out" || fail "no line ends in a space"

case_of "plan as JSON, of one layer, with other tokens"
run fp8gen plan $spec --json
expect_code 0
if command -v python3 >/dev/null; then
    python3 -c 'import json, sys; p = json.load(open(sys.argv[1])); assert p["model"] == "debug_vocab2556"' \
        "$out" || fail "JSON expected"
fi
run fp8gen plan $spec --json --layer head
expect_out_has '"head"'
expect_out_lacks '"name": "qkv"'
expect_out_lacks column_sums
run fp8gen plan $spec --layer head --tokens 100
expect_out_has "y[100,2556]"
expect_out_has "debug_vocab2556, layer head: 1 layer, "
run fp8gen plan $spec --layer hed
expect_code 2
expect_err_has "did you mean 'head'?"
run fp8gen plan $spec --tokens x
expect_code 2
run fp8gen plan $spec --recipe nonsense
expect_code 2
expect_err_has "current"
run fp8gen plan $spec --recipe bf16
expect_code 2
expect_err_has 'compute = "bf16"'

case_of "expand to standard output and into a folder"
run fp8gen expand $spec --kernel quantize_bf16_e4m3
expect_code 0
expect_out_has "quantize_bf16_e4m3"
expect_out_lacks '$('
cp "$out" "$T/one.cu"
run fp8gen expand $spec -o "$T/cuda"
expect_code 0
expect_out ''
expect_file "$T/cuda/quantize_bf16_e4m3.cu"
cmp -s "$T/one.cu" "$T/cuda/quantize_bf16_e4m3.cu" || fail "the same text both ways"
run fp8gen expand $spec --kernel quantize_bf16_e4n3
expect_code 2
expect_err_has "did you mean 'quantize_bf16_e4m3'?"
run fp8gen expand $spec --kernel zzz
expect_err_has "its kernels are"
run fp8gen expand $spec -o "$T/one.cu/sub"
expect_code 3
expect_err_has "one.cu/sub"

case_of "expand with templates of one's own"
cp -r templates "$T/templates"
echo '// mine' >>"$T/templates/amax.cu"
run fp8gen expand $spec --kernel amax_bf16 --template-dir "$T/templates"
expect_code 0
expect_out_has '// mine'
run env FP8GEN_TEMPLATE_DIR="$T/templates" "$FP8GEN" expand $spec --kernel amax_bf16
expect_out_has '// mine'
run fp8gen expand $spec --kernel amax_bf16
expect_out_lacks '// mine'

case_of "expand prints what build compiles: with another recipe, for ranks, with a GEMM forced"
run fp8gen expand $spec --fsdp 4 --kernel sum_fp32_fp32
expect_code 0
expect_out_has "sum_fp32_fp32"
run fp8gen expand $spec --kernel sum_fp32_fp32
expect_code 2
run fp8gen expand $spec --recipe block -o "$T/block" # which leaves the spec's accumulation no choice
expect_code 0
expect_err ''
expect_file "$T/block/quantize_block_bf16_e4m3_pow2.cu"
expect_no_file "$T/block/quantize_bf16_e4m3.cu"
run fp8gen expand $spec --gemm cublaslt -o "$T/cublaslt"
expect_code 0
[ -z "$(find "$T/cublaslt" -name 'gemm_*')" ] || fail "no generated GEMM expected"

case_of "an error in a template has its line and writes nothing"
printf 'int $nothing;\n' >"$T/templates/amax.cu"
run fp8gen expand $spec --template-dir "$T/templates" -o "$T/none"
expect_code 1
expect_err_has "amax.cu:1"
expect_no_file "$T/none"

case_of "build without cubins"
run fp8gen build $spec --arch none -o "$T/bundle"
expect_code 0
expect_out ''
expect_file "$T/bundle/manifest.json"
run fp8gen build $spec --arch none -o "$T/bundle"
expect_code 0
mkdir "$T/mine" && echo mine >"$T/mine/file"
run fp8gen build $spec --arch none -o "$T/mine"
[ "$code" != 0 ] || fail "a folder that is not a bundle is kept"
expect_file "$T/mine/file"

case_of "build for ranks that the spec does not name, and with another recipe"
run fp8gen build $spec --fsdp 4 --recipe delayed --arch none -o "$T/ranks"
expect_code 0
run grep -c '"fsdp": 4' "$T/ranks/manifest.json"
expect_out 1
run grep -c '"name": "delayed"' "$T/ranks/manifest.json"
expect_code 0
run fp8gen build $spec --fsdp 0 --arch none -o "$T/none"
expect_code 2
expect_err_has "'fsdp' must be a whole number of 1..4096, not '0'"
expect_no_file "$T/none"

case_of "build refuses an arch on which nothing computes a product"
run fp8gen build examples/shard_scale.lua --arch sm_90a,sm_100a -o "$T/none"
expect_code 2
expect_err "fp8gen: error: layer 'up': nothing computes dgrad on sm_100a: cuBLASLt has no product of\
 one scale a tensor by scales along the contraction, and the generated kernels are for sm_90a
  hint: leave that arch out, or take a recipe with scales of tensors or rows"
run fp8gen build $spec --recipe block --arch sm_120a -o "$T/none"
expect_code 2
expect_err_has "fprop on sm_120a: cuBLASLt has scales of blocks on compute capability 9.0 alone"
expect_no_file "$T/none"
run fp8gen build examples/shard_scale.lua --arch none -o "$T/shards"
expect_code 0

case_of "tune reads a spec that only --fsdp makes right"
sed 's/recipe.current { format = "hybrid" }/recipe.current { weight_scale = "shard" }/' \
    specs/llama3_8b.lua >"$T/shards.lua"
run fp8gen tune "$T/shards.lua" -o "$T/tuning"
expect_code 1
expect_err_has "give the model mesh = { fsdp = ... }"
run fp8gen tune "$T/shards.lua" --fsdp 2 -o "$T/tuning"
expect_err_has "has nothing to tune"

case_of "build needs a folder and a known arch"
run fp8gen build $spec
expect_code 2
expect_err_has "-o DIR"
run fp8gen build $spec -o "$T/old" --arch sm_80
expect_code 2
expect_err_has "sm_90a"
expect_no_file "$T/old"
finish
