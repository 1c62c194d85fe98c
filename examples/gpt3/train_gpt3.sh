#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT-3 in one of its sizes (table 2.1 of arXiv 2005.14165), with batch and learning rate of the paper:
#
#   bash examples/gpt3/train_gpt3.sh 1.3b
#   LAPTOP=1 bash examples/gpt3/train_gpt3.sh 175b
start_sh="$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

SIZE="${1:-350m}"
[ $# -eq 0 ] || shift
# Nodes of 8 GPUs, micro-batch, samples of 2048 tokens in a step, learning rate.
case "${SIZE,,}" in
    125m) sizes=(1 8 256 6.0e-4) ;;
    345m | 350m) SIZE=350m sizes=(1 8 256 3.0e-4) ;;
    760m) sizes=(1 4 256 2.5e-4) ;;
    1.3b) sizes=(1 4 512 2.0e-4) ;;
    2.7b) sizes=(2 2 512 1.6e-4) ;;
    6.7b) sizes=(4 2 1024 1.2e-4) ;;
    13b) sizes=(8 2 1024 1.0e-4) ;;
    175b) sizes=(64 1 1536 0.6e-4) ;;
    *) fail "GPT-3 $SIZE is not known; use 125m, 350m, 760m, 1.3b, 2.7b, 6.7b, 13b or 175b" ;;
esac
made_for "${sizes[0]}"

need_data_of_gpt2 949,50,1
keep_in "gpt3-$SIZE" 1000 100

start --preset "gpt3-${SIZE,,}" --preset-layout --seq-length 2048 --bf16 \
    --micro-batch-size "${sizes[1]}" --global-batch-size "${sizes[2]}" --train-iters 500000 \
    --lr "${sizes[3]}" --min-lr 6.0e-6 --lr-decay-style cosine --lr-decay-iters 430000 --lr-warmup-fraction .001 \
    --init-method-std 0.006 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    "${data[@]}" "${logs[@]}" ${EXTRA_FLAGS:-} "$@"
