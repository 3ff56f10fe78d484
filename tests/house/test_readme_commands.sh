#!/usr/bin/env bash
# Every command in a console block of README.md runs, in order, in one folder, and prints exactly
# what the README shows. FP8_TEST_UPDATE=1 writes there what it prints now (make golden).
#
# Before a block, a comment may say: <!-- run: exit N --> (the commands' exit code; 0 without),
# <!-- run: output differs --> (times, devices: not compared, not rewritten), <!-- run: needs NVRTC
# --> (left out where that is not found).
. tests/cli/harness.sh
for name in specs templates examples; do ln -s "$PWD/$name" "$T/$name"; done
mkdir "$T/bin" "$T/blocks"
ln -s "$FP8GEN" "$T/bin/fp8gen"
PATH=$T/bin:$PATH
export CUDA_VISIBLE_DEVICES=

# One set of files for each command: NNN.command, NNN.mode, NNN.shown.
awk -v folder="$T/blocks" '
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

has_nvrtc=1
fp8gen doctor 2>/dev/null | grep -q '^NVRTC  *not found' && has_nvrtc=0
for command in "$T"/blocks/*.command; do
    block=${command%.command}
    line=$(cat "$command") mode=$(cat "$block.mode")
    case_of "$line"
    case $mode in *NVRTC*) [ $has_nvrtc = 1 ] || { skip_case "no NVRTC"; continue; } ;; esac
    run bash -c "cd '$T' && { $line; } 2>&1"
    expected=0
    [[ $mode =~ exit\ ([0-9]) ]] && expected=${BASH_REMATCH[1]}
    expect_code "$expected"
    case $mode in *differs*) continue ;; esac
    if [ -n "${FP8_TEST_UPDATE:-}" ]; then
        cp "$out" "$block.new"
    else
        expect_out "$(cat "$block.shown")"
    fi
done

if [ -n "${FP8_TEST_UPDATE:-}" ]; then
    awk -v folder="$T/blocks" '
        /^```/ { inside = /^```console/; skipping = 0 }
        inside && /^\$ / {
            print
            file = sprintf("%s/%03d.new", folder, ++count)
            skipping = system("test -e " file) == 0
            if (skipping) while ((getline line < file) > 0) print line
            next
        }
        !skipping { print }
    ' README.md >"$T/README.md" && cp "$T/README.md" README.md
fi

case_of "the README's environment table is the program's"
run fp8gen help
for name in $(sed -n 's/^  \([A-Z][A-Z0-9_]*\)  .*/\1/p' "$out"); do
    grep -q "^| \`$name\`" README.md || fail "README.md has no row for $name"
done
for name in $(sed -n 's/^| `\([A-Z][A-Z0-9_]*\)`.*/\1/p' README.md); do
    expect_out_has "$name"
done

finish
