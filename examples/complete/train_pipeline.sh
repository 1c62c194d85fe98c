#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From raw text to a model that others can open: prepare, train on all GPUs (or several nodes), resume, evaluate, export.
#
#   CORPUS=corpus.jsonl TOKENIZER_MODEL=tokenizer WORK_DIR=runs/first bash examples/complete/train_pipeline.sh
#   CORPUS_URL=https://.../corpus.jsonl ...                       fetched to WORK_DIR/corpus.jsonl first
#   LAPTOP=1 WORK_DIR=runs/trial bash examples/complete/train_pipeline.sh       all of it on this machine, small, offline
#
# DRY_RUN=1 prints the commands. Each step is skipped when its result is there: run it again after an interruption. On several nodes run it on the first
# one, which prepares the data, then on all with NNODES, NODE_RANK, MASTER_ADDR (docs/launching.md).
#
# Variables: CORPUS or CORPUS_URL (JSON lines with "text"), TOKENIZER_MODEL (a tokenizer.json or its directory), WORK_DIR,
# PRESET (llama3.2-1b), ITERATIONS, SEQ_LENGTH, GLOBAL_BATCH, WORKERS, GPUS_PER_NODE, EXTRA_FLAGS.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"

source examples/launch/steps.sh

command -v python > /dev/null || fail "there is no python; activate the environment that has torch (README.md)"
if [ -n "${DRY_RUN:-}" ]; then
    WORK_DIR="${WORK_DIR:-/path/to/results}" CORPUS="${CORPUS:-/path/to/corpus.jsonl}"
    TOKENIZER_MODEL="${TOKENIZER_MODEL:-/path/to/tokenizer}"
fi
[ -n "${WORK_DIR:-}" ] || fail "WORK_DIR is not set; give a directory for all results"
work="$WORK_DIR"
gpus="${GPUS_PER_NODE:-}"

if [ -n "${LAPTOP:-}" ]; then
    # The sources of Python's standard library are text that every machine has.
    run mkdir -p "$work"
    CORPUS="$work/corpus.jsonl" TOKENIZER_MODEL="$work/tokenizer" gpus=0
    [ -f "$CORPUS" ] || run python examples/quickstart/build_corpus.py --output "$CORPUS" --megabytes "${CORPUS_MEGABYTES:-1}"
    [ -f "$TOKENIZER_MODEL/tokenizer.json" ] ||
        run python examples/quickstart/train_tokenizer.py --input "$CORPUS" --output "$TOKENIZER_MODEL" --vocab-size 1000
    model=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 --swiglu
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
        --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4)
    length="${SEQ_LENGTH:-128}" batch="${GLOBAL_BATCH:-8}" iterations="${ITERATIONS:-20}" LR="${LR:-2e-3}" MIN_LR="${MIN_LR:-2e-4}"
else
    model=(--preset "${PRESET:-llama3.2-1b}" --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
        --micro-batch-size "${MICRO_BATCH:-1}")
    length="${SEQ_LENGTH:-4096}" batch="${GLOBAL_BATCH:-256}" iterations="${ITERATIONS:-10000}"
fi

step "1. Raw text"
if [ -z "${CORPUS:-}" ] && [ -n "${CORPUS_URL:-}" ]; then
    run mkdir -p "$work"
    CORPUS="$work/corpus.jsonl"
    # Under another name until it is complete: a broken download is not taken for the corpus.
    [ -f "$CORPUS" ] || { run curl --fail --location --output "$CORPUS.part" "$CORPUS_URL" && run mv "$CORPUS.part" "$CORPUS"; }
fi
[ -n "${CORPUS:-}" ] || fail "neither CORPUS nor CORPUS_URL is set; give a file of JSON lines with \"text\", or LAPTOP=1"
[ -n "${DRY_RUN:-}" ] || [ -f "$CORPUS" ] || fail "CORPUS=$CORPUS does not exist; give a file of JSON lines with \"text\""
[ -n "${DRY_RUN:-}" ] || [ -e "${TOKENIZER_MODEL:-}" ] || fail "TOKENIZER_MODEL=${TOKENIZER_MODEL:-} does not exist; give a tokenizer.json or its directory"

step "2. Token ids, verified against the text"
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
run mkdir -p "$work"
if [ ! -f "$work/data_text_document.idx" ]; then
    run python tools/preprocess_data.py --input "$CORPUS" --output-prefix "$work/data" "${tokenizer[@]}" --append-eod \
        --workers "${WORKERS:-2}"
fi
run python tools/verify_dataset.py --input "$work/data_text_document" "${tokenizer[@]}"

step "3. The variables of the network"
eval "$(python tools/env.py --format shell)"

step "4. Training: resumes from $work/checkpoints where there is one"
flags=("${model[@]}" --seq-length "$length" --global-batch-size "$batch" "${tokenizer[@]}"
    --data-path "$work/data_text_document" --split "95,5,0" --data-cache-path "$work/cache"
    --train-iters "$iterations" --lr "${LR:-3e-4}" --min-lr "${MIN_LR:-3e-5}" --lr-decay-style cosine
    --lr-warmup-iters $((iterations / 10)) --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval $((iterations / 2)) --eval-iters 2 --save "$work/checkpoints" --load "$work/checkpoints"
    --save-interval $((iterations / 2)) --keep-last 3 --async-save --exit-signal-handler
    --log-interval 10 --log-throughput --log-progress --tensorboard-dir "$work/tensorboard" --metrics-dir "$work/metrics")
# shellcheck disable=SC2206
flags+=(${EXTRA_FLAGS:-})
if [ "$gpus" = 0 ]; then
    run python pretrain_gpt.py "${flags[@]}"
else
    bash examples/launch/start.sh "${flags[@]}"
fi
[ "${NODE_RANK:-0}" = 0 ] || exit 0

step "5. How it went"
run python examples/complete/monitor_run.py --metrics-dir "$work/metrics" --finished || echo "see docs/troubleshooting.md"
run python tools/checkpoint/doctor.py "$work/checkpoints"

step "6. Text from the model"
run python tools/generate.py --load "$work/checkpoints" --prompt "import os" --max-new-tokens 40 --temperature 0.7 --seed 1

step "7. For other programs"
[ -d "$work/hf" ] ||
    run python -m megatron.bridge.convert --source megatron --target hf --input-path "$work/checkpoints" --output-path "$work/hf"
printf '\nOpen it:  AutoModelForCausalLM.from_pretrained("%s")\nCurves:   tensorboard --logdir %s\n' "$work/hf" "$work/tensorboard"
