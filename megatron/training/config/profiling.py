# SPDX-License-Identifier: Apache-2.0
"""Settings of profiles of a few iterations, to see where their time and memory go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs, NeedsGPU, PathText

_DRY = Needs("--dry-run", lambda run: run.dry_run)
_PROFILE = Needs("--profile", lambda run: run.profile)
_WINDOW = Needs("--profile", lambda run: run.profile or run.pipeline_trace_dir is not None)
_TORCH = Needs(
    "--profile --use-pytorch-profiler, or --profile on the CPU", lambda run: run.profile and run.use_pytorch_profiler
)


@dataclass(kw_only=True)
class ProfilingConfig(CheckedConfig):
    """Profiles, memory history, pipeline traces."""

    usual_kind = "report"

    dry_run: bool = False
    """Do one step of ranks of the job in this process, without a GPU and without values, and stop: peak memory,
    products, kernels and collectives of each, and whether ranks would wait for each other for ever (exit code 1)."""
    dry_run_world_size: int | None = flag(None, names=("--world-size",), minimum=1, maximum=10_000_000, needs=_DRY)
    """Processes of the job that is tried; WORLD_SIZE of the environment when not given."""
    dry_run_ranks: Literal["sample", "all"] = flag("sample", names=("--ranks",), needs=_DRY)
    """Ranks to try: some that stand for all others, or every one."""
    dry_run_json: PathText | None = flag(None, metavar="FILE", needs=_DRY)
    """Write what was seen of each rank as JSON."""
    profile: bool = flag(
        False,
        gpu=NeedsGPU(
            lambda run: run.profile and not run.use_pytorch_profiler,
            "--use-pytorch-profiler takes the place of Nsight Systems",
            {"use_pytorch_profiler": True},
        ),
    )
    """Profile some iterations: for Nsight Systems (nsys profile -c cudaProfilerApi), or with --use-pytorch-profiler."""
    # The window counts iterations of the whole run, not of this job.
    profile_step_start: int = flag(10, minimum=0, unit="iterations", needs=_WINDOW)
    """Begin after this many iterations of the whole run; pipeline traces, too."""
    profile_step_end: int = flag(12, minimum=1, unit="iterations", needs=_WINDOW)
    """End after this many."""
    profile_ranks: list[int] = flag(
        default_factory=list,
        nargs="+",
        minimum=0,
        needs=Needs("--profile", lambda run: run.profile or run.record_memory_history),
    )
    """Ranks to profile; the first one when not given."""
    profile_dir: PathText = flag("torch_profile", needs=_TORCH)
    """Directory for what --use-pytorch-profiler writes: rank-N.json.gz, a Chrome trace, for each profiled rank."""
    use_pytorch_profiler: bool = flag(False, needs=_PROFILE)
    """Profile with torch.profiler instead of marking the iterations for Nsight Systems."""
    pytorch_profiler_collect_shapes: bool = flag(False, needs=_TORCH)
    """The trace has the shapes of all operands."""
    pytorch_profiler_collect_callstack: bool = flag(False, needs=_TORCH)
    """The trace has the place in the program of every operation."""
    pytorch_profiler_collect_chakra: bool = flag(False, needs=_TORCH)
    """Also write an execution trace, rank-N.chakra.json, that the Chakra tools read."""
    # Independent of --profile: nsys can also watch a whole run from outside.
    nvtx_ranges: bool = False
    """Iterations, and the parts of the layers in forward, have names in the profiles of Nsight Systems and
    torch.profiler."""
    record_shapes: bool = flag(
        False, needs=Needs("--profile for Nsight Systems", lambda run: run.profile and not run.use_pytorch_profiler)
    )
    """Ranges for Nsight Systems have the shapes of operands."""
    record_memory_history: bool = flag(
        False,
        gpu=NeedsGPU(
            lambda run: run.record_memory_history,
            "nothing is recorded",
            {"record_memory_history": False},
        ),
    )
    """Record every allocation on a GPU, and write the record at the end of the run, also after an error."""
    memory_snapshot_path: PathText = flag(
        "snapshot.pickle", needs=Needs("--record-memory-history", lambda run: run.record_memory_history)
    )
    """File for --record-memory-history (pytorch.org/memory_viz shows it); several ranks add their number."""
    pipeline_trace_dir: PathText | None = None
    """Directory for the times of every action of the pipeline in those iterations; tools/draw_schedule.py draws
    them."""

    def rules(self) -> Iterator[str]:
        """The profiled iterations are some."""
        is_used = self.profile or self.pipeline_trace_dir is not None
        if is_used and self.profile_step_end <= self.profile_step_start:
            yield f"{self.say('profile_step_end')} is not after {self.say('profile_step_start')}; give a larger number"
