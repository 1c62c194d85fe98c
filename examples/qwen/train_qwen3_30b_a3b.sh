#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Qwen 3 30B-A3B on 32 GPUs: 4 nodes of 8.
#
#   sbatch --nodes=4 --gpus-per-node=8 --time=24:00:00 examples/launch/slurm.sh examples/qwen/train_qwen3_30b_a3b.sh
#   LAPTOP=1 bash examples/qwen/train_qwen3_30b_a3b.sh
start_sh="$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

made_for 4
need_data 99,1,0 HuggingFaceTokenizer "a directory with the tokenizer.json of Qwen 3"
keep_in qwen3-30b-a3b 500 10

start --preset qwen3-30b-a3b --preset-layout --bf16 --seq-length 4096 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32 \
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion \
    --micro-batch-size 1 --global-batch-size 512 --train-iters 500000 \
    --lr 2e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 500 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.01 \
    "${data[@]}" "${logs[@]}" --moe-per-layer-logging ${EXTRA_FLAGS:-} "$@"
