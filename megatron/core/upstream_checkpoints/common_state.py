# SPDX-License-Identifier: Apache-2.0
"""Upstream's checkpoints of torch.distributed.checkpoint: where one is, in which format, and its common state.

| upstream                                       | here                                    |
|------------------------------------------------|-----------------------------------------|
| common_state/shard_0_1, or the file common.pt  | settings, progress, schedule, step      |
| args, iteration, opt_param_scheduler.<name>    | the same of torch_dcp                   |
| other objects (_extra_state, rng_state)        | not used                                |
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron.core.dist_checkpointing.directory import COMMON_NAME, TRACKER_NAME, iteration_directory, saved_iterations
from megatron.core.dist_checkpointing.durable import read_file, storage_errors
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.dist_checkpointing.safe_pickle import StandIn, read_restricted
from megatron.core.dist_checkpointing.saved_boxes import BoxReader
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.errors import CheckpointError

RELEASE = "release"
"""Word in upstream's tracker in the place of a number, and name of the directory, for a model never trained."""
_OURS_ALONE = "tensors.json"
_LONGEST_SETTING = 100_000
_DEEPEST_OPTIMIZER, _MOST_OPTIMIZERS = 3, 32
_COMMON_OBJECT = "common_state/shard_0_1"
_OPTIMIZER_OBJECT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_.+")


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
MODEL_PREFIX, _WRAPPED = "model.", "model.module."
_PLAIN_KEYS = ("decoder.layers.", "embedding.word_embeddings.")
_SCHEDULER = "opt_param_scheduler."
_BESIDE_MODULES = ("optimizer.", "rng_state", "model")


def name_format(path: Path, metadata: Metadata) -> str | None:
    """The --ckpt-format of upstream's that a table of contents without anything of ours is of; None for other
    programs'."""
    keys = metadata.state_dict_metadata
    if (path / COMMON_NAME).is_file() or isinstance(keys.get(_COMMON_OBJECT), BytesStorageMetadata):
        return "torch_dist"
    if any(key.startswith(MODEL_PREFIX) for key in keys):
        # It also cuts gates from up projections, and numbers experts differently.
        return FSDP_DTENSOR if any(key.startswith(_WRAPPED) for key in keys) else TORCH_DCP
    is_plain = any(key.startswith(_PLAIN_KEYS) for key in keys)
    # A checkpoint of ours that has lost its other files has more than weights.
    return PLAIN_MODULE if is_plain and not any(key.startswith(_BESIDE_MODULES) for key in keys) else None


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
