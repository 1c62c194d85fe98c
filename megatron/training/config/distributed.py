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
    use_tp_pp_dp_mapping: bool = False
    """Number the ranks so that the stages of one pipeline lie close together, instead of the replicas of a stage."""
