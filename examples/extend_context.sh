#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train on short sequences, then extend the model to four times their length by YaRN, and see perplexity by position.
#
#   bash examples/extend_context.sh                 small, on this machine, with text that it has
#   SHORT=512 ITERATIONS=2000 bash examples/extend_context.sh
#
# Three tables come out: the short model within its length and beyond it, where it fails; and the extended one.
# DRY_RUN=1 prints the commands. Variables: OUT (extend_context), SHORT (64), ITERATIONS of the short training (300), EXTENSION of the long one (60).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${OUT:-extend_context}" short="${SHORT:-64}" iterations="${ITERATIONS:-300}" extension="${EXTENSION:-60}"
long=$((4 * short))
source examples/launch/steps.sh

command -v python > /dev/null || fail "there is no python; activate the environment that has torch"
run mkdir -p "$out"

step "Text and tokens"
[ -f "$out/corpus.jsonl" ] || run python examples/quickstart/build_corpus.py --output "$out/corpus.jsonl" --megabytes "${CORPUS_MEGABYTES:-3}"
[ -f "$out/tokenizer/tokenizer.json" ] ||
    run python examples/quickstart/train_tokenizer.py --input "$out/corpus.jsonl" --output "$out/tokenizer" --vocab-size 1000
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer")
[ -f "$out/text_text_document.idx" ] || run python tools/preprocess_data.py --input "$out/corpus.jsonl" --output-prefix "$out/text" \
    "${tokenizer[@]}" --append-eod --workers 2

model=(--num-layers 3 --hidden-size 96 --num-attention-heads 4 --swiglu --normalization RMSNorm --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 "${tokenizer[@]}" --data-path "$out/text_text_document" --split "95,5,0"
    --weight-decay 0.1 --clip-grad 1.0 --log-interval 50 --eval-iters 0 --num-workers 0)
perplexity() { run python tools/loss_by_position.py --load "$1" --data-path "$out/text_text_document" --seq-length "$2" --sequences 16; }

step "1. A model of $short positions"
[ -d "$out/short" ] || run python pretrain_gpt.py "${model[@]}" --position-embedding-type rope \
    --seq-length "$short" --max-position-embeddings "$long" --micro-batch-size 16 --global-batch-size 16 \
    --train-iters "$iterations" --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters $((iterations / 10)) \
    --save "$out/short"
perplexity "$out/short" "$long"

step "2. The same weights with positions stretched by YaRN, trained on a little at $long"
# Fast rotations stay as they are, slow ones are divided by the factor: see docs/long_context.md.
[ -d "$out/long" ] || run python pretrain_gpt.py "${model[@]}" --pretrained-checkpoint "$out/short" --override-model-settings \
    --position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings "$short" \
    --seq-length "$long" --max-position-embeddings "$long" --micro-batch-size 4 --global-batch-size 4 \
    --train-iters "$extension" --lr 5e-4 --min-lr 5e-5 --lr-decay-style cosine --lr-warmup-iters $((extension / 10)) \
    --save "$out/long"
perplexity "$out/long" "$long"
