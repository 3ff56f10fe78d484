#!/usr/bin/env bash
# Ranks as processes with a GPU each, as torchrun and mpirun start them: right results, and none
# that hangs when another is killed, does not come, has another spec or makes other calls. Needs two
# GPUs; takes up to four.
. tests/cli/harness.sh
spec=specs/debug_vocab2556.lua
gpus=$("$FP8GEN" doctor 2>/dev/null | grep -c '^GPU .*capability')
if [ "$gpus" -lt 2 ]; then
    echo "skip: two GPUs are needed, there are $gpus"
    exit 77
fi
[ "$gpus" -le 4 ] || gpus=4
last=$((gpus - 1))
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE MASTER_PORT
declare -a pids codes

# The environment of a rank.
torchrun_rank() {
    echo RANK="$1" WORLD_SIZE="$gpus" LOCAL_RANK="$1" LOCAL_WORLD_SIZE="$gpus" MASTER_PORT="$port" \
        TORCHELASTIC_RUN_ID=test$$
}
mpirun_rank() {
    echo OMPI_COMM_WORLD_RANK="$1" OMPI_COMM_WORLD_SIZE="$gpus" OMPI_COMM_WORLD_LOCAL_RANK="$1" \
        OMPI_COMM_WORLD_LOCAL_SIZE="$gpus" PMIX_NAMESPACE="test$$.$port"
}
port=1
start_rank() { # rank, launcher, command...
    local rank=$1 launcher=$2
    shift 2
    # shellcheck disable=SC2046
    env $("${launcher}_rank" "$rank") "$@" >"$T/$rank.out" 2>"$T/$rank.err" </dev/null &
    pids[rank]=$!
}
start_ranks() { # launcher, command...: all ranks, under another name for the next
    local rank
    port=$((port + 1))
    for ((rank = 0; rank < gpus; rank++)); do start_rank $rank "$@"; done
}
join_ranks() { # seconds: waits for all; one that is not done by then hangs
    local rank end=$((SECONDS + $1))
    for ((rank = 0; rank < gpus; rank++)); do
        [ -n "${pids[rank]:-}" ] || continue
        while kill -0 "${pids[rank]}" 2>/dev/null && [ $SECONDS -lt $end ]; do sleep 0.1; done
        if kill -0 "${pids[rank]}" 2>/dev/null; then
            kill -9 "${pids[rank]}"
            fail "rank $rank hangs"
        fi
        wait "${pids[rank]}"
        codes[rank]=$?
        pids[rank]=
    done
    cat "$T"/*.out >"$out"
    cat "$T"/*.err >"$err"
    command_line="$gpus ranks"
    code=${codes[*]}
}

for launcher in torchrun mpirun; do
    case_of "$gpus processes as $launcher starts them: as unsharded"
    start_ranks $launcher "$FP8GEN" run $spec --fsdp $gpus --json -q --timeout 20
    join_ranks 60
    for ((rank = 0; rank < gpus; rank++)); do
        [ "${codes[rank]}" = 0 ] || fail "exit code 0 of rank $rank expected"
    done
    expect_out_lacks '"verdict":"failed"'
    [ "$(grep -c '"verdict":"ok"' "$out")" -eq 6 ] || fail "six layers, reported once, expected"
done

case_of "one is killed at work: the others end with an error that names rank and collective"
start_ranks torchrun "$FP8GEN" run specs/llama3_8b.lua --tokens 64 --fsdp $gpus --timeout 10
sleep 8
kill -9 "${pids[last]}" 2>/dev/null || fail "rank $last ended too early to be killed"
join_ranks 60
for ((rank = 0; rank < last; rank++)); do
    [ "${codes[rank]}" != 0 ] || fail "an error of rank $rank expected"
    grep -qE "rank $rank( of $gpus|:|,)" "$T/$rank.err" ||
        fail "a message that names rank $rank expected"
done

case_of "one does not come, has another spec, another model"
port=$((port + 1))
for ((rank = 0; rank < last; rank++)); do
    start_rank $rank torchrun "$FP8GEN" run $spec --fsdp $gpus --timeout 3
done
join_ranks 60
for ((rank = 0; rank < last; rank++)); do
    [ "${codes[rank]}" = 3 ] || fail "exit code 3 of rank $rank expected"
done
expect_err_has "for rank $last"
port=$((port + 1))
for ((rank = 0; rank < last; rank++)); do
    start_rank $rank torchrun "$FP8GEN" run specs/llama3_8b.lua --shrink --fsdp $gpus --timeout 6
done
start_rank $last torchrun "$FP8GEN" run specs/qwen3_8b.lua --shrink --fsdp $gpus --timeout 6
join_ranks 60
for ((rank = 0; rank < gpus; rank++)); do
    [ "${codes[rank]}" != 0 ] || fail "an error of rank $rank expected"
done
expect_err_has "rank $last has "

case_of "after all that the next run starts clean"
start_ranks torchrun "$FP8GEN" run $spec --layer qkv --fsdp $gpus -q --timeout 20
join_ranks 60
[ "${codes[*]}" = "$(printf '0 %.0s' $(seq $gpus) | sed 's/ $//')" ] || fail "exit codes 0 expected"

case_of "fewer GPUs than ranks: refused with both numbers"
run env CUDA_VISIBLE_DEVICES=0 "$FP8GEN" run $spec --fsdp $gpus
expect_code 3
expect_err_has "$gpus ranks need a GPU each, but there is 1"
run fp8gen run $spec --fsdp 64
expect_code 3
expect_err_has "64 ranks need a GPU each, but there are"
run env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 "$FP8GEN" run $spec --fsdp 3
expect_code 2
expect_err_has "torchrun started 2 ranks, but the weights are shared by 3"
finish
