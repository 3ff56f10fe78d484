# embed.cmake - writes Lua modules and templates as C arrays, so that the library needs no files.
#
#   cmake -DROOT=<project> -DFILES=<a,b,..> -DOUTPUT=<file.c> -P gen/embed.cmake
#
# FILES are paths below ROOT. The name of an embedded file is its last part ("plan.lua",
# "quantize.cu"). The array is sorted by path, so that its order does not depend on the caller, and
# ends with a NULL name. Each file's data is followed by a NUL that its size does not count.
string(REPLACE "," ";" FILES "${FILES}")
list(SORT FILES COMPARE STRING)
set(arrays "")
set(table "")
set(index 0)
foreach(file IN LISTS FILES)
    file(READ "${ROOT}/${file}" hex HEX)
    string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
    string(REGEX REPLACE "(................................................................................)"
        "\\1\n" bytes "${bytes}")
    string(LENGTH "${hex}" size)
    math(EXPR size "${size} / 2")
    get_filename_component(name "${file}" NAME)
    string(APPEND arrays
        "/* ${file} */\nstatic const unsigned char file_${index}[] = {\n${bytes}0x00};\n\n")
    string(APPEND table "    {\"${name}\", file_${index}, ${size}},\n")
    math(EXPR index "${index} + 1")
endforeach()
set(text "/* Written by gen/embed.cmake; edit the files named here, not this one. */\n\
#include \"gen/internal.h\"\n\n${arrays}\
const struct embedded_file gen_embedded_files[] = {\n${table}    {NULL, NULL, 0},\n};\n")
file(WRITE "${OUTPUT}" "${text}")
