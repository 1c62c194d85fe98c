#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A LLaMA-sized model with 70 billion parameters on 64 GPUs: 8 nodes of 8.
#
#   sbatch --nodes=8 --gpus-per-node=8 examples/llama/train_llama_70b.sh
#   LAPTOP=1 bash examples/llama/train_llama_70b.sh
#
# It has the width and depth of Llama 70B and none of the rest (GELU, LayerNorm, learned positions): for the model itself
# use --preset llama3-70b, as examples/llama/train_llama3_70b.sh does.
start_sh="$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

made_for 8
TP="${TP:-4}"
PP="${PP:-4}"
CP="${CP:-1}"

need_dataset
need_files_of_gpt2

start --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --context-parallel-size "$CP" \
    --sequence-parallel --num-layers 80 --hidden-size 8192 --num-attention-heads 64 \
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 1024 \
    --lr 3e-4 --train-iters 100000 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0 \
    --bf16 --use-mcore-models --transformer-impl transformer_engine \
    --data-path "$DATA_PATH" --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE" ${EXTRA_FLAGS:-} "$@"
