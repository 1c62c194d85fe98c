# SPDX-License-Identifier: Apache-2.0
"""The first weights of a mixture of experts from a dense model, --moe-use-upcycling.

Each expert begins as a copy of the dense MLP (Komatsuzaki et al., 2022), or, with granularity G, as one of G slices of
it along its inner width, so that G neighbours are one copy (He et al., 2024):

    expert i, with slice s = i mod G      fc1_i = rows of s       fc2_i = columns of s, times G / w       b2_i = b2 / w

w is what the weights of a token's experts add up to. Where that is the same for all tokens, and the router's rows are
alike inside a copy, so that whole copies are chosen ("virtual groups" in He et al., 2024), the model computes at first
what the dense one did. The router begins as in any new model, but with alike rows inside a copy (router.py).

Only what is asked of the checkpoint changes: dense tensors instead of experts. So every format can be read, in any
layout, and settings may divide parameters over replicas.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.errors import CheckpointError
from megatron.core.transformer.moe.routing import choose_experts, weigh_experts
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.checkpoint.differences import Change
from megatron.training.checkpoint.save_directories import say_once
from megatron.training.run import Run

_EXPERTS = re.compile(r"(?P<mlp>.*\.mlp\.)experts\.(?P<rest>linear_fc[12]\.(?:weight|bias))")
_ROUTER = re.compile(r".*\.mlp\.router\..+")
_ABOUT_EXPERTS = ("num_moe_experts", "moe_", "ffn_hidden_size", "use_fused_weighted_squared_relu")


def begins(run: Run, changes: Sequence[Change], source: Path) -> bool:
    """Return whether a checkpoint whose settings differ so is of a dense model, of which this run is to make experts.

    Raises CheckpointError where the run has begun before, and would begin once more.
    """
    if not _is_of_dense_model(run, changes):
        return False
    _refuse_second_beginning(run, source)
    return True


def _is_of_dense_model(run: Run, changes: Sequence[Change]) -> bool:
    experts = (change for change in changes if change.setting.dest == "num_moe_experts")
    return run.config.model.moe_use_upcycling and any(not change.then for change in experts)


def refuse_files_of_ranks(run: Run, changes: Sequence[Change], source: Path) -> None:
    """Raise CheckpointError where experts were to be made of files of upstream's --ckpt-format torch."""
    if _is_of_dense_model(run, changes):
        raise CheckpointError(
            f"--moe-use-upcycling reads no files of single ranks such as {source}; convert the dense checkpoint first, "
            "with --ckpt-convert-format torch_dist"
        )


def leave_out_expert_settings(changes: Sequence[Change]) -> list[Change]:
    """The changes without those that a dense model has no value for."""
    return [change for change in changes if not change.setting.dest.startswith(_ABOUT_EXPERTS)]


def _refuse_second_beginning(run: Run, source: Path) -> None:
    """Raise CheckpointError where --save holds checkpoints."""
    save = run.config.checkpoint.save
    if save is None or not on_first_rank(run.groups.world, lambda: any(Path(save).glob(f"iter_*/{MANIFEST_NAME}"))):
        return
    raise CheckpointError(
        f"--moe-use-upcycling makes experts of {source}, but --save {save} holds checkpoints of a run already; "
        "leave the flag out and --load them, or save elsewhere"
    )


@contextlib.contextmanager
def load_as_dense(run: Run, tensors: ShardedStateDict) -> Iterator[ShardedStateDict]:
    """Yield what to load in place of `tensors`: of each layer the dense MLP. Its experts are filled afterwards."""
    config = run.config.model
    experts: list[tuple[ShardedTensor, str]] = []
    asked: ShardedStateDict = {}
    for key, tensor in tensors.items():
        name = tensor.fallback_key or key
        found = _EXPERTS.fullmatch(name)
        if found is not None:
            dense = found["mlp"] + found["rest"]
            experts.append((tensor, dense))
            if dense not in asked:
                # In host memory: files come from there, and the device may have no room for both.
                shape = _find_dense_shape(tensor.global_shape, found["rest"], config.moe_upcycling_granularity)
                asked[dense] = ShardedTensor.whole(dense, torch.empty(shape, dtype=tensor.dtype, device="cpu"))
        # A router has nothing in a dense model, and keeps the values that it was drawn with.
        elif not _ROUTER.fullmatch(name):
            asked[key] = tensor
    yield asked
    with torch.no_grad():
        for tensor, dense in experts:
            _fill(tensor, asked[dense].data, dense.rpartition(".mlp.")[2], config)
    exact = "computes what the dense model did" if keeps_function(config) else (
        "computes about what the dense model did: the weights of a token's experts do not add up to a constant, or "
        "no whole copies of its MLP are chosen"
    )  # fmt: skip
    say_once(run.groups.world, f"made {config.num_moe_experts} experts of each MLP; at first the model {exact}")


def keeps_function(config: TransformerConfig) -> bool:
    """Return whether the mixture of experts computes at first what the dense model did, but for rounding."""
    function, alone = config.moe_router_score_function, config.moe_router_topk == 1
    adds_up = not config.moe_router_pre_softmax if function == "softmax" else not alone
    adds_up &= "sinkhorn" not in config.moe_router_load_balancing_type and not config.drops_tokens
    return adds_up and config.moe_router_topk % config.moe_upcycling_granularity == 0


def _sum_weights(config: TransformerConfig) -> float:
    """Return what the weights of a token's experts add up to, where all logits are alike."""
    assert config.num_moe_experts is not None
    logits = torch.zeros(1, config.num_moe_experts, dtype=torch.float64)
    if "sinkhorn" in config.moe_router_load_balancing_type:
        routing = weigh_experts(logits, torch.arange(config.moe_router_topk).unsqueeze(0), config)
    else:
        routing = choose_experts(logits, config)
    # A sum that is 1 but for rounding must be 1: factors of 1 leave the dense weights bit for bit.
    return round(float(routing.weights.sum()), 12)


def _find_dense_shape(experts: Sequence[int], rest: str, granularity: int) -> tuple[int, ...]:
    """Shape of the dense tensor of which a stack of experts [experts, ...] is made."""
    shape = list(experts[1:])
    if rest.startswith("linear_fc1"):
        shape[0] *= granularity
    elif rest == "linear_fc2.weight":
        shape[1] *= granularity
    return tuple(shape)


def _fill(tensor: ShardedTensor, dense: Tensor, rest: str, config: TransformerConfig) -> None:
    """Fill this process's blocks of a stack of experts."""
    granularity, total = config.moe_upcycling_granularity, _sum_weights(config)
    for number, piece in enumerate(tensor.blocks):
        (first, _), *inner = piece.box
        region = tuple(slice(start, start + length) for start, length in inner)
        for expert, into in enumerate(tensor.block(number), first):
            part, factor = expert % granularity, 1.0
            if rest.startswith("linear_fc1"):
                rows = _list_rows(dense.shape[0] // granularity, part, config)[region[0]]
                values = dense[rows][(slice(None), *region[1:])]
            elif rest == "linear_fc2.weight":
                width = dense.shape[1] // granularity
                values, factor = dense[:, part * width : (part + 1) * width][region], granularity / total
            else:
                values, factor = dense[region], 1.0 / total
            into.copy_(values if factor == 1.0 else values * factor)


def _list_rows(rows: int, part: int, config: TransformerConfig) -> Tensor:
    """The rows of the dense first layer that the first layer of an expert with this slice has, in its order."""
    if not config.gated_linear_unit:
        return torch.arange(part * rows, (part + 1) * rows)
    width = rows // 2
    gate = torch.arange(part * width, (part + 1) * width)
    both = torch.stack((gate, gate + config.moe_upcycling_granularity * width))  # of the gate, of the up projection
    size = config.moe_mlp_glu_interleave_size
    return both.flatten() if size is None else both.unflatten(1, (-1, size)).transpose(0, 1).flatten()
