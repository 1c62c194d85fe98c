#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# DeepSeek V3 on 1024 GPUs: 128 nodes of 8.
#
#   sbatch --nodes=128 --gpus-per-node=8 --time=24:00:00 examples/launch/slurm.sh examples/deepseek/train_deepseek_v3.sh
#   LAPTOP=1 bash examples/deepseek/train_deepseek_v3.sh
start_sh="$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

made_for 128
need_data 99,1,0 HuggingFaceTokenizer "a directory with the tokenizer.json of the model"
keep_in deepseek-v3 500 10

start --preset deepseek-v3 --preset-layout --bf16 --seq-length 4096 \
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 \
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-bias-update-rate 1e-3 \
    --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion \
    --micro-batch-size 1 --global-batch-size 15360 --train-iters 500000 \
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.006 \
    "${data[@]}" "${logs[@]}" --moe-per-layer-logging ${EXTRA_FLAGS:-} "$@"
