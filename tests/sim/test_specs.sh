#!/usr/bin/env bash
# Every shipped spec, and the example of scales by shard, over 1, 2, 3, 4 and 8 ranks, dims cut:
# gathered FP8 bytes and scales, y and dx as unsharded, dw within the roundings of its sum; the last
# rank's second micro-batch is empty.
. tests/sim/sim.sh
for spec in specs/*.lua examples/shard_scale.lua; do
    case_of "$(basename "$spec" .lua) over 1, 2, 3, 4 and 8 ranks"
    for ranks in 1 2 3 4 8; do
        simulate "$spec" $ranks --shrink
        layers=$(grep -cE '^ *(linear|add\()' "$spec" || true)
        [ "$(wc -l <"$out")" -ge 2 ] || fail "a row for each layer expected, the spec has $layers"
    done
done
finish
