#!/usr/bin/env bash
# The weight wrapper, the function mode, and FSDP2 on two ranks.
exec bash "$(dirname "$0")/run.sh" check_wrapper.py check_fsdp.py
