# SPDX-License-Identifier: Apache-2.0
"""Settings of logging: contents, places and intervals."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs, NeedsGPU, PathText

# TensorBoard and Weights & Biases are given the same curves, so either is enough.
_CURVES = Needs("--tensorboard-dir", lambda run: run.tensorboard_dir is not None or run.wandb_project is not None)
_EXPERTS = Needs("--num-experts", lambda run: run.num_moe_experts is not None)
_TRACE = Needs(
    "--moe-routing-trace-path, and without --moe-enable-routing-replay",
    lambda run: run.moe_routing_trace_path is not None and not run.moe_enable_routing_replay,
)
_WANDB = Needs("--wandb-project", lambda run: run.wandb_project is not None)


@dataclass(kw_only=True)
class LoggerConfig(CheckedConfig):
    """Progress line, TensorBoard, Weights & Biases, metrics file."""

    usual_kind = "report"

    log_interval: int = flag(100, minimum=1, unit="iterations")
    """Iterations between progress lines."""
    progress_line: str = flag("auto", choices=("auto", "short", "full", "bar", "rich"))
    """The progress line: short, 120 columns at most, or full, in upstream's wording; auto: short on a terminal. There
    bar and rich (needs the package) draw one view in place instead of lines; elsewhere both are short."""
    log_params_norm: bool = False
    """Also log the norm of all parameters."""
    log_num_zeros_in_grad: bool = False
    """Also log how many elements of the gradient are zero."""
    log_max_attention_logit: bool = False
    """Also log the largest attention score of the step, over all layers and heads; costs another product of queries
    and keys."""
    # Measured at --log-interval only: every norm is a pass over all parameters.
    log_layer_norms: bool = False
    """Print the norms of every layer's parameters and gradients with each progress line, and of the states that
    sequences end with (letters M, G, K)."""
    log_comm_volume: bool = False
    """Add to the progress line what a step sends over each axis of the mesh; kinds apart in the metrics and curves."""
    log_throughput: bool = False
    """Also write TFLOP/s per device, MFU and tokens/s to TensorBoard; the progress line always has them."""
    moe_routing_trace_path: PathText | None = flag(None, needs=_EXPERTS)
    """Directory for the experts that each token of every step got, by layer; with --moe-enable-routing-replay the
    directory to take them from."""
    moe_routing_trace_max_training_iters: int | None = flag(None, minimum=1, unit="iterations", needs=_TRACE)
    """Write the first so many iterations only."""
    moe_routing_trace_capture_logits: bool = flag(False, needs=_TRACE)
    """Also write the routers' logits."""
    moe_routing_trace_capture_hidden_states: bool = flag(False, needs=_TRACE)
    """Also write what the routers read."""
    moe_routing_trace_dump_weights: bool = flag(False, needs=_TRACE)
    """Also write the routers' weights after each step."""
    log_progress: bool = flag(False, needs=Needs("--save", lambda run: run.save is not None))
    """Keep a history of starts and checkpoints, with their throughput, in progress.txt in the --save directory."""
    log_memory_interval: int | None = flag(None, minimum=1, unit="iterations")
    """Iterations between lines with each rank's memory."""
    log_device_memory_used: bool = False
    """Also log the memory that all processes together use of the first rank's GPU, or of its machine."""
    log_energy: bool = flag(
        False, gpu=NeedsGPU(lambda run: run.log_energy, "no energy is logged", {"log_energy": False})
    )
    """Add to the progress line the energy that an iteration takes and the power, as means over the GPUs; needs the
    package nvidia-ml-py."""
    logging_level: int | None = flag(None, minimum=0, maximum=50)
    """Level of Python's logging for libraries and for your scripts: 10 debug, 20 info, 30 warning, 40 error."""
    timing_log_level: int = flag(0, choices=(0, 1, 2))
    """Detail of the timing of an iteration: 0 none, 1 its phases, 2 also data, forward and backward computation."""
    timing_log_option: str = flag(
        "minmax",
        choices=("max", "minmax", "all"),
        needs=Needs("--timing-log-level", lambda run: run.timing_log_level > 0),
    )
    """Statistic printed of the ranks' times: the largest, the smallest and the largest, or every rank's."""
    # Upstream's flag has another name than its setting, too.
    barrier_with_L1_time: bool = flag(  # noqa: N815 (upstream's name)
        True, names=("--barrier-with-level-1-timing",), off_names=("--no-barrier-with-level-1-timing",)
    )
    """With --timing-log-level, the ranks wait for each other before a timed phase, so that none pays for another."""
    log_loss_scale_to_tensorboard: bool = True
    """Write the loss scale to TensorBoard; it is 1 without --fp16."""
    tensorboard_dir: PathText | None = None
    """Directory of TensorBoard event files."""
    tensorboard_log_interval: int = flag(1, minimum=1, unit="iterations", needs=_CURVES)
    """Iterations between points in TensorBoard and Weights & Biases."""
    tensorboard_queue_size: int = flag(
        1000,
        minimum=1,
        unit="events",
        needs=Needs("--tensorboard-dir", lambda run: run.tensorboard_dir is not None),
    )
    """Events kept in memory before TensorBoard writes them."""
    log_timers_to_tensorboard: bool = flag(False, needs=_CURVES)
    """Also write the time of an iteration and of what --timing-log-level times."""
    log_memory_to_tensorboard: bool = flag(False, needs=_CURVES)
    """Also write the memory in use and its peak."""
    log_validation_ppl_to_tensorboard: bool = flag(False, needs=_CURVES)
    """Also write the perplexity of each evaluation."""
    log_world_size_to_tensorboard: bool = flag(False, needs=_CURVES)
    """Also write the number of processes."""
    wandb_project: str | None = None
    """Project of Weights & Biases to log to; nothing is logged there when not given."""
    wandb_exp_name: str | None = flag(None, needs=_WANDB)
    """Name of the run there; Weights & Biases invents one when not given."""
    wandb_entity: str | None = flag(None, needs=_WANDB)
    """Team or user that the project belongs to; the account's default when not given."""
    wandb_save_dir: PathText | None = flag(None, needs=_WANDB)
    """Directory of its local files; wandb in the --save directory, or here, when not given."""
    metrics_dir: PathText | None = None
    """Directory of metrics.jsonl, one JSON object per iteration; a resumed run continues the file. Files with events
    and times next to it are for `python -m megatron report`."""
    alert_command: str | None = flag(None, metavar="COMMAND")
    """Program to run, without a shell, when a loss is not a number or far above the usual ones, throughput falls, or no
    step ends; a JSON object on its input says which."""
    alert_webhook: str | None = flag(None, metavar="URL")
    """Address, http or https, to post the same JSON object to."""
    alert_stall_seconds: float = flag(
        600.0,
        minimum=1.0,
        unit="seconds",
        needs=Needs(
            "--alert-command or --alert-webhook",
            lambda run: run.alert_command is not None or run.alert_webhook is not None,
        ),
    )
    """Alert when no step has ended for so long."""

    def rules(self) -> Iterator[str]:
        """An alert's command and address can be used."""
        if self.alert_command is not None:
            try:
                words = shlex.split(self.alert_command)
            except ValueError as error:
                yield f"{self.say('alert_command')} cannot be split into words ({error}); close its quotes"
            else:
                if not words or shutil.which(words[0]) is None:
                    yield f"{self.say('alert_command')} names no program that can be run; give its path"
        if self.alert_webhook is not None and not self.alert_webhook.startswith(("http://", "https://")):
            yield f"{self.say('alert_webhook')} is no address; give one that begins with https:// or http://"
