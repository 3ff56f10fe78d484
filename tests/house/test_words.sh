#!/usr/bin/env bash
# No file of the product says that a part of it is not there yet, no line of C, Lua or a template is
# longer than 100 columns; and a report of the long files.
set -u
status=0
if grep -rnwEi 'TODO|FIXME|XXX|placeholders?|stubs?' gen templates runtime examples specs ||
    grep -rnEi 'not( yet)? implemented' gen templates runtime examples specs; then
    echo "these words promise something that is not there"
    status=1
fi
mapfile -t sources < <(find gen runtime templates examples specs tests -type f \( -name '*.c' -o -name '*.h' -o \
    -name '*.cu' -o -name '*.cuh' -o -name '*.lua' \) ! -path 'tests/golden/expected/*' ! -path 'tests/bad_specs/*' ! -path 'tests/fuzz/*' \
    ! -name format_tables.h ! -name op_tables.h)
if awk 'length($0) > 100 { print FILENAME ":" FNR ": " length($0) " columns"; n++ } END { exit !n }' \
    "${sources[@]}"; then
    echo "these lines are longer than 100 columns"
    status=1
fi
echo "files over 600 lines:"
find gen templates runtime examples specs tests tools -type f \( -name '*.c' -o -name '*.h' -o -name '*.cu' \
    -o -name '*.cuh' -o -name '*.lua' -o -name '*.sh' \) -exec wc -l {} + |
    awk '$1 > 600 && $2 != "total" { print "  " $2 ": " $1; n++ } END { if (!n) print "  none" }'
exit $status
