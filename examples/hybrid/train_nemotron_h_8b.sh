#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A decoder like Nemotron-H 8B on 64 GPUs: 24 layers of Mamba-2, 4 of attention, 24 MLPs, no positions.
#
#   sbatch --nodes=8 --gpus-per-node=8 --time=24:00:00 examples/launch/slurm.sh examples/hybrid/train_nemotron_h_8b.sh
#   LAPTOP=1 bash examples/hybrid/train_nemotron_h_8b.sh
start_sh="$(dirname "${BASH_SOURCE[0]}")/../launch/start.sh"
[ -e "$start_sh" ] || start_sh=examples/launch/start.sh # sbatch runs a copy of this file
source "$start_sh" || exit 2

made_for 8
need_data 99,1,0 HuggingFaceTokenizer "a directory with the tokenizer.json of Nemotron-H"
keep_in nemotron-h-8b 1000 10

start --hybrid-layer-pattern 'M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-' \
    --hidden-size 4096 --ffn-hidden-size 21504 --squared-relu \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 \
    --mamba-num-heads 128 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128 \
    --position-embedding-type none --normalization RMSNorm --disable-bias-linear \
    --untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192 --bf16 \
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \
    --overlap-grad-reduce --overlap-param-gather \
    --micro-batch-size 1 --global-batch-size 768 --train-iters 500000 \
    --lr 8e-4 --min-lr 8e-6 --lr-decay-style cosine --lr-warmup-iters 1000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.014 \
    "${data[@]}" "${logs[@]}" ${EXTRA_FLAGS:-} "$@"
