# SPDX-License-Identifier: Apache-2.0
"""Upstream's `torch` checkpoints, written: a pickled file for each model-parallel rank.

    iter_0000010/mp_rank_01_002_003/model_optim_rng.pt      tensor-parallel rank 1, stage 2, expert-parallel rank 3

    {"model": {"decoder.layers.0.mlp.linear_fc1.weight": shard, ...}, "optimizer": {"state": {0: ...}, ...}, ...}

A file holds the shards of its rank under the names that its stage gives them; upstream writes each expert's weights
apart, and numbers the optimizer's parameters group by group in the order of its modules. The replicas of a rank hold
the same, and one of them writes. rank_file.py and rank_files.py are the readers.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.device import is_cpu
from megatron.core.dist_checkpointing.agreement import on_every_rank
from megatron.core.dist_checkpointing.durable import create_file
from megatron.core.dist_checkpointing.manifest import FileRecord
from megatron.core.plan.model_plan import LayerPlan
from megatron.core.process_groups_config import Group
from megatron.core.upstream_checkpoints.names import list_kept, name_upstream
from megatron.core.upstream_checkpoints.pickles import write_pickle
from megatron.core.upstream_checkpoints.rank_file import FILE_NAME

_LINEAR = re.compile(r"(.*\.(?:linear_\w+|(?:eh|e|h)_proj|in_proj|out_proj|output_layer)|output_layer)\.weight\d*")
_EXPERTS = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<layer>linear_fc[12])\.(?P<kind>weight|bias)")


@dataclass(frozen=True)
class RankTensor:
    """A parameter as one rank holds it."""

    name: str
    """In its chunk of the model, where layers are counted from 0."""
    shard: Tensor
    state: Mapping[str, Tensor]
    """The optimizer's tensors for it, in its shape; main_param among them where it is other memory."""
    group: int | None
    """Number of its parameter group; None where the optimizer does not update it."""
    layer: LayerPlan | None = None
    """The layer that it is in; None outside of layers."""


@dataclass(frozen=True)
class SavedGroups:
    """Optimizer state other than its tensors."""

    groups: Sequence[Mapping[str, Any]]
    """Options of each parameter group, in upstream's words."""
    step_count: int
    grad_scaler: Mapping[str, Any] | None
    """State of the dynamic loss scale."""
    is_mixed: bool
    """Parameters are in 16 bits, so that upstream wraps the optimizer and keeps main parameters in addition to its
    state."""


def name_rank_directory(tensor_rank: int, stage: int | None, expert_rank: int | None) -> str:
    """`mp_rank_01_002_003`: upstream leaves out the stage and the expert-parallel rank where there is only one."""
    parts = [f"mp_rank_{tensor_rank:02d}", *(f"{number:03d}" for number in (stage, expert_rank) if number is not None)]
    return "_".join(parts)


# ---- content


def build_models(chunks: Sequence[Sequence[RankTensor]]) -> dict[str, Any]:
    """{"model": ...}, or {"model0": ..., "model1": ...} of several chunks as `arrange` returned them."""
    models = [_with_extra_states(chunk) for chunk in chunks]
    names = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
    return dict(zip(names, models, strict=True))


def build_optimizer(chunks: Sequence[Sequence[RankTensor]], saved: SavedGroups) -> Any:
    """The state of upstream's optimizer over chunks as `arrange` returned them; a list of two where experts have a
    separate optimizer."""
    parameters = [tensor for chunk in chunks for tensor in chunk]
    numbers = range(len(saved.groups))
    of_experts = [number for number in numbers if saved.groups[number]["is_expert_parallel"]]
    dense = [number for number in numbers if number not in of_experts]
    parts = [_build_part(parameters, saved, part) for part in (dense, of_experts) if part]
    return parts[0] if len(parts) == 1 else parts


def _build_part(parameters: Sequence[RankTensor], saved: SavedGroups, numbers: Sequence[int]) -> dict[str, Any]:
    """The state of one optimizer, which has the groups of these numbers."""
    members = [[tensor for tensor in parameters if tensor.group == number] for number in numbers]
    state: dict[int, Any] = {}
    groups, main_params = [], []
    for number, group in zip(numbers, members, strict=True):
        first = len(state)
        groups.append({**saved.groups[number], "params": list(range(first, first + len(group)))})
        main_params.append([_copy(tensor.state.get("main_param", tensor.shard.float())) for tensor in group])
        for index, tensor in enumerate(group, first):
            kinds = {kind: _copy(value) for kind, value in tensor.state.items() if kind != "main_param"}
            state[index] = {"step": torch.tensor(float(saved.step_count)), **kinds}
    inner = {"state": state, "param_groups": groups}
    if not saved.is_mixed:
        return inner
    scaler = {} if saved.grad_scaler is None else {"grad_scaler": dict(saved.grad_scaler)}
    return {"optimizer": inner, **scaler, "fp32_from_fp16_params": main_params}


def arrange(chunk: Sequence[RankTensor], *, fused: bool, grouped: bool) -> list[RankTensor]:
    """The parameters of a chunk under the names and in the order of upstream's modules, experts one by one.

    fused: of its layers with Transformer Engine, where a norm is part of the linear layer after it. grouped: of the
    layers that multiply all experts at once.
    """
    arranged: list[RankTensor] = []
    for _, held in itertools.groupby((_rename(tensor, fused=fused) for tensor in chunk), key=_owner):
        members = list(held)
        if _EXPERTS.fullmatch(members[0].name):
            arranged += _divide_experts(members, grouped=grouped)
        else:
            arranged += sorted(members, key=_place_in_mixer)
    return arranged


def _place_in_mixer(tensor: RankTensor) -> tuple[bool, bool]:
    """Order parameters as upstream registers them: a module's parameters come before its submodules', and upstream
    makes the output projection of attention before what comes before it."""
    is_in_part = "." in tensor.name.removeprefix(_owner(tensor))
    return is_in_part, ".self_attention.linear_proj." not in tensor.name


def _rename(tensor: RankTensor, *, fused: bool) -> RankTensor:
    kept = ["mlp.experts.", *list_kept(tensor.layer, fused=fused, renames_norms=False)]
    name = name_upstream(tensor.name, kept=kept, layer=tensor.layer)
    return dataclasses.replace(tensor, name=name.replace(".mixer.conv1d.", ".mixer.conv1d_"))


def _owner(tensor: RankTensor) -> str:
    """The module within which upstream's order is another: the attention or the mixer of a layer, or its experts."""
    found = re.match(r".*\.(self_attention|mixer|experts)\.", tensor.name)
    return tensor.name if found is None else found[0]


def _divide_experts(stacked: Sequence[RankTensor], *, grouped: bool) -> Iterator[RankTensor]:
    """Yield the tensors [experts, ...] of one layer's experts as one for each expert."""
    numbers = range(stacked[0].shard.shape[0])
    pairs = [(tensor, number) for tensor in stacked for number in numbers]
    if not grouped:
        pairs = [(tensor, number) for number in numbers for tensor in stacked]
    for tensor, number in pairs:
        found = _EXPERTS.fullmatch(tensor.name)
        assert found is not None, f"{tensor.name} is no weight of experts"
        experts, layer, kind = found["experts"], found["layer"], found["kind"]
        name = f"{experts}.{layer}.{kind}{number}" if grouped else f"{experts}.local_experts.{number}.{layer}.{kind}"
        state = {kind: value[number] for kind, value in tensor.state.items()}
        yield RankTensor(name, tensor.shard[number], state, tensor.group)


def _with_extra_states(tensors: Iterable[RankTensor]) -> dict[str, Tensor | None]:
    """The shards by name, and after each linear layer's the entry that Transformer Engine has for it, which is
    empty."""
    model: dict[str, Tensor | None] = {}
    waiting: str | None = None
    for tensor in tensors:
        layer = tensor.name.rpartition(".")[0]
        if waiting is not None and waiting != layer:
            model[f"{waiting}._extra_state"] = None
            waiting = None
        model[tensor.name] = _copy(tensor.shard)
        if _LINEAR.fullmatch(tensor.name):
            waiting = layer
    if waiting is not None:
        model[f"{waiting}._extra_state"] = None
    # It has one also where the output layer is the embedding.
    elif any(name.startswith(("decoder.final_layernorm.", "decoder.final_norm.")) for name in model):
        model["output_layer._extra_state"] = None
    return model


def _copy(tensor: Tensor) -> Tensor:
    # torch writes the whole memory that a view belongs to, here a buffer with all parameters.
    is_alone = is_cpu(tensor) and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.detach() if is_alone else tensor.detach().to("cpu", copy=True).contiguous()


# ---- files


def write_rank_file(
    directory: Path, name: str | None, build: Callable[[], Mapping[str, Any]], group: Group
) -> dict[str, FileRecord]:
    """Write the files of all members of `group`, flushed to the device; returns the records of all.

    name: of this member's directory; None where another one writes the same. build: makes the content. Raises, on every
    member, StorageError where one of them could not write.
    """

    def write() -> dict[str, FileRecord]:
        return {} if name is None else {f"{name}/{FILE_NAME}": write_torch_file(directory / name / FILE_NAME, build())}

    records: dict[str, FileRecord] = {}
    for written in on_every_rank(group, write):
        records |= written
    return records


def write_torch_file(path: Path, content: Mapping[str, Any]) -> FileRecord:
    """Create the file with torch.save()'s form of the content and flush it to the device. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with create_file(path, "shard") as file:
        write_pickle(content, file)
    return FileRecord(file.bytes_written, file.crc32)
