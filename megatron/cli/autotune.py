# SPDX-License-Identifier: Apache-2.0
"""The fastest micro-batch, recomputation and kernels of a configuration, found by trying them on the device at hand.

    python tools/autotune.py --trial-steps 5 --minutes 10 <the flags of pretrain_gpt.py>
    python tools/autotune.py --processes 8 --json tuned.json <the flags of pretrain_gpt.py>

Each trial is a few steps of the real training in a fresh process, so that one that runs out of memory, or hangs, takes
nothing with it; nothing is saved or loaded. The memory formula (tools/report_theoretical_memory.py) says with which
micro-batch to begin; from there it goes up while the memory lasts, and down while that is faster. Recomputation is
tried only for micro-batches that do not fit without. Last, one after the other, kernels that a flag chooses: what is
faster by more than 2 % stays. Micro-batch and recomputation that are given give way to those that are tried, a kernel
that is given stays; what the trials train is the same run otherwise: the global batch stays what it is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.report_theoretical_memory import describe_workload, read
from megatron.core.errors import (
    ConfigError,
    MemoryShortageError,
    command_line,
    explain_refused_memory,
    format_bytes,
)
from megatron.planner.step_memory import predict_step_memory
from megatron.training.config.container import RunConfig
from megatron.training.flags.argument import ProgramParser
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.run import Hook, Phase, Run, Step

if TYPE_CHECKING:
    from megatron.core.device import Mark

_GRACE_SECONDS = 40.0
"""Between the request to end and the end by force: torchrun, whose ranks are in separate sessions, gives them 30."""
_WORTH_KEEPING = 1.02
"""A kernel stays when steps are faster by more than what measurements of a few steps differ by."""

# From no loss of time to the greatest.
RECOMPUTATION = (
    "",
    "--recompute-granularity selective --recompute-modules layernorm",
    "--recompute-granularity selective --recompute-modules mlp",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
)
KERNELS = ("--attention-backend flash", "--attention-backend fused", "--cross-entropy-loss-fusion")
KERNELS_OF_EXPERTS = ("--moe-grouped-gemm", "--moe-permute-fusion")
_TRIED = frozenset(
    """--micro-batch-size --recompute-granularity --recompute-method --recompute-num-layers --recompute-modules
    --recompute-activations --moe-layer-recompute""".split()
)
_WRITERS = frozenset(
    "tensorboard_dir metrics_dir wandb_project wandb_exp_name wandb_save_dir alert_command alert_webhook".split()
)
"""Settings of the log that name a place outside of the process."""


@dataclass(frozen=True)
class Candidate:
    """One set of flags that is tried."""

    micro_batch: int
    recomputation: str = ""
    kernels: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """Flags behind those that are given."""
        return shlex.split(f"--micro-batch-size {self.micro_batch} {self.recomputation} {' '.join(self.kernels)}")


@dataclass(frozen=True)
class TrialResult:
    """Result of trying a candidate."""

    candidate: Candidate
    state: str
    """"fits", "out of memory", or why it cannot run."""
    estimated_bytes: float
    seconds: float | None = None
    """Of a step, median."""
    tokens_per_second: float | None = None
    peak_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """True if it could be measured."""
        return self.seconds is not None


# ---- one trial, in a separate process


class TrialClock(Hook):
    """Times some steps, and ends the run after them."""

    phase = Phase.SAVE

    def __init__(self, steps: int, warm_ups: int) -> None:
        self.steps, self.warm_ups = steps, warm_ups
        self.marks: list[tuple[Mark, Mark]] = []
        self.found: dict[str, Any] = {}

    def wrap_step(self, step: Step) -> Step:
        """Mark before and after."""
        from megatron.core import device

        def timed(run: Run, batches: Iterator[Any]) -> None:
            before = device.mark()
            step(run, batches)
            self.marks.append((before, device.mark()))
            if len(self.marks) >= self.steps + self.warm_ups:
                run.stop_reason = "the steps of a trial are done"

        return timed

    def on_train_end(self, run: Run) -> None:
        """Read the clock and the memory."""
        from megatron.core import device

        device.synchronize()
        seconds = [device.measure_seconds_between(*pair) for pair in self.marks[self.warm_ups :]]
        middle = max(statistics.median(seconds), 1e-9)
        tokens = (run.config.training.global_batch_size or 0) * run.seq_length
        peak = device.read_memory_stats()["peak_bytes"]
        self.found = {"seconds": middle, "tokens_per_second": tokens / middle, "peak_bytes": peak}


def run_trial(path: Path, steps: int, warm_ups: int, flags: Sequence[str]) -> int:
    """Train for some steps and write what was found, or why nothing was; returns the exit status."""
    from megatron.training.training import run_recipe

    clock = TrialClock(steps, warm_ups)
    try:
        config = prepare_config(read(flags, os.environ), steps + warm_ups)
        run_recipe(config, build_gpt_recipe(config), [clock])
        if os.environ.get("RANK", "0") == "0":
            _write(path, clock.found)
        return 0
    except MemoryShortageError as error:
        content = {"state": "out of memory", "text": str(error)}
    except ConfigError as error:
        content = {"state": "cannot run", "text": str(error)}
    except RuntimeError as error:
        if explain_refused_memory(error) is None:
            raise
        content = {"state": "out of memory", "text": str(error)}
    # Whichever rank it is: a single pipeline stage may lack memory. The others wait for it until torchrun, told by
    # the exit status, ends them.
    _write(path, content)
    return 1


def _write(path: Path, content: Mapping[str, Any]) -> None:
    # Several ranks may fail at the same time.
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


def prepare_config(config: RunConfig, steps: int) -> RunConfig:
    """The same run, but one that writes and reads nothing that belongs to the user's, and lasts for so many steps."""
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(config.logger) if f.name in _WRITERS}
    logger = dataclasses.replace(config.logger, **defaults)
    training = dataclasses.replace(
        config.training, exit_interval=None, exit_duration_in_mins=None, phase_transition_iterations=None
    )
    if training.train_iters is not None:
        training.train_iters = max(training.train_iters, steps)
    return dataclasses.replace(config, checkpoint=type(config.checkpoint)(), logger=logger, training=training)


# ---- the search


class Tuner:
    """Tries candidates, each once, and remembers what became of them."""

    def __init__(
        self,
        flags: Sequence[str],
        try_one: Callable[[Candidate], dict[str, Any]],
        deadline: float,
        environment: Mapping[str, str],
    ) -> None:
        """flags: of pretrain_gpt.py, without those that are tried. try_one: what a trial has found. deadline: of
        time.monotonic(), after which no further trial begins. environment: with WORLD_SIZE, the processes of the job.
        """
        self.flags, self.try_one, self.deadline = list(flags), try_one, deadline
        self.environment = environment
        self.outcomes: dict[Candidate, TrialResult] = {}
        self.is_out_of_time = False

    def search(self, sizes: Sequence[int], memory_bytes: float, kernels: Sequence[str]) -> TrialResult | None:
        """The fastest candidate; None where none fits. sizes: of micro-batches, ascending."""
        largest = 0
        for recomputation in RECOMPUTATION:
            # Smaller ones fit without it, or with less of it.
            left = [size for size in sizes if size > largest]
            if not left:
                break
            largest = max(largest, self._climb(left, recomputation, memory_bytes))
            if all(outcome.state.startswith("failed") for outcome in self.outcomes.values()):
                break  # no matter of memory: it would fail with recomputation as well
        best = self.find_best()
        if best is None:
            return None
        for flag in kernels:
            kept = best.candidate.kernels
            # One backend of attention takes the place of the other.
            rest = tuple(other for other in kept if other.split()[0] != flag.split()[0])
            outcome = self.measure(dataclasses.replace(best.candidate, kernels=(*rest, flag)))
            if (
                outcome is not None
                and outcome.seconds
                and best.seconds
                and best.seconds > _WORTH_KEEPING * outcome.seconds
            ):
                best = outcome
        return best

    def _climb(self, sizes: Sequence[int], recomputation: str, memory_bytes: float) -> int:
        """The largest of the sizes that fits; 0 where none does. Others are tried where they may be faster."""
        estimates = [self.estimate_bytes(Candidate(size, recomputation)) for size in sizes]
        # By the formula; the device has the last word.
        start = max((index for index, needed in enumerate(estimates) if needed <= memory_bytes), default=0)
        largest, fastest = 0, math.inf
        index = start
        while index < len(sizes) and (outcome := self.measure(Candidate(sizes[index], recomputation))) is not None:
            if not outcome.fits:
                break
            largest, fastest = sizes[index], min(fastest, outcome.seconds or fastest)
            index += 1
        for index in reversed(range(start)):
            outcome = self.measure(Candidate(sizes[index], recomputation))
            if outcome is None:
                break
            if outcome.fits:
                largest = max(largest, sizes[index])
                if (outcome.seconds or fastest) > fastest:
                    break
                fastest = min(fastest, outcome.seconds or fastest)
        return largest

    def measure(self, candidate: Candidate) -> TrialResult | None:
        """Try a candidate and return its result; None where the time is over."""
        if candidate in self.outcomes:
            return self.outcomes[candidate]
        if time.monotonic() > self.deadline:
            self.is_out_of_time = True
            return None
        found = dict(self.try_one(candidate))
        state = found.pop("state", "fits")
        if text := found.pop("text", ""):
            state = f"{state}: {text}"
        outcome = TrialResult(candidate, state, self.estimate_bytes(candidate), **found)
        self.outcomes[candidate] = outcome
        return outcome

    def find_best(self) -> TrialResult | None:
        """The fastest so far."""
        return min((o for o in self.outcomes.values() if o.fits), key=lambda o: o.seconds or 0.0, default=None)

    def estimate_bytes(self, candidate: Candidate) -> float:
        """Of one process, by the formula; infinite where the settings refuse the candidate."""
        try:
            config = read([*self.flags, *candidate.flags], self.environment)
        except ConfigError:
            return math.inf
        stages = predict_step_memory(config.model, config.ddp, config.optimizer, describe_workload(config))
        return max(stage.total for stage in stages)


def list_micro_batches(config: RunConfig, most: int | None) -> list[int]:
    """Divisors of what one replica gets of the global batch, ascending."""
    share = (config.training.global_batch_size or 1) // config.data_parallel_size
    return [size for size in range(1, share + 1) if share % size == 0 and (most is None or size <= most)]


def list_kernels(words: Sequence[str], *, has_experts: bool, on_gpu: bool) -> list[str]:
    """The kernels to try, but for those that these flags choose already."""
    given = {word.partition("=")[0] for word in words}
    kernels = [flag for flag in KERNELS if on_gpu or "fused" not in flag]
    kernels += KERNELS_OF_EXPERTS if has_experts else ()
    return [flag for flag in kernels if flag.split()[0] not in given]


def leave_out(words: Sequence[str], names: frozenset[str]) -> list[str]:
    """The words of a command line without these flags and their values."""
    kept: list[str] = []
    drops = False
    for word in words:
        if word.startswith("--"):
            drops = word.partition("=")[0] in names
        if not drops:
            kept.append(word)
    return kept


# ---- the program


def start_trial(flags: Sequence[str], arguments: argparse.Namespace, candidate: Candidate) -> dict[str, Any]:
    """Run a trial in separate processes."""
    with tempfile.TemporaryDirectory(prefix="autotune-") as directory:
        path = Path(directory, "found.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(arguments.processes)]
        command = [sys.executable, *(launcher if arguments.processes > 1 else []), *find_program()]
        command += ["--trial", str(path), "--trial-steps", str(arguments.trial_steps)]
        command += ["--warm-up-steps", str(arguments.warm_up_steps), *flags, *candidate.flags]
        status, said = _run_with_limit(command, 60 * arguments.trial_minutes, Path(directory))
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
    if status is None:
        text = f"not done after {arguments.trial_minutes:g} min and ended; --trial-minutes gives more"
        return {"state": "failed", "text": text}
    # The system kills a process that takes the last of the machine's memory.
    if status in (-9, 137):
        return {"state": "out of memory", "text": "the system has killed the process"}
    lines = (said or "it said nothing").splitlines()
    # torchrun says more behind the sentence of the process that has failed.
    said = next((line for line in reversed(lines) if "rror: " in line), lines[-1])
    return {"state": "failed", "text": f"exit code {status}: {said}"}


def _run_with_limit(command: Sequence[str], seconds: float, directory: Path) -> tuple[int | None, str]:
    """The exit status, None for one that took longer and was ended, and what it said: its errors, else its output."""
    # Files: a pipe would stay open, and be waited for, as long as any process that it has started lives.
    outputs = [directory / "stderr", directory / "stdout"]
    with outputs[0].open("wb") as errors, outputs[1].open("wb") as output:
        # In a new session, so that what it starts can be ended with it.
        process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            _end(process)
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in outputs]
    return status, texts[0] or texts[1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with what it has started in its session; returns when it is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Also where it has ended by itself: its children may be left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    process.wait()


def find_program() -> list[str]:
    """Return what Python, or torchrun, is given to start this program: the script of a checkout, or else this
    module."""
    script = Path(__file__).resolve().parents[2] / "tools" / "autotune.py"
    return [str(script)] if script.exists() else ["-m", "megatron.cli.autotune"]


def format_table(outcomes: Sequence[TrialResult]) -> str:
    """A line for each trial."""
    lines = [f"{'micro-batch':>11}{'estimated':>12}{'peak':>12}{'ms/step':>10}{'tokens/s':>11}  flags"]
    for outcome in outcomes:
        candidate = outcome.candidate
        estimated = "" if outcome.estimated_bytes == math.inf else format_bytes(outcome.estimated_bytes)
        said = " ".join(filter(None, [candidate.recomputation, *candidate.kernels]))
        if outcome.seconds is None:
            numbers = f"{'':>33}"
            said = f"{said}  {outcome.state[:100]}".strip()
        else:
            peak = format_bytes(outcome.peak_bytes or 0)
            numbers = f"{peak:>12}{outcome.seconds * 1e3:>10.1f}{outcome.tokens_per_second or 0:>11.0f}"
        lines.append(f"{candidate.micro_batch:>11}{estimated:>12}{numbers}  {said}".rstrip())
    return "\n".join(lines)


class SearchProgress:
    """Says which trial begins, and when the last one may be over."""

    def __init__(self, most: int, run: Callable[[Candidate], dict[str, Any]]) -> None:
        self.most, self.run = most, run
        self.seconds: list[float] = []

    def __call__(self, candidate: Candidate) -> dict[str, Any]:
        remaining = self.most - len(self.seconds)
        eta = f", at most {statistics.mean(self.seconds) * remaining / 60:.1f} min left" if self.seconds else ""
        print(f"trial {len(self.seconds) + 1} of at most {self.most}{eta}: {shlex.join(candidate.flags)}", flush=True)
        began_at = time.monotonic()
        found = self.run(candidate)
        self.seconds.append(time.monotonic() - began_at)
        return found


def tune(arguments: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Search, and print the table and the winner; what the JSON file has. Raises MemoryShortageError where nothing
    fits."""
    from megatron.core.device import current_device, is_cuda
    from megatron.training.launch.memory_limits import read_total_memory

    environment = {**os.environ, "WORLD_SIZE": str(arguments.processes)}
    config = read(words, environment)
    flags = leave_out(words, _TRIED)
    sizes = list_micro_batches(config, arguments.most_micro_batch)
    has_experts = config.model.num_moe_experts is not None
    kernels = list_kernels(words, has_experts=has_experts, on_gpu=is_cuda(current_device()))
    memory, source = read_total_memory()
    print(f"{source} {format_bytes(memory)}; micro-batches of {', '.join(map(str, sizes))}; {len(kernels)} kernels")
    progress = SearchProgress(
        len(sizes) * len(RECOMPUTATION) + len(kernels), lambda candidate: start_trial(flags, arguments, candidate)
    )
    tuner = Tuner(flags, progress, time.monotonic() + 60 * arguments.minutes, environment)
    best = tuner.search(sizes, memory, kernels)
    outcomes = list(tuner.outcomes.values())
    print(f"\n{format_table(outcomes)}")
    if tuner.is_out_of_time:
        print(f"note: {arguments.minutes:g} minutes were over before everything was tried; --minutes gives more")
    if best is None:
        reasons = outcomes[-1].state if outcomes else "nothing was tried"
        raise MemoryShortageError(f"no candidate could train a step here, the last one: {reasons}")
    print(f"\nfastest, {best.tokens_per_second:.0f} tokens/s: {shlex.join(best.candidate.flags)}")
    return {
        "flags": [*flags, *best.candidate.flags],
        "changed": best.candidate.flags,
        "trials": [dataclasses.asdict(outcome) for outcome in outcomes],
    }


@command_line
def main() -> int:
    parser = ProgramParser(__doc__)
    parser.add_argument("--trial-steps", type=int, default=5, help="steps that count in each trial (default: 5)")
    parser.add_argument("--warm-up-steps", type=int, default=2, help="steps before them (default: 2)")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no trial begins (default: 30)")
    parser.add_argument(
        "--trial-minutes", type=float, default=10.0, help="after which a trial is ended that hangs (default: 10)"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="of this machine, as torchrun starts them (default: 1)"
    )
    parser.add_argument("--most-micro-batch", type=int, help="the largest micro-batch to try")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all trials and the winner")
    parser.add_argument("--trial", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    arguments, words = parser.parse_known_args(sys.argv[1:])
    if arguments.trial is not None:
        return run_trial(arguments.trial, arguments.trial_steps, arguments.warm_up_steps, words)
    for name in ("trial_steps", "processes"):
        if getattr(arguments, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {getattr(arguments, name)} is too few; give at least 1")
    # Written so that nan is refused.
    if not arguments.trial_minutes > 0:
        raise ConfigError(f"--trial-minutes {arguments.trial_minutes:g} leaves no time; give 10, or any number above 0")
    found = tune(arguments, words)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
