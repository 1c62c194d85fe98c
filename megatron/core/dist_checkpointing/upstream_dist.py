# SPDX-License-Identifier: Apache-2.0
"""Upstream's `torch_dist` checkpoints: its table of contents under our names, and its common state; and what
torch.distributed.checkpoint saves of its modules, as its `torch_dcp` does: weights, and the settings stored with them.

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
| common_state/shard_0_1, or the file common.pt  | settings, progress, schedule, step      |
| other objects (_extra_state, rng_state)        | not used                                |
| model.<name> (torch_dcp)                       | the weight of this name                 |
| args, iteration, opt_param_scheduler.<name>    | settings, progress, schedule            |
| other keys of torch_dcp (optimizer.state.0...) | not used: parameters have numbers there |

The keys and shapes are those that upstream's sharded_state_dict gives. Its files have no checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.directory import COMMON_NAME, TRACKER_NAME, iteration_directory, saved_iterations
from megatron.core.dist_checkpointing.durable import read_file, storage_errors
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX
from megatron.core.dist_checkpointing.safe_pickle import StandIn, read_restricted
from megatron.core.dist_checkpointing.saved_boxes import BoxReader
from megatron.core.errors import CheckpointError
from megatron.core.plan.model_plan import LayerPlan
from megatron.core.plan.state_kinds import STATE_KINDS

METADATA_NAME = ".metadata"
RELEASE = "release"
"""Word in upstream's tracker in the place of a number, and name of the directory, for a model never trained."""
_OURS_ALONE = "tensors.json"
_LONGEST_SETTING = 100_000
_DEEPEST_OPTIMIZER, _MOST_OPTIMIZERS = 3, 32
_COMMON_OBJECT = "common_state/shard_0_1"

FLAT_KEY = re.compile(
    r"(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\.(?P<rest>.+)"
)
"""Of upstream's distributed optimizer: what belongs to no single parameter."""
_STATE_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<parameter>.+)")
_OPTIMIZER_OBJECT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_.+")
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


class SavedSlice(NamedTuple):
    """Place of a tensor of ours in upstream's checkpoint."""

    key: str
    layer: int | None
    """Index along the leading dimension; None where the tensor is not one of a stack."""
    starts: Mapping[tuple[int, ...], int]
    """Of a stack: where the saved box that has the layer starts along the leading dimension, by its other offsets."""


@dataclasses.dataclass(frozen=True)
class UpstreamTable:
    """A table of contents under our names, and where each tensor really lies."""

    metadata: Metadata
    slices: Mapping[str, SavedSlice]

    def read(self, reader: BoxReader, name: str) -> Tensor:
        """A whole tensor of ours. Raises CheckpointError."""
        key, layer, _ = self.slices[name]
        if layer is None:
            return reader.read_whole(key)
        return reader.read_region(key, ((layer, 1), *((0, size) for size in reader.find(key).size[1:])))[0]


@dataclasses.dataclass(frozen=True)
class CommonState:
    """State that upstream saves in addition to the tensors, as far as it is used."""

    args: Mapping[str, Any]
    """The settings of the saved run, by the names of upstream's argparse: numbers, texts, lists of them."""
    iteration: int
    scheduler: Mapping[str, Any] | None
    step_count: int | None
    """Updates of the optimizer; None without its state."""
    floating_point_operations: int = 0

    @property
    def consumed_train_samples(self) -> int:
        """Samples that the saved run has trained on."""
        count = self.args.get("consumed_train_samples")
        # The schedule counts samples as well; settings of old releases have no other count.
        return int(count if count is not None else (self.scheduler or {}).get("num_steps", 0))


def find_setting(args: Mapping[str, Any], name: str, flag: str) -> Any:
    """Upstream's value of a setting, which is called as ours or after its flag (`num_experts`); None without one."""
    return next((args[known] for known in name_setting(name, flag) if known in args), None)


def name_setting(name: str, flag: str) -> list[str]:
    """The names that a setting of ours may have among upstream's: the field's, and the flag's."""
    spelled = flag.removeprefix("--").replace("-", "_")
    # What is called after a switch that turns something off means the opposite of ours.
    is_opposite = spelled.startswith(("no_", "disable_"))
    return [name] if is_opposite or spelled == name else [name, spelled]


# ---- finding one


def find_upstream_checkpoint(root: Path, iteration: int | None = None, *, or_ours: bool = False) -> Path | None:
    """The directory of the checkpoint that `root` (or the iteration in it) names, where it is upstream's torch_dist.

    None where it is one of ours, of another format, or missing. or_ours: one that we have saved for upstream will do,
    which has a manifest.
    """
    if (root / METADATA_NAME).is_file():
        return root if _is_upstream(root, or_ours=or_ours) else None
    newest = [iteration_directory(root, saved) for saved in saved_iterations(root)[:1]]
    candidates = list_named(root, iteration) or newest
    return next((path for path in candidates if _is_upstream(path, or_ours=or_ours)), None)


def list_named(root: Path, iteration: int | None) -> list[Path]:
    """The directory in `root` of this iteration, or the one that the tracker names; nothing where it names none."""
    tracker = root / TRACKER_NAME
    if iteration is None:
        with storage_errors(f"reading {tracker}"):
            text = read_file(tracker, 64).decode("ascii", "replace").strip() if tracker.is_file() else ""
        if text == RELEASE:
            return [root / text]
        iteration = int(text) if re.fullmatch("[0-9]{1,12}", text) else None
    return [] if iteration is None else [iteration_directory(root, iteration)]


def is_release(root: Path) -> bool:
    """Return whether the tracker names a model that was never trained, in a directory without a number."""
    try:
        return read_file(root / TRACKER_NAME, 64).strip() == RELEASE.encode() and (root / RELEASE).is_dir()
    except OSError:
        return False


def find_release(root: Path) -> Path | None:
    """Return the directory of a release that was a checkpoint of ours before a converter renamed it."""
    return root / RELEASE if is_release(root) and (root / RELEASE / MANIFEST_NAME).is_file() else None


def _is_upstream(path: Path, *, or_ours: bool) -> bool:
    """Return whether a directory is a torch_dist checkpoint without anything that only we write."""
    # A checkpoint of ours that has lost its manifest must be refused as damaged, not be read unverified.
    ours = any(os.path.exists(path / name) for name in ([] if or_ours else [MANIFEST_NAME]) + [_OURS_ALONE])
    # os.path: a directory that may not be read is not upstream's, and no end of the search for one that is good.
    return os.path.isfile(path / METADATA_NAME) and not ours


TORCH_DCP, FSDP_DTENSOR, PLAIN_MODULE = "torch_dcp", "fsdp_dtensor", "state_dict"
"""Forms in which torch.distributed.checkpoint saves modules: in a dictionary next to the optimizer's (upstream's
torch_dcp), the same of modules that upstream's fully sharded data parallelism wraps, or only the weights."""
FSDP_REMEDY = (
    "export it with Megatron-Bridge (examples/conversion/mfsdp/convert_checkpoints_fsdp.py export --megatron-path ... "
    "--hf-path DIR), and take the weights with --load hf:DIR"
)
_MODEL, _WRAPPED = "model.", "model.module."
_PLAIN_KEYS = ("decoder.layers.", "embedding.word_embeddings.")
_SCHEDULER = "opt_param_scheduler."
_BESIDE_MODULES = ("optimizer.", "rng_state", "model")


def name_format(path: Path, metadata: Metadata) -> str | None:
    """The --ckpt-format of upstream's that a table of contents without anything of ours is of; None for other
    programs'."""
    keys = metadata.state_dict_metadata
    if (path / COMMON_NAME).is_file() or isinstance(keys.get(_COMMON_OBJECT), BytesStorageMetadata):
        return "torch_dist"
    if any(key.startswith(_MODEL) for key in keys):
        # It also cuts gates from up projections, and numbers experts differently.
        return FSDP_DTENSOR if any(key.startswith(_WRAPPED) for key in keys) else TORCH_DCP
    is_plain = any(key.startswith(_PLAIN_KEYS) for key in keys)
    # A checkpoint of ours that has lost its other files has more than weights.
    return PLAIN_MODULE if is_plain and not any(key.startswith(_BESIDE_MODULES) for key in keys) else None


# ---- names


def translate_table(metadata: Metadata) -> UpstreamTable:
    """Upstream's table of contents under our names: the tensors that have the shapes of parameters."""
    translated: dict[str, Any] = {}
    slices: dict[str, SavedSlice] = {}
    flat, table = find_flat_shards(metadata), metadata.state_dict_metadata
    prefix = _MODEL if any(key.startswith(_MODEL) for key in table) else ""
    for key, tensor in table.items():
        # Transformer Engine's state of a layer may be bytes in the shape of a tensor.
        is_weight = key.startswith(prefix) and not key.endswith("._extra_state")
        if is_weight and isinstance(tensor, TensorStorageMetadata) and key not in flat and not FLAT_KEY.fullmatch(key):
            for name, layer in our_names(key.removeprefix(prefix), tuple(tensor.size)):
                chunks = [] if layer is None else _list_chunks(tensor, layer)
                translated[name] = tensor if layer is None else _take_layer(tensor, chunks)
                starts = {tuple(chunk.offsets[1:]): chunk.offsets[0] for chunk in chunks}
                slices[name] = SavedSlice(key, layer, starts)
    return UpstreamTable(dataclasses.replace(metadata, state_dict_metadata=translated), slices)


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
    if any(key.startswith(_MODEL) for key in metadata.state_dict_metadata):
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


# ---- common state


def read_common_state(path: Path, metadata: Metadata) -> CommonState:
    """Return what a checkpoint holds in addition to its tensors. Raises CheckpointError; nothing that is in it runs."""
    common = parse_common_state(_read_common(path, metadata), str(path))
    place = next((key for key in metadata.state_dict_metadata if _OPTIMIZER_OBJECT.fullmatch(key)), None)
    if common.step_count is not None or place is None:
        return common
    # A distributed optimizer whose state lies in buckets saves its parameter groups in a separate object.
    groups = BoxReader(path, metadata).read_object(place)
    groups = groups[0] if isinstance(groups, list) and len(groups) == 1 else groups
    with _unusable(str(path)):
        return dataclasses.replace(common, step_count=_find_count(groups))


def parse_common_state(content: Any, where: str) -> CommonState:
    """The common state in what was unpickled. Raises CheckpointError, with `where` in it, when it is none."""
    # The object is one entry of a list, the file the entry itself.
    content = content[0] if isinstance(content, list) and len(content) == 1 else content
    args = content.get("args") if isinstance(content, dict) else None
    settings = args.state if isinstance(args, StandIn) else args
    if not isinstance(content, dict) or not isinstance(settings, dict | None):
        raise CheckpointError(f"{where}: the common state is no dictionary with settings (args); it is damaged")
    iteration, scheduler = content.get("iteration", 0), content.get("opt_param_scheduler")
    with _unusable(where):
        return CommonState(
            {name: value for name, value in (settings or {}).items() if isinstance(name, str) and _is_plain(value)},
            _check_count(int(iteration), "iteration"),
            None if scheduler is None else dict(scheduler),
            _find_count(content.get("optimizer")),
            int(content.get("num_floating_point_operations_so_far") or 0),
        )


@contextlib.contextmanager
def _unusable(where: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where}: the common state cannot be used: {error}") from None


def _read_common(path: Path, metadata: Metadata) -> Any:
    if (path / COMMON_NAME).is_file():
        return read_restricted(path / COMMON_NAME, str(path / COMMON_NAME))
    found = name_format(path, metadata)
    if found == FSDP_DTENSOR:
        raise CheckpointError(
            f"{path} is in upstream's format {found}, the only one that its --use-megatron-fsdp saves, and that is not "
            f"read here; {FSDP_REMEDY}"
        )
    if found == PLAIN_MODULE:
        return {}
    if found == TORCH_DCP:
        return _read_objects(path, metadata)
    if found is None:
        raise CheckpointError(
            f"{path} holds no {MANIFEST_NAME}: it is no complete checkpoint of ours; it holds neither "
            f"{_COMMON_OBJECT} nor {COMMON_NAME}: it is none of upstream's"
        )
    return BoxReader(path, metadata).read_object(_COMMON_OBJECT)


def _read_objects(path: Path, metadata: Metadata) -> dict[str, Any]:
    """Return what torch_dcp has in addition to the weights: torch.distributed.checkpoint takes nested dictionaries
    apart."""
    reader, table = BoxReader(path, metadata), metadata.state_dict_metadata
    objects = [key for key, entry in table.items() if isinstance(entry, BytesStorageMetadata)]
    content = {key: reader.read_object(key) for key in ("args", "iteration") if key in objects}
    scheduler = {key.removeprefix(_SCHEDULER): reader.read_object(key) for key in objects if key.startswith(_SCHEDULER)}
    return content | ({"opt_param_scheduler": scheduler} if scheduler else {})


def _is_plain(value: Any) -> bool:
    """Return whether a setting is a number, a text, or a list of them, lists of lists included."""
    left, seen = [value], 0
    while left:
        item = left.pop()
        seen += 1
        if isinstance(item, list | tuple):
            # The same list may occur in a pickle many times, so that a few bytes are millions of items.
            if seen + len(left) + len(item) > _LONGEST_SETTING:
                return False
            left += item
        elif not (item is None or isinstance(item, bool | int | float | str)):
            return False
    return True


def _find_step(optimizer: Any, depth: int = 0) -> int | None:
    """The number of updates: state.common_step, or `step` of a parameter group or of a parameter, wherever the
    optimizers are nested."""
    if isinstance(optimizer, list) and depth < _DEEPEST_OPTIMIZER:
        found = (_find_step(value, depth + 1) for value in optimizer[:_MOST_OPTIMIZERS])
        return next((step for step in found if step is not None), None)
    if not isinstance(optimizer, dict) or depth > _DEEPEST_OPTIMIZER:
        return None
    state = optimizer.get("state")
    if isinstance(state, dict) and "common_step" in state:
        return int(state["common_step"])
    parameters = list(state.values()) if isinstance(state, dict) else []
    for group in [*(optimizer.get("param_groups") or ()), *parameters[:1]]:
        if isinstance(group, dict) and "step" in group:
            return int(group["step"])
    # `optimizer` of mixed precision, and 0, 1, ... of several optimizers in one.
    inner = [value for value in optimizer.values() if isinstance(value, dict)][:_MOST_OPTIMIZERS]
    found = (_find_step(value, depth + 1) for value in inner)
    return next((step for step in found if step is not None), None)


def _find_count(optimizer: Any) -> int | None:
    step = _find_step(optimizer)
    return None if step is None else _check_count(step, "number of updates")


def _check_count(count: int, what: str) -> int:
    if not 0 <= count < 2**63:
        raise ValueError(f"the {what} is no number of them")
    return count
