#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A model of Hugging Face to a checkpoint, to another layout, into training, and back; every step is verified.
#
#   HF_DIR=Llama-3.1-8B WORK_DIR=converted bash examples/complete/convert_checkpoint.sh
#
# Variables:
#   HF_DIR     directory with config.json, weights and tokenizer
#   WORK_DIR   where results go: WORK_DIR/checkpoint, WORK_DIR/resharded, WORK_DIR/tuned, WORK_DIR/hf; must not exist
#   TP, PP     tensor- and pipeline-parallel sizes that the job shall have (1, 1): checked against the model
#   PYTHON     the interpreter (python)
#   DRY_RUN=1  print the commands, run nothing
#   CONVERT_FLAGS   further flags of every conversion, such as --no-verify
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

source "$root/examples/launch/steps.sh"

python="${PYTHON:-python}"
command -v "$python" > /dev/null || fail "there is no $python; activate the environment that has torch"
if [ -n "${DRY_RUN:-}" ]; then
    HF_DIR="${HF_DIR:-/path/to/model}" WORK_DIR="${WORK_DIR:-/path/to/results}"
fi
[ -n "${HF_DIR:-}" ] || fail "HF_DIR is not set; give a directory with config.json and weights"
[ -n "${DRY_RUN:-}" ] || [ -f "$HF_DIR/config.json" ] || fail "HF_DIR=$HF_DIR has no config.json; give a model's directory"
[ -n "${WORK_DIR:-}" ] || fail "WORK_DIR is not set; give a directory that does not exist yet"
[ ! -e "$WORK_DIR" ] || fail "WORK_DIR=$WORK_DIR exists; remove it, or give another one"
tp="${TP:-1}" pp="${PP:-1}"
run mkdir -p "$WORK_DIR"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
read -r -a further <<< "${CONVERT_FLAGS:-}"
convert() { run "$python" -m megatron.bridge.convert "$@" "${further[@]}"; }

step "1. Hugging Face to a checkpoint: every tensor is read back and compared, bit for bit; small models by their logits, too"
convert --source hf --target megatron --input-path "$HF_DIR" --output-path "$WORK_DIR/checkpoint" \
    --tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp"

step "2. What is in it"
run "$python" "$root/tools/checkpoint/inspect_checkpoint.py" "$WORK_DIR/checkpoint"

step "3. Another layout: a checkpoint has none, so that files are copied, verified, and the sizes checked against the model"
convert --source megatron --target megatron --input-path "$WORK_DIR/checkpoint" --output-path "$WORK_DIR/resharded" \
    --source-tp "$tp" --source-pp "$pp" --target-tp 1 --target-pp 1
run "$python" "$root/tools/checkpoint/inspect_checkpoint.py" --diff \
    "$WORK_DIR/checkpoint/iter_0000000" "$WORK_DIR/resharded/iter_0000000"

step "4. Two steps of training from it, on made-up data; your data take their place"
run "$python" "$root/pretrain_gpt.py" --pretrained-checkpoint "$WORK_DIR/resharded" --use-checkpoint-args \
    --seq-length 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-5 --eval-iters 0 --mock-data \
    --save "$WORK_DIR/tuned" --log-interval 1

step "5. Back: the converted model, and the one that was trained on"
convert --source megatron --target hf --input-path "$WORK_DIR/resharded" --output-path "$WORK_DIR/hf"
convert --source megatron --target hf --input-path "$WORK_DIR/tuned" --output-path "$WORK_DIR/hf-tuned"
printf '\nOpen it:  AutoModelForCausalLM.from_pretrained("%s")\n' "$WORK_DIR/hf"
