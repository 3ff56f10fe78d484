#!/usr/bin/env bash
# bench.sh - measures on the GPU of this machine and keeps what `fp8gen bench ... --json` prints
# under tests/bench/results, one file for each benchmark. A new run replaces a file only when it is
# whole.
set -u
cd "$(dirname "$0")/.." || exit 1
export BUILD=${BUILD:-build}
tools/build.sh fp8gen || exit $?
results=tests/bench/results
mkdir -p $results
sources() { # as git lists them, or, without git, as they lie here
    git ls-files gen templates runtime 2>/dev/null | grep . || find gen templates runtime -type f
}
hash=$(sources | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -d' ' -f1)
status=0
gpus=$("$BUILD/bin/fp8gen" doctor 2>/dev/null | grep -c 'compute capability')
measure() { # file, the benchmark and its options
    local file=$1
    shift
    echo "fp8gen bench $*"
    if "$BUILD/bin/fp8gen" bench "$@" --json --source-hash "$hash" >"$results/.$file.new"; then
        mv "$results/.$file.new" "$results/$file.jsonl"
    else
        status=$?
        rm -f "$results/.$file.new"
    fi
}
measure gemm gemm
measure quantize quantize
measure layer layer
measure host host specs/llama3_8b.lua
# the four linears of Llama-3 8B over two GPUs; the five of Llama-3 70B over half of the GPUs and
# over all
measure_ranks() { # file, GPUs that it needs, options
    local file=$1 needed=$2
    shift 2
    if [ "$gpus" -ge "$needed" ]; then
        measure "$file" shard "$@"
    else
        echo "fp8gen bench shard $*: needs $needed GPUs, there are $gpus:" \
            "$results/$file.jsonl stays as it is"
    fi
}
# shellcheck disable=SC2054
block70=(--shape 10240,8192 --shape 8192,8192 --shape 28672,8192 --shape 28672,8192
    --shape 8192,28672)
measure_ranks shard 2
measure_ranks shard_x4 4 --ranks 4 --ranks 2 --blocks 2 "${block70[@]}"
measure_ranks shard_x8 8 --ranks 8 --ranks 4 --blocks 2 "${block70[@]}"
exit $status
