# SPDX-License-Identifier: Apache-2.0
"""--profile: a window of iterations for Nsight Systems or torch.profiler; --record-memory-history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.core import device
from megatron.core.errors import ConfigError, say
from megatron.training.config.container import RunConfig
from megatron.training.config.profiling import ProfilingConfig
from megatron.training.run import Hook, HookContext, Phase, Run, StepResult


class ProfilerHook(Hook):
    """Profiles iterations (start, end] on the chosen ranks."""

    phase = Phase.MEASURE

    def __init__(self, config: ProfilingConfig) -> None:
        self.config = config
        self._profiler: Any = None
        self._ranges: Any = None

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> ProfilerHook | None:
        """Return the hook for --profile; None where it is not asked for."""
        return cls(config.profiling) if config.profiling.profile else None

    def on_step_start(self, run: Run) -> None:
        """Begin where the window begins, or in the middle of it when the run was resumed there."""
        done = run.progress.iteration
        is_inside = self.config.profile_step_start <= done < self.config.profile_step_end
        # A window, not an equality: a run resumed inside of it still profiles the rest.
        if is_inside and self._profiler is None and self._ranges is None and is_profiled(run, self.config):
            self._begin(run)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Stop and write the profile where the window ends."""
        if run.progress.iteration >= self.config.profile_step_end:
            self._end(run)

    def on_close(self, run: Run) -> None:
        """A run that stops inside the window keeps what it has."""
        self._end(run)

    def _begin(self, run: Run) -> None:
        device.synchronize()
        if not self.config.use_pytorch_profiler:
            device.start_cuda_profiler()
            self._ranges = torch.autograd.profiler.emit_nvtx(record_shapes=self.config.record_shapes)
            self._ranges.__enter__()
            return
        # The Chakra trace is a second listener on the same profiler, so both cover the same iterations.
        observer = None
        if self.config.pytorch_profiler_collect_chakra:
            observer = torch.profiler.ExecutionTraceObserver()
            observer.register_callback(str(self._path(run, "chakra.json")))
        self._profiler = torch.profiler.profile(
            activities=device.list_profiler_activities(),
            record_shapes=self.config.pytorch_profiler_collect_shapes,
            with_stack=self.config.pytorch_profiler_collect_callstack,
            execution_trace_observer=observer,
        )
        self._profiler.start()

    def _end(self, run: Run) -> None:
        if self._ranges is not None:
            device.synchronize()
            self._ranges.__exit__(None, None, None)
            self._ranges = None
            device.stop_cuda_profiler()
        # Forgotten first: a profile that cannot be written is lost, and is not tried again at the end of the run.
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            device.synchronize()
            # Kernels that were launched inside the window have run by now (synchronize), so the trace is complete.
            profiler.stop()
            path = self._path(run, "json.gz")
            profiler.export_chrome_trace(str(path))
            say(f"profile: rank {run.groups.world.rank()} wrote {path}")

    def _path(self, run: Run, ending: str) -> Path:
        directory = Path(self.config.profile_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--profile-dir {directory} cannot be written ({error.strerror}); give a writable directory"
            ) from error
        return directory / f"rank-{run.groups.world.rank()}.{ending}"


class MemoryHistoryHook(Hook):
    """Records allocations on a GPU from the start of training."""

    phase = Phase.MEASURE

    def __init__(self, config: ProfilingConfig) -> None:
        self.config = config
        self._is_recording = False

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> MemoryHistoryHook | None:
        """Return the hook for --record-memory-history; None where it is not asked for."""
        return cls(config.profiling) if config.profiling.record_memory_history else None

    def on_train_start(self, run: Run) -> None:
        """Begin to record allocations."""
        if is_profiled(run, self.config):
            device.record_memory_history()
            self._is_recording = True

    def on_close(self, run: Run) -> None:
        """Write the record, also after an error: that is when it is wanted most."""
        if self._is_recording:
            path = Path(self.config.memory_snapshot_path)
            if len(self.config.profile_ranks) > 1:
                # Ranks share a file system: with one name, only the file written last would remain.
                path = path.with_name(f"{path.stem}-rank-{run.groups.world.rank()}{path.suffix}")
            self._is_recording = False
            device.dump_memory_snapshot(path)


def is_profiled(run: Run, config: ProfilingConfig) -> bool:
    """Tell whether this rank is among --profile-ranks; by default the first rank is."""
    return run.groups.world.rank() in (config.profile_ranks or [0])
