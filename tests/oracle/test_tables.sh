#!/bin/bash
# The committed tables are what numpy and ml_dtypes say today; skipped where they are not installed.
if ! python3 -c 'import numpy, ml_dtypes' 2>/dev/null; then
    echo "skipped: python3 has no numpy and ml_dtypes (pip install numpy ml_dtypes)"
    exit 77
fi
python3 tests/oracle/make_tables.py --check &&
python3 tests/oracle/make_op_tables.py --check
