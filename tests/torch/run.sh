#!/usr/bin/env bash
# run.sh FILE.py... - runs test files of this folder with a Python that has PyTorch.
#
# The interpreter is FP8_TEST_PYTHON, or python3. Exit code 77, with the reason, where PyTorch is
# not installed; with FP8_TEST_REQUIRE=torch that is a failure. The libraries come from
# FP8_TEST_BUILD.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${FP8_TEST_PYTHON:-python3}
recent='import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)'
if ! "$python" -c "$recent" 2>/dev/null; then
    echo "skip: $python has no PyTorch 2.6 or newer (FP8_TEST_PYTHON names another interpreter)"
    [ "${FP8_TEST_REQUIRE:-}" = torch ] && exit 1
    exit 77
fi
export FP8GEN_LIBRARY_DIR=${FP8GEN_LIBRARY_DIR:-${FP8_TEST_BUILD:-$here/../../build}/lib}
export PYTHONPATH=$here/../../examples/torch:$here PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
status=0
for file in "$@"; do
    timeout -k 5 "${FP8_TEST_TIMEOUT:-280}" "$python" "$here/$file" || status=1
done
exit $status
