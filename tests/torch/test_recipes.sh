#!/usr/bin/env bash
# Every recipe through fp8_linear.
exec bash "$(dirname "$0")/run.sh" check_recipes.py
