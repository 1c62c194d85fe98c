"""How processes find and talk to each other."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag


@dataclass(kw_only=True)
class DistributedInitConfig:
    """Process groups."""

    distributed_backend: str | None = flag(None, choices=("nccl", "gloo"))
    """Communication library; nccl on CUDA devices and gloo on CPUs when not given."""
    distributed_timeout_minutes: int = flag(10, minimum=1, unit="minutes")
    """How long a collective may wait for other ranks."""
    use_gloo_process_groups: bool = flag(True, off_names=("--disable-gloo-process-groups",))
    """Make gloo groups beside NCCL's for work on the CPU, as upstream does. Here nothing needs them, so none are made
    either way; a note says so when they are switched off."""
    high_priority_stream_groups: list[str] = flag(
        default_factory=list,
        nargs="+",
        choices=("tp", "pp", "cp", "dp", "dp_cp", "tp_cp", "tp_dp", "tp_dp_cp", "mp", "embd", "pos_embd", "ep",
                 "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp", "world"),
    )  # fmt: skip
    """Groups whose NCCL communication runs on streams of high priority, by their names in process_groups_config.py: tp,
    cp, pp, dp, dp_cp, ... Has no effect with gloo, which has no streams."""
    use_tp_pp_dp_mapping: bool = False
    """Number the ranks so that the stages of one pipeline lie close together, instead of the replicas of a stage."""
