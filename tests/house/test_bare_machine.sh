#!/usr/bin/env bash
# The program starts, checks, plans and runs on the host where there is no libcuda, NVRTC or
# cuBLASLt, and says what is missing where it needs them.
. tests/cli/harness.sh
command -v cc >/dev/null || { echo "skip: no C compiler for the preloaded library"; exit 77; }
cc -shared -fPIC -D_GNU_SOURCE -O1 -o "$T/hide.so" tests/house/preload/hide_libraries.c -ldl ||
    exit 1
bare() { # a sanitizer's runtime wants to come first
    ASAN_OPTIONS=verify_asan_link_order=0 LD_PRELOAD=$T/hide.so "$FP8GEN" "$@"
}
spec=specs/debug_vocab2556.lua

case_of "no CUDA library is linked"
run bash -c "LC_ALL=C readelf -d '$FP8GEN' '$FP8_TEST_BUILD'/lib/lib*.so | grep NEEDED"
expect_code 0
expect_out_lacks libcuda
expect_out_lacks libnvrtc
expect_out_lacks libcublas

case_of "--version"
run bare --version
expect_code 0
expect_out_has 0.1.0

case_of "help"
run bare help
expect_code 0
expect_out_has check

case_of "check"
run bare check $spec
expect_code 0
expect_out ''
expect_err ''

case_of "plan"
run bare plan $spec
expect_code 0

case_of "expand needs no compiler"
run bare expand $spec -o "$T/expanded"
expect_code 0

case_of "build says that NVRTC is missing"
run bare build $spec --arch sm_90a -o "$T/bundle"
expect_code 3
expect_err_has libnvrtc
expect_no_file "$T/bundle"

case_of "build without cubins needs no NVRTC"
run bare build $spec --arch none -o "$T/host_bundle"
expect_code 0
expect_file "$T/host_bundle/manifest.json"

case_of "run on the host"
run bare run $spec --device host --tokens 16
expect_code 0

case_of "run picks the host by itself"
run bare run $spec --device auto --tokens 16
expect_code 0

case_of "run on a GPU says that libcuda is missing"
run bare run $spec --device cuda --tokens 16
expect_code 3
expect_err_has "--device cuda needs a CUDA device, and this machine has none: libcuda"
expect_err_has "'run --device host'"

case_of "so do the commands that need a GPU, before anything else"
spec_with_none=$T/none.lua
cat >"$spec_with_none" <<'EOF'
return model "m" { tokens = 16, layers = {
    linear "a" { in_features = 64, out_features = 64 },
    linear "b" { in_features = 64, out_features = 64, recipe = recipe.block {} } } }
EOF
for command in "bench layer" "bench gemm" "bench quantize" "bench host" "tune $spec_with_none -o $T/t"; do
    run bare $command
    expect_code 3
    expect_err_has "' needs a CUDA device, and this machine has none: libcuda (the NVIDIA driver) was not found"
    expect_err_lacks "nothing to tune"
    expect_err_lacks "set the variable"
done

case_of "doctor lists what is missing"
run bare doctor
expect_out_has libnvrtc

finish
