"""How long to train, and on how much data per step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import derived, flag

UNCATCHABLE_SIGNALS = ("SIGKILL", "SIGSTOP")
EXIT_SIGNALS = (
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
    "SIGRTMIN",
    "SIGRTMAX",
)


@dataclass(kw_only=True)
class TrainingConfig:
    """Batch sizes, length of the run, reasons to stop, memory housekeeping."""

    micro_batch_size: int | None = flag(None, minimum=1, unit="samples")
    """Sequences per forward pass on one data-parallel rank; 1 when not given."""
    global_batch_size: int | None = flag(None, minimum=1, unit="samples")
    """Sequences per optimizer step over all ranks; micro-batch size x data-parallel size when not given."""
    rampup_batch_size: list[int] | None = flag(None, nargs=3, minimum=0, metavar=("START", "INCREMENT", "SAMPLES"))
    """Grow the global batch size from START by INCREMENT to --global-batch-size over SAMPLES samples."""
    step_batch_size_schedule: str | None = flag(None, nargs="+", metavar="TOKENS:SIZE")
    """Global batch size over the run: each size from its number of tokens on, such as 0:16 2.4B:320 4.8B:624."""
    train_iters: int | None = flag(None, minimum=0, unit="iterations")
    """Optimizer steps over all runs. Give this or --train-samples."""
    train_samples: int | None = flag(None, minimum=1, unit="samples")
    """Samples over all runs. Give this or --train-iters."""
    exit_interval: int | None = flag(None, minimum=1, unit="iterations")
    """Save and stop after an iteration divisible by this."""
    exit_duration_in_mins: int | None = flag(None, minimum=1, unit="minutes")
    """Save and stop after this time."""
    exit_signal_handler: bool = False
    """On --exit-signal, which any rank may get, all ranks finish the iteration, save, and end with exit code 0."""
    exit_signal: str = flag("SIGTERM", choices=EXIT_SIGNALS)
    """The signal that --exit-signal-handler waits for."""
    exit_signal_handler_for_dataloader: bool = False
    """Data loader processes ignore that signal, for launchers that send it to every process they find."""
    iterations_to_skip: list[int] = flag(default_factory=list, nargs="+", minimum=0)
    """Iterations, counted from 0, whose data is passed over without training on it."""
    decrease_batch_size_if_needed: bool = False
    """Round a global batch size that the ranks cannot share evenly down, instead of refusing it."""
    manual_gc: bool = False
    """Collect Python garbage at fixed iterations only, so that ranks do not pause one after the other."""
    manual_gc_interval: int = flag(0, minimum=0, unit="iterations")
    """With --manual-gc, iterations between collections; 0: none."""
    manual_gc_eval: bool = True
    """With --manual-gc, also collect before and after each evaluation."""
    empty_unused_memory_level: int = flag(0, choices=(0, 1, 2))
    """Give cached GPU memory back to the device: 1 after forward and backward of every iteration, 2 also after the
    update. Slower, but other allocations find larger pieces."""
    check_for_spiky_loss: bool = False
    """Warn of a loss more than 10 times the largest of the process's first 100 iterations."""
    check_for_large_grads: bool = False
    """Warn of a gradient norm more than 10 times the largest of the process's first 100 iterations."""
    dump_param_to_param_group_map: str | None = None
    """File to write: a JSON object, parameter name -> number of its optimizer group."""
    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""
    samples_per_step: int | None = derived()
    """Not a flag: micro-batch size x data-parallel size, the samples of one microbatch over all ranks."""
