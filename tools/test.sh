#!/usr/bin/env bash
# test.sh cpu|gpu [NAME...] - builds and runs the tests and ends with the line
#   N passed, N failed, N skipped
#
# cpu runs every test but those labelled gpu, several at a time. gpu runs those, eight at a time
# (they spend most of their time in CPU references), and writes tests/gpu/receipt.txt. NAMEs (shell
# patterns) choose among them. Needs only bash and coreutils once the tests are built, so that a
# build folder can be carried to a machine without compilers: FP8GEN_NO_BUILD=1 BUILD=folder
# tools/test.sh gpu.
#
# A cmocka program counts as its cases, any other test as one; a program that fails without a failed
# case (it crashed or ran out of time) is one failed case. FP8_TEST_REQUIRE=gpu: a GPU that is
# missing is a failure. Exit codes: 0 all passed, 1 failures, 3 the machine lacks something.
set -u
cd "$(dirname "$0")/.." || exit 1
suite=${1:?cpu or gpu}
shift
export BUILD=${BUILD:-build}
tools/build.sh all || exit $?
build=$(cd "$BUILD" && pwd) || exit 3
export FP8GEN=$build/bin/fp8gen FP8_TEST_BUILD=$build FP8GEN_CACHE_DIR=$build/cache
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
logs=$build/tests/logs-$suite
rm -rf "$logs"
mkdir -p "$logs"

# Where the loader does not know the toolkit's libraries, they are found here.
for toolkit in "${CUDA_PATH:-}" "${CUDA_HOME:-}" /usr/local/cuda; do
    for folder in lib64 lib; do
        if [ -n "$toolkit" ] && [ -d "$toolkit/$folder" ]; then
            export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$toolkit/$folder
        fi
    done
done

run_one() { # name label device kind path
    local log=$logs/$1 command=("$build/$5")
    [ "$4" = script ] && command=(bash "$5")
    local start=$SECONDS status
    FP8_TEST_DEVICE=$3 timeout -k 10 900 "${command[@]}" >"$log.log" 2>&1 </dev/null
    status=$?
    local passed=0 failed=0 skipped=0
    count() { # word: the number in cmocka's closing lines
        sed -n "s/^\[  $1 *\] \([0-9][0-9]*\) test(s).*/\1/p" "$log.log" |
            awk '{ n += $1 } END { print n + 0 }'
    }
    passed=$(count PASSED) failed=$(count FAILED) skipped=$(count SKIPPED)
    if [ $((passed + failed + skipped)) = 0 ]; then
        [ $status = 0 ] && passed=1
        [ $status = 77 ] && skipped=1
    fi
    [ $status != 0 ] && [ $status != 77 ] && [ "$failed" = 0 ] && failed=1
    echo "$passed $failed $skipped" >"$log.count"
    if [ "$failed" != 0 ]; then
        [ $status = 124 ] && echo "(ran out of time)" >>"$log.log"
        printf 'FAIL  %s (exit %d)\n%s\n' "$1" $status \
            "$(tail -n 80 "$log.log" | sed 's/^/      /')"
    else
        local note=
        [ "$skipped" != 0 ] && note=", $skipped skipped$(skip_reason "$log.log")"
        printf 'ok    %-36s %4d passed%s, %d s\n' "$1" "$passed" "$note" $((SECONDS - start))
    fi
}
skip_reason() { # the first line that says why
    local reason
    reason=$(grep -m1 -i '^skip' "$1" | sed 's/^[Ss][Kk][Ii][Pp][a-z]*:* *//')
    [ -n "$reason" ] && echo " ($reason)"
}
export -f run_one skip_reason
export build logs

wanted() { # name: does it match one of the patterns?
    [ ${#patterns[@]} = 0 ] && return 0
    local pattern
    for pattern in "${patterns[@]}"; do
        # shellcheck disable=SC2053
        [[ $1 == $pattern ]] && return 0
    done
    return 1
}
patterns=("$@")
jobs=$(nproc 2>/dev/null || echo 2)
[ "$suite" = gpu ] && [ "$jobs" -gt 8 ] && jobs=8
while read -r name label device kind path; do
    [ "$suite" = gpu ] && [ "$label" != gpu ] && continue
    [ "$suite" = cpu ] && [ "$label" = gpu ] && continue
    wanted "$name" && echo "$name $label $device $kind $path"
done <"$build/tests/list" | xargs -r -P "$jobs" -L 1 bash -c 'run_one "$@"' run_one

total=$(cat "$logs"/*.count 2>/dev/null |
    awk '{ p += $1; f += $2; s += $3 } END { printf "%d passed, %d failed, %d skipped", p, f, s }')

if [ "$suite" = gpu ]; then
    gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    if [ -n "$gpu" ]; then
        files() { # the sources as git lists them, or, without git, as they lie here
            git ls-files gen templates runtime 2>/dev/null | grep . ||
                find gen templates runtime -type f
        }
        mkdir -p tests/gpu
        {
            echo "source  $(files | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -d' ' -f1)"
            echo "gpu     ${gpu%%, *}"
            echo "driver  ${gpu##*, }"
            echo "tests   $total"
        } >tests/gpu/receipt.txt
        echo "wrote tests/gpu/receipt.txt"
    else
        echo "no GPU: nvidia-smi lists none, so tests/gpu/receipt.txt is left as it is"
        if [ "${FP8_TEST_REQUIRE:-}" = gpu ]; then
            echo "FP8_TEST_REQUIRE=gpu is set: that is a failure"
            echo "$total"
            exit 1
        fi
    fi
fi
echo "$total"
case $total in
*" 0 failed,"*) exit 0 ;;
esac
exit 1
