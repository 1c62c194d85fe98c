# SPDX-License-Identifier: Apache-2.0
"""The pass over all pairs of answers before the first step: the reference model's log-probabilities of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.collectives import all_gather_object, broadcast_object
from megatron.core.errors import ConfigError, say
from megatron.core.progress import CountedProgress
from megatron.training.checkpoint.foreign_files import load_adapter
from megatron.training.checkpoint.restore import load_checkpoint, load_weights
from megatron.training.data.loading import SPLITS
from megatron.training.hooks.forward_passes import pass_over
from megatron.training.recipes.preference import PreferenceStep, References
from megatron.training.run import Run

_REPORTED = ("numbers", "log_probs", "lengths")


def complete_references(run: Run) -> None:
    """Give a step on pairs of answers the references of all pairs of the run's data. Every rank calls this.

    Raises ConfigError where the weights to measure them with are no longer there.
    """
    step = run.recipe.forward_step
    if not isinstance(step, PreferenceStep) or not step.needs_references:
        return
    known = step.references
    seen = set(known)
    wanted = {name: _list_new_pairs(run, name, seen) for name in SPLITS}
    count = sum(len(indices) for parts in wanted.values() for indices in parts)
    directory = _choose_weights(run, count)
    found = dict(known)
    progress = CountedProgress("reference log-probabilities", count, "pairs", speaks=run.is_first_rank)
    for name, parts in wanted.items():
        for dataset, indices in zip(run.data.parts(name), parts, strict=True):
            for reports in pass_over(run, step.measure, dataset, name, indices):
                measured = _gather(run, reports)
                found |= measured
                progress.add(len(measured))
    if directory is not None and count:
        # What the run goes on with, once more.
        load_checkpoint(run)
        load_adapter(run)
    if run.is_first_rank and count:
        source = directory or "the weights of the beginning"
        pairs = f"{count} pair{'s' if count > 1 else ''}"
        say(f"reference log-probabilities: {pairs} by {source}, {progress.seconds:.1f} s")
    step.set_references(found, run.device)


def _choose_weights(run: Run, count: int) -> str | None:
    """Load the reference model where the run has other weights by now, and return its directory. count: of new pairs.

    Raises ConfigError where it is gone.
    """
    directory, flag = run.config.preference.dpo_reference, "--dpo-reference"
    if directory is None and run.progress.iteration:
        directory, flag = run.config.checkpoint.pretrained_checkpoint, "--pretrained-checkpoint"
    if run.progress.iteration and count and (directory is None or run.config.model.lora_rank is not None):
        raise ConfigError(
            f"{count} pairs of the data were not among those of the run's first start, and the weights of that time, "
            "by which they would be judged, are gone; begin a new run with --pretrained-checkpoint, or leave the data "
            "and --train-iters as they were"
        )
    if directory is not None and count:
        load_weights(run, flag, directory)
    return directory


def _list_new_pairs(run: Run, split: str, seen: set[int]) -> list[list[int]]:
    """Of each dataset of a split the samples with a pair that was not seen before; adds their pairs to `seen`."""
    found = []
    for dataset in run.data.parts(split):
        new = []
        for index in range(len(dataset)):
            number = int(dataset[index]["pair"])
            if number not in seen:
                seen.add(number)
                new.append(index)
        found.append(new)
    return found


def _gather(run: Run, measured: Sequence[dict[str, Any]]) -> References:
    """Collect the measurements of all replicas, from the last stage on every rank."""
    own = {
        number: tuple(pair)
        for report in measured
        for number, pair, lengths in zip(*(report[name].tolist() for name in _REPORTED), strict=True)
        if min(lengths) > 0  # else a sample that fills up a batch
    }
    of_all = all_gather_object(own, run.groups.dp)
    of_last_stage = broadcast_object(of_all, run.groups.pp, run.groups.last_stage)
    return {number: pair for part in of_last_stage for number, pair in part.items()}
