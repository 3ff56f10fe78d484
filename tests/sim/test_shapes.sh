#!/usr/bin/env bash
# Shapes whose shards are uneven, short or empty, whole: the largest element of w is in its last
# row, which is in the last shard that is not empty.
. tests/sim/sim.sh
spec_of() { # N K fields
    echo "return model 'shape' { tokens = 16, $3 layers = { linear 'a' { out_features = $1, in_features = $2 },
        linear 'b' { out_features = $1, in_features = $2, gather_group = 'g' },
        linear 'c' { out_features = $1, in_features = $2, gather_group = 'g' } } }" >"$T/shape.lua"
}
for shape in "4096 1024 3" "10 128 8" "5 64 4" "96 128 5" "1 1 2" "129 272 2" "2556 17 7"; do
    read -r n k ranks <<<"$shape"
    case_of "w [$n,$k] over $ranks ranks"
    for fields in "" "bias = true, shard = { backward = 'keep', reduce = 'sum' }, weight = 'fp32',
        grad_weight = 'bf16',"; do
        spec_of "$n" "$k" "$fields"
        simulate "$T/shape.lua" "$ranks"
    done
    grep -q '"w_bit_equal":true' "$out" || fail "gathered bytes are compared"
done

for shape in "600 300 3" "129 1000 2" "2556 130 8"; do
    read -r n k ranks <<<"$shape"
    case_of "w [$n,$k] in tiles of 128 x 128 over $ranks ranks: cuts fall on tiles"
    spec_of "$n" "$k" "recipe = recipe.block {}, bias = true,"
    simulate "$T/shape.lua" "$ranks"
done

for shape in "600 300 3" "5 64 4" "257 130 8"; do
    read -r n k ranks <<<"$shape"
    for recipe in rowwise rowwise_hp_wgrad; do
        case_of "w [$n,$k], $recipe over $ranks ranks: two copies, gathered each for its pass"
        spec_of "$n" "$k" "recipe = recipe.$recipe {}, bias = true,"
        simulate "$T/shape.lua" "$ranks"
    done
done

for shape in "600 300 3" "5 64 4" "1100 130 8" "300 1 2"; do
    read -r n k ranks <<<"$shape"
    case_of "w [$n,$k], a scale for each shard over $ranks ranks"
    spec_of "$n" "$k" "recipe = recipe.current { weight_scale = 'shard' }, bias = true,"
    simulate "$T/shape.lua" "$ranks"
done

case_of "delayed scaling: shared weights take the scale that the ranks agreed on"
spec_of 129 272 "recipe = recipe.delayed {}, bias = true,"
simulate "$T/shape.lua" 3

case_of "no tokens at all: dw is zero, nothing hangs"
spec_of 129 272 "bias = true,"
simulate "$T/shape.lua" 3 --tokens 0

case_of "64 ranks, most of them with a row or none"
spec_of 40 64 ""
simulate "$T/shape.lua" 64 --tokens 5 --seed 7

case_of "the report names ranks, shards and how dw is summed"
spec_of 10 128 "mesh = { fsdp = 8 },"
run fp8gen run "$T/shape.lua" --device host
expect_code 0
expect_out_has "2 rows"
expect_out_has "bit-equal"
expect_out_has "8 ranks (threads)"
expect_out_has "0 failed"
finish
