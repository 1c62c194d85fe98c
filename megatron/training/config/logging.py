"""What to log, where, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag


@dataclass(kw_only=True)
class LoggerConfig:
    """Progress line, TensorBoard, metrics file."""

    log_interval: int = flag(100, minimum=1, unit="iterations")
    """Iterations between progress lines."""
    log_params_norm: bool = False
    """Also log the norm of all parameters."""
    log_throughput: bool = False
    """Also write TFLOP/s per device, MFU and tokens/s to TensorBoard; the progress line always has them."""
    log_loss_scale_to_tensorboard: bool = True
    """Write the loss scale to TensorBoard; it is 1 without --fp16."""
    tensorboard_dir: str | None = None
    """Directory of TensorBoard event files."""
    tensorboard_log_interval: int = flag(1, minimum=1, unit="iterations")
    """Iterations between TensorBoard points."""
    tensorboard_queue_size: int = flag(1000, minimum=1, unit="events")
    """Events kept in memory before TensorBoard writes them."""
    metrics_dir: str | None = None
    """Directory of metrics.jsonl, one JSON object per iteration; a resumed run continues the file."""
