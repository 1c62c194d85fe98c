"""Checkpoints and data sources."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config_base import multiples_near
from megatron.training.flags.settings import Settings


def saving_has_an_interval(s: Settings) -> Iterator[str]:
    interval, kept = s.save_interval, s.save_retain_interval
    if s.save is not None and interval is None:
        yield f"{s.say('save')} needs --save-interval, the iterations between checkpoints"
    if kept is not None and interval is not None and (kept < 1 or kept % interval):
        yield (
            f"{s.say('save_retain_interval')} is not a multiple of {s.say('save_interval')}; "
            f"use {multiples_near(max(kept, 1), interval)}"
        )


def checkpoints_are_files(s: Settings) -> Iterator[str]:
    for dest in ("save", "load", "pretrained_checkpoint"):
        path = getattr(s, dest)
        if path is not None and "://" in path:
            yield f"{s.say(dest)} is in object storage, checkpoints are files and directories; give a path"


def formats_fit(s: Settings) -> Iterator[str]:
    if s.ckpt_format == "fsdp_dtensor" and not s.use_megatron_fsdp:
        yield "--ckpt-format fsdp_dtensor needs --use-megatron-fsdp; use torch_dist"
    if not s.use_gloo_process_groups and s.use_distributed_optimizer and s.ckpt_format == "torch":
        yield (
            "--disable-gloo-process-groups with --use-distributed-optimizer cannot save --ckpt-format torch; use "
            "torch_dist"
        )
    if s.ckpt_convert_format is not None and (s.ckpt_convert_save is None or s.load is None):
        yield f"{s.say('ckpt_convert_format')} needs --load, what to convert, and --ckpt-convert-save, where to"


def loading_is_consistent(s: Settings) -> Iterator[str]:
    if s.override_ckpt_iteration is not None and s.finetune:
        yield f"{s.say('override_ckpt_iteration')} contradicts --finetune, which starts at iteration 0; keep one"
    if s.ckpt_step is not None and s.load is None:
        yield f"{s.say('ckpt_step')} needs --load"
    if s.exit_on_missing_checkpoint and s.load is None and s.pretrained_checkpoint is None:
        yield "--exit-on-missing-checkpoint needs --load"


def data_has_one_source(s: Settings) -> Iterator[str]:
    """Blends, lists of blends in a file, blends per split, or synthetic data."""
    per_split = [dest for dest in ("train_data_path", "valid_data_path", "test_data_path") if getattr(s, dest)]
    sources = [dest for dest in ("data_path", "data_args_path", "per_split_data_args_path") if getattr(s, dest)]
    sources += per_split[:1] + (["mock_data"] if s.mock_data else [])
    if len(sources) > 1:
        yield f"{' and '.join(s.name(dest) for dest in sources)} are different sources of data; keep one"
    if per_split and "split" in s.given:
        yield f"{s.say('split')} says nothing about {s.name(per_split[0])}, which names each split's data; leave it out"
    for dest in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if getattr(s, dest) == []:
            yield f"{s.name(dest)} is given without a path; name a dataset prefix, or leave it out"


def weights_come_from_somewhere(s: Settings) -> Iterator[str]:
    if not s.perform_initialization and s.load is None and s.pretrained_checkpoint is None:
        yield f"{s.say('perform_initialization')} leaves the weights undefined; add --load or --pretrained-checkpoint"


CHECKS = (
    saving_has_an_interval, checkpoints_are_files, formats_fit, loading_is_consistent, weights_come_from_somewhere,
    data_has_one_source,
)  # fmt: skip
