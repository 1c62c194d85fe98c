"""What a training run is made of: its parts, how far it is, what a step gives back, and the moments hooks may use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from megatron.core.distributed.model_chunk import ModelChunk
    from megatron.core.num_microbatches_calculator import NumMicrobatchesCalculator
    from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel.executor import Executor
    from megatron.core.pipeline_parallel.programs import Program
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.timers import Timers
    from megatron.training.config.container import RunConfig
    from megatron.training.data.loading import TrainingData
    from megatron.training.data.planned_batches import StepPlans
    from megatron.training.recipes.recipe import Recipe


@dataclass
class Progress:
    """How far a run is. With the seed it decides which samples come next, so every checkpoint has it."""

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

    @property
    def finished(self) -> bool:
        """True when no iteration is left."""
        return self.iteration >= self.target_iterations

    def advance(self, samples: int, *, skipped: bool) -> None:
        """Count one iteration over `samples` samples."""
        self.iteration += 1
        self.consumed_train_samples += samples
        self.skipped_iterations += skipped

    def end_here(self) -> None:
        """No further iteration: the run only evaluates (--skip-train)."""
        self.target_iterations = self.iteration

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: everything but the target, which is the next run's own."""
        state = dataclasses.asdict(self)
        del state["target_iterations"]
        return state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The inverse of `state_dict`; counts that an older checkpoint lacks stay as they are."""
        for name, value in state.items():
            if name != "target_iterations" and hasattr(self, name):
                setattr(self, name, value)


@dataclass(frozen=True)
class StepResult:
    """What one training step gives to the hooks. Tensors stay on the device until a hook reads them."""

    losses: dict[str, torch.Tensor]
    """Mean over the tokens of the global batch, by name; "lm loss" is the language-model loss."""
    grad_norm: torch.Tensor | None
    """L2 norm of all gradients before clipping."""
    skipped: bool
    """The update was not applied because a gradient was not finite."""
    learning_rate: float
    """After this step, as upstream logs it: the rate that the next step will use."""
    samples: int
    """Size of the global batch."""
    loss_scale: float = 1.0
    """What this step's loss was multiplied by before backward, with --fp16."""


@dataclass(frozen=True)
class Evaluation:
    """Mean losses over one evaluation."""

    split: Literal["validation", "test"]
    losses: dict[str, float]
    final: bool
    """True for the evaluation after the last iteration."""
    set_name: str | None = None
    """Which of several validation sets; None where there is one."""

    @property
    def name(self) -> str:
        """`validation`, `validation-books`, `test`."""
        return self.split if self.set_name is None else f"{self.split}-{self.set_name}"


@dataclass
class Run:
    """One process's share of a training run: everything a step or a hook needs, built once by `setup`."""

    config: RunConfig
    groups: ProcessGroupCollection
    device: torch.device
    recipe: Recipe
    """What depends on the kind of model: tokens, data, forward step."""
    model: list[ModelChunk]
    """This rank's pipeline chunks."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    executor: Executor
    schedule: Callable[[int], Program]
    """Number of microbatches -> this rank's actions in order: forward and backward of each, sends and receives."""
    evaluation_schedule: Callable[[int], Program]
    """The same, forward only."""
    batch_size: NumMicrobatchesCalculator
    data: TrainingData
    progress: Progress
    hooks: Hook
    timers: Timers
    """Of the parts of a step; --timing-log-level says which of them run."""
    flops_per_token: float | None
    """Floating-point operations of the whole model for one token, forward and backward; None where they are unknown."""
    plans: StepPlans | None = None
    """With --hybrid-context-parallel: which conversations of a step share a microbatch, and on which ranks."""
    evaluation_shape: Sequence[int] | None = None
    """Of the hidden states that stages exchange in an evaluation; the executor's own when None."""
    stop_reason: str | None = field(default=None, init=False)
    loss_names: tuple[str, ...] | None = field(default=None, init=False)
    """Names of the losses, once the last stage has told the others."""

    @property
    def is_first_rank(self) -> bool:
        """True on the one process that writes logs and metrics."""
        return self.groups.world.rank() == 0

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank in the next step."""
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
        asked = self.config.validation.eval_global_batch_size or self.batch_size.steps[-1].global_batch_size
        unit = self.evaluation_samples_per_microbatch
        return max(1, asked // unit) * unit

    @property
    def seq_length(self) -> int:
        """Tokens per training sequence."""
        assert self.config.data.seq_length is not None, "checked by read_run_config"
        return self.config.data.seq_length

    def request_stop(self, reason: str) -> None:
        """End training after the current step. All ranks must ask at the same iteration."""
        self.stop_reason = self.stop_reason or reason


class Hook:
    """The moments of a run at which something may happen beside the step itself. Override what is needed.

    on_train_start   once, after loading, before the first step
    on_step_start    before each step
    on_gradients     in each step, when the gradients are complete, before they are clipped and used
    on_step_end      after each step; the iteration is counted already
    on_evaluate      after an evaluation
    on_save          after a checkpoint has become visible
    on_train_end     once, after the last step, also when a stop was requested
    on_close         once, also after an error: release files and processes
    """

    def on_train_start(self, run: Run) -> None:
        """Before the first step."""

    def on_step_start(self, run: Run) -> None:
        """Before each step."""

    def on_gradients(self, run: Run) -> None:
        """Between backward and update; the gradients are those of the loss times `run.optimizer.loss_scale`."""

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """After each step."""

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """After an evaluation."""

    def on_save(self, run: Run) -> None:
        """After a checkpoint has become visible."""

    def on_train_end(self, run: Run) -> None:
        """After the last step."""

    def on_close(self, run: Run) -> None:
        """At the very end, also after an error."""
