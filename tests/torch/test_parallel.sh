#!/usr/bin/env bash
# Weight parallel and FSDP2 on two ranks: gloo on the CPU, NCCL on two GPUs.
exec bash "$(dirname "$0")/run.sh" check_parallel.py check_fsdp.py
