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
from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.upstream.modules import unwrap_model
from megatron.training.arguments import make_run_config
from megatron.training.checkpoint import documents, restore
from megatron.training.config.run_groups import group_classes
from megatron.training.data.samples import build_batch_size_calculator
from megatron.training.global_vars import get_args
from megatron.training.hooks.dispatch import Hooks
from megatron.training.run import Progress
from megatron.training.upstream.loop_saves import LoopSaves

isfile = os.path.isfile
_SAVES = "_saves"


# Upstream's functions are passed pieces; a complete Run, with data, does not exist in a user's loop.
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
    """Empty: a user's loop does itself what hooks do."""
    has_common_file: bool = True
    """Converters of programs (slime's) open it."""
    flops_per_token: float | None = None
    seq_length: int = 0
    recipe: Any = None
    """Of a user's loop only the vocabulary's rows are known, and that no files of another system belong to it."""


@take_arguments(
    "iteration model optimizer opt_param_scheduler num_floating_point_operations_so_far checkpointing_context=... "
    "pipeline_rank=... expert_rank=... tensor_rank=... pipeline_parallel=... expert_parallel=... non_persistent_ckpt "
    "train_data_iterator=... preprocess_common_state_dict_fn=None release=False tp_group=... pp_group=... "
    "dp_cp_group=... dp_group=... expt_dp_group=... rng_state_key_prefix=''",
    "iterations are saved, and settings as they are; load with --finetune what is to begin at 0",
)  # the process groups and args.consumed_train_samples say all of the rest
def save_checkpoint(
    iteration: int,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    non_persistent_ckpt: bool = False,
) -> Path | None:
    """Save to args.save as the given iteration; returns the directory.

    The format is pretrain_gpt.py's, whatever args.ckpt_format "torch_dist" may mean elsewhere; for upstream's files set
    args.ckpt_format = "upstream_torch_dist". With --async-save it is written while the loop goes on, and None is
    returned: the next call, maybe_finalize_async_save and the end of the program wait for it, and say what has become
    of it.

    model: wrapped or bare. optimizer, opt_param_scheduler: None to save only weights. args.consumed_train_samples says
    which samples come next; from the iteration and the global batch sizes where it is missing. args.save and the other
    settings count as they are now. non_persistent_ckpt: save where only the newest stays, as
    --non-persistent-save-interval does. num_floating_point_operations_so_far: load_checkpoint returns it. Raises
    ConfigError without args.save, StorageError.
    """
    args = get_args()
    parts = _parts(args, model, optimizer, opt_param_scheduler)
    if optimizer is not None and opt_param_scheduler is None and parts.config.checkpoint.ckpt_format[:8] == "upstream":
        raise ConfigError(f"--ckpt-format {args.ckpt_format} saves an optimizer with its schedule; give both, or None")
    parts.progress.iteration = iteration
    parts.progress.floating_point_operations = int(num_floating_point_operations_so_far)
    # Upstream's scripts count it in args while they train.
    consumed = getattr(args, "consumed_train_samples", None)
    if not consumed:
        consumed = build_batch_size_calculator(parts.config).count_samples(iteration)
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


@take_arguments(
    "ddp_model optimizer opt_param_scheduler load_arg strict checkpointing_context=... "
    "skip_load_to_model_and_opt=False tp_group=... pp_group=... dp_cp_group=... dp_group=... expt_dp_group=... "
    "rng_state_key_prefix=''",
    "parameters of FSDP are loaded like any other",
)
def load_checkpoint(
    ddp_model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
) -> tuple[int, int]:
    """Fill all three from what args.load holds; returns (iterations done, floating-point operations so far, as they
    were saved by such a loop; 0 otherwise).

    ddp_model: wrapped or bare. optimizer, opt_param_scheduler: None to load only weights. args.consumed_train_samples
    then says which samples come next. load_arg: "load" only. strict: False also takes a checkpoint that lacks
    tensors of the model, which then keep their values, and names them.
    A release counts as iteration 0. Raises CheckpointError.
    """
    # Upstream also reads --pretrained-checkpoint through this door; here `load` falls back to it by itself.
    if load_arg != "load":
        raise CheckpointError(f"load_checkpoint() reads what --load names; found load_arg={load_arg!r}")
    args = get_args()
    parts = _parts(args, ddp_model, optimizer, opt_param_scheduler)
    if not strict:
        lax = replace(parts.config.checkpoint, dist_ckpt_strictness="log_all")
        parts.config = parts.config.with_groups(checkpoint=lax)
    restore.load_checkpoint(parts)  # type: ignore[arg-type]
    args.iteration, args.consumed_train_samples = parts.progress.iteration, parts.progress.consumed_train_samples
    return parts.progress.iteration, parts.progress.floating_point_operations


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
    path = Path(get_load_checkpoint_path_by_args(args, load_arg)) / f"{documents.CONFIG}.json"
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


class _ProgramModel:
    """A program's model, wrapped or bare, as checkpoints need it: the network in `module`."""

    def __init__(self, wrapped: Any, groups: ProcessGroupCollection) -> None:
        self.module = unwrap_model(wrapped)
        self.groups = groups
        self._wrapper: ModelChunk | None = wrapped if isinstance(wrapped, ModelChunk) else None

    def finish_param_sync(self) -> None:
        """Wait for gathers under way, where there is a wrapper that gathers."""
        if self._wrapper is not None:
            self._wrapper.finish_param_sync()

    def get_held_part(self, param: Any, *, main: bool = False) -> tuple[Any, int | None]:
        """See ModelChunk."""
        return (param, None) if self._wrapper is None else self._wrapper.get_held_part(param, main=main)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapper"], name)


class _NoOptimizer:
    """In the place of an optimizer, or of a schedule, that a program does not have."""

    def numbers(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    state_dict = named_slices = named_state = shard_state = param_keys = numbers

    def load_numbers(self, state: Any) -> None:
        """Take nothing."""

    load_state_dict = check_state = load_numbers

    def reload_model_params(self) -> None:
        """Do nothing: the network's parameters are all there is."""

    after_load = reload_model_params


def _parts(args: Namespace, model: Any, optimizer: Any, scheduler: Any) -> _Parts:
    groups = ProcessGroupCollection.current()
    config = make_run_config(args)
    if optimizer is None:
        config = config.with_groups(checkpoint=replace(config.checkpoint, no_load_optim=True, no_save_optim=True))
    chunks = [_ProgramModel(chunk, groups) for chunk in (model if isinstance(model, list | tuple) else [model])]
    return _Parts(
        config,
        groups,
        chunks,
        optimizer or _NoOptimizer(),
        scheduler or _NoOptimizer(),
        Progress(args.train_iters or 0),
        recipe=SimpleNamespace(foreign_files=None, padded_vocab_size=getattr(args, "padded_vocab_size", None)),
    )
