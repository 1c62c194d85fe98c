"""When and how long to evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag


@dataclass(kw_only=True)
class ValidationConfig:
    """Evaluation during and after training."""

    eval_iters: int = flag(100, minimum=0, unit="iterations")
    """Global batches per evaluation; 0: no evaluation."""
    eval_interval: int | None = flag(None, minimum=1, unit="iterations")
    """Iterations between evaluations; none when not given."""
    eval_global_batch_size: int | None = flag(None, minimum=1, unit="samples")
    """Sequences per evaluation step; the --global-batch-size that the run ends with when not given."""
    eval_micro_batch_size: int | None = flag(None, minimum=1, unit="samples")
    """Sequences per forward pass in evaluation; --micro-batch-size when not given."""
    start_eval_at_iter: int | None = flag(None, minimum=1, unit="iterations")
    """First iteration with an evaluation during training; --eval-interval when not given."""
    skip_train: bool = False
    """Load and evaluate on validation and test data, without training."""
    full_validation: bool = False
    """Every evaluation goes over all validation data once, instead of --eval-iters global batches of it."""
    multiple_validation_sets: bool = False
    """The validation datasets are not blended: each has a loss of its own."""
    validation_set_names: list[str] | None = None
    """Names of the validation sets in logs, in their order; their numbers from 0 when not given."""
