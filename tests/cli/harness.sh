# harness.sh - sourced by the tests of the command line: runs a command, compares exit code, stdout,
# stderr.
#
#   . tests/cli/harness.sh
#   case_of "an unknown command is refused"     a case begins
#   run fp8gen frobnicate                       stdout, stderr and exit code are kept; stdin is empty
#   expect_code 2
#   expect_out ''                               exactly this (a closing newline is not compared)
#   expect_err_has "unknown command"            holds this text;  expect_out_has likewise
#   expect_err_lacks "Segmentation"             does not hold it; expect_out_lacks likewise
#   expect_file "$T/bundle/manifest.json"       is there;  expect_no_file: is not
#   finish                                      prints the counts, exits 0 or 1
#
# A case passes if all its expectations hold; the first that does not prints what was seen. $T is an
# empty folder for the test's files, removed at the end. `fp8gen` is the program under test,
# $FP8GEN. skip_case "reason" ends a case as skipped.
set -u
FP8GEN=${FP8GEN:-$PWD/build/bin/fp8gen}
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
out=$(mktemp -p "$T" .out.XXXXXX) err=$(mktemp -p "$T" .err.XXXXXX)
code=0 command_line=
case_name='' case_state=none
passed=0 failed=0 skipped=0

fp8gen() { "$FP8GEN" "$@"; }

end_case() {
    case $case_state in
    passed) passed=$((passed + 1)); echo "[       OK ] $case_name" ;;
    failed) failed=$((failed + 1)); echo "[  FAILED  ] $case_name" ;;
    skipped) skipped=$((skipped + 1)) ;;
    esac
    case_state=none
}
case_of() {
    end_case
    case_name=$1 case_state=passed
}
skip_case() {
    [ "$case_state" = passed ] && case_state=skipped
    echo "skip: $case_name: $1"
}
run() {
    command_line=$*
    "$@" >"$out" 2>"$err" </dev/null
    code=$?
}
fail() { # what was expected
    [ "$case_state" = failed ] && return
    case_state=failed
    echo "$case_name: $1"
    echo "    command: $command_line"
    echo "    exit code: $code"
    sed 's/^/    stdout: /' "$out" | head -n 40
    sed 's/^/    stderr: /' "$err" | head -n 40
}
expect_code() { [ "$code" = "$1" ] || fail "exit code $1 expected"; }
expect_out() { [ "$(cat "$out")" = "$1" ] || fail "stdout expected: $1"; }
expect_err() { [ "$(cat "$err")" = "$1" ] || fail "stderr expected: $1"; }
expect_out_has() { grep -qF -- "$1" "$out" || fail "stdout with this expected: $1"; }
expect_err_has() { grep -qF -- "$1" "$err" || fail "stderr with this expected: $1"; }
expect_out_lacks() { ! grep -qF -- "$1" "$out" || fail "stdout without this expected: $1"; }
expect_err_lacks() { ! grep -qF -- "$1" "$err" || fail "stderr without this expected: $1"; }
expect_file() { [ -e "$1" ] || fail "file expected: $1"; }
expect_no_file() { [ ! -e "$1" ] || fail "no file expected: $1"; }
finish() {
    end_case
    echo "[  PASSED  ] $passed test(s)."
    [ "$skipped" = 0 ] || echo "[  SKIPPED ] $skipped test(s), listed above"
    [ "$failed" = 0 ] || echo "[  FAILED  ] $failed test(s), listed above"
    [ "$failed" = 0 ]
    exit
}
