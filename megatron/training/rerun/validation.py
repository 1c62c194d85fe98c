# SPDX-License-Identifier: Apache-2.0
"""Is a wrong result wrong again? A step whose loss or gradient is no number is computed again before its update; so is
one whose loss or gradient is far beyond the usual, where that is asked for, and the run goes on with it in any case.

The outcomes and exit codes are upstream's: a result that is clean the second time came from a passing fault of the
device (17); one that comes back is to be computed on another device (16), which says whether the first device has a
lasting fault, or the result follows from weights and data (17). With --nan-policy skip or rollback the run goes on:
with the clean result, or without the samples that give the wrong one.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.errors import NonFiniteError, RerunError, say
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.config.reliability import ReliabilityConfig
from megatron.training.rerun.outliers import LargestValues
from megatron.training.rerun.replay import StepStart, describe_samples, find_first_bad, replay
from megatron.training.rerun.tracker_file import RejectionLog, ResultVerdict
from megatron.training.run import Place, Run

GRADIENTS, LOSSES = "the gradient norm", "loss"
_TOLERANCES = {GRADIENTS: 1e-3}
"""Of a relative difference; forward passes are repeated bit for bit."""
_NOTE = "rerun.json"


@dataclass(frozen=True)
class Value:
    """One result that is looked at."""

    message: str
    microbatch: int
    """Of this rank; -1 for what belongs to the step."""
    number: float

    @property
    def key(self) -> tuple[str, int]:
        """Tell values of one rank and step apart."""
        return self.message, self.microbatch

    @property
    def kind(self) -> str:
        """GRADIENTS or LOSSES."""
        return GRADIENTS if self.message == GRADIENTS else LOSSES


@dataclass(frozen=True)
class Rejection:
    """The first value of a step that was rejected, and where."""

    value: Value
    rank: int
    node: str
    device: int
    is_injected: bool
    where: str
    beyond: str | None = None
    """What a finite value is beyond, in words. Such a one ends nothing."""

    @property
    def sentence(self) -> str:
        """Return `rank 1, node a, device 0, samples 4 to 5: lm loss is nan`."""
        number = self.value.number if self.beyond is None else f"{self.value.number:.6g}, {self.beyond}"
        what = f"{self.value.message} is {number}" + (" (injected)" if self.is_injected else "")
        return f"rank {self.rank}, node {self.node}, device {self.device}, {self.where}: {what}"


class StepRejectedError(Exception):
    """The step under way is to be passed over, for this reason, which is the same on all ranks."""


def compare(first: float, second: float) -> float:
    """Relative difference of two results: 0 where they are equal or neither is a number, infinite where one is."""
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(2 * (first - second) / (first + second)) if first + second else math.inf


class StepValidator:
    """Looks at each step's results before they are used. Every rank calls all of its methods together."""

    def __init__(
        self,
        settings: ReliabilityConfig,
        save: str | None,
        place: Place,
        seed: int,
        spikes: Collection[str] = (),
    ) -> None:
        """place: this process's. seed: of the injected errors. spikes: which of LOSSES and GRADIENTS are looked at for
        values far beyond the usual."""
        self._settings, self._save, self._place = settings, save, place
        self._reruns = settings.rerun_mode == "validate_results"
        self._random = random.Random(seed)
        self.log = RejectionLog(settings.result_rejected_tracker_filename, place.job)
        self._spikes = spikes if self._reruns else ()
        self.yardstick = LargestValues()
        """Largest values of a micro-batch of any rank in each of the first iterations."""
        self._pending: Rejection | None = None
        """Of an attempt before this one: is to be computed again in the next step."""
        self._is_judged = False
        """The attempts before this one have a verdict on the next step."""

    @property
    def _note(self) -> Path:
        return Path(self._save or ".") / _NOTE

    def begin(self, run: Run) -> None:
        """Take up what an attempt that ended with exit code 16 has left."""
        content = all_gather_object(self._read_note() if run.groups.world.rank() == 0 else None, run.groups.world)[0]
        if not self._reruns or not content or content.get("iteration") != run.progress.iteration + 1:
            return
        self._is_judged = "verdict" in content
        if not self._is_judged:
            rejection = dict(content["rejection"])
            self._pending = Rejection(value=Value(**rejection.pop("value")), **rejection)

    def validate(self, run: Run, start: StepStart) -> None:
        """Look at the results of a step whose gradients are complete; compute it again where one of them is wrong.

        Returns where the step may go on, with gradients of the second time where there was one. Raises RerunError,
        NonFiniteError, or StepRejectedError where it is to be passed over.
        """
        found = self._reject(run)
        if found is None:
            self._pending, self._is_judged = None, False
            return
        iteration = run.progress.iteration + 1
        if found.beyond is not None:
            self._look_at_spike(run, start, found, iteration)
            return
        if not self._reruns or self._is_judged:
            self._note_event(found, iteration, "rerun_disabled", found.value.number)
            self._act(run, start, f"iteration {iteration}: {found.sentence}")
            return
        self._note_event(found, iteration, "initial_run", found.value.number)
        _say(run, f"warning: iteration {iteration}: {found.sentence}; the step is computed again")
        start.put_back(run)
        replay(run)
        second = self._look_again(run, found)
        injected = self._settings.error_injection_type
        same = compare(found.value.number, second) <= _TOLERANCES.get(found.value.message, 0.0)
        if found.is_injected:
            same = injected != "transient_error"
        if not same:
            self._judge_transient(run, found, iteration, second)
        elif self._pending is not None:
            self._judge_elsewhere(run, found, iteration, second)
        else:
            self._judge_reproduced(run, start, found, iteration, second)

    def _look_at_spike(self, run: Run, start: StepStart, found: Rejection, iteration: int) -> None:
        self._note_event(found, iteration, "initial_run", found.value.number)
        start.put_back(run)
        replay(run)
        second = self._look_again(run, found)
        same = compare(found.value.number, second) <= _TOLERANCES.get(found.value.message, 0.0)
        self._note_event(found, iteration, f"first_rerun_{'' if same else 'not_'}reproducible", second)
        again = "also" if same else f"and {second:.6g}"
        _say(run, f"warning: iteration {iteration}: {found.sentence}, {again} when it was computed again")

    def _judge_transient(self, run: Run, found: Rejection, iteration: int, second: float) -> None:
        self._note_event(found, iteration, "first_rerun_not_reproducible", second)
        sentence = (
            f"Possible transient error: iteration {iteration}: {found.sentence}, and {second:.6g} when it was computed "
            "again"
        )
        if self._settings.nan_policy == "stop":
            raise NonFiniteError(
                f"{sentence}; nothing was saved: start again from the last checkpoint",
                iteration,
                is_explained=True,
            )
        _say(run, f"warning: {sentence}; training goes on with that")

    def _judge_reproduced(self, run: Run, start: StepStart, found: Rejection, iteration: int, second: float) -> None:
        self._note_event(found, iteration, "first_rerun_reproducible", second)
        sentence = f"iteration {iteration}: {found.sentence}, also when it was computed again"
        if self._settings.nan_policy != "stop" or self._save is None:
            self._act(run, start, sentence)
            return
        start.put_back(run)
        if run.progress.iteration > 0 and (
            run.saved_progress is None or run.saved_progress.iteration != run.progress.iteration
        ):
            save_checkpoint(run)
        self._write_note(run, {"iteration": iteration, "rejection": asdict(found)})
        raise RerunError(
            f"{sentence}; the state before this step is saved: start again, on another device, to find out whether "
            "this device or the result is at fault"
        )

    def _judge_elsewhere(self, run: Run, found: Rejection, iteration: int, second: float) -> None:
        before = self._pending
        assert before is not None
        if (before.node, before.device) == (found.node, found.device):
            raise RerunError(
                f"iteration {iteration}: rank {before.rank} computes on the same node {before.node} and device "
                f"{before.device} as before; start again with another one in its place"
            )
        same = compare(before.value.number, second) <= _TOLERANCES.get(found.value.message, 0.0)
        if before.is_injected:
            same = self._settings.error_injection_type == "correct_result"
        status = "second_rerun_reproducible" if same else "second_rerun_not_reproducible"
        self._note_event(found, iteration, status, second)
        self._write_note(run, {"iteration": iteration, "verdict": status})
        if same:
            raise NonFiniteError(
                f"correct result (but possible application error): iteration {iteration}: {found.sentence}, on another "
                f"device as well: lower --lr, or pass over its data with --iterations-to-skip {iteration}",
                iteration,
                is_explained=True,
            )
        raise NonFiniteError(
            f"Possible persistent error: node {before.node}, device {before.device} gave {before.value.number} in "
            f"iteration {iteration}, another device {second:.6g}; take that device out of the job, then start again",
            iteration,
            is_explained=True,
        )

    def _act(self, run: Run, start: StepStart, sentence: str) -> None:
        """Do what --nan-policy says about a result that is not computed again any more."""
        start.put_back(run)
        first = find_first_bad(run)
        sentence += "" if first is None else f"; first of all {first}"
        start.put_back(run)
        if self._settings.nan_policy == "stop":
            raise NonFiniteError(f"{sentence}; nothing was updated", run.progress.iteration + 1, is_explained=True)
        raise StepRejectedError(sentence)

    def _reject(self, run: Run) -> Rejection | None:
        """The first value that is no number, over all ranks; one that is far beyond the usual where all are."""
        rank, own, largest = run.groups.world.rank(), None, dict.fromkeys(self._spikes, -math.inf)
        for value in measure(run):
            is_injected, kind = self._injects(rank), value.kind
            if kind in largest and math.isfinite(value.number):
                largest[kind] = max(largest[kind], value.number)
            is_spike = kind in self._spikes and self.yardstick.is_outlier(kind, value.number)
            if is_injected or not math.isfinite(value.number):
                own = self._describe(run, value, rank, is_injected)
                break
            if is_spike and own is None:
                own = replace(self._describe(run, value, rank, False), beyond=self.yardstick.describe(kind))
        numbers = torch.tensor([0.0 if own is None else 1.0, *largest.values()], device=run.device)
        all_reduce(numbers, run.groups.world, "max")
        is_rejected, *usual = numbers.tolist()
        for kind, number in zip(largest, usual, strict=True):
            self.yardstick.learn(kind, number)
        if is_rejected == 0.0:
            return self._find_pending(run)
        # Losses come before gradients: those are the same on all ranks, and follow from the loss of one.
        found = [rejection for rejection in all_gather_object(own, run.groups.world) if rejection is not None]
        first = min(found, key=lambda r: (r.beyond is not None, r.value.message == GRADIENTS, r.rank))
        return first if first.beyond is None else self._find_pending(run) or first

    def _describe(self, run: Run, value: Value, rank: int, is_injected: bool) -> Rejection:
        where = "the whole step"
        if value.microbatch >= 0:
            where = f"micro-batch {value.microbatch} ({describe_samples(run, value.microbatch)})"
        return Rejection(value, rank, self._place.node, self._place.device, is_injected, where)

    def _find_pending(self, run: Run) -> Rejection | None:
        """Return what was wrong in an attempt before, which is looked at also where it is right now."""
        before = self._pending
        if before is None:
            return None
        here = all_gather_object(self._place, run.groups.world)[before.rank]
        return replace(before, node=here.node, device=here.device)

    def _look_again(self, run: Run, found: Rejection) -> float:
        own = {value.key: value.number for value in measure(run)}
        return float(all_gather_object(own, run.groups.world)[found.rank].get(found.value.key, math.nan))

    def _injects(self, rank: int) -> bool:
        rate = self._settings.error_injection_rate
        return rate > 0 and self._pending is None and (self._random.randrange(rate) + rank) % rate == 0

    def _note_event(self, found: Rejection, iteration: int, status: str, number: float) -> None:
        event = ResultVerdict(found.node, found.device, found.rank, iteration, status, number, found.value.message)
        self.log.add(event)

    def _read_note(self) -> dict[str, Any] | None:
        try:
            content = json.loads(self._note.read_text())
        except (OSError, ValueError):
            return None
        return content if self._save and isinstance(content, dict) else None

    def _write_note(self, run: Run, content: dict[str, object]) -> None:
        if self._save is not None and run.is_first_rank:
            temporary = self._note.with_suffix(".part")
            temporary.write_text(json.dumps(content))
            os.replace(temporary, self._note)


def _say(run: Run, sentence: str) -> None:
    if run.is_first_rank:
        say(sentence, sys.stderr)


def measure(run: Run) -> list[Value]:
    """This rank's results of the step under way: the loss of each micro-batch and the norm of all gradients. Waits for
    the device."""
    values = []
    for microbatch, losses in enumerate(run.microbatch_losses):
        for name, loss in losses.items():
            pair = loss.detach().reshape(-1).tolist()
            number = pair[0] / max(pair[1], 1.0) if len(pair) > 1 else pair[0]
            values.append(Value(name if name.endswith("loss") else f"{name} loss", microbatch, number))
    # A dynamic loss scale looks for overflow itself.
    if run.optimizer.grad_scaler is None:
        run.optimizer.prepare_grads()
        values.append(Value(GRADIENTS, -1, float(run.optimizer.get_grad_norm())))
    return values


class RepeatStatistics:
    """--rerun-mode report_stats: every step twice, and how far its results differ."""

    def __init__(self) -> None:
        self._differences: dict[str, list[float]] = {}

    def validate(self, run: Run, start: StepStart) -> None:
        """Compute the step again and compare; every second iteration the first rank prints. Every rank calls this."""
        first = {value.key: value.number for value in measure(run)}
        start.put_back(run)
        replay(run)
        for value in measure(run):
            found = compare(first.get(value.key, math.nan), value.number)
            self._differences.setdefault(value.message, []).append(found)
        if (run.progress.iteration + 1) % 2 == 0:
            lines = self._report(run)
            if run.is_first_rank:
                say("\n".join(lines))

    def _report(self, run: Run) -> list[str]:
        gathered = all_gather_object(self._differences, run.groups.world)
        lines = ["relative differences of results computed twice:"]
        for message in sorted({name for found in gathered for name in found}):
            every = sorted(d for found in gathered for d in found.get(message, ()))
            same = sum(d == 0.0 for d in every)
            at = {f"p{p:g}": every[min(len(every) - 1, int(p / 100 * len(every)))] for p in (50, 90, 99, 99.9)}
            mean = sum(every) / len(every)
            numbers = " ".join(f"{name} {d:.3g}" for name, d in {"mean": mean, **at, "max": every[-1]}.items())
            lines.append(f"  {message}: {len(every)} samples, {same} identical; {numbers}")
        return lines
