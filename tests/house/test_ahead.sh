#!/usr/bin/env bash
# Bundles ahead of time: one for several archs is opened and computes on a node that has libfp8
# alone.
. tests/cli/harness.sh
command -v cc >/dev/null || { echo "skip: no C compiler"; exit 77; }
sanitize=$(sed -n 's/^FP8GEN_SANITIZE:STRING=//p' "$FP8_TEST_BUILD/CMakeCache.txt" 2>/dev/null)
mkdir "$T/node"
cp -L "$FP8_TEST_BUILD"/lib/libfp8.so* "$T/node/" || exit 1
# A machine where jansson is carried has it beside the library.
cp -L "$FP8_TEST_BUILD"/lib/libjansson.so* "$T/node/" 2>/dev/null
cc -std=c11 -D_GNU_SOURCE -Wall -I. ${sanitize:+-fsanitize=$sanitize} -o "$T/node/ahead" \
    tests/house/ahead/ahead.c -L"$T/node" -lfp8 || exit 1
cc -shared -fPIC -D_GNU_SOURCE -O1 -o "$T/node/hide.so" tests/house/preload/hide_libraries.c -ldl ||
    exit 1
cat >"$T/spec.lua" <<END
return model "ahead" { layers = { linear "a" { in_features = 16, out_features = 32, tokens = 4 } } }
END
node() { # the program with nothing of this machine's environment; a sanitizer's runtime wants to come first
    env -i PATH=/nonexistent HOME=/nonexistent LD_LIBRARY_PATH="$T/node" LD_PRELOAD="$T/node/hide.so" \
        ASAN_OPTIONS=verify_asan_link_order=0 "$T/node/ahead" "$@"
}

case_of "libfp8 needs neither generator nor toolkit"
run bash -c "LC_ALL=C readelf -d '$T/node/libfp8.so' | grep NEEDED"
expect_code 0
for library in lua nvrtc cuda cublas fp8gen; do expect_out_lacks $library; done

case_of "a bundle without cubins"
run fp8gen build "$T/spec.lua" --arch none -o "$T/node/host"
expect_code 0
run node "$T/node/host"
expect_code 0
for library in lua nvrtc libcuda cublas fp8gen.so; do expect_out_lacks "/lib$library"; done

case_of "a bundle for several archs"
if fp8gen doctor 2>/dev/null | grep -q '^NVRTC.*not found' || ! fp8gen build "$T/spec.lua" \
    --arch sm_90a,sm_100a -o "$T/node/several" 2>"$T/why"; then
    skip_case "$(head -n 1 "$T/why" 2>/dev/null || echo no NVRTC)"
else
    mv "$T/node/several" "$T/node/moved"
    run node "$T/node/moved"
    expect_code 0
    for library in lua nvrtc libcuda cublas fp8gen.so; do expect_out_lacks "/lib$library"; done
    expect_file "$T/node/moved/kernels/amax_bf16.sm_90a.cubin"
    expect_file "$T/node/moved/kernels/amax_bf16.sm_100a.cubin"
fi

case_of "a truncated cubin is refused"
if [ -d "$T/node/moved" ]; then
    truncate -s 100 "$T/node/moved/kernels/amax_bf16.sm_100a.cubin"
    run node "$T/node/moved"
    expect_code 1
    expect_out_has "has 100 bytes"
else
    skip_case "no bundle with cubins"
fi

finish
