# SPDX-License-Identifier: Apache-2.0
"""Settings by which processes find and talk to each other."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs, NeedsGPU, PathText

_MOST_MINUTES = 10_000_000
"""19 years: clocks that count nanoseconds in 64 bits overflow after 292."""
_RECORDER = Needs("--flight-recorder-dump-path", lambda run: run.flight_recorder_dump_path is not None)


@dataclass(kw_only=True)
class DistributedInitConfig(CheckedConfig):
    """Process groups."""

    usual_kind = "report"

    distributed_backend: str | None = flag(
        None,
        choices=("nccl", "gloo"),
        kind="kernel",
        gpu=NeedsGPU(lambda run: run.distributed_backend == "nccl", "gloo communicates", {"distributed_backend": None}),
    )
    """Communication library; nccl on CUDA devices and gloo on CPUs when not given."""
    elastic_layouts: str | None = flag(None, kind="layout", metavar="LAYOUT,LAYOUT,...")
    """Layouts for a run that may be started again with more or fewer processes, such as tp2pp2,tp1pp2,tp1pp1: the first
    one that fits the processes at hand is used. The global batch stays. A command line makes the sizes of a layout of
    it; a config in Python has its sizes and reads nothing here."""
    # Also the time in which the processes must find each other when a job starts.
    distributed_timeout_minutes: int = flag(10, minimum=1, maximum=_MOST_MINUTES, unit="minutes")
    """Minutes that a collective may wait for other ranks."""
    distributed_timeout_seconds_after_init: int | None = flag(
        None,
        minimum=1,
        maximum=60 * _MOST_MINUTES,
        unit="seconds",
        needs=Needs("several processes", lambda run: run.world_size > 1),
    )
    """Seconds that a collective may wait from the second iteration on; as before when not given."""
    flight_recorder_dump_path: PathText | None = flag(
        None,
        gpu=NeedsGPU(
            lambda run: run.flight_recorder_dump_path is not None,
            "it has no effect: NCCL's recorder sees nothing of gloo",
        ),
    )
    """Beginning of the names of files, to which the rank is appended, for what NCCL's flight recorder in torch knows of
    the last collectives when one of them times out. Like its options, without effect with gloo; what the environment
    says already (TORCH_FR_..., TORCH_NCCL_...) wins."""
    flight_recorder_trace_buffer_size: int = flag(2000, minimum=0, unit="events", needs=_RECORDER)
    """With --flight-recorder-dump-path: events that are kept."""
    flight_recorder_dump_on_timeout: bool = flag(True, needs=_RECORDER)
    """With --flight-recorder-dump-path: write when a collective times out."""
    flight_recorder_include_stack_trace: bool = flag(False, needs=_RECORDER)
    """With --flight-recorder-dump-path: where in the program each collective was called."""
    flight_recorder_include_only_active: bool = flag(True, needs=_RECORDER)
    """With --flight-recorder-dump-path: only collectives that have not ended."""
    flight_recorder_extra_dump_on_exec: bool = flag(True, needs=_RECORDER)
    """With --flight-recorder-dump-path: write also after an exception."""
    use_gloo_process_groups: bool = flag(True, off_names=("--disable-gloo-process-groups",), kind="kernel")
    """Make gloo groups in addition to NCCL's for work on the CPU, as upstream does. Nothing here needs them, so none
    are made either way; a note says so when they are switched off."""
    high_priority_stream_groups: list[str] = flag(
        default_factory=list,
        nargs="+",
        choices=("tp", "pp", "cp", "dp", "dp_cp", "tp_cp", "tp_dp", "tp_dp_cp", "mp", "embd", "pos_embd", "ep",
                 "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp", "world"),
        kind="kernel",
        gpu=NeedsGPU(lambda run: bool(run.high_priority_stream_groups), "it has no effect: gloo has no streams"),
    )  # fmt: skip
    """Groups whose NCCL communication runs on streams of high priority, by their names in process_groups_config.py: tp,
    cp, pp, dp, dp_cp, ... Has no effect with gloo, which has no streams."""
    # kind "layout": another numbering moves shards between ranks, and changes no number.
    use_tp_pp_dp_mapping: bool = flag(False, kind="layout")
    """Number the ranks so that the stages of one pipeline are close together, instead of the replicas of a stage."""
