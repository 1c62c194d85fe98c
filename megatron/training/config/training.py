# SPDX-License-Identifier: Apache-2.0
"""Length of training, data per step, and times of evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs, NeedsGPU, PathText

# Choices that a program can never handle: the system ends or stops it without asking.
UNCATCHABLE_SIGNALS = ("SIGKILL", "SIGSTOP")
EXIT_SIGNALS = (
    "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGUSR1",
    "SIGSEGV", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGSTKFLT", "SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP",
    "SIGTTIN", "SIGTTOU", "SIGURG", "SIGXCPU", "SIGXFSZ", "SIGVTALRM", "SIGPROF", "SIGWINCH", "SIGIO", "SIGPWR",
    "SIGSYS", "SIGRTMIN", "SIGRTMAX",
)  # fmt: skip


_SIGNAL_HANDLER = Needs("--exit-signal-handler", lambda run: run.exit_signal_handler)


@dataclass(kw_only=True)
class TrainingConfig(CheckedConfig):
    """Batch sizes, length of the run, reasons to stop, memory housekeeping."""

    usual_kind = "report"

    micro_batch_size: int | None = flag(None, minimum=1, unit="samples", kind="numerics")
    """Sequences per forward pass on one data-parallel rank; 1 when not given."""
    global_batch_size: int | None = flag(None, minimum=1, unit="samples", kind="numerics")
    """Sequences per optimizer step over all ranks; micro-batch size x data-parallel size when not given."""
    rampup_batch_size: list[int] | None = flag(
        None, nargs=3, minimum=0, metavar=("START", "INCREMENT", "SAMPLES"), kind="numerics"
    )
    """Grow the global batch size from START by INCREMENT to --global-batch-size over SAMPLES samples."""
    step_batch_size_schedule: str | None = flag(None, nargs="+", metavar="TOKENS:SIZE", kind="numerics")
    """Global batch size over the run: each size from its number of tokens on, such as 0:16 2.4B:320 4.8B:624."""
    # Lengths count the whole run, not the present job, so that a resumed run ends where it would have ended.
    train_iters: int | None = flag(None, minimum=0, unit="iterations", kind="numerics")
    """Optimizer steps over all runs. Give this or --train-samples."""
    train_samples: int | None = flag(None, minimum=1, unit="samples", kind="numerics")
    """Samples over all runs. Give this or --train-iters."""
    exit_interval: int | None = flag(None, minimum=1, unit="iterations")
    """Save and stop after an iteration divisible by this."""
    phase_transition_iterations: str | None = flag(None, metavar="N[,N...]", kind="numerics")
    """Save and stop after each of these iterations. The run that is started again there reads its data, which may be
    others, from their first sample on; the global batch size is the same in all phases."""
    exit_duration_in_mins: int | None = flag(None, minimum=1, unit="minutes")
    """Save and stop after this time."""
    exit_signal_handler: bool = False
    """On --exit-signal, which any rank may get, all ranks finish an iteration, save, and end with exit code 0."""
    exit_signal: str = flag("SIGTERM", choices=EXIT_SIGNALS, needs=_SIGNAL_HANDLER)
    """The signal that --exit-signal-handler waits for."""
    exit_signal_handler_for_dataloader: bool = flag(False, needs=_SIGNAL_HANDLER)
    """Data loader processes ignore that signal, as they do Ctrl-C, for launchers that send it to every process."""
    iterations_to_skip: list[int] = flag(default_factory=list, nargs="+", minimum=1, kind="numerics")
    """Iterations, counted from 1 as the log does, whose data is passed over without training on it."""
    decrease_batch_size_if_needed: bool = flag(False, kind="numerics")
    """Round a global batch size that the ranks cannot share evenly down, instead of refusing it."""
    manual_gc: bool = False
    """Collect Python garbage at fixed iterations only, so that ranks do not pause one after the other."""
    manual_gc_interval: int = flag(
        0, minimum=0, unit="iterations", needs=Needs("--manual-gc", lambda run: run.manual_gc)
    )
    """With --manual-gc, iterations between collections; 0: none."""
    manual_gc_eval: bool = True
    """With --manual-gc, also collect before and after each evaluation."""
    empty_unused_memory_level: int = flag(
        0,
        choices=(0, 1, 2),
        gpu=NeedsGPU(lambda run: run.empty_unused_memory_level > 0, "it has no effect"),
    )
    """Give cached GPU memory back to the device: 1 after forward and backward of every iteration, 2 also after the
    update. Slower, but other allocations find larger pieces."""
    check_for_spiky_loss: bool = False
    """Warn of a loss of at least 10 times the largest of the run's first 100 iterations; with --rerun-mode
    validate_results, compute the step again, and go on with that."""
    check_for_large_grads: bool = False
    """Warn of a gradient norm of at least 10 times the largest of the run's first 100 iterations; with --rerun-mode
    validate_results, compute the step again, and go on with that."""
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, minimum=1, unit="iterations", needs=Needs("several processes", lambda run: run.world_size > 1)
    )
    """Iterations between comparisons of the weights that several processes hold, bit for bit. Where a replica has
    drifted, the run ends, before it saves, and names the rank and the tensor."""
    dump_param_to_param_group_map: PathText | None = None
    """File to write: a JSON object, parameter name -> number of its optimizer group."""
    # Here because upstream has it among the training flags; the model's setting is recompute_granularity.
    recompute_activations: bool = flag(False, kind="kernel")
    """Short for --recompute-granularity selective."""

    def normalize(self) -> None:
        """A schedule may come as a list of its words."""
        if isinstance(self.step_batch_size_schedule, list):
            self.step_batch_size_schedule = " ".join(map(str, self.step_batch_size_schedule))

    @property
    def phase_transitions(self) -> list[int]:
        """--phase-transition-iterations as numbers, in order; none where they are not given."""
        return sorted({int(number) for number in (self.phase_transition_iterations or "").split(",") if number.strip()})

    def rules(self) -> Iterator[str]:
        """The length is said once; the signal can be waited for; phases end after numbered iterations."""
        transitions = self.phase_transition_iterations
        if transitions is not None and not re.fullmatch(r" *[1-9][0-9]{0,11} *(, *[1-9][0-9]{0,11} *)*", transitions):
            yield (
                f"{self.say('phase_transition_iterations')} is not a list of iterations, counted from 1, with commas "
                "between them; give one such as 1000,2000"
            )
        if self.train_iters is not None and self.train_samples is not None:
            yield f"{self.say('train_iters')} and {self.say('train_samples')} both say how long to train; keep one"
        if self.exit_signal_handler and self.exit_signal in UNCATCHABLE_SIGNALS:
            yield f"{self.say('exit_signal')} ends a process without asking it; use SIGTERM, SIGINT or SIGUSR1"


def _evaluates(run: Any) -> bool:
    return run.eval_interval is not None or run.skip_train


_EVALUATION = Needs("--eval-interval", _evaluates)


def _is_whole_on_each_process(run: Any) -> bool:
    sizes = (run.tensor_model_parallel_size, run.pipeline_model_parallel_size, run.context_parallel_size)
    return max(sizes) == 1 and not run.hybrid_context_parallel


WHOLE_MODEL = Needs(
    "a model that is whole on each process: --tensor-model-parallel-size, --pipeline-model-parallel-size and "
    "--context-parallel-size 1, and no --hybrid-context-parallel",
    _is_whole_on_each_process,
)


_GENERATES = Needs(
    "--context-parallel-size 1, no --hybrid-context-parallel and no virtual stages: text is written by whole sequences",
    lambda run: (
        run.context_parallel_size == 1
        and not run.hybrid_context_parallel
        and run.virtual_pipeline_model_parallel_size is None
    ),
)
_TASKS = Needs("--eval-tasks", lambda run: run.eval_tasks is not None)


@dataclass(kw_only=True)
class ValidationConfig(CheckedConfig):
    """Evaluation during and after training."""

    usual_kind = "report"

    eval_iters: int = flag(
        100,
        minimum=0,
        unit="iterations",
        # 0 switches evaluation off, which is something to do even without an interval.
        needs=Needs("--eval-interval", lambda run: run.eval_interval is not None or run.eval_iters == 0),
    )
    """Global batches per evaluation; 0: no evaluation."""
    eval_interval: int | None = flag(None, minimum=1, unit="iterations")
    """Iterations between evaluations; none when not given."""
    eval_global_batch_size: int | None = flag(None, minimum=1, unit="samples", needs=_EVALUATION)
    """Sequences per evaluation step; the --global-batch-size that the run ends with when not given."""
    eval_micro_batch_size: int | None = flag(None, minimum=1, unit="samples", needs=_EVALUATION)
    """Sequences per forward pass in evaluation; --micro-batch-size when not given."""
    start_eval_at_iter: int | None = flag(None, minimum=1, unit="iterations", needs=_EVALUATION)
    """First iteration with an evaluation during training; --eval-interval when not given."""
    eval_sample_prompt: str | None = flag(None, needs=(_EVALUATION, WHOLE_MODEL))
    """Text that the model continues at each evaluation on validation data, for the log; training is not affected."""
    eval_sample_tokens: int = flag(
        64,
        minimum=1,
        unit="tokens",
        needs=Needs("--eval-sample-prompt", lambda run: run.eval_sample_prompt is not None),
    )
    """Length of that continuation."""
    eval_tasks: str | None = flag(None, needs=(_EVALUATION, _GENERATES))
    """Tasks of lm-evaluation-harness, with commas between them, that the model does at each evaluation on validation
    data; training is not affected."""
    eval_tasks_path: PathText | None = flag(None, needs=_TASKS)
    """Directory of further tasks, as YAML files."""
    eval_tasks_limit: int | None = flag(None, minimum=1, unit="documents", needs=_TASKS)
    """Documents of each task; all of them when not given."""
    skip_train: bool = False
    """Load and evaluate on validation and test data, without training."""
    full_validation: bool = False
    """Every evaluation goes over all validation data once, instead of --eval-iters global batches of it."""
    multiple_validation_sets: bool = False
    """The validation datasets are not blended: a loss is computed for each."""
    validation_set_names: list[str] | None = None
    """Names of the validation sets in logs, in their order; their numbers from 0 when not given."""

    def rules(self) -> Iterator[str]:
        """Named sets are kept apart, under distinct names."""
        names = self.validation_set_names
        if names and not self.multiple_validation_sets:
            yield f"{self.say('validation_set_names')} needs --multiple-validation-sets, which keeps the sets apart"
        if names and len(set(names)) < len(names):
            yield f"{self.say('validation_set_names')} names a set twice; give each one a name of its own"
