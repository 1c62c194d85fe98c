"""Learning rate and weight decay over the run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag


@dataclass(kw_only=True)
class SchedulerConfig:
    """Warm-up, decay, and weight-decay growth."""

    lr_decay_style: str = flag("linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"))
    """Shape of the decay from --lr to --min-lr."""
    lr_decay_iters: int | None = flag(None, minimum=1, unit="iterations")
    """Iterations until the learning rate is --min-lr; --train-iters when not given."""
    lr_decay_samples: int | None = flag(None, minimum=1, unit="samples")
    """Samples until the learning rate is --min-lr; --train-samples when not given."""
    lr_warmup_iters: int = flag(0, minimum=0, unit="iterations")
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = flag(0, minimum=0, unit="samples")
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = flag(None, minimum=0, maximum=1)
    """Warm-up as a share of the decay length."""
    lr_warmup_init: float = flag(0.0, minimum=0)
    """Learning rate the warm-up starts from."""
    lr_wsd_decay_style: str = flag("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    """Shape of the final decay of the WSD schedule."""
    lr_wsd_decay_iters: int | None = flag(None, minimum=1, unit="iterations")
    """Iterations of the WSD schedule's final decay."""
    lr_wsd_decay_samples: int | None = flag(None, minimum=1, unit="samples")
    """Samples of the WSD schedule's final decay."""
    start_weight_decay: float | None = flag(None, minimum=0)
    """Weight decay at the start; --weight-decay when not given."""
    end_weight_decay: float | None = flag(None, minimum=0)
    """Weight decay at the end; --weight-decay when not given."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """Shape of the change from --start-weight-decay to --end-weight-decay."""
    override_opt_param_scheduler: bool = flag(False, aliases=("--override-opt_param-scheduler",))
    """Schedule settings of the command line win over the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = flag(False, aliases=("--use-checkpoint-opt_param-scheduler",))
    """Schedule settings of the checkpoint win over the command line's."""
