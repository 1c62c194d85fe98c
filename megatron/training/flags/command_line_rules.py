# SPDX-License-Identifier: Apache-2.0
"""Rules that concern more than the settings of a RunConfig: two flags for one thing, environment; and the flags that no
config declares, whose status judges them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from megatron.core.setting import Setting
from megatron.training.config.container import RunConfig
from megatron.training.config.layout_relations import are_parameters_divided, sharding_flag


class PlannedFlags:
    """The values of the flags that no config declares, by upstream's name: `planned["mtp_hsm"]`."""

    def __init__(self, flags: Mapping[str, Setting], given: Mapping[str, Any]) -> None:
        self._flags, self._given = flags, given

    def __getitem__(self, dest: str) -> Any:
        # A missing name is a mistake of ours and raises KeyError.
        return self._given.get(dest, self._flags[dest].default)

    def say(self, dest: str) -> str:
        """The flag as a user writes it: `--pipeline-model-parallel-comm-backend ucc`."""
        return self._flags[dest].spell(self[dest])

    def name(self, dest: str) -> str:
        """The flag's usual spelling."""
        return self._flags[dest].name


def checkpoint_problems(run: RunConfig) -> Iterator[str]:
    """Yield what a checkpoint of upstream's format needs of the communication."""
    checkpoint = run.checkpoint
    # Upstream gathers the optimizer's state over gloo for that format.
    without_gloo = not run.distributed.use_gloo_process_groups and run.ddp.use_distributed_optimizer
    if without_gloo and checkpoint.ckpt_format == "torch":
        yield (
            "--disable-gloo-process-groups with --use-distributed-optimizer cannot save --ckpt-format torch; use "
            "torch_dist"
        )


def contradicting_flags(run: RunConfig, given: Set[str]) -> Iterator[str]:
    """Flags that say one thing in two ways. given: names of the settings a user wrote."""
    # `given` rather than the settings: derivation turns the first into the second.
    if given >= {"use_megatron_fsdp", "use_torch_fsdp2"}:
        yield "--use-megatron-fsdp and --use-torch-fsdp2 contradict each other; keep one"
    if given & {"use_megatron_fsdp", "use_torch_fsdp2"}:
        yield from _formats_said_twice(run, given)
    if given >= {"step_batch_size_schedule", "global_batch_size"}:
        yield "--step-batch-size-schedule and --global-batch-size both set the global batch size; keep one"


def _formats_said_twice(run: RunConfig, given: Set[str]) -> Iterator[str]:
    """Check dtypes of gradients with fully sharded data parallelism against the switches for runs without it."""
    for name in ("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype"):
        number_format = getattr(run.ddp, name)
        if number_format in ("bf16", "fp16") and "grad_reduce_in_fp32" in given:
            yield f"{run.say(name)} contradicts --accumulate-allreduce-grads-in-fp32; keep one"
        # Gradients of divided parameters may be sent in another dtype; others are sent as they are stored.
        is_sent = name == "megatron_fsdp_grad_comm_dtype" or not are_parameters_divided(run)
        if number_format == "fp32" and is_sent and "grad_reduce_in_bf16" in given:
            yield f"{run.say(name)} contradicts --grad-reduce-in-bf16; keep one"


def environment_problems(run: RunConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """Environment variables that contradict the settings."""
    # One hardware queue would run gathers and computation one after the other.
    if (run.ddp.use_megatron_fsdp or run.ddp.use_torch_fsdp2) and environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield (
            f"{sharding_flag(run)} needs several hardware queues, but CUDA_DEVICE_MAX_CONNECTIONS=1 in the "
            "environment; unset it"
        )
    active, there_are = run.in_process.inprocess_active_world_size, environ.get("WORLD_SIZE", "1")
    if run.in_process.inprocess_restart and active is not None and there_are.isdecimal() and active > int(there_are):
        yield (
            f"{run.say('inprocess_active_world_size')} is more than the {there_are} processes that WORLD_SIZE in the "
            "environment counts; give at most so many"
        )
    if run.model.deterministic_mode and environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0") != "0":
        yield "NVTE_ALLOW_NONDETERMINISTIC_ALGO in the environment contradicts --deterministic-mode; set it to 0"
