#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A Hugging Face directory to a checkpoint that pretrain_gpt.py --load and --pretrained-checkpoint take:
#
#   HF_DIR=Llama-3.1-8B MEGATRON_DIR=llama bash tools/checkpoint/convert_hf_to_megatron.sh [FLAGS]
#
# TP, PP: sizes that are checked against the model. FLAGS: further ones of python -m megatron.bridge.convert, such as
# --no-verify. PYTHON: the interpreter (python).
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

[ -n "${HF_DIR:-}" ] || fail "HF_DIR is not set; give the Hugging Face directory to convert, HF_DIR=Llama-3.1-8B"
[ -n "${MEGATRON_DIR:-}" ] || fail "MEGATRON_DIR is not set; give the directory to make, MEGATRON_DIR=llama"
[ -f "$HF_DIR/config.json" ] || fail "HF_DIR=$HF_DIR has no config.json; give a directory that save_pretrained() wrote"
for size in TP PP; do
    [[ "${!size:-1}" =~ ^[1-9][0-9]*$ ]] || fail "$size=${!size} is no whole number from 1; give the number of ranks"
done
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -m megatron.bridge.convert --source hf --target megatron \
    --input-path "$HF_DIR" --output-path "$MEGATRON_DIR" \
    --tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-1}" "$@"
