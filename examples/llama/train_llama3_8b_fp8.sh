#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 8B in FP8: another name of train_llama3_8b_h100_fp8.sh, with its arguments.
script="$(dirname "${BASH_SOURCE[0]}")/train_llama3_8b_h100_fp8.sh"
[ -e "$script" ] || script=examples/llama/train_llama3_8b_h100_fp8.sh # sbatch runs a copy of this file
exec bash "$script" "$@"
