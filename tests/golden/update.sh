#!/usr/bin/env bash
# Makes the golden files anew: bash tests/golden/update.sh (FP8GEN: the program, default build/bin/fp8gen).
# Look at the difference (git diff tests/golden) before you commit it.
set -eu
cd "$(dirname "$0")/../.."
FP8GEN=${FP8GEN:-$PWD/build/bin/fp8gen}
. tests/golden/golden.sh
golden_write tests/golden/expected
git --no-pager diff --stat -- tests/golden/expected 2>/dev/null || true
