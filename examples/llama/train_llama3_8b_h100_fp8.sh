#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 8B in FP8 on the eight H100 of one node, with the arguments of the script of this name that Megatron-LM has:
#
#   bash examples/llama/train_llama3_8b_h100_fp8.sh [CHECKPOINTS] [LOGS] [TOKENIZER] [DATA]
#
# TOKENIZER: a directory with a tokenizer.json. DATA: the prefix of a dataset. MOCK for either, or neither given: made-up data.
start_sh="$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

CHECKPOINTS="${1:-checkpoints/llama3-8b-fp8}"
LOGS="${2:-tensorboard_logs/llama3-8b-fp8}"
TOKENIZER_MODEL="${3:-MOCK}"
DATA_PATH="${4:-MOCK}"
made_for 1
if [ "$TOKENIZER_MODEL" = MOCK ] || [ "$DATA_PATH" = MOCK ]; then
    data=(--mock-data --tokenizer-type NullTokenizer --split "99,1,0")
else
    need_data 99,1,0 HuggingFaceTokenizer "a directory with the tokenizer.json of Llama 3"
fi

start --preset llama3-8b --seq-length 8192 --rotary-base 1000000 --init-method-std 0.0134 --apply-layernorm-1p \
    --tensor-model-parallel-size "${TP:-1}" --context-parallel-size "${CP:-1}" \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --grad-reduce-in-bf16 \
    --bf16 --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather \
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc \
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 \
    --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 \
    --lr-decay-style cosine --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    "${data[@]}" --num-workers 1 \
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 1000 --tensorboard-dir "$LOGS" \
    --log-interval 1 --log-throughput --eval-interval 100 --eval-iters 32 --exit-duration-in-mins 235 \
    --distributed-timeout-minutes 60 ${EXTRA_FLAGS:-}
