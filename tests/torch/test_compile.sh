#!/usr/bin/env bash
# The operators: fake kernels, torch.compile, activation checkpointing.
exec bash "$(dirname "$0")/run.sh" check_compile.py
