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
#   LAUNCHER        torchrun (one for each node), or srun (SLURM starts every process itself)
#   DRY_RUN=1       print the command, run nothing
#   LAPTOP=1        the same kind of run with tiny sizes and made-up data, on this machine, as tools/shrink.py makes it
#
# In a SLURM job (sbatch SCRIPT) the nodes are those of the job, and srun reaches all of them.
set -euo pipefail

LAUNCH_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
START_SH="$LAUNCH_ROOT/examples/launch/start.sh"

fail() { # one sentence, before anything has started
    echo "error: $*" >&2
    exit 2
}

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

count_gpus() {
    local gpus="${GPUS_PER_NODE:-}"
    if [ -z "$gpus" ] && command -v nvidia-smi > /dev/null; then
        gpus="$(nvidia-smi --list-gpus | wc -l)"
    fi
    [ -n "$gpus" ] && [ "$gpus" != 0 ] ||
        fail "no GPU was found; set GPUS_PER_NODE, or LAPTOP=1 for a trial with tiny sizes on this machine"
    echo "$gpus"
}

run_or_print() {
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%q ' "$@"
        echo
    else
        exec "$@"
    fi
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
    command -v torchrun > /dev/null || fail "there is no torchrun; activate the environment that has torch (README.md)"
    local where=(--nproc_per_node="$gpus" --nnodes="${NNODES:-1}")
    if [ "${NNODES:-1}" -gt 1 ]; then
        [ -n "${MASTER_ADDR:-}" ] || fail "NNODES is $NNODES and MASTER_ADDR is not set; give the first node's address"
        [ -n "${NODE_RANK:-${DRY_RUN:-}}" ] || fail "NNODES is $NNODES and NODE_RANK is not set; give 0, 1, ... on the nodes"
        where+=(--node_rank="${NODE_RANK:-0}" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
    fi
    run_or_print torchrun "${where[@]}" "$LAUNCH_ROOT/pretrain_gpt.py" "$@"
}

start_in_slurm() {
    local gpus=$1
    shift
    command -v srun > /dev/null || fail "SLURM_JOB_ID is set and there is no srun; unset it, or load SLURM's commands"
    export NNODES="${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}" GPUS_PER_NODE="$gpus"
    local hosts
    hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
    MASTER_ADDR="${MASTER_ADDR:-${hosts%%$'\n'*}}"
    # Jobs that share a node need ports of their own.
    MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
    export MASTER_ADDR MASTER_PORT
    local options=(--nodes="$NNODES" --kill-on-bad-exit=1)
    # Options of the site, such as --container-image and --container-mounts.
    read -r -a site <<< "${SRUN_OPTIONS:-}"
    case "${LAUNCHER:-torchrun}" in
        torchrun)
            # On each node this file again, which takes its rank from the step: the inner shell expands it.
            # shellcheck disable=SC2016
            run_or_print srun "${options[@]}" --ntasks-per-node=1 "${site[@]}" \
                bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$0" "$@"' "$START_SH" "$@"
            ;;
        srun)
            run_or_print srun "${options[@]}" --ntasks-per-node="$gpus" "${site[@]}" \
                python "$LAUNCH_ROOT/pretrain_gpt.py" "$@"
            ;;
        *) fail "LAUNCHER=$LAUNCHER is not known; use torchrun or srun" ;;
    esac
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    start "$@"
fi
