# SPDX-License-Identifier: Apache-2.0
"""Upstream's `torch` checkpoints: a pickled file for each model-parallel rank,
iter_0000010/mp_rank_00/model_optim_rng.pt.

    {"model": {"decoder.layers.0.mlp.linear_fc1.weight": tensor, ...}, "args": argparse.Namespace, "iteration": 10, ...}

The file is read with torch's restricted unpickler (safe_pickle.read_restricted).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron.core.dist_checkpointing.directory import iteration_directory, saved_iterations
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, leave_out_padding
from megatron.core.dist_checkpointing.safe_pickle import read_restricted, refuse_expanded
from megatron.core.dist_checkpointing.saved_boxes import LazyTensor
from megatron.core.dist_checkpointing.validation import KeyReport, fill_wanted
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import Group
from megatron.core.upstream_checkpoints.common_state import RELEASE, CommonState, list_named, parse_common_state

FILE_NAME = "model_optim_rng.pt"
_REFUSAL = "pass --no-load-optim or --finetune"
_IGNORED = re.compile(r"_extra_state|\.local_tokens_per_expert$|\.inv_freq$|rotary_pos_emb\.")
_UNTRAINED = re.compile(r"\.expert_bias$")
"""Weights that no optimizer updates."""
_VOCABULARY = re.compile(r"(^|\.)(word_embeddings|output_layer)\.weight$")
"""Weights that --decoupled-lr is the learning rate of."""
_NESTINGS = ("model", "state_dict", "module")
_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\."
    r"(local_experts\.(?P<number>\d+)\.(?P<part>linear_fc[12]\.(weight|bias))"
    r"|(?P<grouped_part>linear_fc[12]\.(weight|bias))(?P<grouped_number>\d+))"
)
"""One expert's tensor: under a separate name, or numbered, as upstream's grouped layers have them."""


def find_legacy_file(root: Path, iteration: int | None = None) -> Path | None:
    """The file of rank 0 in a directory of upstream checkpoints (or in one checkpoint); None when there is none.

    The tracker names an iteration or `release`; without one, the newest iteration or `release/` is taken.
    """
    candidates = list_named(root, iteration)
    if iteration is None:
        saved = [iteration_directory(root, saved) for saved in saved_iterations(root)]
        candidates = [root, *candidates, root / RELEASE, *saved]
    for candidate in candidates:
        ranks = sorted(path.parent.name for path in candidate.glob(f"mp_rank_*/{FILE_NAME}"))
        if ranks:
            return candidate / ranks[0] / FILE_NAME
    return None


class RankFile(NamedTuple):
    """Contents of the file of one rank. Its tensors are mapped, and read when they are used."""

    chunks: list[dict[str, Tensor]]
    """The weights of each model chunk by upstream's names, layers counted from 0; several where the pipeline is
    interleaved."""
    state: list[dict[str, dict[str, Tensor]]]
    """For each chunk the optimizer's state that is shaped like the weights: kind -> name -> tensor."""
    ignored: list[str]
    """Names beside the weights that have no place here: `_extra_state`."""
    has_flat_state: bool
    """True if the optimizer's tensors are in a separate file, distrib_optim.pt."""
    common: CommonState
    """State that is no tensor."""


def read_rank_file(path: Path, *, with_optimizer: bool = False) -> RankFile:
    """The weights in a rank's file, and the optimizer's state.

    Raises CheckpointError when the file is damaged, names a class we do not know, or has no state that can be used.
    """
    content = read_restricted(path, str(path), mmap=True)
    # mmap: tensors are read from the file when they are copied, so the whole model is never in memory twice.
    saved = _list_chunks(content)
    if not saved:
        raise CheckpointError(f"{path} holds no weights; expected {{'model': {{name: tensor}}}}")
    chunks: list[dict[str, Tensor]] = []
    ignored: list[str] = []
    for weights in saved:
        useless = [name for name, value in weights.items() if _IGNORED.search(name) or not isinstance(value, Tensor)]
        chunks.append({n.removeprefix("module."): value for n, value in weights.items() if n not in useless})
        ignored += useless
        for name, value in chunks[-1].items():
            refuse_expanded(value, f"{path}: {name}")
    # Weights may be in a separate file, without anything else.
    common = parse_common_state({} if saved[0] is content else content, str(path))
    optimizer = content.get("optimizer") if with_optimizer else None
    if with_optimizer and optimizer is None:
        raise CheckpointError(f"{path} holds no optimizer state; {_REFUSAL}")
    inner = [wrapped.get("optimizer", wrapped) for wrapped in _list_optimizers(optimizer)]
    # The distributed optimizer leaves its parameter groups here, and no state.
    is_flat = bool(inner) and not any(isinstance(each, dict) and "state" in each for each in inner)
    try:
        state = _name_optimizer_state(optimizer, chunks, path) if with_optimizer and not is_flat else []
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path}: the optimizer state is not as upstream writes it ({error!r})") from None
    return RankFile(chunks, state or [{} for _ in chunks], ignored, is_flat, common)


def _list_chunks(content: Any) -> list[dict[str, Any]]:
    """The dictionaries of weights: `model`, or `model0`, `model1`, ... of an interleaved pipeline."""
    if isinstance(content, dict) and isinstance(content.get("model0"), dict):
        found: list[dict[str, Any]] = []
        while isinstance(chunk := content.get(f"model{len(found)}"), dict):
            found.append(chunk)
        return found
    innermost = _innermost(content)
    return [] if innermost is None else [innermost]


def _list_optimizers(optimizer: Any) -> list[dict[str, Any]]:
    """List the optimizers of a file: one, or a second one for experts."""
    return [each for each in (optimizer if isinstance(optimizer, list) else [optimizer]) if isinstance(each, dict)]


def _name_optimizer_state(
    optimizer: Any, chunks: list[dict[str, Tensor]], path: Path
) -> list[dict[str, dict[str, Tensor]]]:
    """The optimizer's tensors by chunk, kind and name; upstream numbers the parameters group by group, in the model's
    order, chunk after chunk.

    A group holds the parameters with weight decay, or the vectors, which have none; experts, and embedding and output
    layer with a separate learning rate, may have another.
    """
    found: list[dict[str, dict[str, Tensor]]] = [defaultdict(dict) for _ in chunks]
    places = [(chunk, name) for chunk, weights in enumerate(chunks) for name in weights if not _UNTRAINED.search(name)]
    optimizers = _list_optimizers(optimizer)
    inner = [wrapped.get("optimizer", wrapped) for wrapped in optimizers]
    groups_of_all = [group for each in inner for group in each["param_groups"]]
    splits_experts = any(group.get("is_expert_parallel") for group in groups_of_all)
    splits_vocabulary = any(_is_decoupled(group) for group in groups_of_all)
    for wrapped, each in zip(optimizers, inner, strict=True):
        main = wrapped.get("fp32_from_fp16_params")  # mixed precision wraps the optimizer
        for number, group in enumerate(each["param_groups"]):
            mine = [
                (chunk, name)
                for chunk, name in places
                if _is_undecayed(name, chunks[chunk][name]) == (group["wd_mult"] == 0)
                and (not splits_experts or (".experts." in name) == bool(group.get("is_expert_parallel")))
                and (not splits_vocabulary or bool(_VOCABULARY.search(name)) == _is_decoupled(group))
            ]
            if len(mine) != len(group["params"]):
                raise CheckpointError(
                    f"{path}: group {number} of the optimizer has {len(group['params'])} parameters, the weights that "
                    f"belong there are {len(mine)}; {_REFUSAL}"
                )
            for position, ((chunk, name), index) in enumerate(zip(mine, group["params"], strict=True)):
                state = dict(each["state"].get(index, {}))
                state.pop("step", None)
                if main is not None:
                    state["fp32_param"] = main[number][position]
                for kind, tensor in state.items():
                    _check_shape(tensor, chunks[chunk][name], f"{path}: {kind} of {name}")
                    found[chunk][kind][name] = tensor
    return found


def _is_decoupled(group: Mapping[str, Any]) -> bool:
    """Return whether a group has a separate learning rate; releases say it in two ways."""
    return bool(group.get("is_decoupled_lr")) or group.get("default_config") is False


def _check_shape(tensor: Tensor, weight: Tensor, what: str) -> None:
    refuse_expanded(tensor, what)
    if tensor.shape != weight.shape:
        raise CheckpointError(f"{what} is {tuple(tensor.shape)}, the weight is {tuple(weight.shape)}; {_REFUSAL}")


def _is_undecayed(name: str, tensor: Tensor) -> bool:
    """Upstream's rule: vectors and biases are in a group without weight decay."""
    return tensor.dim() == 1 or name.endswith(".bias")


class ExpertName(NamedTuple):
    """One expert's tensor as a part of the stack of all."""

    stack: str
    number: int
    """Among the experts of its rank."""


def parse_expert_name(name: str) -> ExpertName | None:
    """The expert that a tensor of upstream's belongs to; None where it is no expert's."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    number, part = found["number"] or found["grouped_number"], found["part"] or found["grouped_part"]
    return ExpertName(f"{found['experts']}.{part}", int(number))


def fill_from_full(
    tensors: ShardedStateDict,
    weights: Mapping[str, LazyTensor],
    group: Group,
    *,
    may_lack: bool = False,
    may_have_more: bool = False,
) -> KeyReport:
    """Copy full tensors into the shards of all members of `group`, converted to their dtypes; one of them is in memory
    at a time. The rest is as in `validation.fill_wanted`."""

    def fill(tensor: ShardedTensor, key: str) -> None:
        full = weights[key].read()
        for index, block in enumerate(tensor.blocks):
            # Rows that the file lacks, which may be padded to fewer, keep the values that they were initialised with.
            box, target = leave_out_padding(block.box, tensor.block(index), full.shape)
            target.copy_(full[tuple(slice(start, start + length) for start, length in box)])

    shapes = {key: tensor.shape for key, tensor in weights.items()}
    return fill_wanted(tensors, shapes, fill, group, may_lack=may_lack, may_have_more=may_have_more)


def _innermost(content: Any) -> dict[str, Any] | None:
    """The dictionary of weights, whether it stands alone or below `model`, `state_dict` or `module`."""
    while isinstance(content, dict):
        if any(isinstance(value, Tensor) for value in content.values()):
            return content
        content = next((content[key] for key in _NESTINGS if isinstance(content.get(key), dict)), None)
    return None
