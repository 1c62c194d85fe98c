#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT-3 in one of its sizes (table 2.1 of arXiv 2005.14165), with batch and learning rate of the paper:
#
#   bash examples/gpt3/train_gpt3.sh 1.3b
#   LAPTOP=1 bash examples/gpt3/train_gpt3.sh 175b
source "$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"

SIZE="${1:-350m}"
[ $# -eq 0 ] || shift
# Nodes of 8 GPUs, tensor- and pipeline-parallel size, micro-batch, samples of 2048 tokens in a step, learning rate.
case "${SIZE,,}" in
    125m) layout=(1 1 1 8 256 6.0e-4) ;;
    345m | 350m) SIZE=350m layout=(1 1 1 8 256 3.0e-4) ;;
    760m) layout=(1 1 1 4 256 2.5e-4) ;;
    1.3b) layout=(1 1 1 4 512 2.0e-4) ;;
    2.7b) layout=(2 1 1 2 512 1.6e-4) ;;
    6.7b) layout=(4 2 1 2 1024 1.2e-4) ;;
    13b) layout=(8 4 1 2 1024 1.0e-4) ;;
    175b) layout=(64 8 16 1 1536 0.6e-4) ;;
    *) fail "GPT-3 $SIZE is not known; use 125m, 350m, 760m, 1.3b, 2.7b, 6.7b, 13b or 175b" ;;
esac
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
NNODES="${NNODES:-${layout[0]}}"
MASTER_ADDR="${MASTER_ADDR:-${DRY_RUN:+localhost}}"
parallel=(--tensor-model-parallel-size "${layout[1]}" --pipeline-model-parallel-size "${layout[2]}")
[ "${layout[1]}" = 1 ] || parallel+=(--sequence-parallel)
[ "${layout[2]}" = 1 ] || parallel+=(--num-layers-per-virtual-pipeline-stage 3)

need DATA_PATH /path/to/data .idx "the prefix of a dataset of tools/preprocess_data.py"
need VOCAB_FILE /path/to/vocab.json "" "the vocab.json of GPT-2's tokenizer"
need MERGE_FILE /path/to/merges.txt "" "the merges.txt of GPT-2's tokenizer"
CHECKPOINTS="${CHECKPOINTS:-checkpoints/gpt3-$SIZE}"

start --preset "gpt3-${SIZE,,}" --seq-length 2048 "${parallel[@]}" \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 \
    --micro-batch-size "${layout[3]}" --global-batch-size "${layout[4]}" --train-iters 500000 \
    --lr "${layout[5]}" --min-lr 6.0e-6 --lr-decay-style cosine --lr-decay-iters 430000 --lr-warmup-fraction .001 \
    --init-method-std 0.006 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --data-path "$DATA_PATH" --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE" \
    --tokenizer-type GPT2BPETokenizer --split 949,50,1 \
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 1000 --tensorboard-dir "$CHECKPOINTS/tensorboard" \
    --log-interval 100 --log-throughput --eval-interval 1000 --eval-iters 10 ${EXTRA_FLAGS:-} "$@"
