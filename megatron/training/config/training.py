"""How long to train, and on how much data per step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import derived, flag


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
    manual_gc: bool = False
    """Collect Python garbage at fixed iterations only, so that ranks do not pause one after the other."""
    manual_gc_interval: int = flag(0, minimum=0, unit="iterations")
    """With --manual-gc, iterations between collections; 0: none."""
    manual_gc_eval: bool = True
    """With --manual-gc, also collect before and after each evaluation."""
    empty_unused_memory_level: int = flag(0, choices=(0, 1, 2))
    """Give cached GPU memory back to the device: 1 after forward and backward of every iteration, 2 also after the
    update. Slower, but other allocations find larger pieces."""
    dump_param_to_param_group_map: str | None = None
    """File to write: a JSON object, parameter name -> number of its optimizer group."""
    compile: bool = False
    """Compile each transformer layer with torch.compile: slower start, faster steps."""
    samples_per_step: int | None = derived()
    """Not a flag: micro-batch size x data-parallel size, the samples of one microbatch over all ranks."""
