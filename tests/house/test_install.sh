#!/usr/bin/env bash
# What is installed is enough: a project of its own finds the package, builds against it and runs,
# and so does a copy of each example by a compiler alone; the installed tree may be moved.
set -eu
command -v cmake >/dev/null || { echo "skip: no cmake"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
sanitize=$(sed -n 's/^FP8GEN_SANITIZE:STRING=//p' "$FP8_TEST_BUILD/CMakeCache.txt")
cmake --install "$FP8_TEST_BUILD" --prefix "$folder/first" >/dev/null
mv "$folder/first" "$folder/moved"
cmake -S examples/consumer -B "$folder/build" -DCMAKE_PREFIX_PATH="$folder/moved" \
    ${sanitize:+-DCMAKE_C_FLAGS=-fsanitize=$sanitize} >"$folder/log" ||
        { cat "$folder/log"; exit 1; }
cmake --build "$folder/build" >"$folder/log" || { cat "$folder/log"; exit 1; }
"$folder/build/consumer" "$folder/bundle"
"$folder/moved/bin/fp8gen" --version
"$folder/moved/bin/fp8gen" check "$folder/moved/share/fp8gen/specs/llama3_8b.lua"
libraries=$(dirname "$(find "$folder/moved" -name libfp8.so | head -n 1)")
for source in examples/*.c; do
    cp "$source" "$folder/"
    program=$folder/$(basename "$source" .c)
    (cd "$folder" && cc ${sanitize:+-fsanitize=$sanitize} \
        -I"$folder/moved/include" "$program.c" -o "$program" \
        -L"$libraries" -Wl,-rpath,"$libraries" -lfp8gen -lfp8 -pthread -lm)
done
CUDA_VISIBLE_DEVICES='' "$folder/embed" "$folder/bundle" head 8
