#!/usr/bin/env bash
# fp8gen cache path|list|trim|verify, and builds through the cache, with an NVRTC that compiles
# nothing.
. tests/cli/harness.sh
command -v cc >/dev/null || { echo "skip: no C compiler for the fake NVRTC"; exit 77; }
mkdir "$T/lib"
cc -shared -fPIC -O1 -w -Wl,-soname,libnvrtc.so.13 -o "$T/lib/libnvrtc.so.13" tests/cache/fake/nvrtc.c || exit 1
export LD_LIBRARY_PATH=$T/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export FP8GEN_CACHE_DIR=$T/cache FAKE_NVRTC_LOG=$T/log
cat >"$T/spec.lua" <<END
return model "small" { layers = { linear "a" { in_features = 64, out_features = 48, tokens = 32 } } }
END
compiled() { grep -c ^start "$T/log"; }

case_of "cache path"
run fp8gen cache path
expect_code 0
expect_out "$T/cache"
expect_no_file "$T/cache"

case_of "cache path where no variable says it"
run env -u FP8GEN_CACHE_DIR -u XDG_CACHE_HOME HOME=/h "$FP8GEN" cache path
expect_out "/h/.cache/fp8gen"
run env -u FP8GEN_CACHE_DIR -u XDG_CACHE_HOME -u HOME "$FP8GEN" cache path
expect_code 3
expect_err_has "neither HOME nor FP8GEN_CACHE_DIR"

case_of "a cache that is not there is empty"
for command in list verify trim; do
    run fp8gen cache $command
    expect_code 0
    expect_err ''
done
expect_no_file "$T/cache"

case_of "a second build compiles nothing"
run fp8gen build "$T/spec.lua" -o "$T/one"
expect_code 0
expect_err ''
cold=$(compiled)
run fp8gen build -v "$T/spec.lua" -o "$T/two"
expect_code 0
expect_err_lacks "compiled"
[ "$(compiled)" = "$cold" ] || fail "nothing compiled"
run diff -r "$T/one" "$T/two"
expect_code 0

case_of "--no-cache compiles everything and keeps nothing"
run env FP8GEN_CACHE_DIR="$T/none" "$FP8GEN" build --no-cache "$T/spec.lua" -o "$T/two"
expect_code 0
expect_no_file "$T/none"
[ "$(compiled)" = $((2 * cold)) ] || fail "all compiled"

case_of "-v says what was compiled"
run env FP8GEN_CACHE_DIR="$T/other" "$FP8GEN" build -v "$T/spec.lua" -o "$T/two"
expect_err_has "compiled amax_bf16 for sm_90a in "

case_of "run uses the cache"
run fp8gen run "$T/spec.lua" --device host
expect_code 0

case_of "cache list"
run fp8gen cache list
expect_code 0
expect_out_has "kernels  amax_bf16."
expect_out_has "$cold entries"
expect_err ''

case_of "cache verify"
run fp8gen cache verify
expect_code 0
expect_out "$cold entries, 0 damaged"
truncate -s 10 "$T"/cache/kernels/amax_bf16.*/kernel.cubin
run fp8gen cache verify
expect_code 3
expect_out_has "damaged: kernels/amax_bf16."
expect_out_has "$cold entries, 1 damaged"
expect_err_has "rebuilt when next needed"
run fp8gen build -v "$T/spec.lua" -o "$T/two"
expect_err_has "is damaged: it is rebuilt"
run fp8gen cache verify
expect_code 0

case_of "cache trim"
run fp8gen cache trim
expect_code 0
expect_out "removed 0 B"
run fp8gen cache trim --max-size 12X
expect_code 2
expect_err_has "'12X' is no size"
FP8GEN_CACHE_SIZE=12X run fp8gen cache trim
expect_code 2
expect_err_has "FP8GEN_CACHE_SIZE: '12X' is no size"
expect_err_has "512M"
run fp8gen cache trim --max-size 0
expect_code 0
run fp8gen cache list
expect_out "0 entries, 0 B"

case_of "a cache that cannot be used: one warning, and the build is done"
run env FP8GEN_CACHE_DIR=/dev/null/cache "$FP8GEN" build "$T/spec.lua" -o "$T/three"
expect_code 0
expect_err_has "warning: the cache cannot be used in /dev/null/cache: Not a directory"
[ "$(wc -l <"$err")" = 1 ] || fail "one line"
expect_file "$T/three/manifest.json"

case_of "a relative path, and a working folder that is gone"
mkdir "$T/gone"
(cd "$T/gone" && rmdir "$T/gone" &&
    FP8GEN_CACHE_DIR=there exec "$FP8GEN" build "$T/spec.lua" -o "$T/six") 2>"$T/err"
expect_file "$T/six/manifest.json"
run cat "$T/err"
expect_out_has "warning: the cache has a relative path, which the working folder does not lead to"

case_of "help"
run fp8gen help
expect_out_has "cache trim"
expect_out_has FP8GEN_CACHE_DIR
expect_out_has FP8GEN_CACHE_SIZE
run fp8gen help cache
expect_out_has "--max-size"
run fp8gen cache
expect_code 2
expect_err_has "path, list, trim, verify"
run fp8gen cache verfy
expect_err_has "did you mean 'cache verify'?"

finish
