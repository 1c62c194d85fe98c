# SPDX-License-Identifier: Apache-2.0
"""Learning rate and weight decay over the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs

_WSD = Needs("--lr-decay-style WSD", lambda run: run.lr_decay_style == "WSD")


@dataclass(kw_only=True)
class SchedulerConfig(CheckedConfig):
    """Warm-up, decay, and weight-decay growth."""

    usual_kind = "numerics"

    lr_decay_style: str = flag("linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"))
    """Shape of the decay from --lr to --min-lr."""
    # Each length exists in iterations and in samples; relations.py sees to it that they agree with the unit of the run.
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
    lr_wsd_decay_style: str = flag("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"), needs=_WSD)
    """Shape of the final decay of the WSD schedule."""
    lr_wsd_decay_iters: int | None = flag(None, minimum=1, unit="iterations", needs=_WSD)
    """Iterations of the WSD schedule's final decay."""
    lr_wsd_decay_samples: int | None = flag(None, minimum=1, unit="samples", needs=_WSD)
    """Samples of the WSD schedule's final decay."""
    start_weight_decay: float | None = flag(None, minimum=0)
    """Weight decay at the start; --weight-decay when not given."""
    end_weight_decay: float | None = flag(None, minimum=0)
    """Weight decay at the end; --weight-decay when not given."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """Shape of the change from --start-weight-decay to --end-weight-decay."""
    # Neither flag: settings that differ from the checkpoint's are an error.
    override_opt_param_scheduler: bool = flag(False, aliases=("--override-opt_param-scheduler",), kind="report")
    """Schedule settings of the command line win over the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, aliases=("--use-checkpoint-opt_param-scheduler",), kind="report"
    )
    """Schedule settings of the checkpoint win over the command line's."""

    def rules(self) -> Iterator[str]:
        """Warm-up and weight decay are said once and completely."""
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if self.lr_warmup_fraction is not None and getattr(self, name):
                yield f"{self.say('lr_warmup_fraction')} and {self.say(name)} both set the warm-up; keep one"
        # The share is of the decay's length, so 1 would end the decay where it begins.
        if self.lr_warmup_fraction == 1:
            yield f"{self.say('lr_warmup_fraction')} leaves nothing for the decay; use a share below 1"
        yield from self._weight_decay_problems()
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield (
                "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other; "
                "keep one"
            )

    def _weight_decay_problems(self) -> Iterator[str]:
        style, start, end = self.weight_decay_incr_style, self.start_weight_decay, self.end_weight_decay
        if style == "constant":
            return
        if start is None or end is None:
            missing = "--start-weight-decay" if start is None else "--end-weight-decay"
            yield f"--weight-decay-incr-style {style} needs {missing}"
        elif start > end:
            yield (
                f"{self.say('start_weight_decay')} is above {self.say('end_weight_decay')}; weight decay can only grow"
            )
