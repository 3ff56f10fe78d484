#!/usr/bin/env bash
# Every #include is an edge between rooms; this fails on an edge outside the table below.
#
# The first matching row counts: the room, what it may include in quotes (- for nothing; paths begin
# at the project's root, in templates at their folder), and what it may not include in <>, or, after
# "only:", the sole headers that it may.
table='
runtime/fp8.h    -                                                 only:stdint.h,stddef.h
runtime/fp8_comm.h fp8.h                                           only:stdint.h,stddef.h
runtime/fp8_model.h fp8.h fp8_comm.h                               only:stdint.h,stddef.h
runtime/fp8_state.h fp8.h                                          only:stdint.h,stddef.h
runtime/fp8_device.h fp8.h                                         only:stdint.h,stddef.h
runtime/fp8_jit.h fp8.h                                            only:stdint.h,stddef.h
runtime/fp8_primitives.h fp8.h                                     only:stdint.h,stddef.h
gen/fp8gen.h     -                                                 only:stdint.h,stddef.h
gen/cli/cublaslt.c gen/cli/*.h                                     cuda* nvrtc* lua* lauxlib* lualib*
gen/cli/*        gen/fp8gen.h runtime/fp8.h runtime/fp8_comm.h runtime/fp8_model.h runtime/fp8_state.h runtime/fp8_device.h runtime/fp8_jit.h runtime/fp8_primitives.h gen/cli/*.h            cuda* nvrtc* cublas* lua* lauxlib* lualib*
gen/provider.c   gen/*.h runtime/fp8.h runtime/fp8_jit.h           cuda* cublas*
gen/*            gen/*.h runtime/bundle_format.h runtime/dynlib.h runtime/thread.h  cuda* cublas*
runtime/*        runtime/*.h                                       lua* lauxlib* lualib* nvrtc*
templates/*      *.cuh                                             *
examples/*       -                                                 lua* lauxlib* lualib* jansson*
'
set -u -f
edges=0 faults=0
fault() {
    echo "$1"
    faults=$((faults + 1))
}
matches() { # text pattern...
    local text=$1 pattern
    shift
    for pattern in "$@"; do
        # shellcheck disable=SC2053
        [[ $text == $pattern ]] && return 0
    done
    return 1
}
row_of() { # file -> "allowed|system"
    local room allowed_and_system
    while read -r room allowed_and_system; do
        [ -n "$room" ] && matches "$1" "$room" && echo "$allowed_and_system" && return
    done <<<"$table"
}
while read -r file; do
    row=$(row_of "$file")
    [ -n "$row" ] || fault "$file: no row in the table"
    quoted=() angled=()
    for word in $row; do
        case $word in
        *.h | - | *.cuh) [ "${#angled[@]}" = 0 ] &&
            case $word in only:*) ;; *) quoted+=("$word"); continue ;; esac ;;
        esac
        angled+=("$word")
    done
    while IFS=: read -r line text; do
        edges=$((edges + 1))
        target=$(sed -n 's/^ *# *include *[<"]\([^>"]*\)[>"].*/\1/p' <<<"$text")
        if [[ $text == *\"* ]]; then
            matches "$target" "${quoted[@]}" || fault "$file:$line: may not include \"$target\""
            matches "$file" 'gen/*' && ! matches "$file" 'gen/cli/*' &&
                matches "$target" 'gen/cli/*' &&
                fault "$file:$line: libfp8gen may not include the program's \"$target\""
            case $file in
            templates/*) [ -f "templates/$target" ] || fault "$file:$line: no templates/$target" ;;
            runtime/fp8_*.h) ;; # public headers lie side by side
            *) [ -f "$target" ] ||
                fault "$file:$line: \"$target\" does not begin at the project's root" ;;
            esac
        else
            case "${angled[*]}" in
            only:*)
                matches "$target" $(tr ',' ' ' <<<"${angled[0]#only:}") ||
                    fault "$file:$line: may not include <$target>"
                ;;
            *) matches "$target" "${angled[@]}" && fault "$file:$line: may not include <$target>" ;;
            esac
        fi
    done < <(grep -nE '^ *# *include *[<"]' "$file")
done < <(find gen runtime templates examples -type f \( -name '*.c' -o -name '*.h' -o -name '*.cu' \
    -o -name '*.cuh' \) | LC_ALL=C sort)
echo "$edges includes, $faults outside the table"
[ $edges -gt 0 ] && [ $faults = 0 ]
