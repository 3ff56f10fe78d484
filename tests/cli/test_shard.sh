#!/usr/bin/env bash
# Ranks that share weights: what plan says of them, and which ranks there are.
. tests/cli/harness.sh
spec=specs/debug_vocab2556.lua

case_of "a plan for ranks says who holds what, and the collectives"
run fp8gen plan $spec --fsdp 8
expect_code 0
expect_out_has "shards of w: 7 of [320,512], one of [316,512]"
expect_out_has "shards of w: 1 of [1,1], 7 empty"
expect_out_has "fsdp 8"
for word in all_reduce_max all_gather reduce_scatter; do
    expect_out_has "$word"
done
run fp8gen plan $spec
expect_code 0
expect_out_has "fsdp 1"
if grep -q "shards of w\|all_gather" "$out"; then fail "no ranks expected"; fi

case_of "times and memory are those of a rank, and a collective's bytes those of its piece"
run fp8gen plan specs/llama3_8b.lua --fsdp 8 --layer qkv
expect_code 0
for text in "quantize_bf16_e4m3  bf16 -> e4m3         768 x 4096" "gathered w   transpose" \
    "memory of a rank: its rows of w 3.15 MB, gathered w 50.3 MB, " "one step of a rank moves" \
    "over 8 ranks: gathers " "reduce_scatter  qkv                          fp32      32         12.6 MB"; do
    expect_out_has "$text"
done
run fp8gen plan specs/llama3_8b.lua --layer qkv
expect_out_has "quantize_bf16_e4m3  bf16 -> e4m3         6144 x 4096"
expect_out_has "memory: quantised w 50.3 MB, "
expect_out_lacks "of a rank"

case_of "a product that cuBLASLt has not is generated, whatever --gemm says, and the plan says why"
run fp8gen plan examples/shard_scale.lua --layer up --gemm cublaslt -v
expect_code 0
expect_out_has "gemm = cublaslt is asked for, but cuBLASLt has no product of one scale a tensor by"
run fp8gen plan examples/shard_scale.lua --layer up --gemm pp128x128c1s6g8 -v
expect_out_has "gemm = pp128x128c1s6g8 is asked for, which does not apply scales along the contraction"

case_of "one rank of them"
run fp8gen plan $spec --fsdp 8 --rank 7 --layer head
expect_code 0
expect_out_has "rank 7 of 8: rows 2240 to 2555 of w, w and dw shards [316,512]"
run fp8gen plan $spec --fsdp 8 --rank 3 --layer gate
expect_out_has "rank 3 of 8: no rows of w"
expect_out_has "memory of a rank: its rows of w, padded to as many as every rank's, "
run fp8gen plan $spec --fsdp 8 --rank 0 --layer head
expect_out_has "memory of a rank: its rows of w 164 kB"
run fp8gen plan $spec --fsdp 8 --rank 8
expect_code 2
expect_err_has "--rank 8: the mesh has 8 ranks, from 0"

case_of "pieces that are short and pieces that are empty"
printf 'return model "few" { mesh = { fsdp = 4 }, layers = {
    linear "c" { in_features = 77, out_features = 3, tokens = 8 } } }' >"$T/few.lua"
run fp8gen plan "$T/few.lua"
expect_out_has "shards of w: 3 of [1,77], 1 empty"
sed -i 's/out_features = 3/out_features = 77, recipe = recipe.block {}/' "$T/few.lua"
run fp8gen plan "$T/few.lua"
expect_out_has "shards of w: one of [77,77], 3 empty"
for kind in "" ", recipe = recipe.block {}"; do
    sed -i "s/out_features = .*tokens/out_features = 3$kind, tokens/" "$T/few.lua"
    run fp8gen run "$T/few.lua" --device host
    expect_code 0
    expect_out_has ", uneven"
done
sed -i 's/out_features = 3.*tokens/out_features = 4, tokens/' "$T/few.lua"
run fp8gen run "$T/few.lua" --device host
expect_out_lacks "uneven"

case_of "every kernel says what uses it"
run fp8gen expand "$T/few.lua" --recipe delayed
expect_code 0
expect_out_has "//   used by:    the state of recipe delayed"
expect_out_has "//   used by:    sums over ranks"
if grep -q "used by: *$" "$out"; then fail "a kernel that nothing uses"; fi

case_of "the collectives of a plan are those of a run, in its order"
shapes="64,64 128,64 64,128 96,64 64,96"
for count in 1 2 3 5; do
    list= arguments=() layers= at=0
    for shape in $shapes; do
        [ $at = $count ] && break
        arguments+=(--shape $shape)
        layers+="linear 'l$at' { out_features = ${shape%,*}, in_features = ${shape#*,} },"
        at=$((at + 1))
    done
    run fp8gen bench shard --device host --case step "${arguments[@]}" --tokens 64 --blocks 1 \
        --rounds 1 --trace "$T/trace.json"
    expect_code 0
    echo "return model 'm' { tokens = 64, mesh = { fsdp = 2 }, layers = { $layers } }" >"$T/m.lua"
    run fp8gen plan "$T/m.lua"
    expect_code 0
    planned=$(sed -n 's/^ *[a-z]* *\(all_gather\|reduce_scatter\) *l\([0-9]\) .*/\1 \2/p' "$out")
    ran=$(sed -n 's/.*"name":"\([a-z_]* [0-9]\)","cat":"communication".*"pid":0,.*/\1/p' \
        "$T/trace.json")
    [ -n "$ran" ] && [ "$ran" = "$planned" ] ||
        fail "$count layers: $(echo $ran) expected, not $(echo $planned)"
done

case_of "rows are gathered anew where the slot holds a turned copy, as often as the step says"
printf 'return model "m" { tokens = 64, mesh = { fsdp = 4 }, layers = {
    linear "a" { in_features = 64, out_features = 64, recipe = recipe.delayed {} },
    linear "b" { in_features = 64, out_features = 64, recipe = recipe.block {} },
    linear "c" { in_features = 64, out_features = 64, recipe = recipe.rowwise {} } } }' >"$T/m.lua"
run fp8gen plan "$T/m.lua"
expect_code 0
[ "$(sed -n 's/ *\([a-z]*\) *all_gather *\([a-c]\) .*/\1 \2/p' "$out" | xargs)" = \
    "fprop a fprop b fprop c dgrad c dgrad a" ] || fail "five gathers expected"
expect_out_has "(gathers 320 us, " # of 64 us each

case_of "the rows of all ranks are those of w, once each; every rank plans the same collectives"
for ranks in 3 7 16; do
    at=0 lines=
    for ((rank = 0; rank < ranks; rank++)); do
        run fp8gen plan $spec --fsdp $ranks --rank $rank
        expect_code 0
        rows=$(sed -n '/^head/,/memory/s/.*: rows \([0-9]*\) to \([0-9]*\) of w.*/\1 \2/p' "$out")
        first=${rows% *} end=${rows#* }
        [ "${first:-$at}" = $at ] || fail "rank $rank of $ranks begins at $at"
        at=$((${end:-$((at - 1))} + 1))
        collectives=$(sed -n '/^collectives/,$p' "$out")
        [ -z "$lines" ] || [ "$lines" = "$collectives" ] ||
            fail "the collectives of rank 0 expected"
        lines=$collectives
    done
    [ $at = 2556 ] || fail "2556 rows over $ranks ranks, not $at"
done

case_of "as JSON: the same plan for all ranks, and a rank's rows"
run fp8gen plan $spec --fsdp 3 --rank 1 --layer head --json
expect_code 0
for word in '"rank": 1' '"first": 852' '"count": 852' '"rows": 852' '"fsdp": 3'; do
    expect_out_has "$word"
done

case_of "a step over ranks is predicted, and the meshes of a number of GPUs compared"
run fp8gen plan specs/llama3_8b.lua --fsdp 4
expect_code 0
expect_out_has "over 4 ranks: quantising this rank's rows"
expect_out_has "exposed (gathers"
run fp8gen plan specs/llama3_8b.lua --fsdp 9
expect_code 0
if grep -q "over 9 ranks" "$out"; then fail "nine GPUs are no host: no prediction expected"; fi
run fp8gen plan specs/llama3_8b.lua --world 6
expect_code 0
for mesh in 1 2 3 6; do expect_out_has "fsdp $mesh "; done
[ "$(wc -l <"$out")" -eq 6 ] || fail "a heading, four meshes and what a step is expected"
step=$(sed -n 's/^fsdp 1 .* \([0-9.]* ms\) *- .*/\1/p' "$out")
run fp8gen plan specs/llama3_8b.lua
expect_out_has "forward and backward $step"
expect_out_has "ms pass by pass"
run fp8gen plan specs/llama3_8b.lua --world 8 --json
expect_code 0
[ "$(grep -c '"predicted":{"all_gather":' "$out")" -eq 4 ] || fail "four predictions expected"
for wrong in "--world 9" "--world 0" "--world 4 --fsdp 2" "--world 4 --rank 1" "--world 4 --layer qkv"; do
    run fp8gen plan specs/llama3_8b.lua $wrong
    expect_code 2
    expect_err_has "world"
done

case_of "amaxes shared over fsdp: fewer ranks than the spec's may be one"
printf 'return model "m" { mesh = { fsdp = 2 }, recipe = recipe.delayed { amax_group = "fsdp" },
    layers = { linear "a" { in_features = 32, out_features = 16, tokens = 8 } } }' >"$T/shared.lua"
run fp8gen plan "$T/shared.lua" --world 2
expect_code 0
for mesh in 1 2; do expect_out_has "fsdp $mesh "; done
run fp8gen run "$T/shared.lua" --fsdp 1 --device host
expect_code 0
expect_out_has "m on host: 6 passes, 0 failed"

case_of "a group of more parts than one call of a gather takes"
{
    echo 'local list = {}'
    echo 'for i = 1, 90 do'
    echo '    list[i] = linear ("l" .. i) { in_features = 16 + i % 5, out_features = 8 + i % 7,'
    echo '        gather_group = "all", bias = true, recipe = recipe.rowwise {} }'
    echo 'end'
    echo 'return model "group" { tokens = 3, mesh = { fsdp = 2 }, layers = list }'
} >"$T/group.lua"
run fp8gen run "$T/group.lua" --device host
expect_code 0
expect_out_has "2 ranks (threads), 90 layers, 2 steps of 2 micro-batches"
expect_out_has ", 0 failed"

case_of "too many tokens: said once, whatever the number of ranks"
run fp8gen run "$T/shared.lua" --tokens 9 --device host
expect_code 2
expect_err "fp8gen: error: --tokens 9: layer 'a' is planned for at most 8 tokens
  hint: raise max_tokens in the spec"

case_of "a number of ranks that is none"
for ranks in 0 5000 two; do
    run fp8gen plan $spec --fsdp $ranks
    expect_code 2
    expect_err_has "fsdp"
done

case_of "a bench without a GPU heads with what there is"
run fp8gen bench shard --device host --case step --shape 64,64 --tokens 16 --blocks 1 --rounds 1
expect_code 0
expect_out_has "host; medians of 1 round"
expect_out_lacks "SMs,"

finish
