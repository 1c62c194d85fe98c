# SPDX-License-Identifier: Apache-2.0
"""Launchers of a planned layout: a shell script for Slurm or torchrun, a job for Kubernetes."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence

from megatron.cli.plan_search import Layout
from megatron.core.errors import ConfigError
from megatron.core.paths import write_atomically
from megatron.planner.devices import Device

SCRIPTS = ("slurm", "torchrun", "k8s")

_SLURM = """#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
# What a plan leaves open goes behind this script: --data-path, --tokenizer-type, --lr, --train-iters, --save, ...
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun python -m megatron launch --nnodes {nodes} --nproc_per_node {per_node} \\
    --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:29500" --rdzv_id "$SLURM_JOB_ID" -- \\
    {flags} \\
    "$@"
"""
_TORCHRUN = """#!/bin/bash
# On every node, with NODE_RANK from 0 to {last_node} and MASTER_ADDR of the first one. What a plan leaves open goes
# behind this script: --data-path, --tokenizer-type, --lr, --train-iters, --save, ...
set -euo pipefail
python -m megatron launch --nnodes {nodes} --nproc_per_node {per_node} --node_rank "${{NODE_RANK:-0}}" \\
    --master_addr "${{MASTER_ADDR:-127.0.0.1}}" --master_port "${{MASTER_PORT:-29500}}" -- \\
    {flags} \\
    "$@"
"""
_K8S = """# A job of {nodes} pods, one a node; the service gives them names. Put in your image and volumes, and
# behind the flags what a plan leaves open: --data-path, --tokenizer-type, --lr, --train-iters, --save, ...
apiVersion: v1
kind: Service
metadata: {{name: megatron}}
spec: {{clusterIP: None, selector: {{job-name: megatron}}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: megatron}}
spec:
  completions: {nodes}
  parallelism: {nodes}
  completionMode: Indexed
  backoffLimit: 0
  template:
    spec:
      subdomain: megatron
      restartPolicy: Never
      containers:
        - name: train
          image: YOUR-IMAGE
          resources: {{limits: {{nvidia.com/gpu: {per_node}}}}}
          command: [bash, -c]
          args:
            - >-
              exec python -m megatron launch --nnodes {nodes} --nproc_per_node {per_node}
              --node_rank "$JOB_COMPLETION_INDEX" --master_addr megatron-0.megatron --master_port 29500 --
              {flags}
"""


# Of what a plan assumes, the run must say these itself.
_LEFT_TO_THE_USER = frozenset({"--mock-data", "--tokenizer-type", "--lr", "--train-iters"})


def write_script(arguments: argparse.Namespace, layout: Layout, device: Device, added: Sequence[str]) -> None:
    """Write the launcher that --script asks for, to --output or standard output. added: flags that only the plan needs.
    Raises ConfigError for processes that do not fill the nodes."""
    if arguments.script is None:
        return
    per_node = min(int(device.devices_per_node), arguments.gpus)
    if arguments.gpus % per_node:
        raise ConfigError(
            f"--script: {arguments.gpus} processes do not fill nodes of {per_node}; give --gpus-per-node, or a multiple"
        )
    nodes = math.ceil(arguments.gpus / per_node)
    form = {"slurm": _SLURM, "torchrun": _TORCHRUN, "k8s": _K8S}[arguments.script]
    indent = "\n              " if arguments.script == "k8s" else " \\\n    "
    left_out = _LEFT_TO_THE_USER & set(added)
    flags = [text for text in _list_flags(layout.flags) if text.split()[0] not in left_out]
    text = form.format(nodes=nodes, per_node=per_node, last_node=nodes - 1, flags=indent.join(flags))
    if arguments.output is None:
        print(text)
    else:
        write_atomically(arguments.output, text)


def _list_flags(words: list[str]) -> list[str]:
    """Each flag with its values, quoted."""
    found: list[str] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append(shlex.quote(word))
        else:
            found[-1] += f" {shlex.quote(word)}"
    return found
