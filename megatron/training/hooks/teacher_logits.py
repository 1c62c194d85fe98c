# SPDX-License-Identifier: Apache-2.0
"""--logits-save-dir: a teacher's pass over the training data, which writes its likeliest tokens for a student."""

from __future__ import annotations

from pathlib import Path

from megatron.core.datasets.teacher_logits import KeyedDataset, LogitsWriter, write_manifest
from megatron.core.dist_checkpointing.agreement import on_every_rank, on_first_rank
from megatron.core.errors import ConfigError, StorageError, say
from megatron.core.progress import CountedProgress
from megatron.training.data.samples import count_needed_samples
from megatron.training.hooks.forward_passes import pass_over
from megatron.training.recipes.distillation import TeacherStep
from megatron.training.run import Run


def write_teacher_logits(run: Run) -> None:
    """Write the teacher's tokens of the samples that the run would train on, and end it there. Every rank calls this.

    Raises ConfigError for a directory that has files, StorageError where it cannot be written.
    """
    config = run.config.distillation
    if config.logits_save_dir is None:
        return
    directory = Path(config.logits_save_dir)
    on_first_rank(run.groups.world, lambda: _prepare(directory))
    parts = run.data.parts("train")
    if not parts:
        raise ConfigError("--logits-save-dir reads the training data, and there is none; see --data-path and --split")
    count = min(len(parts[0]), count_needed_samples(run.config)[0])
    # All ranks of a replica have the same rows; one of them writes.
    is_writer = run.groups.is_last_stage and run.groups.tp.rank() == 0 and run.groups.cp.rank() == 0
    writer = LogitsWriter(directory, run.groups.dp.rank(), config.logits_save_dtype)
    step = TeacherStep(config, run.recipe.vocab_size)
    progress = CountedProgress("teacher", count, "samples", speaks=run.is_first_rank)

    def work() -> list[str]:
        for reports in pass_over(run, step, KeyedDataset(parts[0]), "train", range(count)):
            for report in reports if is_writer else ():
                writer.add(report["keys"], report["tokens"], report["values"])
            progress.add(run.evaluation_batch_size)
        writer.flush()
        return writer.files

    of_all = on_every_rank(run.groups.world, work)
    content = {
        "k": min(config.logits_save_top_k or 1, run.recipe.vocab_size), "dtype": config.logits_save_dtype,
        "sequence_length": run.config.data.seq_length, "vocab_size": run.recipe.vocab_size, "samples": count,
        "files": sorted(name for files in of_all for name in files),
    }  # fmt: skip
    on_first_rank(run.groups.world, lambda: write_manifest(directory, content))
    if run.is_first_rank:
        say(f"teacher: {content['k']} tokens at each place of {count} samples in {directory}, {progress.seconds:.1f} s")
    run.progress.end_here()


def _prepare(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = next(directory.iterdir(), None)
    except OSError as error:
        raise StorageError(f"--logits-save-dir {directory}: {error.strerror}") from error
    if found is not None:
        raise ConfigError(
            f"--logits-save-dir {directory} has files already, such as {found.name}; give a new directory"
        )
