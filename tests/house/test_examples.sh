#!/usr/bin/env bash
# The examples run on the host backend, and say what is wrong where something is.
. tests/cli/harness.sh
export CUDA_VISIBLE_DEVICES=
embed=$FP8_TEST_BUILD/bin/example_embed

case_of "a bundle for the example"
run fp8gen build specs/llama3_8b.lua --arch none -o "$T/bundle"
expect_code 0

case_of "embed: forward and backward of one layer"
run "$embed" "$T/bundle" qkv 8
expect_code 0
expect_out_has "without FP8"
expect_err ''

case_of "embed: any number of tokens"
run "$embed" "$T/bundle" qkv 1
expect_code 0

case_of "embed: a layer with a bias, odd dims and fp32 tensors"
run fp8gen build specs/debug_vocab2556.lua --arch none -o "$T/odd"
run "$embed" "$T/odd" up 33
expect_code 0
expect_out_has dbias
run "$embed" "$T/odd" head 33
expect_code 0

case_of "embed: a layer that is not there"
run "$embed" "$T/bundle" nosuch
expect_code 1
expect_err_has qkv

case_of "embed: no bundle"
run "$embed" "$T" qkv
expect_code 1
expect_err_has manifest.json

case_of "embed: usage"
run "$embed"
expect_code 2

case_of "jit: layers by description, on the CPU"
export FP8GEN_CACHE_DIR=$T/cache
run "$FP8_TEST_BUILD/bin/example_jit"
expect_code 0
expect_out_has "64 -> 256: "
expect_out_has "256 -> 64: "
expect_err ''
run "$FP8_TEST_BUILD/bin/example_jit" 100 30 7
expect_code 0
expect_out_has "100 -> 30: "
run "$FP8_TEST_BUILD/bin/example_jit" 0 30 7
expect_code 1
expect_err_has "in_features is 0"

finish
