#!/usr/bin/env bash
# gpu_check.sh [tests] [bench] [train] - the PyTorch package on a GPU: its tests, its figures, its
# losses.
#
# Without a word: tests and bench, under 3 minutes on one GPU; what needs two runs if there are two.
# train: 1,000 steps of train_llama.py in every recipe and in bf16, of each of SEEDS. Needs the
# built libraries (FP8GEN_LIBRARY_DIR, or build/lib) and a python with PyTorch (PYTHON, else
# python3). Every step has its own time limit, and the next ones run whatever happened. OUT
# (default: build/torch-check) gets torch.jsonl, the logs, curves. Exit code: the number of steps
# that failed.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$root/build/torch-check}
mkdir -p "$out"
export FP8GEN_LIBRARY_DIR=${FP8GEN_LIBRARY_DIR:-$root/build/lib}
export FP8_TEST_PYTHON=$python FP8_TEST_DEVICE=cuda FP8_TEST_REQUIRE=torch
export FP8_TEST_BUILD=$root/build FP8GEN_CACHE_DIR=${FP8GEN_CACHE_DIR:-$root/build/torch-cache}
export PYTHONUNBUFFERED=1 TORCH_CPP_LOG_LEVEL=ERROR
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)
wanted=" ${*:-tests bench} "
begin=$SECONDS
rm -f "$out/failed"

step() { # name seconds command...
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout -k 5 "$limit" "$@" >"$out/$name.out" 2>"$out/$name.err" </dev/null
    status=$?
    if [ $status = 0 ]; then
        local counts
        counts=$(grep -h '^\[  [PS]' "$out/$name.out" | tr '\n' ' ')
        echo "ok    $name, $((SECONDS - start)) s  $counts"
    else
        echo "$name" >>"$out/failed"
        [ $status = 124 ] && status="$status (ran out of time)"
        echo "FAIL  $name, $((SECONDS - start)) s, exit $status"
        tail -n 25 "$out/$name.out" "$out/$name.err" | sed 's/^/      /'
    fi
}
checked() { # name seconds file...
    local name=$1 limit=$2
    shift 2
    FP8_TEST_TIMEOUT=$limit step "$name" "$limit" bash "$root/tests/torch/run.sh" "$@"
}
pair() {
    local port=$((20000 + RANDOM % 20000))
    "$python" -m torch.distributed.run --nproc-per-node 2 --master-port $port "$@"
}
export -f pair
export python

echo "$gpus GPU(s); $("$python" -c 'import torch; print("torch", torch.__version__)')"
# The tests run at once: they are small, and compile on the CPU most of the time.
if [[ $wanted == *" tests "* ]]; then
    checked linear 150 check_abi.py check_linear.py &
    checked recipes 150 check_recipes.py &
    checked cuda 150 check_cuda.py &
    checked compile 150 check_compile.py &
    checked wrapper 150 check_wrapper.py &
    checked train 170 check_train.py &
    if [ "$gpus" -ge 2 ]; then
        checked parallel 150 check_parallel.py &
        checked fsdp 150 check_fsdp.py &
    fi
    wait
fi
if [[ $wanted == *" bench "* ]]; then
    step bench_layers 150 "$python" "$here/bench_torch.py" layers
    cp "$out/bench_layers.out" "$out/torch.jsonl"
    if [ "$gpus" -ge 2 ]; then
        step bench_wire 90 bash -c "pair '$here/bench_torch.py' wire --append"
        cat "$out/bench_wire.out" >>"$out/torch.jsonl"
        for gather in fp8 bf16; do
            step "two_ranks_$gather" 60 bash -c "pair '$here/train_llama.py' --steps 30 \
                --every 10 --gather $gather --out '$out/two_$gather'"
            tail -n 1 "$out/two_ranks_$gather.out"
        done
    fi
fi
if [[ $wanted == *" train "* ]]; then
    run=("$python" "$here/train_llama.py" --steps 1000 --every 100 --tokens 8192 --held-out 64)
    run+=(--graph)
    recipes="current delayed rowwise rowwise_hp_wgrad block"
    seeds=${SEEDS:-1 2 3}
    # At once, spread over the GPUs: what counts is the losses.
    IFS=, read -ra cards <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"
    turn=0
    for seed in $seeds; do
        for recipe in bf16 $recipes; do
            flags="--recipe $recipe"
            [ $recipe = bf16 ] && flags="--precision bf16"
            CUDA_VISIBLE_DEVICES=${cards[turn++ % ${#cards[@]}]} step "train_${recipe}_$seed" 280 \
                "${run[@]}" $flags --seed "$seed" --out "$out/${recipe}_$seed" &
        done
    done
    wait
    for recipe in $recipes; do
        files=()
        for kind in $recipe bf16; do
            for seed in $seeds; do files+=("$out/${kind}_$seed.csv"); done
        done
        step "losses_$recipe" 60 "$python" "$here/bench_torch.py" losses --append \
            --recipe "$recipe" "${files[@]}"
        cat "$out/losses_$recipe.out" >>"$out/torch.jsonl"
    done
fi
[ -f "$out/torch.jsonl" ] && "$python" - "$out/torch.jsonl" <<'END'
import json, sys
for line in open(sys.argv[1]):
    if not line.startswith("{"):
        continue
    r = json.loads(line)
    if "case" in r:
        ratio = "" if r["ratio"] is None else f"  ratio {r['ratio']:.3f}"
        pair = r["value"], r["baseline"]
        value, base = (f"{v:.1f}" if isinstance(v, float) else v for v in pair)
        print(f"{r['case'][:44]:44} {r['M']} {r['N']} {r['K']} {r['pass']}: {value} {r['unit']}, "
              f"{r['baseline_name']} {base}{ratio}")
END
failed=$(cat "$out/failed" 2>/dev/null | wc -l)
echo "$failed step(s) failed, $((SECONDS - begin)) s in all; results in $out"
exit $failed
