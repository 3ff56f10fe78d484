#!/usr/bin/env bash
# Every recipe through fp8gen: run on the host against the rules, dumps recomputed by other tools,
# the report of accuracy, and what is refused.
. tests/cli/harness.sh
cat >"$T/recipes.lua" <<'SPEC'
return model "recipes" {
    tokens = 150, bias = true,
    layers = {
        linear "current" { in_features = 270, out_features = 141 },
        linear "delayed" { in_features = 270, out_features = 141, recipe = recipe.delayed { margin = 1 } },
        linear "rowwise" { in_features = 270, out_features = 141, recipe = recipe.rowwise {} },
        linear "exact_rows" {
            in_features = 270, out_features = 141, weight = "fp32", recipe = recipe.rowwise { power_of_two = false },
        },
        linear "hp_wgrad" { in_features = 270, out_features = 141, recipe = recipe.rowwise_hp_wgrad {} },
        linear "block" { in_features = 270, out_features = 141, recipe = recipe.block {} },
        linear "exact_blocks" {
            in_features = 270, out_features = 141, weight = "fp32", recipe = recipe.block { power_of_two = false },
        },
        linear "bf16" { in_features = 270, out_features = 141, compute = "bf16" },
    },
}
SPEC

case_of "every recipe is within its bounds, scales and bytes by the rules"
run fp8gen run "$T/recipes.lua" --device host
expect_code 0
expect_err ''
expect_out_has "quantize_tile_fp32_e4m3"
expect_out_has "bf16 x bf16 -> fp32"
expect_out_has "0 failed"

case_of "any number of tokens"
for tokens in 0 1 17 129; do
    run fp8gen run "$T/recipes.lua" --device host --tokens $tokens
    expect_code 0
    expect_out_has "0 failed"
done

case_of "another recipe than the spec's"
run fp8gen run "$T/recipes.lua" --device host --layer current --recipe block
expect_code 0
expect_out_has "quantize_block_bf16_e4m3_pow2"
expect_err_has "--recipe block leaves 1 of 8 layers as they are: they compute in bf16 ('bf16')"
run fp8gen plan "$T/recipes.lua" --recipe blocks
expect_code 2
expect_err_has "unknown recipe 'blocks'"

case_of "the dump recomputed with numpy and ml_dtypes"
if python3 -c 'import numpy, ml_dtypes' 2>/dev/null; then
    for tokens in 0 17 150; do
        run fp8gen run "$T/recipes.lua" --device host -q --dump "$T/dump" --tokens $tokens
        expect_code 0
        run python3 tests/oracle/check_dump.py "$T/dump"
        expect_code 0
        expect_out_has "8 layers, 0 differences"
    done
    python3 - "$T/dump/05_block/x_row_scales.npy" <<'FLIP'
import sys
data = bytearray(open(sys.argv[1], "rb").read())
data[-2] ^= 1
open(sys.argv[1], "wb").write(data)
FLIP
    run python3 tests/oracle/check_dump.py "$T/dump"
    expect_code 1
    expect_out_has "FAILED block"
else
    skip_case "numpy and ml_dtypes are not installed"
fi

case_of "the report: SQNR of every recipe and accumulation against K"
run fp8gen run --report --device host
expect_code 0
expect_err ''
for word in rowwise_hp_wgrad "outlier x 1e5" "after silu" 65536 "256, mean"; do
    expect_out_has "$word"
done
run fp8gen run --report --device host --tokens 5
expect_code 2
expect_err_has "takes no --tokens"
run fp8gen run
expect_code 2
expect_err_has "a SPEC is missing"
finish
