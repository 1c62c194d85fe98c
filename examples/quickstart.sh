#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a trained language model, with one command:
#
#   bash examples/quickstart.sh
#
# Every command is printed before it runs (DRY_RUN=1: and does not run). Run it again and it resumes from the last
# checkpoint and trains on.
# ITERATIONS=50 bash examples/quickstart.sh makes it shorter; QUICKSTART_DIR is where everything is written. On a folder of
# text files of your own:  TEXT_DIR=my_texts QUICKSTART_DIR=mine PROMPT="Once" bash examples/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out="${QUICKSTART_DIR:-quickstart}"
source examples/launch/steps.sh

step "1. Python packages"
run source tools/install.sh plot
run mkdir -p "$out"

step "2. Corpus: ${TEXT_DIR:-the Python standard library of this machine}"
[ -f "$out/corpus.jsonl" ] || run python examples/quickstart/build_corpus.py \
    --output "$out/corpus.jsonl" --megabytes "${CORPUS_MEGABYTES:-12}" ${TEXT_DIR:+--from "$TEXT_DIR"}

step "3. Tokenizer: a byte-level BPE trained on that corpus"
[ -f "$out/tokenizer/tokenizer.json" ] || run python examples/quickstart/train_tokenizer.py \
    --input "$out/corpus.jsonl" --output "$out/tokenizer" --vocab-size 4096

step "4. Dataset: text to token ids"
[ -f "$out/stdlib_text_document.idx" ] || run python tools/preprocess_data.py \
    --input "$out/corpus.jsonl" --output-prefix "$out/stdlib" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" --append-eod --workers 2

step "5. Training"
if [ -z "${DRY_RUN:-}" ] && python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    iterations="${ITERATIONS:-1000}" # about 100 M parameters on a GPU
    model=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024
        --micro-batch-size 16 --global-batch-size 32 --lr 6e-4 --min-lr 6e-5 --bf16)
else
    iterations="${ITERATIONS:-300}" # about 5 M parameters on a CPU
    model=(--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256
        --micro-batch-size 8 --global-batch-size 8 --lr 2e-3 --min-lr 2e-4)
fi
# One run trains `iterations` more than the last complete one; an interrupted run is finished first.
reached="$(cat "$out/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)"
target=$(((reached / iterations + 1) * iterations))
run python pretrain_gpt.py "${model[@]}" \
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope \
    --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 \
    --data-path "$out/stdlib_text_document" --split 95,5,0 --data-cache-path "$out/cache" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" \
    --train-iters "$target" --lr-decay-style cosine --lr-warmup-iters $((iterations / 10)) --lr-decay-iters "$iterations" \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234 \
    --eval-interval 100 --eval-iters 10 --eval-sample-prompt "${PROMPT:-import os}" --log-interval 10 --log-throughput \
    --save "$out/checkpoints" --load "$out/checkpoints" --save-interval 100 --save-hf "$out/hf" \
    --tensorboard-dir "$out/tensorboard" --metrics-dir "$out/metrics"

step "6. Text from the model"
code=$'def read_file(path):\n    """'
run python tools/generate.py --load "$out/checkpoints" --max-new-tokens 120 --temperature 0.7 --seed 1 \
    --prompt "${PROMPT:-$code}"

step "7. What it learnt"
run python examples/quickstart/report.py --metrics-dir "$out/metrics" --data-path "$out/stdlib_text_document" \
    --output "$out/loss.png"
printf '\nCurves in the browser:  tensorboard --logdir %s\nTrain on from here:     bash examples/quickstart.sh\n' "$out/tensorboard"
