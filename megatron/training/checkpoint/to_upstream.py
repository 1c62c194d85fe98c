# SPDX-License-Identifier: Apache-2.0
"""State that upstream saves in addition to tensors, from a run of ours: settings, progress, schedule, random numbers.

from_upstream.py is the other direction.
"""

from __future__ import annotations

import random
import signal
from argparse import Namespace
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.core.config_base import get_settings
from megatron.core.enums import AttnBackend
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.placement import Placement
from megatron.core.upstream_checkpoints.common_state import name_setting
from megatron.core.upstream_checkpoints.pickles import UpstreamObject
from megatron.training.checkpoint.rng_state import get_torch_states
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import group_classes
from megatron.training.run import Progress, Run

FULLY_RESHARDABLE = "fully_reshardable"
"""Upstream's name of optimizer state in the shapes of the parameters."""
DP_RESHARDABLE = "dp_reshardable"
"""Its name of optimizer state in the flat buckets of each model-parallel rank."""
CHECKPOINT_VERSION = 3.0
"""Of upstream's formats, since the rows of queries, keys and values have the order that they have today."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8, "auto": None}
_RERUN = "megatron.core.rerun_state_machine"
_STREAM = "stream."


# ---- settings


def build_args(config: RunConfig, progress: Progress, padded_vocab_size: int | None) -> Namespace:
    """The settings as upstream's parser would have returned them, under each name that they may have there."""
    args: dict[str, Any] = {}
    content = config.to_dict()
    for group, config_class in group_classes().items():
        for name, setting in get_settings(config_class).items():
            if name in content[group]:
                value = _upstream_value(name, content[group][name])
                args |= dict.fromkeys(name_setting(name, setting.name), value)
    model = config.model
    args |= {
        "params_dtype": model.params_dtype or torch.float32,
        "padded_vocab_size": padded_vocab_size,
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": config.data.seq_length,
        "virtual_pipeline_model_parallel_size": model.virtual_pipeline_model_parallel_size,
        "transformer_pipeline_model_parallel_size": model.pipeline_model_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "world_size": config.world_size,
        "rank": 0,
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_train_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
        "skipped_train_samples": 0,
    }
    return Namespace(**args)


def _upstream_value(name: str, value: Any) -> Any:
    """A setting's value in upstream's types."""
    if name == "attention_backend":
        return UpstreamObject("megatron.core.transformer.enums", "AttnBackend", (AttnBackend[value].value,))
    if name == "exit_signal":
        return signal.Signals[value]
    if name == "transformer_impl" and value == "auto":
        return "local"  # upstream has no auto, and modules are named as its local layers name them
    if name.endswith("_dtype") and isinstance(value, str):
        return _DTYPES.get(value, value)
    # It writes a single value where several are possible.
    if name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff") and isinstance(value, list) and len(value) == 1:
        return value[0]
    return value


# ---- progress, schedule, optimizer


def build_common(run: Run) -> dict[str, Any]:
    """Return what both formats hold, but for the optimizer's state and random numbers."""
    counted = (run.flops_per_token or 0.0) * run.seq_length * run.progress.consumed_train_samples
    flops = counted or run.progress.floating_point_operations
    common: dict[str, Any] = {
        "args": build_args(run.config, run.progress, run.recipe.padded_vocab_size),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": run.progress.iteration,
        "num_floating_point_operations_so_far": float(flops),
    }
    if not run.config.checkpoint.no_save_optim:
        common["opt_param_scheduler"] = run.scheduler.state_dict()
    return common


class _GroupKey(NamedTuple):
    """Key that tells groups apart. --decoupled-lr concerns embedding and output layer, which have weight decay."""

    is_expert: bool
    is_decoupled: bool
    is_undecayed: bool


def _list_group_keys(run: Run) -> list[_GroupKey]:
    """List them in upstream's order: parameters without a special setting, then learning rates, then weight decay."""
    dense = [_GroupKey(False, False, False), _GroupKey(False, True, False), _GroupKey(False, False, True)]
    if run.config.optimizer.decoupled_lr is None:
        del dense[1]
    of_experts = [_GroupKey(True, False, is_undecayed) for is_undecayed in (False, True)]
    return [*dense, *(of_experts if run.groups.grid.ep > 1 else [])]


def choose_group(run: Run, placement: Placement, *, is_undecayed: bool) -> int:
    """Return the index of a parameter's group in `build_param_groups`."""
    is_decoupled = run.config.optimizer.decoupled_lr is not None and placement.is_vocabulary
    key = _GroupKey(placement.is_expert and run.groups.grid.ep > 1, is_decoupled, is_undecayed)
    return _list_group_keys(run).index(key)


def build_param_groups(run: Run) -> list[dict[str, Any]]:
    """Options of the groups of upstream's optimizer: with weight decay and without, and both again for experts that are
    divided over processes; with --decoupled-lr one more."""
    settings = run.config.optimizer
    if settings.optimizer == "sgd":
        defaults = torch.optim.SGD([torch.empty(1)], lr=0.0, momentum=settings.sgd_momentum).defaults
    else:
        betas = (settings.adam_beta1, settings.adam_beta2)
        defaults = torch.optim.AdamW([torch.empty(1)], betas=betas, eps=settings.adam_eps).defaults
    groups = []
    for key in _list_group_keys(run):
        rates = {"max_lr": run.scheduler.max_lr, "min_lr": run.scheduler.min_lr}
        if key.is_decoupled:
            rates["max_lr"] = settings.decoupled_lr or 0.0
            rates["min_lr"] = settings.min_lr if settings.decoupled_min_lr is None else settings.decoupled_min_lr
        wd_mult = 0.0 if key.is_undecayed else 1.0
        groups.append(
            {
                "is_expert_parallel": key.is_expert,
                "default_config": not key.is_decoupled,
                "wd_mult": wd_mult,
                "lr_mult": 1.0,
                "is_decoupled_lr": key.is_decoupled,
                **rates,
                **defaults,
                "lr": run.scheduler.get_lr(rates),
                "weight_decay": run.scheduler.get_wd() * wd_mult,
            }
        )
    return groups


def build_common_optimizer(run: Run, sharding: str | None) -> dict[Any, Any]:
    """Return what upstream's torch_dist has of the optimizer in addition to tensors; twice where experts have a
    separate one.

    sharding: how its distributed optimizer saves; None without it.
    """
    saved = [_build_common_part(run, part, sharding) for part in _list_parts(run)]
    return saved[0] if len(saved) == 1 else dict(enumerate(saved))


def _list_parts(run: Run) -> list[list[dict[str, Any]]]:
    """List the groups of each optimizer: with expert parallelism experts have a separate one."""
    groups = build_param_groups(run)
    parts = [[g for g in groups if g["is_expert_parallel"] == of_experts] for of_experts in (False, True)]
    return [part for part in parts if part]


def _build_common_part(run: Run, groups: list[dict[str, Any]], sharding: str | None) -> dict[str, Any]:
    if sharding is not None:
        # With the flat layout each model-parallel rank has one.
        beside = {} if sharding == DP_RESHARDABLE else _build_divided_part(run, groups)
        return {**beside, "param_state_sharding_type": sharding}
    scaler = build_grad_scaler(run)
    whole = {"state": {"common_step": torch.tensor(float(run.optimizer.step_count))}, "param_groups": groups}
    return {"optimizer": whole, **({} if scaler is None else {"grad_scaler": scaler})} if is_mixed(run) else whole


def _build_divided_part(run: Run, groups: list[dict[str, Any]]) -> dict[str, Any]:
    scaler = build_grad_scaler(run)
    inner = {"param_groups": [{**group, "step": float(run.optimizer.step_count)} for group in groups]}
    return {"optimizer": inner, **({} if scaler is None else {"grad_scaler": scaler})}


def build_divided_optimizers(run: Run) -> list[dict[str, Any]]:
    """Return what the distributed optimizer of a model-parallel rank has in addition to its flat buffers; experts'
    comes second."""
    return [_build_divided_part(run, part) for part in _list_parts(run)]


def build_content_metadata(sharding: str | None) -> dict[str, Any]:
    """Return how upstream is to understand the optimizer's tensors; sharding as in `build_common_optimizer`."""
    kind: dict[str, Any] = {} if sharding is None else {"distrib_optim_sharding_type": sharding}
    if sharding == FULLY_RESHARDABLE:
        kind["distrib_optim_fully_reshardable_mem_efficient"] = False
    return {**kind, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def is_mixed(run: Run) -> bool:
    """Return True if upstream's optimizer keeps main parameters in addition to the model's."""
    return run.config.model.bf16 or run.config.model.fp16


def build_grad_scaler(run: Run) -> dict[str, Any] | None:
    """State of the loss scale as upstream's DynamicGradScaler has it; None without one."""
    scaler = run.optimizer.grad_scaler
    if not isinstance(scaler, DynamicGradScaler):
        return None
    state = scaler.state_dict()
    scale = torch.tensor([state["scale"]], dtype=torch.float32)
    return {"scale": scale, "growth_tracker": state["good_steps"], "hysteresis_tracker": state["patience"]}


# ---- random numbers


def build_rng_state() -> list[dict[str, Any]]:
    """This process's generators, in a list as upstream has one for its data-parallel ranks."""
    states = get_torch_states()
    host = states["cpu"]
    of_device = [state for name, state in states.items() if state is not host and not name.startswith(_STREAM)]
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": host,
            # Without a GPU upstream saves the generator that takes its place.
            "cuda_rng_state": next(iter(of_device), host),
            "rng_tracker_states": {
                name.removeprefix(_STREAM): state for name, state in states.items() if name.startswith(_STREAM)
            },
        }
    ]


# ---- upstream's check of results that come out otherwise the second time


def build_rerun_state(iteration: int) -> dict[str, Any]:
    """The part of its state that is the same on all ranks: nothing is being run again."""
    return {
        "mode": UpstreamObject(_RERUN, "RerunMode", ("validate_results",)),
        "state": UpstreamObject(_RERUN, "RerunState", (0,)),
        "current_iteration": iteration,
    }


def build_rank_rerun_state() -> dict[str, Any]:
    """Build the part that differs between ranks."""
    nothing = dict.fromkeys(("failed_validation_call", "initial_result", "suspicious_node", "suspicious_device",
                             "data_iterator_checkpoints"))  # fmt: skip
    requests = dict.fromkeys(
        ("rerun_requested", "checkpoint_requested", "restart_again_requested", "continue_requested"), False
    )
    errors = {
        "error_injection_rate": 0,
        "error_injection_type": UpstreamObject(_RERUN, "RerunDiagnostic", ("transient_error",)),
        "injected_error_type": None,
    }
    return {**requests, "error_injector_checkpoint": errors, **nothing, "large_value_counts": {}, "max_values": {}}
