#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT-3 with 356 million parameters, one copy on each GPU of this node; NNODES and the other variables of
# examples/launch/start.sh are for several nodes.
#
#   DATA_PATH=my_text_document VOCAB_FILE=vocab.json MERGE_FILE=merges.txt bash examples/pretrain_gpt_distributed.sh
#   LAPTOP=1 bash examples/pretrain_gpt_distributed.sh
start_sh="$(dirname "${BASH_SOURCE[0]}")/launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

need_data_of_gpt2 949,50,1
keep_in gpt3-350m 1000 100

start --preset gpt3-350m --seq-length 2048 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 \
    --micro-batch-size 4 --global-batch-size 256 --train-iters 500000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction .01 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    "${data[@]}" "${logs[@]}" ${EXTRA_FLAGS:-} "$@"
