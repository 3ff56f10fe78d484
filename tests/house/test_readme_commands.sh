#!/usr/bin/env bash
# Every `$ fp8gen ...` in a console block of README.md runs, in order, in one folder. Where the block is
# not marked as depending on the machine, it prints exactly what the README shows.
#
# Before a block, an HTML comment may say: <!-- run: exit N --> (the code of its last command; 0 without),
# <!-- run: output differs --> (times, devices, paths), <!-- run: skip --> (not for a test machine).
. tests/cli/harness.sh
for name in specs templates examples; do ln -s "$PWD/$name" "$T/$name"; done
mkdir "$T/bin"
ln -s "$FP8GEN" "$T/bin/fp8gen"
PATH=$T/bin:$PATH
export CUDA_VISIBLE_DEVICES=

# One file for each command: its line, then the output shown; named by number, mode and exit code.
awk -v folder="$T/blocks" '
    BEGIN { system("mkdir -p " folder) }
    /^<!-- run: / { mode = $0; sub(/^<!-- run: /, "", mode); sub(/ -->$/, "", mode); next }
    /^```console/ { inside = 1; next }
    /^```/ { inside = 0; mode = ""; file = ""; next }
    inside && /^\$ / {
        file = sprintf("%s/%03d", folder, ++count)
        print mode > (file ".mode")
        print substr($0, 3) > (file ".command")
        printf "" > (file ".shown")
        next
    }
    inside && file { print > (file ".shown") }
' README.md

for command in "$T"/blocks/*.command; do
    block=${command%.command}
    line=$(cat "$command") mode=$(cat "$block.mode")
    case $line in fp8gen*) ;; *) continue ;; esac
    case $mode in *skip*) continue ;; esac
    case_of "$line"
    run bash -c "cd '$T' && $line 2>&1"
    expected=0
    [[ $mode =~ exit\ ([0-9]) ]] && expected=${BASH_REMATCH[1]}
    expect_code "$expected"
    case $mode in *differs*) ;; *) expect_out "$(cat "$block.shown")" ;; esac
done

case_of "the README's environment table is the program's"
run fp8gen help
for name in $(sed -n 's/^  \([A-Z][A-Z0-9_]*\)  .*/\1/p' "$out"); do
    grep -q "^| \`$name\`" README.md || fail "README.md has no row for $name"
done
for name in $(sed -n 's/^| `\([A-Z][A-Z0-9_]*\)`.*/\1/p' README.md); do
    expect_out_has "$name"
done

finish
