#!/usr/bin/env bash
# bench.sh - measures on the GPU of this machine and keeps what `fp8gen bench ... --json` prints under
# tests/bench/results, one file for each benchmark. A new run replaces a file only when it is whole.
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
for what in gemm quantize layer host shard; do
    if [ $what = shard ] && [ "$gpus" -lt 2 ]; then
        echo "fp8gen bench shard needs 2 GPUs, there are $gpus: $results/shard.jsonl stays as it is"
        continue
    fi
    echo "fp8gen bench $what"
    spec=
    [ $what = host ] && spec=specs/llama3_8b.lua
    if "$BUILD/bin/fp8gen" bench $what $spec --json --source-hash "$hash" >$results/.$what.new; then
        mv $results/.$what.new $results/$what.jsonl
    else
        status=$?
        rm -f $results/.$what.new
    fi
done
exit $status
