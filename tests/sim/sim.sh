# sim.sh - sourced by the simulations: ranks as threads on the host, checked by `fp8gen run --fsdp`.
. tests/cli/harness.sh
# New and freed memory is filled with junk, so that what a pass leaves out shows.
export MALLOC_PERTURB_=129

# simulate SPEC RANKS OPTIONS...: every layer must be as unsharded.
simulate() {
    local spec=$1 ranks=$2
    shift 2
    run fp8gen run "$spec" --fsdp "$ranks" --device host --json -q "$@"
    expect_code 0
    expect_err ''
    expect_out_lacks '"verdict":"failed"'
    expect_out_has '"verdict":"ok"'
}
