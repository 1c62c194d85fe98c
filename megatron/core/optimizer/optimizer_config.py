"""What the optimizer needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import derived, flag


@dataclass(kw_only=True)
class OptimizerConfig:
    """Update rule, its constants, and clipping."""

    optimizer: str = flag(
        "adam", choices=("adam", "sgd", "muon", "dist_muon", "adaptive_muon", "lion", "soap"),
        planned_choices=("sgd", "muon", "dist_muon", "adaptive_muon", "lion", "soap"),
        coming="the remaining optimizers",
    )  # fmt: skip
    """Update rule; adam is AdamW, with decoupled weight decay (Loshchilov and Hutter, 2019)."""
    lr: float | None = flag(None, minimum=0)
    """Learning rate at the end of the warm-up; the schedule scales it."""
    min_lr: float = flag(0.0, minimum=0)
    """Learning rate the schedule ends at, and never goes below after the warm-up."""
    weight_decay: float = flag(0.01, minimum=0)
    """Decoupled weight decay; biases and one-dimensional weights get none."""
    clip_grad: float = flag(1.0, minimum=0)
    """Largest global gradient norm (L2 over all parameters); 0 switches clipping off."""
    adam_beta1: float = flag(0.9, minimum=0, maximum=1)
    """Decay of the running mean of gradients."""
    adam_beta2: float = flag(0.999, minimum=0, maximum=1)
    """Decay of the running mean of squared gradients."""
    adam_eps: float = flag(1e-8, minimum=0)
    """Added to the root of the second moment."""
    bf16: bool = derived(False)
    """Model parameters are bfloat16; the optimizer keeps float32 main parameters."""
    fp16: bool = derived(False)
    """Model parameters are float16; the optimizer keeps float32 main parameters and scales the loss."""
    loss_scale: float | None = flag(None, above=0)
    """With --fp16: multiply the loss by this number, always. Without it the scale is dynamic."""
    initial_loss_scale: float = flag(2**32, above=0)
    """With --fp16: dynamic loss scale at the start; halved until gradients no longer overflow."""
    min_loss_scale: float = flag(1.0, above=0)
    """With --fp16: smallest dynamic loss scale; gradients that overflow even so end the run."""
    loss_scale_window: float = flag(1000, minimum=1, unit="iterations")
    """With --fp16: iterations in a row without overflow after which the dynamic loss scale is doubled."""
    hysteresis: int = flag(2, minimum=1, unit="iterations")
    """With --fp16: iterations with overflow until the dynamic loss scale is halved."""
