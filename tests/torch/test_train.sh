#!/usr/bin/env bash
# train_llama.py: it learns, follows its bf16 twin, resumes bit for bit, on one and two ranks.
exec bash "$(dirname "$0")/run.sh" check_train.py
