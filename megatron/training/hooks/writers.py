# SPDX-License-Identifier: Apache-2.0
"""Files and services that are given every row of metrics and every evaluation: metrics.jsonl, TensorBoard, W&B.

metrics.jsonl has one JSON object per line, for programs to read. A row of training has "iteration", "consumed_samples",
"lm loss", "grad_norm", "lr", ...; a row of an evaluation has "iteration", "split" and "eval": {"lm loss": ...}. Numbers
have full precision; a value that is not known or not finite is null. Rows are flushed when they are written, so that a
killed run loses only the rows since its last progress line.

Curves have upstream's names, which for the numbers of a step differ from the names in metrics.jsonl.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.core import optional_deps
from megatron.core.dist_checkpointing.directory_lock import DirectoryLock
from megatron.core.errors import ConfigError, say
from megatron.core.line_files import append_lines, read_rows
from megatron.training.config.container import RunConfig
from megatron.training.config.logging import LoggerConfig
from megatron.training.metrics import MetricsRow
from megatron.training.run import Evaluation, Hook, HookContext, Phase, Run

# Read by examples/quickstart/report.py and by users' scripts: names in it are an interface.
FILE_NAME = "metrics.jsonl"
REDONE_NAME = "metrics.redone.jsonl"


# ---- metrics.jsonl


class MetricsFileHook(Hook):
    """--metrics-dir: every iteration and every evaluation, on the first rank."""

    phase = Phase.WRITE

    def __init__(self, directory: str) -> None:
        self.file = MetricsFile(directory)
        self._lock: DirectoryLock | None = None
        self._written = 0
        """The last iteration that has a line."""
        self._unwritten: Sequence[MetricsRow] = ()
        """On another rank than the first, the rows that it was given last."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> MetricsFileHook | None:
        """Return the hook for --metrics-dir; None where it is not asked for."""
        return None if config.logger.metrics_dir is None else cls(config.logger.metrics_dir)

    def on_train_start(self, run: Run) -> None:
        """Drop the rows of iterations that will be done again. Raises TemporaryError while another run writes there."""
        if run.is_first_rank:
            root = self.file.path.parent
            # A directory inside of --save belongs to this run already.
            is_ours = any(lock.covers(root) for lock in run.save_locks)
            self._lock = None if is_ours else self.file.lock()
            self.file.open(run.progress.iteration)

    def on_step_start(self, run: Run) -> None:
        """After a way back to a checkpoint, drop the rows of what is done again, as a new start would."""
        if run.is_first_rank and run.progress.iteration < self._written:
            self._written = run.progress.iteration
            self.file.open(self._written)

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        """Write a line for each iteration."""
        if run.is_first_rank and rows:
            self._written = rows[-1].iteration
            self._write_rows(rows)
        else:
            self._unwritten = rows

    def on_save(self, run: Run) -> None:
        """Write the rows that a lost first rank had no time to, if this rank has taken its place."""
        if run.is_first_rank and self._unwritten:
            last = max((row.get("iteration", 0) for row in read_rows(self.file.path)[0]), default=0)
            self._write_rows([row for row in self._unwritten if row.iteration > last])
            self._unwritten = ()

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Write a line for the evaluation."""
        if run.is_first_rank:
            row: dict[str, Any] = {
                "iteration": run.progress.iteration,
                "split": evaluation.split,
                "eval": evaluation.losses,
            }
            row |= {} if evaluation.set_name is None else {"set": evaluation.set_name}
            row |= {"final": True} if evaluation.final else {}
            row |= {"generated": evaluation.generated} if evaluation.generated else {}
            row |= {"tasks": evaluation.scores} if evaluation.scores else {}
            self._write(row)

    def on_close(self, run: Run) -> None:
        """Let the next run have the directory."""
        if self._lock is not None:
            self._lock.release()

    def _write_rows(self, rows: Iterable[MetricsRow]) -> None:
        self._write(*({"iteration": row.iteration, **row.values} for row in rows))

    def _write(self, *rows: dict[str, Any]) -> None:
        if self._lock is not None:
            self._lock.check()
        self.file.write(*rows)


class MetricsFile:
    """Appends rows to DIRECTORY/metrics.jsonl, continuing after the rows of an earlier part of the run."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory) / FILE_NAME

    def lock(self) -> DirectoryLock:
        """The right to write there, which one run at a time has: rows of two would be mixed. Makes the directory.

        Raises TemporaryError while another run has it, ConfigError when the directory cannot be written.
        """
        root = self.path.parent
        try:
            root.mkdir(parents=True, exist_ok=True)
            return DirectoryLock(root, lambda sentence: say(f"metrics: {sentence}"), flag="--metrics-dir")
        except OSError as error:
            raise self._explain(error) from error

    def open(self, resumed_iteration: int) -> None:
        """Keep the rows up to `resumed_iteration`, and see that more can be appended.

        Rows after it belong to iterations that will be done again, and are moved to metrics.redone.jsonl; final
        evaluations go, since the run goes on. A run from the start (0) sets a file of an earlier run aside as
        metrics.jsonl.old. Raises ConfigError when the directory cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._keep_until(resumed_iteration)
            self.path.touch()
        except OSError as error:
            raise self._explain(error) from error

    def write(self, *rows: dict[str, Any]) -> None:
        """Append rows, all or none. Raises StorageError when the disk does not take them."""
        append_lines(self.path, (json.dumps(_finite(row)) for row in rows))

    def _explain(self, error: OSError) -> ConfigError:
        where = self.path.parent
        return ConfigError(f"--metrics-dir {where} cannot be written ({error.strerror}); give a writable directory")

    def _keep_until(self, iteration: int) -> None:
        if iteration == 0:
            if self.path.stat().st_size:
                # Two runs in one file would have every iteration twice; deleting the earlier one would lose a user's
                # data.
                os.replace(self.path, self.path.with_suffix(".jsonl.old"))
                self.path.with_name(REDONE_NAME).unlink(missing_ok=True)
            return
        kept, redone = [], []
        # Line by line: the file of a long run need not fit into memory twice, and a torn byte must not stop a resumed
        # run.
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                row = _row_or_none(line)
                if row is not None and row.get("iteration", 0) <= iteration and not row.get("final"):
                    kept.append(line)
                elif row is not None and "eval" not in row:
                    redone.append(line.rstrip("\n"))
        # For reports: the steps were made, although they do not count.
        append_lines(self.path.with_name(REDONE_NAME), redone)
        # Written under another name and renamed: a crash in between leaves the old file intact.
        partial = self.path.with_suffix(".jsonl.tmp")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, self.path)


def _row_or_none(line: str) -> dict[str, Any] | None:
    """The row of a complete line; None for the torn last line of a killed run."""
    # A row that lacks its end may be cut inside a number and still be valid JSON.
    if not line.endswith("\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    # JSON has no NaN and no infinity; Python would write words that other readers refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ---- curves

CURVE_NAMES = {
    "lr": "learning-rate", "global_batch_size": "batch-size", "loss_scale": "loss-scale", "grad_norm": "grad-norm",
    "params_norm": "params-norm", "num_zeros_in_grad": "num-zeros", "iteration_time_seconds": "iteration-time",
    "memory_bytes": "mem-allocated-bytes", "peak_memory_bytes": "mem-max-allocated-bytes", "tflops": "throughput",
    "tokens_per_second": "tokens-per-second", "mfu": "mfu", "consumed_samples": None, "skipped": None,
}  # fmt: skip
"""Numbers of every step -> the curve's name; None: there is no such curve. Other metrics keep their names."""


def build_row_points(row: MetricsRow, config: LoggerConfig, world_size: int) -> dict[str, float]:
    """The points of one iteration, by curve: the numbers of the step at every --tensorboard-log-interval, and what else
    was measured in this iteration whenever it was."""
    wanted = {"learning-rate", "batch-size", "grad-norm", "params-norm", "num-zeros"}
    for is_asked_for, names in (
        (config.log_loss_scale_to_tensorboard, {"loss-scale"}),
        (config.log_timers_to_tensorboard, {"iteration-time"}),
        (config.log_memory_to_tensorboard, {"mem-allocated-bytes", "mem-max-allocated-bytes"}),
        (config.log_throughput, {"throughput", "tokens-per-second", "mfu"}),
    ):
        wanted |= names if is_asked_for else set()
    # Only the step's numbers are thinned out: what a flag measures has a separate interval.
    is_due = row.iteration % config.tensorboard_log_interval == 0
    points = {}
    for name, value in row.values.items():
        is_of_every_step = name in CURVE_NAMES or name in row.losses
        curve = CURVE_NAMES.get(name, name)
        if value is None or curve is None or (is_of_every_step and not is_due):
            continue
        if name not in CURVE_NAMES or curve in wanted:
            points[curve] = value
    if is_due and config.log_world_size_to_tensorboard:
        points["world-size"] = world_size
    return points


def build_evaluation_points(evaluation: Evaluation, config: LoggerConfig) -> dict[str, float]:
    """Return the points of one evaluation, by curve."""
    points = {f"{name} {evaluation.name}": loss for name, loss in evaluation.losses.items()}
    if config.log_validation_ppl_to_tensorboard:
        points |= {f"{name} {evaluation.name} ppl": value for name, value in evaluation.perplexities.items()}
    return points | evaluation.scores


class TensorBoardHook(Hook):
    """--tensorboard-dir: event files, on the first rank; their writer is `run.tensorboard_writer`."""

    phase = Phase.WRITE

    def __init__(self, config: LoggerConfig) -> None:
        self.config = config
        self._previous_excepthook: Any = None

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> TensorBoardHook | None:
        """Return the hook for --tensorboard-dir; None where it is not asked for."""
        return None if config.logger.tensorboard_dir is None else cls(config.logger)

    def on_train_start(self, run: Run) -> None:
        """Open the event file. Curves after the resumed iteration, of iterations done again, are hidden."""
        if run.is_first_rank:
            # On the first rank only: the package need not be installed on every node.
            tensorboard = optional_deps.require("torch.utils.tensorboard", needed_by="--tensorboard-dir")
            # Its errors are raised in the call that follows; the thread's traceback would repeat them.
            self._previous_excepthook, threading.excepthook = threading.excepthook, self._hear_of_thread
            try:
                run.tensorboard_writer = tensorboard.SummaryWriter(
                    log_dir=self.config.tensorboard_dir,
                    max_queue=self.config.tensorboard_queue_size,
                    # TensorBoard hides points from here on, which iterations done again will replace.
                    purge_step=run.progress.iteration + 1,
                )
            except OSError as error:
                raise ConfigError(
                    f"--tensorboard-dir {self.config.tensorboard_dir} cannot be written ({error.strerror}); "
                    "give a writable directory"
                ) from error

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        """Write the points of each iteration."""
        if run.tensorboard_writer is not None:
            world_size = run.groups.world.size()
            points = ((build_row_points(row, self.config, world_size), row.iteration) for row in rows)
            self._write(run.tensorboard_writer, points)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Write the points of the evaluation."""
        if run.tensorboard_writer is not None:
            points = build_evaluation_points(evaluation, self.config)
            self._write(run.tensorboard_writer, [(points, run.progress.iteration)])
            if evaluation.generated:
                # TensorBoard shows Markdown, in which indented text stays as it is.
                text = textwrap.indent(evaluation.generated, "    ", lambda line: True)
                run.tensorboard_writer.add_text("generated text", text, run.progress.iteration)

    def on_close(self, run: Run) -> None:
        """Write what is still in memory and close the writer."""
        writer, run.tensorboard_writer = run.tensorboard_writer, None
        try:
            if writer is not None:
                self._write(writer, ())  # what cannot be written is no longer there to be closed
                writer.close()
        finally:
            if self._previous_excepthook is not None:
                threading.excepthook, self._previous_excepthook = self._previous_excepthook, None

    def _write(self, writer: Any, points: Iterable[tuple[dict[str, float], int]]) -> None:
        """Write points, each with its iteration. Raises OSError when the disk does not take them."""
        try:
            for values, iteration in points:
                for name, value in values.items():
                    writer.add_scalar(name, value, iteration)
            # Now, not two minutes later: an error then belongs to these points.
            writer.flush()
        except OSError:
            # Its thread has ended with the first error. torch opens another file for the next point; closing this one
            # could wait for the thread for ever.
            writer.file_writer = writer.all_writers = None
            raise

    def _hear_of_thread(self, args: threading.ExceptHookArgs) -> None:
        is_of_tensorboard = args.thread is not None and type(args.thread).__module__.startswith("tensorboard.")
        if not is_of_tensorboard:
            self._previous_excepthook(args)


class WandbHook(Hook):
    """--wandb-project: the same curves for Weights & Biases, on the first rank; the run's settings are its config.
    WANDB_MODE=offline keeps them in --wandb-save-dir."""

    phase = Phase.WRITE

    def __init__(self, config: LoggerConfig) -> None:
        self.config = config
        self.writer: Any = None

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> WandbHook | None:
        """Return the hook for --wandb-project; None where it is not asked for."""
        return None if config.logger.wandb_project is None else cls(config.logger)

    def on_train_start(self, run: Run) -> None:
        """Begin a run there. Raises ConfigError where the package is missing or does not take the settings."""
        if not run.is_first_rank:
            return
        needed_by = f"--wandb-project {self.config.wandb_project}"
        wandb = optional_deps.require("wandb", needed_by=needed_by)
        save = run.config.checkpoint.save
        directory = Path(self.config.wandb_save_dir or (Path(save) / "wandb" if save else "."))
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.writer = wandb.init(
                project=self.config.wandb_project,
                name=self.config.wandb_exp_name,
                entity=self.config.wandb_entity,
                dir=str(directory),
                config=run.config.to_dict(),
            )
        except Exception as error:  # whatever the package raises: no account, no network, no such entity
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{needed_by}: Weights & Biases cannot begin a run ({type(error).__name__}: {reason}); "
                "log in, or set WANDB_MODE=offline in the environment"
            ) from error

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        """Write the points of each iteration."""
        for row in rows if self.writer is not None else ():
            points = build_row_points(row, self.config, run.groups.world.size())
            if points:
                # Steps must not go down; rows come once each and in order, so they never do.
                self.writer.log(points, step=row.iteration)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Write the points of the evaluation."""
        if self.writer is not None:
            self.writer.log(build_evaluation_points(evaluation, self.config), step=run.progress.iteration)

    def on_close(self, run: Run) -> None:
        """Send, or write, what is still in memory and end the run there."""
        if self.writer is not None:
            self.writer.finish()
            self.writer = None
