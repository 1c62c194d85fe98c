# SPDX-License-Identifier: Apache-2.0
"""Learning rate and weight decay as functions of the samples consumed.

    lr
    max │    ┌────── constant
        │   /·\\
        │  / · \\    linear, cosine, inverse-square-root,
        │ /  ·  \\   WSD (Warm-up, Stable, Decay: flat, then down over the last `wsd_decay_steps`)
    min │/   ·   └──────────
        └────┴───┴───────── num_steps
          lr_warmup_steps  lr_decay_steps

Steps are counted in samples, so that a run may change its batch size and keep its curve. `compute_scheduler_steps`
turns the flags, which may be in iterations, into them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from megatron.core.errors import CheckpointError, ConfigError

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")

# Keys of the scheduler's state other than num_steps, and the flag that a user would change.
_STATE_FLAGS = {
    "max_lr": "--lr",
    "lr_warmup_steps": "--lr-warmup-iters (in samples)",
    "lr_decay_style": "--lr-decay-style",
    "lr_decay_steps": "--lr-decay-iters (in samples; where it is not given, that of --train-iters)",
    "min_lr": "--min-lr",
    "start_wd": "--start-weight-decay",
    "end_wd": "--end-weight-decay",
    "wd_incr_style": "--weight-decay-incr-style",
    "wd_incr_steps": "--train-iters (in samples)",
}


class HasParamGroups(Protocol):
    """Attributes that the scheduler needs of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class SchedulerSteps(NamedTuple):
    """Lengths of the curves, in samples."""

    lr_warmup_steps: int | float
    lr_decay_steps: int
    wd_incr_steps: int
    wsd_decay_steps: int | None


def compute_scheduler_steps(
    *,
    global_batch_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
    lr_decay_iters: int | None = None,
    lr_decay_samples: int | None = None,
    lr_warmup_iters: int = 0,
    lr_warmup_samples: int = 0,
    lr_warmup_fraction: float | None = None,
    lr_wsd_decay_iters: int | None = None,
    lr_wsd_decay_samples: int | None = None,
) -> SchedulerSteps:
    """Curve lengths in samples from the flags of a run that is counted in iterations or in samples.

    global_batch_size: samples that an iteration stands for in these lengths; where the batch grows, the caller chooses.
    The decay is as long as the run unless given; a warm-up fraction is a share of the decay, not of the run.
    """
    if train_iters is not None:
        total = train_iters * global_batch_size
        decay = total if lr_decay_iters is None else lr_decay_iters * global_batch_size
        warmup: int | float = lr_warmup_iters * global_batch_size
        wsd_decay = None if lr_wsd_decay_iters is None else lr_wsd_decay_iters * global_batch_size
    elif train_samples is not None:
        total = train_samples
        decay = total if lr_decay_samples is None else lr_decay_samples
        warmup = lr_warmup_samples
        wsd_decay = lr_wsd_decay_samples
    else:
        raise ConfigError("the length of the run is missing; give --train-iters or --train-samples")
    if lr_warmup_fraction is not None:
        # Not rounded to whole samples, as upstream's is not.
        warmup = lr_warmup_fraction * decay
    return SchedulerSteps(warmup, decay, total, wsd_decay)


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` of an optimizer's parameter groups.

    A group may carry `max_lr` and `min_lr` that replace the common ones, and `wd_mult`, the multiple of the weight
    decay it gets (0 for biases and norms). Its `lr_mult` is kept for checkpoints only and, as upstream, not applied.

    use_checkpoint_opt_param_scheduler: a loaded state wins over these arguments; override_opt_param_scheduler: these
    arguments win; with neither, load_state_dict refuses a state that differs. Raises ConfigError for a curve that
    cannot be drawn.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int | float,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
        samples_per_iteration: int | None = None,
    ) -> None:
        """samples_per_iteration: where these lengths were given in iterations."""
        self._samples_per_iteration = samples_per_iteration
        self.optimizer = optimizer
        self.init_lr, self.max_lr, self.min_lr = init_lr, max_lr, min_lr
        self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style = lr_warmup_steps, lr_decay_steps, lr_decay_style
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.wsd_decay_steps, self.lr_wsd_decay_style = wsd_decay_steps, lr_wsd_decay_style
        self.num_steps = 0
        problems = self._find_contradictions()
        if problems:
            raise ConfigError(problems)
        # The first update comes before the first step of the schedule and needs a rate.
        self.step(0)

    def _find_contradictions(self) -> list[str]:
        problems = []
        if not 0 <= self.min_lr <= self.max_lr:
            problems.append(f"--min-lr {self.min_lr} must lie between 0 and --lr {self.max_lr}")
        if self.init_lr > self.max_lr:
            problems.append(f"--lr-warmup-init {self.init_lr} is above --lr {self.max_lr}, which the warm-up ends at")
        if self.lr_decay_steps <= 0:
            problems.append(f"the learning rate decays over {self.lr_decay_steps} samples; at least 1 is needed")
        elif self.lr_warmup_steps >= self.lr_decay_steps:
            problems.append(
                f"the warm-up of {self.lr_warmup_steps} samples leaves nothing of the decay's {self.lr_decay_steps}; "
                "shorten --lr-warmup-iters/-samples/-fraction or lengthen --lr-decay-iters/-samples"
            )
        if self.lr_decay_style == "WSD" and self.wsd_decay_steps is None:
            problems.append("--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples")
        for flag, value, known in (
            ("--lr-decay-style", self.lr_decay_style, LR_DECAY_STYLES),
            ("--lr-wsd-decay-style", self.lr_wsd_decay_style or "exponential", WSD_DECAY_STYLES),
            ("--weight-decay-incr-style", self.wd_incr_style, WD_INCR_STYLES),
        ):
            if value not in known:
                problems.append(f"{flag} {value} is unknown; use one of {', '.join(known)}")
        if not 0 <= self.start_wd <= self.end_wd:
            problems.append(f"--start-weight-decay {self.start_wd} must lie between 0 and the end's {self.end_wd}")
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            problems.append(
                f"--weight-decay-incr-style constant contradicts a weight decay from {self.start_wd} to {self.end_wd}"
            )
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            problems.append(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict each other; "
                "keep one"
            )
        return problems

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """Learning rate of a parameter group at the current step."""
        # Decoupled and muP rates differ by group; the start of the warm-up is the same for all.
        max_lr: float = param_group.get("max_lr", self.max_lr)
        min_lr: float = param_group.get("min_lr", self.min_lr)
        if self.lr_warmup_steps > 0 and self.num_steps <= self.lr_warmup_steps:
            return self.init_lr + (max_lr - self.init_lr) * float(self.num_steps) / float(self.lr_warmup_steps)
        if self.lr_decay_style == "constant":
            return max_lr
        # A run may be longer than its decay.
        if self.num_steps > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            # At least 1, for a run without warm-up and for its first step.
            warmup_steps, num_steps = max(self.lr_warmup_steps, 1), max(self.num_steps, 1)
            return max(min_lr, max_lr * math.sqrt(warmup_steps) / math.sqrt(num_steps))
        return min_lr + self._compute_decay() * (max_lr - min_lr)

    def _compute_decay(self) -> float:
        """1 where the decay starts, 0 where it ends."""
        if self.lr_decay_style == "WSD":
            return self._compute_wsd_decay()
        decayed = (self.num_steps - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        if self.lr_decay_style == "cosine":
            return 0.5 * (math.cos(math.pi * decayed) + 1.0)
        return 1.0 - decayed

    def _compute_wsd_decay(self) -> float:
        """Flat, then down over the last `wsd_decay_steps` (Hu et al., 2024, MiniCPM, section 4)."""
        assert self.wsd_decay_steps is not None, "checked on construction"
        # Counted back from the end of the decay, so that a longer run stays flat for longer.
        annealing_steps = self.num_steps - (self.lr_decay_steps - self.wsd_decay_steps)
        if annealing_steps <= 0:
            return 1.0
        annealed = annealing_steps / self.wsd_decay_steps
        match self.lr_wsd_decay_style:
            case "linear":
                return 1.0 - annealed
            case "cosine":
                return 0.5 * (math.cos(math.pi * annealed) + 1.0)
            case "minus_sqrt":
                return 1.0 - math.sqrt(annealed)
            case _:  # exponential, shifted and scaled so that it starts at 1 and ends at 0
                return 2.0 * math.pow(0.5, annealed) - 1.0

    def get_wd(self) -> float:
        """Weight decay at the current step, before each group's `wd_mult`."""
        if self.num_steps > self.wd_incr_steps or self.wd_incr_style == "constant":
            return self.end_wd
        grown = self.num_steps / self.wd_incr_steps
        if self.wd_incr_style == "cosine":
            grown = 0.5 * (math.cos(math.pi * (1.0 - grown)) + 1.0)
        return self.start_wd + grown * (self.end_wd - self.start_wd)

    def step(self, increment: int) -> None:
        """Advance by `increment` samples and set lr and weight_decay of every parameter group."""
        # In samples, so that a batch size that grows moves along the curve as fast as its data.
        self.num_steps += increment
        weight_decay = self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)
            group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)

    def _find_idle_settings(self, saved: Mapping[str, Any]) -> set[str]:
        """Keys of the state that decide nothing, here and in a saved run: a run without decay may be made longer."""
        idle: set[str] = set()
        if self.lr_decay_style == saved.get("lr_decay_style") == "constant":
            idle |= {"lr_decay_steps", "min_lr"}
        if self.wd_incr_style == saved.get("wd_incr_style") == "constant":
            idle |= {"wd_incr_steps"}
        return idle

    def _advise(self, differing: Sequence[str], saved: Mapping[str, Any]) -> str:
        """Return what to give for the checkpoint's curves; a longer run is the usual reason why they differ."""
        steps, unit = saved.get("lr_decay_steps", 0), self._samples_per_iteration
        if differing != ["lr_decay_steps"] or (unit is not None and steps % unit):
            return "use the same values"
        length = f"--lr-decay-samples {steps}" if unit is None else f"--lr-decay-iters {steps // unit}"
        return f"give {length}, the checkpoint's, for the same curve, which then stays at --min-lr"

    def state_dict(self) -> dict[str, Any]:
        """Position and shape of the curves; plain numbers and texts."""
        return {"num_steps": self.num_steps, **{key: getattr(self, key) for key in _STATE_FLAGS}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; CheckpointError where its curves differ and no flag says who wins."""
        if not self.override_opt_param_scheduler:
            idle = self._find_idle_settings(state_dict)
            saved = {key: state_dict[key] for key in _STATE_FLAGS if key in state_dict and key not in idle}
            differing = [key for key, value in saved.items() if value != getattr(self, key)]
            if differing and not self.use_checkpoint_opt_param_scheduler:
                listing = ", ".join(
                    f"{_STATE_FLAGS[key]} was {saved[key]} and is {getattr(self, key)}" for key in differing
                )
                raise CheckpointError(
                    f"the checkpoint's schedule differs from this run's: {listing}; {self._advise(differing, saved)}, "
                    "or pass --override-opt_param-scheduler (this run's win) or --use-checkpoint-opt_param-scheduler "
                    "(the checkpoint's win)"
                )
            for key, value in saved.items():
                setattr(self, key, value)
        self.num_steps = 0
        # Sets the rates as well; checkpoints of the optimizer do not have them.
        self.step(state_dict["num_steps"])
