#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpt-oss 20B on 16 GPUs: 2 nodes of 8.
#
#   sbatch --nodes=2 --gpus-per-node=8 --time=24:00:00 examples/launch/slurm.sh examples/gpt_oss/train_gpt_oss_20b.sh
#   LAPTOP=1 bash examples/gpt_oss/train_gpt_oss_20b.sh
start_sh="$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

made_for 2
need_data 99,1,0 HuggingFaceTokenizer "a directory with the tokenizer.json of gpt-oss"
keep_in gpt-oss-20b 500 10

start --preset gpt-oss-20b --preset-layout --bf16 --seq-length 4096 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 \
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion \
    --micro-batch-size 1 --global-batch-size 512 --train-iters 500000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    "${data[@]}" "${logs[@]}" --moe-per-layer-logging ${EXTRA_FLAGS:-} "$@"
