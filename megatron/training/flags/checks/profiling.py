"""Profiles and traces."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.flags.settings import Settings


def window_is_not_empty(s: Settings) -> Iterator[str]:
    is_used = s.profile or s.pipeline_trace_dir is not None
    if is_used and s.profile_step_end <= s.profile_step_start:
        yield f"{s.say('profile_step_end')} is not after {s.say('profile_step_start')}; give a larger number"


def profiled_ranks_exist(s: Settings) -> Iterator[str]:
    beyond = [rank for rank in s.profile_ranks or () if rank >= s.world_size]
    if beyond and (s.profile or s.record_memory_history):
        yield f"--profile-ranks {beyond[0]} is none of the {s.world_size} ranks; give numbers below {s.world_size}"


def ranges_are_not_compiled(s: Settings) -> Iterator[str]:
    if s.nvtx_ranges and s.compile:
        yield "--nvtx-ranges names parts of layers, which --compile makes one; leave one of the two out"


CHECKS = (window_is_not_empty, profiled_ranks_exist, ranges_are_not_compiled)
