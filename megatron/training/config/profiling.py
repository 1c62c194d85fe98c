"""What to record of a few iterations, to see where their time and memory go."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import flag


@dataclass(kw_only=True)
class ProfilingConfig:
    """Profiles, memory history, pipeline traces."""

    profile: bool = False
    """Profile some iterations: for Nsight Systems (nsys profile -c cudaProfilerApi), or with --use-pytorch-profiler."""
    profile_step_start: int = flag(10, minimum=0, unit="iterations")
    """Begin after this many iterations of the whole run; pipeline traces, too."""
    profile_step_end: int = flag(12, minimum=1, unit="iterations")
    """End after this many."""
    profile_ranks: list[int] = flag(default_factory=list, nargs="+", minimum=0)
    """Ranks to profile; the first one when not given."""
    profile_dir: str = "torch_profile"
    """Directory for what --use-pytorch-profiler writes: rank-N.json.gz, a Chrome trace, for each profiled rank."""
    use_pytorch_profiler: bool = False
    """Profile with torch.profiler instead of marking the iterations for Nsight Systems."""
    pytorch_profiler_collect_shapes: bool = False
    """The trace has the shapes of all operands."""
    pytorch_profiler_collect_callstack: bool = False
    """The trace has the place in the program of every operation."""
    pytorch_profiler_collect_chakra: bool = False
    """Also write an execution trace, rank-N.chakra.json, that the Chakra tools read."""
    nvtx_ranges: bool = False
    """Iterations, and the parts of the layers in forward, have names in the profiles of Nsight Systems and
    torch.profiler."""
    record_shapes: bool = False
    """Ranges for Nsight Systems have the shapes of operands."""
    record_memory_history: bool = False
    """Record every allocation on a GPU, and write the record at the end of the run, also after an error."""
    memory_snapshot_path: str = "snapshot.pickle"
    """File for --record-memory-history (pytorch.org/memory_viz shows it); several ranks add their number."""
    pipeline_trace_dir: str | None = None
    """Directory for the times of every action of the pipeline in those iterations; tools/draw_schedule.py draws
    them."""
