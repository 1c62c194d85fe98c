#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# DeepSeek V2 Lite on 8 GPUs: 1 node of 8.
#
#   sbatch --nodes=1 --gpus-per-node=8 --time=24:00:00 examples/launch/slurm.sh examples/deepseek/train_deepseek_v2_lite.sh
#   LAPTOP=1 bash examples/deepseek/train_deepseek_v2_lite.sh
start_sh="$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

made_for 1
need_data 99,1,0 HuggingFaceTokenizer "a directory with the tokenizer.json of the model"
keep_in deepseek-v2-lite 500 10

start --preset deepseek-v2-lite --preset-layout --bf16 --seq-length 4096 \
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 \
    --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion \
    --micro-batch-size 1 --global-batch-size 512 --train-iters 500000 \
    --lr 4.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.006 \
    "${data[@]}" "${logs[@]}" --moe-per-layer-logging ${EXTRA_FLAGS:-} "$@"
