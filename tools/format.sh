#!/usr/bin/env bash
# format.sh [--check] - lays out C, CUDA and headers with clang-format 14, or says what it would
# change. Exit codes: 0 done or nothing to change, 1 files need it, 3 no clang-format 14.
set -u
cd "$(dirname "$0")/.." || exit 1
tool=$(command -v clang-format-14 || command -v clang-format) || tool=
case $("${tool:-false}" --version 2>/dev/null) in
*"version 14."*) ;;
*)
    echo "clang-format 14 not found (apt-get install clang-format-14)" >&2
    exit 3
    ;;
esac
# Not what tools wrote: golden files, tables of the oracle.
mapfile -t files < <(find gen runtime templates tests examples -type f ! -path 'tests/golden/*' \
    ! -name format_tables.h ! -name op_tables.h \
    \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) | LC_ALL=C sort)
if [ "${1:-}" != --check ]; then
    "$tool" -i "${files[@]}"
    exit
fi
status=0
for file in "${files[@]}"; do
    if ! "$tool" "$file" | cmp -s - "$file"; then
        echo "$file: not laid out as clang-format 14 does it (make format)"
        status=1
    fi
done
exit $status
