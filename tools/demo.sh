#!/usr/bin/env bash
# demo.sh - builds the program, then generates, compiles and runs one layer of a real model: on the
# GPU if there is one, else on the host backend. Exit codes as build.sh and fp8gen.
set -u
cd "$(dirname "$0")/.." || exit 1
export BUILD=${BUILD:-build}
tools/build.sh fp8gen example_embed || exit $?
for toolkit in "${CUDA_PATH:-}" "${CUDA_HOME:-}" /usr/local/cuda; do
    for folder in lib64 lib; do
        if [ -n "$toolkit" ] && [ -d "$toolkit/$folder" ]; then
            export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$toolkit/$folder
        fi
    done
done
fp8gen=$BUILD/bin/fp8gen
spec=specs/llama3_8b.lua
bundle=$BUILD/demo/llama3_8b
step() { # prints the command as one would type it, then runs it
    echo
    echo "\$ fp8gen $*"
    "$fp8gen" "$@"
}
arch=sm_90a
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
case $capability in
9.* | [1-9][0-9].*) arch=sm_${capability/./}a ;;
esac
step check $spec || exit $?
step plan $spec --layer qkv || exit $?
mkdir -p "$BUILD/demo"
if "$fp8gen" doctor 2>/dev/null | grep -q '^NVRTC  *not found'; then
    echo
    echo "NVRTC is not on this machine: the bundle is made without kernels, for the host backend."
    arch=none
fi
step build $spec --arch $arch -o "$bundle" || exit $?
step run $spec --layer qkv --tokens 512 --device auto || exit $?
echo
echo "\$ $BUILD/bin/example_embed $bundle qkv"
"$BUILD/bin/example_embed" "$bundle" qkv
