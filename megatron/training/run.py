# SPDX-License-Identifier: Apache-2.0
"""Building blocks of a training run: its parts, its progress, the result of a step, and the moments hooks may use."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megatron.training.config.preference import PREFERENCE_VALUES
from megatron.training.metrics import Metrics, MetricsRow

# This module is below all parts that it names: at run time it imports none of them, so that a hook or a script can
# be written without loading the model code.
if TYPE_CHECKING:
    import torch

    from megatron.core.dist_checkpointing.directory_lock import DirectoryLock
    from megatron.core.dist_checkpointing.finding import FoundCheckpoint
    from megatron.core.distributed.model_chunk import ModelChunk
    from megatron.core.many_sites.outer_optimizer import OuterOptimizer
    from megatron.core.num_microbatches_calculator import NumMicrobatchesCalculator
    from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel.executor import Executor
    from megatron.core.pipeline_parallel.programs import Program
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.timers import Timers
    from megatron.core.traffic import Traffic
    from megatron.planner.throughput import Yardstick
    from megatron.training.config.container import RunConfig
    from megatron.training.data.loading import Batch, TrainingData
    from megatron.training.data.planned_batches import StepPlans
    from megatron.training.recipes.recipe import Recipe


LARGEST_EXPONENT = 20
"""Of a perplexity."""


@dataclass
class Progress:
    """Progress of a run. With the seed it decides which samples come next, so every checkpoint has it."""

    target_iterations: int
    """The run is over after this many iterations."""
    iteration: int = 0
    """Iterations done, skipped ones included."""
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    """Iterations whose update was not applied because a gradient was not finite."""
    nan_iterations: int = 0
    """Iterations whose loss was not a number."""
    floating_point_operations: int = dataclasses.field(default=0, compare=False)
    """Operations so far, as a user's loop counts them; no part of a run's position, and not set by our loop, which
    counts tokens."""

    @property
    def finished(self) -> bool:
        """True when no iteration is left."""
        return self.iteration >= self.target_iterations

    def advance(self, samples: int, *, skipped: bool) -> None:
        """Count one iteration over `samples` samples."""
        self.iteration += 1
        self.consumed_train_samples += samples
        # A skipped update has used up its samples all the same: without this a resumed run would read them once more.
        self.skipped_iterations += skipped

    def end_here(self) -> None:
        """Leave no further iteration: the run only evaluates (--skip-train)."""
        self.target_iterations = self.iteration

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps: everything but the target, which the next run sets."""
        state = dataclasses.asdict(self)
        # A resumed run may be longer or shorter than the saved one; only its flags say how long it is.
        del state["target_iterations"]
        return state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The inverse of `state_dict`; counts that an older checkpoint lacks stay as they are."""
        # Checkpoints of later releases may hold counts that this one does not know.
        for name in state.keys() & {count.name for count in dataclasses.fields(self)} - {"target_iterations"}:
            setattr(self, name, state[name])


@dataclass(frozen=True)
class StepResult:
    """Result of one training step, for the hooks. Tensors stay on the device until a hook reads them."""

    losses: dict[str, torch.Tensor]
    """Mean over the tokens of the global batch, by name; "lm loss" is the language-model loss."""
    grad_norm: torch.Tensor | None
    """L2 norm of all gradients before clipping."""
    skipped: bool
    """The update was not applied because a gradient was not finite. False where that is only looked at later
    (MegatronOptimizer.defers_check)."""
    learning_rate: float
    """After this step, as upstream logs it: the rate that the next step will use."""
    samples: int
    """Size of the global batch."""
    loss_scale: float = 1.0
    """Factor on this step's loss before backward, with --fp16."""


class EventLog(Protocol):
    """A place to note what happens to a run."""

    def add(self, event: str, iteration: int, text: str = "", **more: Any) -> None:
        """Note an event. Never raises for want of a disk."""


@dataclass(frozen=True)
class PassedOver:
    """Data that were not trained on."""

    first_sample: int
    last_sample: int
    reason: str


@dataclass(frozen=True)
class Evaluation:
    """Mean losses over one evaluation."""

    split: Literal["validation", "test"]
    losses: dict[str, float]
    final: bool
    """True for the evaluation after the last iteration."""
    set_name: str | None = None
    """Name among several validation sets; None where there is one."""
    samples: str = ""
    """Of what the losses are means, in words: `2 batches of 8: samples 16 to 31 of 1000`."""
    generated: str = ""
    """--eval-sample-prompt and what the model made of it; with the last of several sets only."""
    scores: dict[str, float] = field(default_factory=dict)
    """Of --eval-tasks, such as `arc_easy acc`; with the last of several sets only."""

    @property
    def perplexities(self) -> dict[str, float]:
        """exp of the losses that are mean losses of tokens, as all are but the values of --dpo; capped, so that an
        untrained model has a finite number; NaN of NaN."""
        # In this order: of NaN and a number `min` returns the first.
        return {
            name: math.exp(min(loss, LARGEST_EXPONENT))
            for name, loss in self.losses.items()
            if name not in PREFERENCE_VALUES
        }

    @property
    def name(self) -> str:
        """The name in logs: `validation`, `validation-books`, `test`."""
        return self.split if self.set_name is None else f"{self.split}-{self.set_name}"


def list_none(ranks: Sequence[int]) -> list[int]:
    """None of these ranks is known to have ended."""
    return []


def ignore_peers() -> None:
    """There are none, or nothing can be done about them."""


@dataclass
class Run:
    """One process's share of a training run: everything a step or a hook needs, built once by `setup`.

    What changes while it trains: the model and the optimizer with every step, `progress`, and the last fields.
    """

    config: RunConfig
    """The settings, the same on all processes."""
    groups: ProcessGroupCollection
    """The processes this one talks to, by axis of the layout."""
    device: torch.device
    """Device on which this process computes."""
    recipe: Recipe
    """Parts that depend on the kind of model: tokens, data, forward step."""
    model: list[ModelChunk]
    """This rank's pipeline chunks, each with its flat buffers of parameters and gradients."""
    optimizer: MegatronOptimizer
    """Clips the gradients and updates the parameters of all chunks."""
    scheduler: OptimizerParamScheduler
    """Sets learning rate and weight decay, by the number of samples consumed."""
    executor: Executor
    """Runs a schedule on the chunks: forward, backward, and exchange with the neighbouring stages."""
    schedule: Callable[[int], Program]
    """Number of microbatches -> this rank's actions in order: forward and backward of each, sends and receives."""
    evaluation_schedule: Callable[[int], Program]
    """The same, forward only."""
    batch_size: NumMicrobatchesCalculator
    """Sizes of global and micro-batches, by the number of samples consumed."""
    data: TrainingData
    """The datasets of training, validation and test, and how this process reads them."""
    progress: Progress
    """Position of the run: the part of its state that decides which samples come next."""
    hooks: Hook
    """Everything that happens around the steps, as one hook."""
    timers: Timers
    """Of the parts of a step; --timing-log-level says which of them run."""
    flops_per_token: float | None
    """Floating-point operations of the whole model for one token, forward and backward; None where they are unknown."""
    outer: OuterOptimizer | None = None
    """With --diloco-replicas: the exchange with the other sites."""
    plans: StepPlans | None = None
    """With --hybrid-context-parallel: which conversations of a step share a microbatch, and on which ranks."""
    evaluation_shape: Sequence[int] | None = None
    """Of the hidden states that stages exchange in an evaluation; the executor's when None."""
    metrics: Metrics = field(default_factory=Metrics)
    """Values for the log."""
    microbatch_losses: Sequence[dict[str, torch.Tensor]] = ()
    """Of the step under way, after its forward passes: for each microbatch of this rank, name -> [2] = (sum over its
    tokens, number of its tokens); empty before the last stage."""
    step_start: Any = None
    """The StepStart (rerun/replay.py) of the step under way, once a hook has taken it."""
    is_rewound: bool = False
    """The next step begins with other samples than those that follow the last one's."""
    passed_over: dict[int, PassedOver] = field(default_factory=dict)
    """Iterations whose data were taken and not trained on, since this process began."""
    yardstick: Yardstick | None = None
    """Speed that counts as 100 % for MFU; on the first rank, once training starts."""
    has_common_file: bool = False
    """--ckpt-format upstream_torch_dist also writes common.pt, as earlier releases of upstream do."""
    save_locks: list[DirectoryLock] = field(default_factory=list)
    """The right to write into --save, and into another directory of checkpoints; on the first rank, until
    Hook.on_close."""
    loaded_from: Path | None = None
    """The checkpoint that the run continues from; None for a run that starts afresh, or only from weights."""
    base: FoundCheckpoint | None = None
    """The checkpoint of ours whose weights the run began with; None for a run that began otherwise."""
    list_ended_ranks: Callable[[Sequence[int]], list[int]] = list_none
    """Function that returns the ranks among these that have ended; none where that cannot be found out."""
    leave_groups: Callable[[], None] = ignore_peers
    """Function that ends this rank's connections, after an error, so that peers that wait for it meet one, too."""
    saved_progress: Progress | None = None
    """Position of the run when its newest complete checkpoint was taken, which may be some steps ago."""
    events: EventLog | None = None
    """Log of what happens to the run, for reports; on the first rank, with --metrics-dir, from on_train_start on."""
    tensorboard_writer: Any = None
    """TensorBoard's SummaryWriter on the first rank, from Hook.on_train_start to on_close, with --tensorboard-dir."""
    stop_reason: str | None = field(default=None, init=False)
    interrupted: bool = field(default=False, init=False)
    """The stop was asked for by Ctrl-C."""
    loss_names: dict[bool, tuple[str, ...]] = field(default_factory=dict, init=False)
    """Names of the losses of training (False) and evaluation (True), once the last stage has told the others."""

    @cached_property
    def buffers(self) -> list[torch.Tensor]:
        """All buffers of the model; going through its modules takes too long for every step."""
        return [buffer for chunk in self.model for buffer in chunk.module.buffers()]

    @property
    def is_first_rank(self) -> bool:
        """True on the one process that writes logs and metrics."""
        return self.groups.world.rank() == 0

    @property
    def is_repeated(self) -> bool:
        """True if the run had been finished, and its end saved where it stays, before it began."""
        load, path = self.config.checkpoint.load, self.loaded_from
        stays = load is None or path is None or Path(load) in (path, path.parent)
        return (
            self.progress.iteration > 0 and self.progress.finished and stays and not self.config.validation.skip_train
        )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank in the next step."""
        # A batch size that grows, or a plan, gives other numbers as the run goes on: everything here is a function of
        # the samples consumed, so that a resumed run gets the same answer.
        consumed = self.progress.consumed_train_samples
        return (
            self.batch_size.num_microbatches(consumed) if self.plans is None else self.plans.num_microbatches(consumed)
        )

    @property
    def evaluation_samples_per_microbatch(self) -> int:
        """Samples of one microbatch of an evaluation, over all data-parallel ranks."""
        micro_batch_size = self.config.validation.eval_micro_batch_size or self.batch_size.micro_batch_size
        return micro_batch_size * self.batch_size.data_parallel_size

    @property
    def evaluation_batch_size(self) -> int:
        """Samples per evaluation iteration: as asked for, or the global batch size that the run ends with."""
        # The last size, not the present one: evaluations of a run with a growing batch then stay comparable.
        asked = self.config.validation.eval_global_batch_size or self.batch_size.steps[-1].global_batch_size
        unit = self.evaluation_samples_per_microbatch
        return max(1, asked // unit) * unit

    @property
    def seq_length(self) -> int:
        """Tokens per training sequence."""
        assert self.config.data.seq_length is not None, "checked by read_run_config"
        return self.config.data.seq_length

    def read_metrics(self) -> None:
        """Read the values recorded so far and hand them to the hooks. Waits for the device; all ranks call this."""
        rows = self.metrics.read()
        if rows and self.outer is not None:
            means = self.outer.average(
                f"iteration {rows[-1].iteration}", [v for row in rows for v in row.losses.values()]
            )
            for row in rows:
                row.losses = {name: means.pop(0) for name in row.losses}
                row.values |= row.losses
        if rows:
            self.hooks.on_metrics(self, rows)

    def pass_over(self, reason: str) -> None:
        """Count the next iteration without training on its data, which the caller has taken or will not take.

        Neither weights nor the learning rate change. All ranks do this together.
        """
        first = self.progress.consumed_train_samples
        samples = self.batch_size.running_global_batch_size(first)
        # Not "skipped": that counts updates that were not applied because of their gradients.
        self.progress.advance(samples, skipped=False)
        self.passed_over[self.progress.iteration] = PassedOver(first, first + samples - 1, reason)

    def request_stop(self, reason: str) -> None:
        """End training after the current step. All ranks must ask at the same iteration."""
        # The first reason counts: several hooks may ask in the same iteration.
        self.stop_reason = self.stop_reason or reason


Step = Callable[[Run, "Iterator[Batch]"], None]
"""One iteration: a step on the next microbatches, with the moments before and after it."""


class StepWatch(Protocol):
    """Observer that follows a run, to find out when it hangs (launch/hang_watch.py)."""

    def begin_step(self, iteration: int) -> None:
        """An iteration, counted from 1, begins."""

    def count(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same micro-batches, each of which it notes."""

    def saving(self) -> AbstractContextManager[None]:
        """Return what is entered for the time of a save."""

    def end_step(self) -> float | None:
        """The iteration is over; the limit in seconds where it follows from the steps so far, once."""

    def close(self) -> None:
        """The run is over."""


@dataclass(frozen=True)
class Place:
    """The node and device on which a process computes."""

    node: str = "localhost"
    device: int = 0
    """Number of the device, or of the process, on its node."""
    job: str = "N/A"
    """SLURM's id of the job."""


@dataclass(frozen=True)
class HookContext:
    """Arguments of `Hook.build` in addition to the settings."""

    recipe: Recipe
    """Parts that depend on the kind of model."""
    traffic: Traffic
    """Counts of --log-comm-volume."""
    watch: StepWatch | None = None
    """Watch that tells when the job is hung; None for one process, and with --hang-timeout 0."""
    place: Place = field(default_factory=Place)
    """This process's."""


# The order is what makes two guarantees: a value is written before anything acts on it, and everything has acted before
# the run is saved.
class Phase(enum.IntEnum):
    """Order in which hooks take turns. After a step the phases follow each other in this order; before a step and at
    the end of a run in the reverse order, as nested contexts do, so that hooks that measure a step are next to it."""

    MEASURE = 0
    """Records values in `run.metrics`. They are read between this phase and the next one. An error is forgiven, as in
    WRITE, unless other ranks take part (Hook.is_collective)."""
    WRITE = 1
    """Passes on what others have found, and never ends a run: an error is a warning, and the hook is called again.
    Does nothing in which other ranks take part."""
    CONTROL = 2
    """Checks, evaluates, stops, keeps the process in order."""
    SAVE = 3
    """Keeps the run: everything that the step was to bring about has happened."""


class Hook:
    """The moments of a run at which code around the step is called. Override what is needed.

    on_train_start   once, after loading, before the first step
    on_step_start    before each step
    on_gradients     in each step, when the gradients are complete, before they are clipped and used
    on_step_end      after each step; the iteration is counted already
    on_metrics       every --log-interval iterations, and before an evaluation and a checkpoint: one row of numbers for
                     each iteration since
    on_evaluate      after an evaluation
    on_save          after a checkpoint has become visible
    on_train_end     once, after the last step, also when a stop was requested
    on_error         once, when training ends with an error, which goes on afterwards
    on_close         once, also after an error: release files and processes

    In between belongs `wrap_step`, around everything from on_step_start to on_step_end. Hooks of the same phase do not
    rely on each other's order.
    """

    # A user's hooks may stop the run or communicate; CONTROL is the phase in which both are allowed.
    phase: Phase = Phase.CONTROL
    is_collective: bool = False
    """In the phase MEASURE: other ranks take part in its moments. An error then ends the run, because a rank that went
    on after it would be out of step with the others."""

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> Hook | None:
        """The hook of a run with these settings; None where they do not ask for it."""
        return cls()

    def wrap_step(self, step: Step) -> Step:
        """Return what is done for each iteration in place of `step`, which it may call, call again, or leave out."""
        return step

    def on_train_start(self, run: Run) -> None:
        """Called before the first step, after loading."""

    def on_step_start(self, run: Run) -> None:
        """Called before each step."""

    def on_gradients(self, run: Run) -> None:
        """Between backward and update; the gradients include `run.optimizer.loss_scale`."""

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """After each step. Tensors of the result are for `run.metrics.record`; reading one waits for the device."""

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        """Take values that have been read: every iteration comes once, in order."""

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """Called after an evaluation."""

    def on_save(self, run: Run) -> None:
        """Called after the checkpoint of `run.saved_progress` has become visible.

        With --async-save ranks learn of it after different steps, so that no rank may wait for others here.
        """

    def on_train_end(self, run: Run) -> None:
        """Called after the last step, also after a requested stop."""

    def on_error(self, run: Run, error: Exception) -> None:
        """Act when training has raised `error`, on the ranks where it was raised; not when an interrupt ends it."""

    def on_close(self, run: Run) -> None:
        """Called at the very end, also after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the hook: plain numbers, texts, lists and dicts of them, equal on all
        ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from it. Called before on_train_start, and not where the checkpoint has none."""
