# SPDX-License-Identifier: Apache-2.0
"""More memory than there is: seen before it is taken where that can be proven, and one sentence where it happens."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from megatron.core import device as device_module
from megatron.core.collectives import all_gather_object
from megatron.core.config_base import get_settings
from megatron.core.errors import (
    ConfigError,
    MemoryShortageError,
    count_refused_bytes,
    explain_refused_memory,
    format_bytes,
)
from megatron.core.host_memory import name_machine, read_host_memory
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import Group
from megatron.planner.levers import Lever, list_levers
from megatron.planner.memory import Workload
from megatron.planner.state_memory import count_copies, count_element_bytes
from megatron.planner.step_memory import StepMemory, find_fullest, predict_step_memory
from megatron.planner.step_time import shorten
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import group_classes, groups_of_fields

_NUM_LEVERS = 3
# What saves less is not worth a restart.
_LEAST_SHARE = 0.02


def refuse_oversize(
    config: RunConfig, modules: Iterable[nn.Module], world: Group, workload: Workload | None, *, own_optimizer: bool
) -> None:
    """Raise MemoryShortageError on every rank when the parameters of `modules` cannot be
    trained in the memory there is; of activations nothing is assumed. Every rank calls this.

    own_optimizer: it is not the one of the settings, so that nothing is known of its state.
    """
    needed = sum(
        _count_training_bytes(config, parameter, own_optimizer) for m in modules for parameter in m.parameters()
    )
    device = device_module.current_device()
    # Processes on one machine share its memory; each GPU is one process's.
    place = name_machine() if device_module.is_cpu(device) else None
    total, source = read_total_memory()
    found = all_gather_object((place, needed, total, source), world)
    for rank, (machine, own, limit, whose) in enumerate(found):
        together = own if machine is None else sum(other[1] for other in found if other[0] == machine)
        if together > limit:
            processes = sum(other[0] == machine for other in found) if machine is not None else 1
            whom = f"the {processes} processes of a machine" if processes > 1 else f"rank {rank}"
            raise MemoryShortageError(
                f"weights, gradients and optimizer state of {whom} take {format_bytes(together)} at least, and {whose} "
                f"{format_bytes(limit)}; {suggest_levers(config, workload)}"
            )


def _count_training_bytes(config: RunConfig, parameter: nn.Parameter, own_optimizer: bool) -> float:
    """Bytes that certainly belong to a parameter on this process while it is trained."""
    ddp, optimizer = config.ddp, config.optimizer
    weight = parameter.element_size()
    is_trained = parameter.requires_grad and not config.validation.skip_train
    gradient = (4 if ddp.grad_reduce_in_fp32 else weight) if is_trained else 0
    # The host's memory is asked for where it is taken.
    offloads = optimizer.optimizer_cpu_offload and not device_module.is_cpu(device_module.current_device())
    offloaded = optimizer.optimizer_offload_fraction if offloads else 0.0
    copies = count_copies(config.model, config.site_replicas, of_experts=get_placement(parameter, "").is_expert)
    # A program's own optimizer, of whose state nothing is known, does not count.
    each = count_element_bytes(
        ddp, optimizer, weight=weight, gradient=gradient, copies=copies,
        offloaded=1.0 if own_optimizer else offloaded, outer=config.sites.outer_bytes if is_trained else 0,
    )  # fmt: skip
    return parameter.numel() * each


def explain_memory_shortage(error: BaseException, config: RunConfig, workload: Workload | None) -> str | None:
    """The sentence for memory that could not be had while a run was set up or trained; None for other errors."""
    refused = explain_refused_memory(error)
    if refused is None:
        return None
    total, source = read_total_memory()
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        host = read_host_memory()
        total, source = host.total_bytes, host.source
    what = f"out of memory: {refused} could not be had at once, {source} {format_bytes(total)}{_describe_gaps(error)}"
    # Arrays, which are numpy's, hold the data and no part of the model.
    if isinstance(error, MemoryError):
        return f"{what}; take fewer or shorter samples (--train-iters, --global-batch-size, --seq-length)"
    number = count_refused_bytes(error)
    return f"{what}; {suggest_levers(config, workload, is_one_tensor=number is not None and number > total)}"


def _describe_gaps(error: BaseException) -> str:
    """Return what of a GPU's memory is free, and what the allocator holds without being able to use it, where it says
    so."""
    free = re.search(r"of which ([0-9.]+ [KMGT]?i?B) is free", str(error))
    held = re.search(r"([0-9.]+ [KMGT]?i?B) is reserved by PyTorch but unallocated", str(error))
    if free is None:
        return ""
    return f", of which {free[1]} are free" + (f" and {held[1]} lie in gaps between tensors" if held else "")


def read_total_memory() -> tuple[int, str]:
    """Bytes that this process's device has, and who says so: `this machine has`."""
    if device_module.is_cpu(device_module.current_device()):
        host = read_host_memory()
        return host.total_bytes, host.source
    return device_module.read_total_memory_bytes(), "this GPU has"


def suggest_levers(config: RunConfig, workload: Workload | None, *, is_one_tensor: bool = False) -> str:
    """Return what the planner says of the run, and the cheapest settings that make it need less and train the same
    model.

    workload: None for a model that the planner does not know. is_one_tensor: a single tensor is too large, so that
    keeping fewer of them does not help.
    """
    if workload is None:
        return "use more processes, or a smaller model"
    now = _predict(config, workload)
    # Then no saving of activations is enough, however large.
    weights_are_too_many = now.state > read_total_memory()[0]
    found = []
    for lever in list_levers(config.model, config.ddp, workload):
        if (is_one_tensor and not lever.shrinks_tensors) or (
            lever.needs_gpu and device_module.is_cpu(device_module.current_device())
        ):
            continue
        then = _pull(config, workload, lever)
        if then is None or (weights_are_too_many and then.state >= now.state):
            continue
        saved = now.total - then.total
        if saved >= _LEAST_SHARE * now.total:
            found.append(f"{_write_changes(config, lever)} ({format_bytes(saved)} less)")
    estimate = (
        f"estimated for each process: {format_bytes(now.state)} of weights, gradients and optimizer state, "
        f"{format_bytes(now.activations)} of activations"
    )
    if not found:
        return f"{estimate}; no setting makes it less for the same model: use more processes, or a smaller model"
    return f"{estimate}; cheapest first: {', '.join(found[:_NUM_LEVERS])}"


def _predict(config: RunConfig, workload: Workload) -> StepMemory:
    """Predict the memory of a step on the fullest stage."""
    few = dataclasses.replace(workload, num_microbatches=shorten(config.model, workload.num_microbatches))
    return find_fullest(predict_step_memory(config.model, config.ddp, config.optimizer, few))


def _pull(config: RunConfig, workload: Workload, lever: Lever) -> StepMemory | None:
    """Predict the same with the lever's changes; None where the run's other settings do not allow them."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in lever.changes.items():
        changes.setdefault(groups_of_fields()[name], {})[name] = value
    try:
        groups = {group: dataclasses.replace(getattr(config, group), **values) for group, values in changes.items()}
        changed = dataclasses.replace(config, **groups)
    except (ConfigError, ValueError, TypeError):
        return None
    size, replicas = changed.training.micro_batch_size or 1, changed.data_parallel_size
    samples = workload.num_microbatches * workload.micro_batch_size * workload.data_parallel_size
    optimizer = changed.optimizer
    return _predict(
        changed,
        dataclasses.replace(
            workload, micro_batch_size=size, data_parallel_size=replicas,
            num_microbatches=max(1, samples // (size * replicas)),
            offloaded_state=optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0,
        ),
    )  # fmt: skip


def _write_changes(config: RunConfig, lever: Lever) -> str:
    return " ".join(_spell(config, name, value) for name, value in lever.changes.items() if value is not None)


def _spell(config: RunConfig, name: str, value: Any) -> str:
    setting = get_settings(group_classes()[groups_of_fields()[name]])[name]
    now = getattr(getattr(config, groups_of_fields()[name]), name)
    return setting.spell(value) + (f" instead of {now}" if isinstance(now, int) and not setting.is_switch else "")
