#!/usr/bin/env bash
# run --fsdp: what is refused, with the numbers, and that nothing is left behind.
. tests/sim/sim.sh
spec=specs/debug_vocab2556.lua
export TMPDIR=$T/tmp
mkdir "$TMPDIR"

case_of "more ranks than GPUs"
if "$FP8GEN" doctor | grep -q '^GPU .*capability'; then
    skip_case "there is a GPU"
else
    run fp8gen run $spec --fsdp 2 --device cuda
    expect_code 3
    expect_err_has "2 ranks need a GPU each, but there are 0"
    expect_err_has "--device host"
fi

case_of "a launcher that started another number of ranks, or processes for the host"
run env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 "$FP8GEN" run $spec --fsdp 2 --device host
expect_code 2
expect_err_has "torchrun started 2 processes"

case_of "options that do not go together, names and numbers that are none"
run fp8gen run $spec --fsdp 2 --device host --dump "$T/dump"
expect_code 2
expect_err_has "--dump"
run fp8gen run $spec --fsdp 2 --device host --layer hed
expect_code 2
expect_err_has "did you mean 'head'"
run fp8gen run $spec --fsdp 0
expect_code 2
run fp8gen run $spec --fsdp 2 --device host --layer head --tokens 5000
expect_code 2
expect_err_has "at most 1024 tokens"
run fp8gen run $spec --fsdp 2 --device host --timeout soon
expect_code 2
expect_err_has "--timeout"
run fp8gen run $spec --device host --timeout 5
expect_code 2
expect_err_has "--timeout is of collectives between ranks, and there is one rank"

case_of "numbers of one and of many, a chunk that no rank has full"
cat >"$T/few.lua" <<'EOF'
return model "few" { tokens = 16, layers = {
    linear "short" { in_features = 64, out_features = 50, recipe = recipe.block {} },
    linear "two" { in_features = 32, out_features = 2 } } }
EOF
run fp8gen run "$T/few.lua" --fsdp 2 --device host
expect_code 0
expect_out_has "50 rows, uneven"
expect_out_has " 1 row "
expect_out_has "2 ranks (threads), 2 layers, "
run fp8gen run "$T/few.lua" --fsdp 2 --device host --layer two
expect_code 0
expect_out_has "2 ranks (threads), 1 layer, "
run fp8gen run "$T/few.lua" --fsdp 1 --device host --layer two # of one rank: every pass
expect_code 0
expect_out_has "few on host: 6 passes, 0 failed"

case_of "one layer alone; nothing is left behind"
run fp8gen run $spec --fsdp 2 --device host --layer gate --tokens 3
expect_code 0
expect_out_has "gate"
expect_out_lacks "head"
[ -z "$(find "$TMPDIR" -mindepth 1 | head -n 3)" ] || fail "TMPDIR empty expected"

case_of "bench shard: flow and rows, on the host"
run fp8gen bench shard --device host --json --source-hash abc --shape 130,64 --tokens 16 --blocks 2 \
    --mib 1 --rounds 2 --trace "$T/trace.json"
expect_code 0
expect_err ''
for word in gather_copy_engine gather_fp8_vs_bf16 gather_fp8_usable_vs_bf16 step_fsdp exposed_ms '"header":"shard"' \
    '"predicted_seconds":null'; do
    expect_out_has "$word"
done
expect_out_lacks '"case":"prediction_error"' # predictions are of a GPU
if command -v python3 >/dev/null; then
    run python3 -c 'import json, sys
events = json.load(open(sys.argv[1]))["traceEvents"]
assert {event["pid"] for event in events} == {0, 1}
assert {event["cat"] for event in events} == {"compute", "communication"}
assert any("all_gather" in event["name"] for event in events)
assert all(event["dur"] >= 0 for event in events)' "$T/trace.json"
    expect_code 0
fi
run fp8gen bench shard --device host --case weights --shape 130,64 --rounds 1 --ranks 3 --ranks 2
expect_code 0
[ "$(grep -c '^gather_fp8_vs_bf16  *[23] ' "$out")" -eq 2 ] ||
    fail "a row for each number of ranks expected"
[ "$(grep -c '^case ' "$out")" -eq 1 ] || fail "one table expected"
expect_out_lacks predicted
for ranks in 1 65 two; do
    run fp8gen bench shard --device host --ranks $ranks
    expect_code 2
    expect_err_has "--ranks takes a whole number from 2 to 64, not '$ranks'"
done
run fp8gen bench shard --case weights --trace step.json
expect_code 2
expect_err_has "--trace keeps the timeline of case 'step', which these cases leave out"
run fp8gen bench shard --device host --case step --trace "$T/none/step.json"
expect_code 3
expect_out ''
expect_err_has "cannot write '$T/none/step.json': No such file or directory"
small="bench shard --device host --case step --shape 16,16 --tokens 8 --blocks 1 --rounds 1"
ln -s /dev/full "$T/full" # what is no plain file is written, not replaced
run fp8gen $small --trace "$T/full"
if [ -c /dev/full ]; then
    expect_code 3
    expect_err_has "cannot write '$T/full': No space left on device"
fi
ln -s target.json "$T/link.json"
run fp8gen $small --trace "$T/link.json"
expect_code 0
[ -L "$T/full" ] && [ -L "$T/link.json" ] || fail "links that are still there expected"
ln -s nowhere/t.json "$T/lost.json"
run fp8gen $small --trace "$T/lost.json"
expect_code 3
ln -s new.json "$T/untried.json" # a run that fails later leaves no file where a link leads
run fp8gen bench shard --device host --case step --shape 16,16 --tokens 8 --blocks 0 --trace "$T/untried.json"
[ ! -e "$T/new.json" ] || fail "no file for a run that failed expected"
echo kept >"$T/log" # what the output goes to is not replaced
"$FP8GEN" $small --trace /dev/stdout >>"$T/log" 2>"$err" || fail "exit code 0 expected"
{ grep -q kept "$T/log" && grep -q traceEvents "$T/log"; } ||
    fail "a log with a timeline behind it expected"
grep -q traceEvents "$T/target.json" || fail "a timeline where the link leads expected"
run fp8gen bench shard --case gathers
expect_code 2
expect_err_has "no case 'gathers'"
finish
