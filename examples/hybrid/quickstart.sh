#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A hybrid of the quickstart's size, on a CPU: gated delta nets, Mamba-2 and one layer of attention, on the same text.
#
#   bash examples/hybrid/quickstart.sh
#
# Corpus and tokenizer of an earlier quickstart are used where QUICKSTART_DIR (quickstart when not set) has them.
# DRY_RUN=1 prints the commands; ITERATIONS=20 makes it shorter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out="${QUICKSTART_DIR:-quickstart}"
source examples/launch/steps.sh

step "1. Corpus, tokenizer and dataset"
run mkdir -p "$out"
[ -f "$out/corpus.jsonl" ] || run python examples/quickstart/build_corpus.py \
    --output "$out/corpus.jsonl" --megabytes "${CORPUS_MEGABYTES:-12}"
[ -f "$out/tokenizer/tokenizer.json" ] || run python examples/quickstart/train_tokenizer.py \
    --input "$out/corpus.jsonl" --output "$out/tokenizer" --vocab-size 4096
[ -f "$out/stdlib_text_document.idx" ] || run python tools/preprocess_data.py \
    --input "$out/corpus.jsonl" --output-prefix "$out/stdlib" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" --append-eod --workers 2

step "2. Training: eight layers of one branch, about 5 M parameters"
iterations="${ITERATIONS:-200}"
run python pretrain_hybrid.py --hybrid-layer-pattern 'G-M-*-G-' --hidden-size 256 --num-attention-heads 4 \
    --group-query-attention --num-query-groups 2 --position-embedding-type none \
    --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 64 --linear-value-head-dim 64 \
    --mamba-num-heads 8 --mamba-head-dim 32 --mamba-num-groups 2 --mamba-state-dim 64 \
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 256 --max-position-embeddings 256 --micro-batch-size 8 --global-batch-size 8 \
    --untie-embeddings-and-output-weights \
    --data-path "$out/stdlib_text_document" --split 95,5,0 --data-cache-path "$out/cache" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" \
    --train-iters "$iterations" --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters $((iterations / 10)) \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234 \
    --eval-interval 100 --eval-iters 10 --log-interval 10 --save "$out/hybrid" --save-interval "$iterations" --start-over

step "3. Text from the model"
run python tools/generate.py --load "$out/hybrid" --prompt "${PROMPT:-import os}" --max-new-tokens "${TOKENS:-60}"
