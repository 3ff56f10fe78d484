#!/usr/bin/env bash
# libfp8 exports exactly symbols_fp8.txt, libfp8gen exactly symbols_fp8gen.txt, and both lists are
# what the public headers declare. After a change of a header: test_symbols.sh --update.
set -u
status=0
declared() { # headers macro
    # shellcheck disable=SC2086
    cat $1 | grep -v '^#' | tr '\n' ' ' | sed 's/\/\*[^*]*\*\+\([^/*][^*]*\*\+\)*\// /g' |
        grep -oE "$2 [^;]*;" | sed -E 's/\(.*//; s/.*[ *]//' | LC_ALL=C sort
}
check() { # library headers macro list
    if [ "${update:-0}" = 1 ]; then
        declared "$2" "$3" >"$4"
        return
    fi
    if ! diff -u --label "declared in $2" --label "$4" <(declared "$2" "$3") "$4"; then
        status=1
    fi
    if ! diff -u --label "exported by $1" --label "$4" <(nm -D --defined-only "$1" |
        awk '{ print $NF }' | sed 's/@.*//' | grep -v '^__\(odr_\)\?asan\|^_init$\|^_fini$' |
        LC_ALL=C sort) "$4"; then
        status=1
    fi
}
cd "$(dirname "$0")/../.." || exit 1
[ "${1:-}" = --update ] && update=1
command -v nm >/dev/null || { echo "skip: no nm (binutils)"; exit 77; }
lib=${FP8_TEST_BUILD:-build}/lib
check "$lib/libfp8.so" "$(echo runtime/fp8.h runtime/fp8_{comm,device,jit,model,primitives,state}.h)" FP8_API tests/house/symbols_fp8.txt
check "$lib/libfp8gen.so" gen/fp8gen.h FP8GEN_API tests/house/symbols_fp8gen.txt
for list in fp8 fp8gen; do
    if grep -v "^${list}_" tests/house/symbols_$list.txt; then
        echo "these names lack the prefix ${list}_"
        status=1
    fi
done
exit $status
