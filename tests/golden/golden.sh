# golden.sh - sourced by test_golden.sh and update.sh: what the golden files hold.
#
# Plans as JSON, and expansions of the small templates beside this file, which use the whole template
# language and, unlike the real ones, change only when it does.
golden_dir=tests/golden
golden_specs="plain options recipes shards"

# golden_write DIR: the files as this fp8gen makes them.
golden_write() {
    local spec
    for spec in $golden_specs; do
        "$FP8GEN" plan --json "$golden_dir/$spec.lua" >"$1/$spec.plan.json" || return 1
        "$FP8GEN" expand "$golden_dir/$spec.lua" --template-dir "$golden_dir/templates" \
            >"$1/$spec.expand.cu" || return 1
    done
}
