#!/usr/bin/env bash
# What only a GPU shows: the kernels that run, CUDA graphs, streams, threads, memory.
exec bash "$(dirname "$0")/run.sh" check_cuda.py
