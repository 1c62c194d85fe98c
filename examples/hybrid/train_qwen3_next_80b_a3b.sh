#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A decoder like Qwen3-Next 80B-A3B on 64 GPUs: 36 gated delta nets and 12 layers of gated attention, experts behind each.
#
#   sbatch --nodes=8 --gpus-per-node=8 --time=24:00:00 examples/launch/slurm.sh examples/hybrid/train_qwen3_next_80b_a3b.sh
#   LAPTOP=1 bash examples/hybrid/train_qwen3_next_80b_a3b.sh
start_sh="$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

made_for 8
need_data 99,1,0 HuggingFaceTokenizer "a directory with the tokenizer.json of Qwen3-Next"
keep_in qwen3-next-80b-a3b 500 10

four='GEGEGE*E'
start --hybrid-layer-pattern "$four$four$four$four$four$four$four$four$four$four$four$four" \
    --hidden-size 2048 --ffn-hidden-size 5120 --swiglu \
    --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 256 \
    --qk-layernorm --attention-output-gate --rotary-percent 0.25 --rotary-base 10000000 \
    --linear-num-key-heads 16 --linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128 \
    --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 \
    --moe-shared-expert-gate --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 \
    --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion \
    --position-embedding-type rope --normalization RMSNorm --apply-layernorm-1p --norm-epsilon 1e-6 \
    --disable-bias-linear --untie-embeddings-and-output-weights \
    --seq-length 4096 --max-position-embeddings 4096 --bf16 \
    --expert-model-parallel-size 64 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 500000 \
    --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 1000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    "${data[@]}" "${logs[@]}" ${EXTRA_FLAGS:-} "$@"
