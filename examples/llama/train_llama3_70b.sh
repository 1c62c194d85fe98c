#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 70B on 64 GPUs: 8 nodes of 8.
#
#   sbatch --nodes=8 --gpus-per-node=8 --time=24:00:00 examples/launch/slurm.sh examples/llama/train_llama3_70b.sh
#   LAPTOP=1 bash examples/llama/train_llama3_70b.sh
start_sh="$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

made_for 8
need_data 99,1,0 HuggingFaceTokenizer "a directory with the tokenizer.json of Llama 3"
keep_in llama3-70b 500 10

start --preset llama3-70b --preset-layout --bf16 --seq-length 8192 \
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 100000 \
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    "${data[@]}" "${logs[@]}" ${EXTRA_FLAGS:-} "$@"
