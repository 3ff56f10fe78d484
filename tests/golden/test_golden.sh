#!/usr/bin/env bash
# Plans and expansions are, byte for byte, what they were; and the same a second time.
. tests/cli/harness.sh
. tests/golden/golden.sh
mkdir "$T/one" "$T/two"

case_of "plans and expansions are made"
run golden_write "$T/one"
expect_code 0
expect_err ''

case_of "a second time they are the same"
golden_write "$T/two"
run diff -r "$T/one" "$T/two"
expect_code 0

for file in "$T"/one/*; do
    case_of "$(basename "$file") is as expected (else: bash tests/golden/update.sh)"
    run diff -u "tests/golden/expected/$(basename "$file")" "$file"
    expect_code 0
done

case_of "no golden file is left over"
run diff <(ls "$T/one") <(ls tests/golden/expected)
expect_code 0

case_of "nothing holds a path of this machine"
run cat "$T"/one/*
expect_out_lacks "$PWD"
finish
