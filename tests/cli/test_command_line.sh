#!/usr/bin/env bash
# The command line itself: commands, options, help, errors with the nearest word, exit codes,
# colours, and what happens when the results cannot be written.
. tests/cli/harness.sh
spec=specs/debug_vocab2556.lua

case_of "no command"
run fp8gen
expect_code 2
expect_out ''
expect_err_has "no command was given"
expect_err_has "fp8gen help"

case_of "an unknown command names the nearest"
run fp8gen chek x.lua
expect_code 2
expect_err_has "unknown command 'chek'"
expect_err_has "did you mean 'check'?"
run fp8gen frobnicate
expect_code 2
expect_err_has "check, plan, expand, build, run, tune, bench, cache, doctor, help"

case_of "a group of commands needs its second word"
run fp8gen bench
expect_code 2
expect_err_has "'bench' needs one of: gemm, layer, quantize, host"
run fp8gen bench leyer
expect_code 2
expect_err_has "did you mean 'bench layer'?"

case_of "--version, before and after a command"
run fp8gen --version
expect_code 0
version=$(cat "$out")
expect_out_has "fp8gen 0."
run fp8gen run --version
expect_code 0
expect_out "$version"

case_of "help lists every command, option and variable"
run fp8gen help
expect_code 0
expect_err ''
for word in "check SPEC..." "plan SPEC" "expand SPEC" "build SPEC" "run [SPEC]" "tune SPEC" "bench gemm" \
    "bench layer" "bench quantize" "bench host" doctor --color NO_COLOR FP8GEN_TEMPLATE_DIR FP8_LOG \
    FP8_CUBLASLT_PATH FP8_NVRTC_PATH "exit codes"; do
    expect_out_has "$word"
done
help=$(cat "$out")
run fp8gen --help
expect_out "$help"

case_of "every command has a page, the same three ways"
for command in check plan expand build run tune "bench gemm" "bench layer" "bench quantize" "bench host" doctor; do
    # shellcheck disable=SC2086
    run fp8gen help $command
    expect_code 0
    expect_out_has "usage: fp8gen $command"
    page=$(cat "$out")
    # shellcheck disable=SC2086
    run fp8gen $command --help
    expect_code 0
    expect_out "$page"
    # shellcheck disable=SC2086
    run fp8gen $command -h
    expect_out "$page"
done
run fp8gen help bench
pages=$(cat "$out")
for word in --help -h; do
    run fp8gen bench $word
    expect_code 0
    expect_out "$pages"
done
run fp8gen help spec
expect_code 0
expect_out_has "in_features     1..268435456"
expect_out_has 'weight_scale    "tensor" | "shard"'
awk 'length($0) > 96 && !/^ /' < <(fp8gen help bench shard) | grep . &&
    fail "lines of 96 columns expected"
run fp8gen help run more
expect_code 2
expect_err_has "'help run' takes no more words, but 'more' was given too"
run fp8gen help bench
expect_out_has "usage: fp8gen bench host"
run fp8gen help nonsense
expect_code 2

case_of "bad values of tune and bench gemm, before any device is opened"
run fp8gen tune $spec
expect_code 2
expect_err_has "'tune' needs the tuning file"
expect_err_has "fp8gen tune $spec -o FILE"
run fp8gen tune $spec -o "$T"
expect_code 2
expect_err_has "it is a folder"
for tokens in 0 -5 x 16,,32 16, 1e3; do
    run fp8gen tune $spec -o "$T/t.json" --tokens=$tokens
    expect_code 2
    expect_err_has "--tokens takes up to 64 whole numbers from 1 with commas"
done
run fp8gen tune $spec -o "$T/t.json" --tokens 99999999
expect_code 2
expect_err_has "no GEMM has a range that holds the tokens"
run fp8gen tune $spec -o "$T/t.json" --layer nonsense
expect_code 2
expect_err_has "the spec has no layer 'nonsense'"
for seconds in 0 -1 x 1x 4000 nan; do
    run fp8gen tune $spec -o "$T/t.json" --seconds=$seconds
    expect_code 2
    expect_err_has "--seconds takes a number of seconds above 0 and up to 3600"
    run fp8gen bench gemm --seconds=$seconds
    expect_code 2
done
run fp8gen tune $spec -o "$T/t.json" --candidates pp128x128c1s6g9
expect_code 2
expect_err_has "there is no configuration 'pp128x128c1s6g9'"
expect_err_has "did you mean 'pp128x128c1s6g8'?"
run fp8gen tune $spec -o "$T/t.json" --candidates plan
expect_code 2
run fp8gen bench gemm --case tensor_fst
expect_code 2
expect_err_has "did you mean 'tensor_fast'?"
run fp8gen bench shard --case wieghts
expect_code 2
expect_err_has "did you mean 'weights'?"
run fp8gen bench layer --recipe mxfp8
expect_code 2
expect_err_has "the recipes are current, delayed,"
run fp8gen bench gemm --shape 64,48
expect_code 2
expect_err_has "--shape takes 3 whole numbers"
run fp8gen bench gemm --shape 16,16,16 --case odd_n
expect_code 2
expect_err_has "odd_n takes shapes whose N is no multiple of 16"
run fp8gen bench gemm --candidates co128x128c1s6p2g8 --case wgrad_fast --candidates co128x128c1s6g8
expect_code 2
expect_no_file "$T/t.json"

case_of "--gemm and --tuning are looked at where a spec is planned"
run fp8gen plan $spec --gemm nonsense
expect_code 2
expect_err_has "there is no GEMM 'nonsense'"
run fp8gen plan $spec --gemm cublaslt
expect_code 0
expect_out_lacks generated
run fp8gen plan $spec --gemm generated
expect_code 0
expect_out_has "generated  gemm_e4m3_e4m3_bf16_"
run fp8gen plan $spec --tuning "$T/none.json"
expect_code 3
expect_err_has "none.json"
for command in plan build run; do
    run fp8gen help $command
    expect_out_has "--tuning FILE"
    expect_out_has "--gemm CHOICE"
done

case_of "an unknown option names the nearest"
run fp8gen run --tokns 3 $spec
expect_code 2
expect_err_has "unknown option '--tokns' for 'run'"
expect_err_has "did you mean '--tokens'?"
run fp8gen check --frobnicate $spec
expect_code 2
expect_err_has "fp8gen help check"
run fp8gen plan -z $spec
expect_code 2
expect_err_has "unknown option '-z'"

case_of "values of options"
run fp8gen run $spec --tokens
expect_code 2
expect_err_has "option '--tokens' for 'run' needs a value (N)"
run fp8gen run $spec --tokens=many
expect_code 2
expect_err_has "--tokens takes a whole number from 0"
run fp8gen run $spec --tokens -1
expect_code 2
run fp8gen run $spec --tokens 99999999999999999999
expect_code 2
run fp8gen build $spec -o "$T/b" -j 0
expect_code 2
expect_err_has "from 1 to 1024"
run fp8gen run $spec --device=gpu
expect_code 2
expect_err_has "--device takes one of auto, host, cuda, not 'gpu'"
run fp8gen run $spec --device hst
expect_err_has "did you mean 'host'?"
run fp8gen plan $spec --json=yes
expect_code 2
expect_err_has "option '--json' takes no value, but 'yes' was given"
run fp8gen plan $spec --layer ''
expect_code 2
run fp8gen --color=blue help
expect_code 2
expect_err_has "auto, always, never"

case_of "operands"
run fp8gen check
expect_code 2
expect_err_has "'check' needs SPEC..."
run fp8gen plan $spec $spec
expect_code 2
expect_err_has "takes only SPEC"
run fp8gen doctor now
expect_code 2
run fp8gen check -- --not-a-file
expect_code 3
expect_err_has -- "--not-a-file"

case_of "colours: only when asked for, NO_COLOR, --color always"
run fp8gen plan $spec
expect_out_lacks $'\033['
run fp8gen plan $spec --color always
expect_out_has $'\033['
run fp8gen --color always plan $spec
expect_out_has $'\033['
run env NO_COLOR=1 "$FP8GEN" plan $spec
expect_out_lacks $'\033['
run fp8gen check --color always tests/bad_specs/none.lua
expect_err_lacks $'\033[K'

case_of "a closed pipe is silent"
"$FP8GEN" plan $spec 2>"$err" | head -n 1 >"$out"
code=${PIPESTATUS[0]}
expect_code 0
expect_err ''
{ "$FP8GEN" expand $spec; echo $? >"$T/code"; } 2>"$err" | true
code=$(cat "$T/code")
expect_code 0
expect_err ''

case_of "results that cannot be written are an error"
if [ -w /dev/full ]; then
    command_line="plan > /dev/full"
    "$FP8GEN" plan $spec >/dev/full 2>"$err"
    code=$?
    expect_code 3
    expect_err_has "cannot write the results to standard output: No space left on device"
else
    skip_case "no /dev/full"
fi

case_of "a template folder that is not there"
run fp8gen expand $spec --template-dir "$T/none"
expect_code 2
expect_err_has "--template-dir: no folder"
run env FP8GEN_TEMPLATE_DIR="$T/none" "$FP8GEN" expand $spec
expect_code 2
expect_err_has "FP8GEN_TEMPLATE_DIR: no folder"

case_of "doctor says what is there and what to do"
run fp8gen doctor
for word in fp8gen cores driver cuBLASLt NVRTC; do
    expect_out_has "$word"
done
if [ $code = 3 ]; then
    expect_out_has "problem:"
    expect_out_has "fix:"
else
    expect_code 0
    expect_out_has "All is there"
fi

case_of "a library's variable that was not followed is said, with the copy in use"
if "$FP8GEN" doctor | grep -q '^NVRTC.*not found'; then
    skip_case "no NVRTC"
else
    run env FP8_NVRTC_PATH="$T/no/such" "$FP8GEN" doctor
    expect_out_has "FP8_NVRTC_PATH was not used: $T/no/such: No such file or directory; in use is /"
    library=$("$FP8GEN" doctor | sed -n 's/^NVRTC  *[0-9.]*, //p')
    for right in "$library" "$(dirname "$library")"; do
        run env FP8_NVRTC_PATH="$right" "$FP8GEN" doctor
        expect_out_lacks "was not used"
    done
    run env FP8_NVRTC_PATH="$T/no/such" "$FP8GEN" build $spec -o "$T/noted" -v
    expect_code 0
    expect_err_has "FP8_NVRTC_PATH was not used"
    run env FP8_NVRTC_PATH="$T/no/such" "$FP8GEN" build $spec -o "$T/noted"
    expect_err ''
fi

case_of "FP8_LOG with an unknown word is warned of once, with the words"
run env FP8_LOG=info,bogus,more "$FP8GEN" check $spec
expect_code 0
expect_err "fp8gen: warning: FP8_LOG: 'bogus' is no level; the words, with commas between them, are error, warning, info and dispatch"
run env FP8_LOG=info,dispatch,error,warning "$FP8GEN" check $spec
expect_err ''

case_of "a spec from standard input"
run bash -c "'$FP8GEN' check - <$spec"
expect_code 0
expect_err ''
run bash -c "cat $spec | '$FP8GEN' plan - --layer head"
expect_code 0
expect_out_has "2556"
run bash -c "cat examples/mistakes.lua | '$FP8GEN' check -"
expect_code 1
expect_err_has "<stdin>:5:63: error: unknown field 'bais'"
run bash -c "printf 'a\0b' | '$FP8GEN' check -"
expect_code 1
expect_err_has "bytes of value 0"
run fp8gen help
expect_out_has "standard input"

case_of "none stands alone among the archs"
run fp8gen build $spec --arch sm_90a,none -o "$T/never"
expect_code 2
expect_err_has "arch 'none' stands alone"
expect_no_file "$T/never"

case_of "a benchmark without a GPU is refused with a sentence"
if "$FP8GEN" doctor | grep -q '^GPU '; then
    skip_case "there is a GPU"
else
    for what in layer quantize host; do
        run fp8gen bench $what
        expect_code 3
        expect_out ''
        expect_err_has "fp8gen doctor"
    done
    run fp8gen run $spec --device cuda
    expect_code 3
fi
run fp8gen bench layer --shape 1,2
expect_code 2
expect_err_has "--shape takes 3 whole numbers"
run fp8gen bench quantize --shape 8x8
expect_code 2
run fp8gen bench layer --grad-weight fp16
expect_code 2
finish
