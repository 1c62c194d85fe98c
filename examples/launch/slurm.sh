#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run one of the training scripts as a SLURM job that goes on by itself when its time is up:
#
#   sbatch --nodes=8 --gpus-per-node=8 --time=24:00:00 examples/launch/slurm.sh examples/llama/train_llama_70b.sh
#
# Five minutes before the time limit SLURM tells this script, which has every rank finish its step and save; the job is
# then put back into the queue and continues from that checkpoint. So the script must give --save and --load the same
# directory. What the script needs, such as DATA_PATH, is taken from the environment, as by start.sh; variables:
#
#   GPUS_PER_NODE     of each node; those that the job asked for when not set
#   CONTAINER_IMAGE   run in this image (needs the Pyxis plug-in); CONTAINER_MOUNTS: SOURCE:TARGET,...
#   REQUEUE=0         end when the time is up
#   DRY_RUN=1         print what a job would run; needs no SLURM
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

[ $# -ge 1 ] || fail "give the training script: sbatch ... examples/launch/slurm.sh SCRIPT"
[ -f "$1" ] || fail "$1 does not exist; give the training script"
if [ -n "${DRY_RUN:-}" ]; then
    export SLURM_JOB_ID="${SLURM_JOB_ID:-0}" SLURM_JOB_NODELIST="${SLURM_JOB_NODELIST:-localhost}"
fi
[ -n "${SLURM_JOB_ID:-}" ] || fail "this is no SLURM job; submit it: sbatch ... $0 $*"

export GPUS_PER_NODE="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"
# SLURM starts every process, so that its signals reach the ranks and not a torchrun between.
export LAUNCHER=srun
export EXTRA_FLAGS="${EXTRA_FLAGS:-} --exit-signal-handler --exit-signal SIGUSR1"
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    SRUN_OPTIONS="${SRUN_OPTIONS:-} --container-image=$CONTAINER_IMAGE --container-mounts=${CONTAINER_MOUNTS:-$PWD:$PWD}"
    export SRUN_OPTIONS
fi

ends=0
# shellcheck disable=SC2329  # the trap below calls it
save_and_end() {
    echo "time is nearly up: the ranks save and end"
    ends=1
    # Of the job's steps alone: this script itself must live.
    scancel --signal=USR1 "$SLURM_JOB_ID"
}
trap save_and_end USR1

bash "$@" &
script=$!
code=0
wait "$script" || code=$?
# A signal ends wait, and not what is waited for.
while kill -0 "$script" 2> /dev/null; do
    code=0
    wait "$script" || code=$?
done
if [ "$ends" = 1 ] && [ "$code" = 0 ] && [ "${REQUEUE:-1}" = 1 ]; then
    echo "saved; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
