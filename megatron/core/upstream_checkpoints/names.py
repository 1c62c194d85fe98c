# SPDX-License-Identifier: Apache-2.0
"""Upstream's `torch_dist` checkpoints: its table of contents under our names; and what torch.distributed.checkpoint
saves of its modules, as its `torch_dcp` does: weights.

    upstream  decoder.layers.mlp.linear_fc1.weight [layers, rows, columns]
    here      decoder.layers.3.mlp.linear_fc1.weight [rows, columns]: its slice 3

| upstream                                       | here                                    |
|------------------------------------------------|-----------------------------------------|
| one tensor of all layers, or one for each      | one for each layer                      |
| self_attention.linear_qkv.layer_norm_weight    | input_layernorm.weight                  |
| mlp.linear_fc1.layer_norm_weight               | pre_mlp_layernorm.weight                |
| mixer.in_proj.layer_norm_weight                | input_layernorm.weight                  |
| self_attention.linear_q_up_proj.layer_norm_... | self_attention.q_layernorm.weight       |
| mlp.experts.experts.linear_fc1.weight          | mlp.experts.linear_fc1.weight           |
| optimizer.state.exp_avg.<name>, fp32_param     | the same, with the names above          |
| model.<name> (torch_dcp)                       | the weight of this name                 |
| other keys of torch_dcp (optimizer.state.0...) | not used: parameters have numbers there |

The keys and shapes are those that upstream's sharded_state_dict gives. Its files have no checksums.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX
from megatron.core.dist_checkpointing.saved_boxes import RenamedTable, SavedSlice
from megatron.core.dist_checkpointing.tensor_reading import read_tensors
from megatron.core.plan.model_plan import LayerPlan
from megatron.core.plan.state_kinds import STATE_KINDS
from megatron.core.upstream_checkpoints.common_state import MODEL_PREFIX

FLAT_KEY = re.compile(
    r"(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\.(?P<rest>.+)"
)
"""Of upstream's distributed optimizer: what belongs to no single parameter."""
_STATE_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<parameter>.+)")
_LAYERS = re.compile(
    r"(?P<start>(?:.*\.)?layers)\.(?:(?P<number>\d+)\.)?(?P<inner>(?:mtp_model|transformer)_layer\.)?(?P<rest>.+)"
)
_BEGINNINGS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("mlp.experts.experts.", "mlp.experts."),
    ("self_attention.layer_norm_", "input_layernorm."),
    ("mlp.layer_norm_", "pre_mlp_layernorm."),
)
"""First words after the layer's number: in upstream's names, where a norm is part of the linear layer after it,
and in ours."""
_LATENT_BEGINNINGS = (
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
"""The same of the norms of latent vectors; upstream's layers without Transformer Engine have them under our names."""
_MIXER_BEGINNINGS = (
    ("mixer.in_proj.layer_norm_", "input_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),
    ("norm.", "input_layernorm."),
    ("mixer.conv1d_", "mixer.conv1d."),
)
"""The same of state mixers, whose first projection has the norm; a convolution's parameters have such names only in the
format torch."""


_ONE_MATRIX = {"input_layernorm.": "linear_for_attention", "pre_mlp_layernorm.": "linear_for_mlp"}
"""Norms whose projection may be all there is of attention or of an MLP, and the kind that it is then."""


def translate_table(metadata: Metadata) -> RenamedTable:
    """Upstream's table of contents under our names: the tensors that have the shapes of parameters."""
    translated: dict[str, Any] = {}
    slices: dict[str, SavedSlice] = {}
    flat, table = find_flat_shards(metadata), metadata.state_dict_metadata
    prefix = MODEL_PREFIX if any(key.startswith(MODEL_PREFIX) for key in table) else ""
    for key, tensor in table.items():
        # Transformer Engine's state of a layer may be bytes in the shape of a tensor.
        is_weight = key.startswith(prefix) and not key.endswith("._extra_state")
        if is_weight and isinstance(tensor, TensorStorageMetadata) and key not in flat and not FLAT_KEY.fullmatch(key):
            for name, layer in our_names(key.removeprefix(prefix), tuple(tensor.size)):
                chunks = [] if layer is None else _list_chunks(tensor, layer)
                translated[name] = tensor if layer is None else _take_layer(tensor, chunks)
                starts = {tuple(chunk.offsets[1:]): chunk.offsets[0] for chunk in chunks}
                slices[name] = SavedSlice(key, layer, starts)
    return RenamedTable(dataclasses.replace(metadata, state_dict_metadata=translated), slices)


read_upstream_tensors = functools.partial(read_tensors, translate=translate_table)


def find_flat_shards(metadata: Metadata) -> dict[str, str]:
    """The keys of optimizer state that was saved flat, shard by shard, each with the key of the parameter that it
    belongs to."""
    table = metadata.state_dict_metadata
    found: dict[str, str] = {}
    for key, entry in table.items():
        state = _STATE_KEY.fullmatch(key)
        weight = None if state is None else table.get(state["parameter"])
        if state is not None and isinstance(entry, TensorStorageMetadata) and isinstance(weight, TensorStorageMetadata):
            # [cuts of each dimension, elements of a shard]
            is_flat = len(entry.size) == len(weight.size) + 1 and math.prod(entry.size) == math.prod(weight.size)
            found |= {key: state["parameter"]} if is_flat else {}
    return found


def explain_unusable_optimizer(metadata: Metadata) -> str | None:
    """Return why the optimizer state cannot be read; None when it can."""
    if any(key.startswith(MODEL_PREFIX) for key in metadata.state_dict_metadata):
        return (
            "its optimizer state has numbers in the place of the parameters' names, and is not read; pass "
            "--no-load-optim or --finetune"
        )
    if not any(FLAT_KEY.fullmatch(key) or _STATE_KEY.fullmatch(key) for key in metadata.state_dict_metadata):
        return "it holds no optimizer state; pass --no-load-optim or --finetune"
    return None


def our_names(key: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """Our names of what lies under a key of upstream's, each with its index in the stack."""
    prefix = ""
    state = _STATE_KEY.fullmatch(key)
    if state is not None:
        # The distributed optimizer calls its main parameters in some formats otherwise than the others.
        kind = "fp32_param" if state["kind"] == "param" else state["kind"]
        prefix, key = f"{OPTIMIZER_PREFIX}{kind}.", state["parameter"]
    found = _LAYERS.fullmatch(key)
    if found is None:
        return [(prefix + key, None)]
    rest = found["rest"]
    for theirs, ours in _BEGINNINGS + _LATENT_BEGINNINGS + _MIXER_BEGINNINGS:
        if rest.startswith(theirs):
            rest = ours + rest.removeprefix(theirs)
            break
    # Of multi-token prediction; older releases call it transformer_layer.
    rest = f"mtp_model_layer.{rest}" if found["inner"] else rest
    if found["number"] is not None:
        return [(f"{prefix}{found['start']}.{found['number']}.{rest}", None)]
    return [(f"{prefix}{found['start']}.{layer}.{rest}", layer) for layer in range(shape[0] if shape else 0)]


def list_kept(layer: LayerPlan | None, *, fused: bool, renames_norms: bool) -> list[str]:
    """The beginnings of names, after a layer's number, that upstream has in the same place; for `name_upstream`. None
    of what is in no layer.

    fused: its layers with Transformer Engine, where norms are part of linear layers. renames_norms: the format names
    norms so with all of its layers.
    """
    if layer is None:
        return []
    is_latent = layer.has("latent_attention") or layer.has("sparse_attention")
    # Norms of latent vectors have the names of other attention's norms of queries and keys, which stay.
    latent = [] if fused and is_latent else [ours for _, ours in _LATENT_BEGINNINGS]
    if not fused:
        return latent + (["input_layernorm.", "pre_mlp_layernorm."] if is_latent or not renames_norms else [])
    # Latent attention has several linear layers after its norm, and a mixture of experts has none.
    return latent + ["input_layernorm."] * is_latent + ["pre_mlp_layernorm."] * layer.has("experts")


def name_upstream(name: str, *, kept: Collection[str] = (), layer: LayerPlan | None = None) -> str:
    """Upstream's name of a tensor that is called `name` here, with its layer's number.

    kept: beginnings, in our names behind that number, of those that upstream has in the same place. layer: what it is
    in, where that may be a state mixer, or a matrix in place of attention.
    """
    found = _LAYERS.fullmatch(name)
    if found is None or found["number"] is None:
        return name
    rest = found["rest"]
    for theirs, ours in _BEGINNINGS + _LATENT_BEGINNINGS:
        if rest.startswith(ours) and ours not in kept:
            inner = found["inner"] or ""
            mixer = next((kind for kind in STATE_KINDS if layer is not None and layer.has(kind.name)), None)
            if mixer is not None and ours == "input_layernorm.":
                theirs = f"{mixer.attribute}.in_proj.layer_norm_"
            if layer is not None and layer.has(_ONE_MATRIX.get(ours, "")):
                theirs = f"{theirs.partition('.')[0]}.layer_norm_"
            return f"{found['start']}.{found['number']}.{inner}{theirs}{rest.removeprefix(ours)}"
    return name


def _list_chunks(stack: TensorStorageMetadata, layer: int) -> list[ChunkStorageMetadata]:
    """The saved boxes of a stack with a part of the layer; upstream itself saves each layer in separate boxes."""
    return [chunk for chunk in stack.chunks if chunk.offsets[0] <= layer < chunk.offsets[0] + chunk.sizes[0]]


def _take_layer(stack: TensorStorageMetadata, chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    """The record of one layer's tensor in a stack, of which these boxes have a part."""
    boxes = [ChunkStorageMetadata(torch.Size(chunk.offsets[1:]), torch.Size(chunk.sizes[1:])) for chunk in chunks]
    return dataclasses.replace(stack, size=torch.Size(stack.size[1:]), chunks=boxes)
