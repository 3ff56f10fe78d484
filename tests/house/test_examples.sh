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
expect_err_has "remedy: name the folder of a bundle"

case_of "embed: usage"
run "$embed"
expect_code 2

shard=$FP8_TEST_BUILD/bin/example_shard

case_of "shard: ranks that share a weight, also unevenly, and one that has none of it"
run "$shard" "$T/odd" head
expect_code 0
expect_out_has "rank 1 of 2: 1278 of the 2556 rows of w"
expect_out_lacks WRONG
run "$shard" "$T/odd" head 7
expect_code 0
expect_out_has "rank 6 of 7: 360 of the 2556 rows of w"
run fp8gen build examples/shard_scale.lua --arch none -o "$T/scales"
run "$shard" "$T/scales" down 3
expect_code 0
expect_out_has "rank 2 of 3: 44 of the 300 rows of w"
[ "$(grep -c "dw is .* ok" "$out")" = 3 ] || fail "dw of three ranks expected"
run "$shard" "$T/scales" down 4
expect_code 1
expect_err_has "was built for fsdp = 3"

case_of "shard: what it does not do, and usage"
run "$shard" "$T/odd" up
expect_code 2
expect_err_has "'up' has a bias"
run "$shard" "$T/odd" nosuch
expect_code 1
run "$shard" "$T/odd" head 9
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
[ "$(grep -c "in_features is 0" "$err")" = 1 ] || fail "the error once expected"
run "$FP8_TEST_BUILD/bin/example_jit" 3 5
expect_code 2
expect_err_has "usage: "

finish
