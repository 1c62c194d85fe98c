#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A model of the Llama kind, with tensor parallelism, the distributed optimizer, selective recomputation and checkpoints in
# torch_dist, which load at any other layout:
#
#   DATA_PATH=my_text_document TOKENIZER_MODEL=tokenizer bash .github/skills/megatron-lm-expert/assets/pretrain_llama.sh
#   PRESET=llama2-13b TP=2 SEQ_LENGTH=4096 bash .github/skills/megatron-lm-expert/assets/pretrain_llama.sh
#   LAPTOP=1 bash .github/skills/megatron-lm-expert/assets/pretrain_llama.sh
#
# PRESET: a name of `python pretrain_gpt.py --preset list`. TP: ranks that share a layer, at most a node's GPUs.
start_sh="$(dirname "${BASH_SOURCE[0]}")/../../../../examples/launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

PRESET="${PRESET:-llama3-8b}"
TP="${TP:-2}"
made_for 1
need_data 99,1,0 HuggingFaceTokenizer "a directory with the tokenizer.json of the model"
keep_in "$PRESET" 500 10
shared=()
[ "$TP" = 1 ] || shared=(--sequence-parallel)

start --preset "$PRESET" --seq-length "${SEQ_LENGTH:-8192}" --tensor-model-parallel-size "$TP" "${shared[@]}" \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 --recompute-granularity selective \
    --micro-batch-size 1 --global-batch-size "${GLOBAL_BATCH_SIZE:-128}" --train-iters 100000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    "${data[@]}" "${logs[@]}" --ckpt-format torch_dist --auto-detect-ckpt-format ${EXTRA_FLAGS:-} "$@"
