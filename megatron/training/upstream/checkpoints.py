# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions around the checkpoints of a run: those that pretrain_gpt.py writes and reads."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.config_base import get_settings
from megatron.core.dist_checkpointing.directory import TRACKER_NAME, iteration_directory, latest_iteration
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.checkpoint import save_and_load
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import group_classes
from megatron.training.data.samples import build_batch_size_calculator
from megatron.training.global_vars import get_args
from megatron.training.hooks.dispatch import Hooks
from megatron.training.run import Progress
from megatron.training.upstream.loop_saves import LoopSaves

isfile = os.path.isfile
_SAVES = "_saves"


# Upstream's functions are handed pieces; a whole Run, with data, does not exist in a loop of one's own.
@dataclass
class _Parts:
    """As much of a Run as a checkpoint is made of."""

    config: Any
    groups: ProcessGroupCollection
    model: list[Any]
    optimizer: Any
    scheduler: Any
    progress: Progress
    save_locks: list[DirectoryLock] = field(default_factory=list)
    loaded_from: Path | None = None
    hooks: Hooks = field(default_factory=lambda: Hooks([]))
    """Empty: a loop of one's own does itself what hooks do."""
    recipe: Any = field(default_factory=lambda: SimpleNamespace(foreign_files=None))
    """Of a loop of one's own nothing is known but that no files of another system belong to it."""


def save_checkpoint(
    iteration: int,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    *,
    non_persistent_ckpt: bool = False,
) -> Path | None:
    """Save to args.save as the given iteration, in the format of pretrain_gpt.py; returns the directory.

    With --async-save it is written while the loop goes on, and None is returned: the next call,
    maybe_finalize_async_save and the end of the program wait for it, and say what has become of it.

    args.consumed_train_samples says which samples come next; from the iteration and the global batch sizes where it is
    missing. args.save and the other settings of checkpoints count as they are now. non_persistent_ckpt: save where only
    the newest stays, as --non-persistent-save-interval does. num_floating_point_operations_so_far: of upstream's
    signature; it is not kept. Raises ConfigError without args.save, StorageError.
    """
    args = get_args()
    parts = _parts(args, model, optimizer, opt_param_scheduler)
    parts.progress.iteration = iteration
    # Upstream's scripts count it in args while they train.
    consumed = getattr(args, "consumed_train_samples", None)
    if consumed is None:
        consumed = build_batch_size_calculator(args.run_config).count_samples(iteration)
    parts.progress.consumed_train_samples = consumed
    saves: LoopSaves | None = getattr(args, _SAVES, None)
    # A script may say only now where to save, or another directory than before.
    if saves is None or saves.settings != parts.config.checkpoint:
        if saves is not None:
            saves.leave()
        saves = LoopSaves(parts.config.checkpoint, parts.groups.world)
        setattr(args, _SAVES, saves)
    parts.save_locks = saves.locks
    return saves.save(parts, non_persistent=non_persistent_ckpt)


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    """Say what has become of a save under way, once it has come to its end. blocking: wait for it. terminate: that was
    the last one; give memory and process back."""
    saves: LoopSaves | None = getattr(get_args(), _SAVES, None)
    if saves is not None:
        saves.finish(blocking=blocking, terminate=terminate)


def load_checkpoint(
    ddp_model: list[Any], optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load", strict: bool = True
) -> tuple[int, int]:
    """Fill all three from what args.load holds; returns (iterations done, 0).

    args.consumed_train_samples then says which samples come next. load_arg: "load" only. strict: tensors that the model
    lacks are always refused. Raises CheckpointError.
    """
    # Upstream also reads --pretrained-checkpoint through this door; here `load` falls back to it by itself.
    if load_arg != "load":
        raise CheckpointError(f"load_checkpoint() reads what --load names; found load_arg={load_arg!r}")
    args = get_args()
    parts = _parts(args, ddp_model, optimizer, opt_param_scheduler)
    save_and_load.load_checkpoint(parts)  # type: ignore[arg-type]
    args.iteration, args.consumed_train_samples = parts.progress.iteration, parts.progress.consumed_train_samples
    return parts.progress.iteration, 0


def get_checkpoint_name(
    checkpoints_path: str,
    iteration: int,
    release: bool = False,
    pipeline_parallel: bool | None = None,
    tensor_rank: int | None = None,
    pipeline_rank: int | None = None,
    expert_parallel: bool | None = None,
    expert_rank: int | None = None,
    return_base_dir: bool = False,
    basename: str = "model_optim_rng.pt",
) -> str:
    """A checkpoint's directory (return_base_dir), or the file of a model-parallel rank in upstream's torch format."""
    base = os.path.join(checkpoints_path, "release" if release else f"iter_{iteration:07d}")
    if return_base_dir:
        return base
    groups = ProcessGroupCollection.current()
    tensor_rank = groups.tp.rank() if tensor_rank is None else tensor_rank
    pipeline_rank = groups.pp.rank() if pipeline_rank is None else pipeline_rank
    expert_rank = groups.ep.rank() if expert_rank is None else expert_rank
    has_stages = groups.pp.size() > 1 if pipeline_parallel is None else pipeline_parallel
    has_experts = groups.ep.size() > 1 if expert_parallel is None else expert_parallel
    # Upstream leaves the numbers of axes that are not divided out of the name.
    rank = f"mp_rank_{tensor_rank:02d}" + f"_{pipeline_rank:03d}" * has_stages + f"_{expert_rank:03d}" * has_experts
    return os.path.join(base, rank, basename)


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    """The file that names the last iteration."""
    return os.path.join(checkpoints_path, TRACKER_NAME)


def read_metadata(tracker_filename: str) -> tuple[int, bool]:
    """(iteration, whether it is a release) that a tracker file names. Raises CheckpointError for any other text."""
    text = Path(tracker_filename).read_text().strip()
    if text != "release" and not text.isdigit():
        raise CheckpointError(f"{tracker_filename} names no iteration; found {text[:40]!r}")
    return (0, True) if text == "release" else (int(text), False)


def get_load_checkpoint_path_by_args(args: Namespace, load_arg: str = "load") -> str:
    """The directory of the checkpoint that would be loaded: args.ckpt_step's, else the last one's."""
    root = Path(getattr(args, load_arg))
    iteration = args.ckpt_step if getattr(args, "ckpt_step", None) is not None else latest_iteration(root)
    if iteration is None:
        raise CheckpointError(f"{root} holds no checkpoint")
    return str(iteration_directory(root, iteration))


def load_args_from_checkpoint(
    args: Namespace, load_arg: str = "load", checkpointing_context: Any = None
) -> tuple[Namespace, Namespace]:
    """(args with the shape of the saved model, all saved settings). --use-checkpoint-args does so on a command line."""
    path = Path(get_load_checkpoint_path_by_args(args, load_arg)) / f"{save_and_load.CONFIG}.json"
    try:
        saved = json.loads(path.read_bytes())
        settings = {
            name: value for group in ("training", "data", "gpt", "model") for name, value in saved[group].items()
        }
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no settings that can be used ({error})") from error
    model = [setting for group in ("gpt", "model") for setting in get_settings(group_classes()[group]).values()]
    for name in ("seq_length", *(s.dest for s in model if s.kind in ("shape", "function", "shorthand"))):
        if settings.get(name) is not None:
            setattr(args, name, settings[name])
    return args, Namespace(**settings)


def _parts(args: Namespace, model: list[Any], optimizer: Any, scheduler: Any) -> _Parts:
    groups = ProcessGroupCollection.current()
    config = _read_checkpoint_settings(args)
    return _Parts(config, groups, list(model), optimizer, scheduler, Progress(args.train_iters or 0))


def _read_checkpoint_settings(args: Namespace) -> RunConfig:
    """The run's settings, with what a script has changed in `args` about checkpoints since they were parsed. Raises
    ConfigError."""
    config: RunConfig = args.run_config
    parsed = vars(args._parsed_checkpoint)
    changes = {name: getattr(args, name) for name in parsed if getattr(args, name, parsed[name]) != parsed[name]}
    changes = {name: str(value) if isinstance(value, Path) else value for name, value in changes.items()}
    return config.with_groups(checkpoint=replace(config.checkpoint, **changes))
