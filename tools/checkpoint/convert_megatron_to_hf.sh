#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A checkpoint to a directory that Hugging Face's programs open:
#
#   MEGATRON_DIR=llama HF_DIR=llama-hf bash tools/checkpoint/convert_megatron_to_hf.sh [FLAGS]
#
# ITERATION: which checkpoint of MEGATRON_DIR (the latest). FLAGS: further ones of python -m megatron.bridge.convert, such
# as --no-verify. PYTHON: the interpreter (python).
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

[ -n "${MEGATRON_DIR:-}" ] || fail "MEGATRON_DIR is not set; give the directory of checkpoints, MEGATRON_DIR=llama"
[ -n "${HF_DIR:-}" ] || fail "HF_DIR is not set; give the directory to make, HF_DIR=llama-hf"
[ -d "$MEGATRON_DIR" ] || fail "MEGATRON_DIR=$MEGATRON_DIR is no directory; give one that --save has written"
[[ "${ITERATION:-0}" =~ ^[0-9]+$ ]] || fail "ITERATION=$ITERATION is no whole number; give the iteration to convert"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -m megatron.bridge.convert --source megatron --target hf \
    --input-path "$MEGATRON_DIR" --output-path "$HF_DIR" ${ITERATION:+--ckpt-step "$ITERATION"} "$@"
