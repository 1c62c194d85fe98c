#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Start pretrain_gpt.py on every GPU: what all training scripts in examples/ have in common.
#
#   source examples/launch/start.sh; start FLAGS ...       in a script
#   bash examples/launch/start.sh FLAGS ...                by itself
#
# Variables:
#   GPUS_PER_NODE   processes on each node; as many as it has GPUs when not set
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT
#                   several nodes: run the same script on each of them, NODE_RANK being 0, 1, ...
#   LAUNCHER        torchrun (one for each node, as tools/launch.py starts it), or srun (SLURM starts every process itself)
#   DRY_RUN=1       print the command, run nothing; 8 GPUs where there are none
#   LAPTOP=1        the same kind of run with tiny sizes and made-up data, on this machine, as tools/shrink.py makes it
#
# In a SLURM job (sbatch SCRIPT, in the root of the checkout) the nodes are those of the job, and srun reaches all of them.
set -euo pipefail

LAUNCH_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# sbatch runs a copy of this file, in the directory that it was submitted from.
[ -e "$LAUNCH_ROOT/examples/launch/steps.sh" ] || LAUNCH_ROOT="$PWD"
# shellcheck source=examples/launch/steps.sh
source "$LAUNCH_ROOT/examples/launch/steps.sh" || exit 2
START_SH="$LAUNCH_ROOT/examples/launch/start.sh"

is_trial() { [ -n "${DRY_RUN:-}" ] || [ -n "${LAPTOP:-}" ]; }

# need NAME PLACEHOLDER SUFFIX TEXT: the variable NAME must lead to an existing file, NAME's value followed by SUFFIX.
# A trial takes the placeholder where nothing is given.
need() {
    local name=$1 placeholder=$2 suffix=$3 text=$4
    if is_trial; then
        printf -v "$name" '%s' "${!name:-$placeholder}"
        return
    fi
    [ -n "${!name:-}" ] || fail "the variable $name is not set; give $text, or LAPTOP=1 for a trial with made-up data"
    [ "${!name}" != "$placeholder" ] || fail "$name=$placeholder is a placeholder; give $text"
    [ -e "${!name}$suffix" ] || fail "$name: ${!name}$suffix does not exist; give $text"
}

# made_for NODES: of 8 GPUs, unless the user, or the SLURM job, says otherwise. A dry run needs no first node.
made_for() {
    GPUS_PER_NODE="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}"
    NNODES="${NNODES:-$1}"
    MASTER_ADDR="${MASTER_ADDR:-${DRY_RUN:+localhost}}"
}

# need_data SPLIT TOKENIZER_TYPE TEXT: fills the array data with the flags of $DATA_PATH and $TOKENIZER_MODEL, which TEXT describes.
need_data() {
    need_dataset
    need TOKENIZER_MODEL /path/to/tokenizer "" "$3"
    # shellcheck disable=SC2034  # for the script that sources this file
    data=(--data-path "$DATA_PATH" --tokenizer-type "$2" --tokenizer-model "$TOKENIZER_MODEL" --split "$1")
}

# need_data_of_gpt2 SPLIT: the same with the two files of GPT-2's tokenizer, $VOCAB_FILE and $MERGE_FILE.
need_data_of_gpt2() {
    need_dataset
    need_files_of_gpt2
    # shellcheck disable=SC2034  # for the script that sources this file
    data=(--data-path "$DATA_PATH" --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE"
        --tokenizer-type GPT2BPETokenizer --split "$1")
}

need_dataset() { need DATA_PATH /path/to/data .idx "the prefix of a dataset of tools/preprocess_data.py"; }

need_files_of_gpt2() {
    need VOCAB_FILE /path/to/vocab.json "" "the vocab.json of GPT-2's tokenizer"
    need MERGE_FILE /path/to/merges.txt "" "the merges.txt of GPT-2's tokenizer"
}

# keep_in NAME SAVE_INTERVAL LOG_INTERVAL: fills the array logs with the flags of checkpoints, which the next run continues
# from, and of logs; both are under $CHECKPOINTS, which is checkpoints/NAME when it is not set.
keep_in() {
    CHECKPOINTS="${CHECKPOINTS:-checkpoints/$1}"
    # The training makes the last directory of the path alone.
    is_trial || mkdir -p "$(dirname "$CHECKPOINTS")" || fail "CHECKPOINTS=$CHECKPOINTS cannot be made; give another directory"
    # shellcheck disable=SC2034  # for the script that sources this file
    logs=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval "$2" --tensorboard-dir "$CHECKPOINTS/tensorboard"
        --log-interval "$3" --log-throughput --eval-interval 1000 --eval-iters 10)
}

count_gpus() {
    local gpus="${GPUS_PER_NODE:-}"
    if [ -z "$gpus" ] && command -v nvidia-smi > /dev/null; then
        gpus="$(nvidia-smi --list-gpus | wc -l)"
    fi
    if [ -n "${DRY_RUN:-}" ] && [ "${gpus:-0}" = 0 ]; then
        gpus=8
    fi
    [ -n "$gpus" ] && [ "$gpus" != 0 ] ||
        fail "no GPU was found; set GPUS_PER_NODE, or LAPTOP=1 for a trial with tiny sizes on this machine"
    echo "$gpus"
}

# check_flags PROCESSES FLAGS ...: what stands against the flags is said once, before hundreds of processes start and say it.
check_flags() {
    local processes=$1
    shift
    # A container may have another Python than the node.
    [[ "${SRUN_OPTIONS:-}" != *--container-image* && -z "${DRY_RUN:-}" ]] || return 0
    WORLD_SIZE=$processes python "$LAUNCH_ROOT/pretrain_gpt.py" --print-config "$@" > /dev/null || exit 2
}

run_or_print() {
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%q ' "$@"
        echo
    else
        exec "$@"
    fi
}

# srun's last words are which tasks ended with which code: what the first of them said is said again behind those.
srun_or_print() {
    [ -z "${DRY_RUN:-}" ] || { run_or_print srun "$@"; return; }
    local code=0
    { srun "$@" 2>&1 >&3 3>&- | repeat_error >&2 3>&-; } 3>&1 || code=$?
    exit "$code"
}

repeat_error() {
    local line last="" error=""
    while IFS= read -r line || [ -n "$line" ]; do
        last="$line"
        printf '%s\n' "$line"
        # A run that goes on says so behind what it could not do.
        [[ -n "$error" || "$line" != "error: "* || "$line" == *"goes on" ]] || error="$line"
    done
    [ -z "$error" ] || [ "$error" = "$last" ] || printf '%s\n' "$error"
}

start() {
    command -v python > /dev/null || fail "there is no python; activate the environment that has torch (README.md)"
    if [ -n "${LAPTOP:-}" ]; then
        # The layout is that of the cluster's processes.
        export WORLD_SIZE=$((${GPUS_PER_NODE:-8} * ${NNODES:-1}))
        exec python "$LAUNCH_ROOT/tools/shrink.py" ${DRY_RUN:+--print} "$@"
    fi
    local gpus
    gpus="$(count_gpus)" || exit 2
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    # A batch script runs on the first node alone; a step of the job has a number.
    if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
        start_in_slurm "$gpus" "$@"
        return
    fi
    local where=(--nproc_per_node="$gpus" --nnodes="${NNODES:-1}")
    if [ "${NNODES:-1}" -gt 1 ]; then
        [ -n "${MASTER_ADDR:-}" ] || fail "NNODES is $NNODES and MASTER_ADDR is not set; give the first node's address"
        [ -n "${NODE_RANK:-${DRY_RUN:-}}" ] || fail "NNODES is $NNODES and NODE_RANK is not set; give 0, 1, ... on the nodes"
        where+=(--node_rank="${NODE_RANK:-0}" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
    fi
    [ -n "${SLURM_STEP_ID:-}" ] || check_flags $((gpus * ${NNODES:-1})) "$@"
    run_or_print python "$LAUNCH_ROOT/tools/launch.py" "${where[@]}" "$LAUNCH_ROOT/pretrain_gpt.py" "$@"
}

start_in_slurm() {
    local gpus=$1
    shift
    [ -n "${DRY_RUN:-}" ] || command -v srun > /dev/null || fail "SLURM_JOB_ID is set and there is no srun; unset it, or load SLURM's commands"
    export NNODES="${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-${NNODES:-1}}}" GPUS_PER_NODE="$gpus"
    local hosts
    hosts="$([ -n "${DRY_RUN:-}" ] || scontrol show hostnames "$SLURM_JOB_NODELIST")"
    MASTER_ADDR="${MASTER_ADDR:-${hosts%%$'\n'*}}"
    # Jobs that share a node need ports of their own.
    MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
    export MASTER_ADDR MASTER_PORT
    check_flags $((gpus * NNODES)) "$@"
    local options=(--nodes="$NNODES" --kill-on-bad-exit=1)
    # Options of the site, such as --container-image and --container-mounts.
    read -r -a site <<< "${SRUN_OPTIONS:-}"
    case "${LAUNCHER:-torchrun}" in
        torchrun)
            # On each node this file again, which takes its rank from the step: the inner shell expands it.
            # shellcheck disable=SC2016
            srun_or_print "${options[@]}" --ntasks-per-node=1 "${site[@]}" \
                bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$0" "$@"' "$START_SH" "$@"
            ;;
        srun)
            srun_or_print "${options[@]}" --ntasks-per-node="$gpus" "${site[@]}" \
                python "$LAUNCH_ROOT/pretrain_gpt.py" "$@"
            ;;
        *) fail "LAUNCHER=$LAUNCHER is not known; use torchrun or srun" ;;
    esac
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    start "$@"
fi
