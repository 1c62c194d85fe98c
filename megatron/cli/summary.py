# SPDX-License-Identifier: Apache-2.0
"""The last lines of `pretrain_gpt.py`: the results of a run, where they are, and the next commands.

Only the program has them, and not a script that calls pretrain(): they name the program's command line.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.errors import say
from megatron.training.config.container import RunConfig
from megatron.training.hooks.progress_lines import format_duration
from megatron.training.metrics import MetricsRow
from megatron.training.run import Evaluation, Hook, Phase, Run

FILE_NAME = "summary.txt"
_NULL_PROMPT = "1 2 3"
"""For a tokenizer whose text is numbers."""
_PROMPT = "Once upon a time"


@dataclass(frozen=True)
class ProgramStart:
    """Command that started this program."""

    program: str
    """sys.argv[0]."""
    flags: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    """The current one, in which commands are meant to be typed."""
    can_import: bool = False
    """True if `python -m megatron` works in any directory, as the package is installed."""


@dataclass
class Progressed:
    """Position of the run when training began."""

    iteration: int
    samples: int
    at_seconds: float = field(default_factory=time.monotonic)


class SummaryHook(Hook):
    """Prints the summary on the first rank once the run is over, and writes it next to the checkpoints."""

    # First of all phases, which is the last when hooks are closed: nothing is printed below it.
    phase = Phase.MEASURE

    def __init__(self, start: ProgramStart, can_export: Callable[[Run], bool]) -> None:
        """can_export: whether a Hugging Face model can be made of the run's."""
        self.start, self.can_export = start, can_export
        self._began: Progressed | None = None
        self._losses: dict[str, float] = {}
        self._evaluations: dict[str, Evaluation] = {}
        self._failed = False

    def on_train_start(self, run: Run) -> None:
        """Note where the run begins."""
        if run.is_first_rank:
            self._began = Progressed(run.progress.iteration, run.progress.consumed_train_samples)

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        """Keep the last losses."""
        self._losses = dict(rows[-1].losses)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Keep the last evaluation of each set."""
        self._evaluations[evaluation.name] = evaluation

    def on_error(self, run: Run, error: Exception) -> None:
        """The error is the last word."""
        self._failed = True

    def on_close(self, run: Run) -> None:
        """Print the summary and write its file."""
        if self._began is None or self._failed:
            return
        results = self._describe(run, self._began)
        commands = list_commands(run.config, self.start, run.saved_progress is not None, run.progress.finished)
        # Asked only where it matters: the answer takes a tenth of a second.
        if "export" in commands and not self.can_export(run):
            del commands["export"]
        text = format_summary(results, commands)
        say(f"\n{text}")
        directory = find_directory(run.config)
        if directory is not None:
            write_summary(directory, text)

    def _describe(self, run: Run, began: Progressed) -> dict[str, str]:
        elapsed = time.monotonic() - began.at_seconds
        progress, results = run.progress, {}
        iterations = progress.iteration - began.iteration
        if iterations:
            tokens = (progress.consumed_train_samples - began.samples) * run.seq_length
            results["trained"] = (
                f"iterations {began.iteration + 1} to {progress.iteration} of {run.config.training.train_iters}"
                if run.config.training.train_iters else f"iterations {began.iteration + 1} to {progress.iteration}"
            )  # fmt: skip
            results["tokens"] = (
                f"{tokens:,} in {format_duration(elapsed)}, {tokens / elapsed:,.0f} per second with everything beside "
                "training"
            )
        results |= {name: f"{loss:.4f}" for name, loss in self._losses.items() if iterations}
        for evaluation in self._evaluations.values():
            perplexities = evaluation.perplexities
            values = (
                f"{loss:.4f} (perplexity {perplexities[name]:.2f})" if name in perplexities else f"{name} {loss:.4f}"
                for name, loss in evaluation.losses.items()
            )
            results[f"{evaluation.name} loss"] = ", ".join(values)
        # An iteration may be counted as both: a loss that is NaN has gradients that are.
        skipped = max(progress.skipped_iterations, progress.nan_iterations)
        if skipped:
            results["not used"] = f"{skipped} iterations, whose loss or gradients were not finite"
        checkpoint = run.config.checkpoint
        if run.saved_progress is not None and checkpoint.save is not None:
            results["checkpoint"] = f"{checkpoint.save}, iteration {run.saved_progress.iteration}"
        elif iterations:
            results["checkpoint"] = "none was saved; --save DIR keeps the model"
        if checkpoint.save_hf is not None and progress.finished:
            results["Hugging Face"] = str(checkpoint.save_hf)
        return results


def list_commands(config: RunConfig, start: ProgramStart, is_saved: bool, is_finished: bool) -> dict[str, str]:
    """Return what to type next -> the command; nothing where no checkpoint was saved."""
    root = config.checkpoint.save
    if root is None or not is_saved:
        return {}
    commands = {}
    can_resume = not config.checkpoint.no_save_optim and not config.validation.skip_train
    if can_resume and (program := format_program(start)) is not None:
        flags = build_resume_flags(config, start.flags, is_finished)
        commands["train on" if is_finished else "resume"] = f"{program} {shlex.join(flags)}"
    prompt = _NULL_PROMPT if config.tokenizer.tokenizer_type == "NullTokenizer" else _PROMPT
    prompt = config.validation.eval_sample_prompt or prompt
    module = format_module(start)
    commands["generate"] = f"{module} megatron generate {shlex.join(['--load', str(root), '--prompt', prompt])}"
    output = f"{str(root).rstrip('/')}-hf"
    paths = shlex.join(["--input-path", str(root), "--output-path", output])
    commands["export"] = f"{module} megatron convert --source megatron --target hf {paths}"
    return commands


def format_program(start: ProgramStart) -> str | None:
    """Return how the run was started, up to its flags; None where a cluster has started it, or several nodes."""
    environment = start.environment
    processes = environment.get("WORLD_SIZE", "1")
    # There the command was typed on another machine, or in a job script that we have not seen.
    if "SLURM_PROCID" in environment or environment.get("LOCAL_WORLD_SIZE", processes) != processes:
        return None
    name = Path(start.program).name
    if name == "megatron train" or start.program.endswith(("megatron/cli/train.py", "megatron/__main__.py")):
        program = ["-m", "megatron", "train"]
    elif name == "megatron-train":
        program = ["-m", "megatron", "train"] if processes != "1" else []
    else:
        program = [os.path.relpath(start.program, start.directory)]
    if processes != "1":
        return shlex.join(["torchrun", "--nproc_per_node", processes, *program])
    return shlex.join(["python", *program] if program else [name])


def format_module(start: ProgramStart) -> str:
    """`python -m`, in a way that finds this package from the current directory."""
    root = Path(__file__).resolve().parents[2]
    if start.can_import or root == start.directory.resolve():
        return "python -m"
    return f"PYTHONPATH={shlex.quote(str(root))} python -m"


_NOT_AGAIN = {
    "--finetune": 0, "--no-load-optim": 0, "--no-load-rng": 0, "--ckpt-step": 1, "--pretrained-checkpoint": 1,
    "--override-opt-param-scheduler": 0, "--override-ckpt-iteration": 1, "--load-main-params-from-ckpt": 0,
}  # fmt: skip
"""Flags that start another run from a checkpoint, and how many values they have."""


def build_resume_flags(config: RunConfig, flags: Sequence[str], is_finished: bool) -> list[str]:
    """The flags with which the run goes on from its checkpoint; as long again, where it is finished."""
    changes = {"--load": str(config.checkpoint.save)}
    if not is_finished:
        return replace_flags(flags, changes)
    training, scheduler = config.training, config.scheduler
    # Where it has not come down to nothing the learning rate stays what it was, as the checkpoint's schedule has it.
    stays = scheduler.lr_decay_style == "constant" or config.optimizer.min_lr > 0
    if training.train_samples is not None:
        changes["--train-samples"] = str(2 * training.train_samples)
        if stays:
            changes["--lr-decay-samples"] = str(scheduler.lr_decay_samples or training.train_samples)
    elif training.train_iters is not None:
        changes["--train-iters"] = str(2 * training.train_iters)
        if stays:
            changes["--lr-decay-iters"] = str(scheduler.lr_decay_iters or training.train_iters)
    return [*replace_flags(flags, changes), *([] if stays else ["--override-opt-param-scheduler"])]


def replace_flags(flags: Sequence[str], changes: Mapping[str, str]) -> list[str]:
    """The command line with these values, without the flags of `_NOT_AGAIN`."""
    dropped = {**_NOT_AGAIN, **dict.fromkeys(changes, 1)}
    kept: list[str] = []
    values = 0
    for word in flags:
        name, has_value, _ = word.partition("=")
        # A flag that is dropped takes its values with it.
        if values and not word.startswith("--"):
            values -= 1
            continue
        values = 0
        if name in dropped:
            values = 0 if has_value else dropped[name]
            continue
        kept.append(word)
    return [*kept, *(word for name, value in changes.items() for word in (name, value))]


def format_summary(results: Mapping[str, str], commands: Mapping[str, str]) -> str:
    """Two columns of results; below them the commands, one on each line."""
    width = max(map(len, (*results, *commands)), default=0)
    lines = [f"{name:<{width}}  {text}" for name, text in results.items()]
    if commands:
        lines += ["", "What to do next:", *(f"{name:<{width}}  {text}" for name, text in commands.items())]
    return "\n".join(lines)


def find_directory(config: RunConfig) -> Path | None:
    """Return where the summary is written: with the checkpoints, or else with the metrics."""
    for directory in (config.checkpoint.save, config.logger.metrics_dir, config.logger.tensorboard_dir):
        if directory is not None and Path(directory).is_dir():
            return Path(directory)
    return None


def write_summary(directory: Path, text: str) -> None:
    """Replace the summary of an earlier run. A file that cannot be written is a note, as the run is over."""
    path = directory / FILE_NAME
    beside = path.with_suffix(f".tmp-{os.getpid()}")
    try:
        beside.write_text(f"{text}\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        say(f"note: {path} could not be written: {error.strerror}")
