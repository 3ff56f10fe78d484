#!/usr/bin/env bash
# The public headers compile without a warning as C11 and C++17, alone, twice, and beside cuda_fp8.h
# in either order (it has locals that macros of ours could break). Every other header compiles
# alone.
set -u
command -v cc >/dev/null || { echo "skip: no C compiler"; exit 77; }
cuda=$(sed -n 's/^FP8GEN_CUDA_INCLUDE_DIR:[A-Z]*=//p' "$FP8_TEST_BUILD/CMakeCache.txt")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tried=0 failed=0
try() { # language standard header...
    local language=$1 standard=$2 header
    shift 2
    for header in "$@"; do echo "#include \"$header\""; done >"$folder/try.h"
    echo 'extern int not_empty;' >>"$folder/try.h"
    tried=$((tried + 1))
    local compiler=cc
    [ "$language" = c++ ] && compiler=c++
    if ! "$compiler" -x "$language" "-std=$standard" -Wall -Wextra -Wpedantic -Werror -D_GNU_SOURCE \
        -I. -isystem "$cuda" -isystem "$lua" -fsyntax-only "$folder/try.h" 2>"$folder/log"; then
        failed=$((failed + 1))
        echo "$language $standard, $*:"
        grep -v 'pragma once' "$folder/log" | head -n 20
    fi
}
lua=$(pkg-config --variable=includedir lua5.4 2>/dev/null || echo /usr/include/lua5.4)
[ -f "$lua/lua.h" ] || lua=/usr/include/lua5.4
languages="c:c11"
if command -v c++ >/dev/null; then languages="c:c11 c++:c++17"; else echo "no C++ compiler: C only"; fi
for pair in $languages; do
    language=${pair%%:*} standard=${pair##*:}
    try "$language" "$standard" runtime/fp8.h runtime/fp8.h gen/fp8gen.h gen/fp8gen.h
    try "$language" "$standard" gen/fp8gen.h runtime/fp8.h
    try "$language" "$standard" runtime/fp8_comm.h runtime/fp8.h
    for part in device jit primitives state; do
        try "$language" "$standard" "runtime/fp8_$part.h" runtime/fp8.h
    done
    try "$language" "$standard" runtime/fp8_model.h runtime/fp8_comm.h
    if [ -f "$cuda/cuda_fp8.h" ]; then
        try "$language" "$standard" runtime/fp8.h gen/fp8gen.h cuda_fp8.h
        try "$language" "$standard" cuda_fp8.h gen/fp8gen.h runtime/fp8.h
    else
        echo "no cuda_fp8.h in $cuda: the header without it only"
    fi
    try "$language" "$standard" runtime/fp8.h cuda.h nvrtc.h cublasLt.h
done
for header in runtime/*.h gen/*.h gen/cli/*.h; do
    case $header in *_body.h) continue ;; esac # included several times with other parameters
    try c c11 "$header"
done
echo "$tried combinations compiled, $failed failed"
[ $failed = 0 ]
