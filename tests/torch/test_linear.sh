#!/usr/bin/env bash
# fp8_linear: values, dtypes, autograd, the weight's versions; and the structs against the headers.
exec bash "$(dirname "$0")/run.sh" check_abi.py check_linear.py
