"""The settings of a run as the rules in checks/ read them, until these stand beside the fields."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from megatron.training.config.container import RunConfig
from megatron.training.flags.command_line_rules import PlannedFlags
from megatron.training.flags.derive import Fields


class Settings(Fields):
    def __init__(self, run: RunConfig, given: Set[str], planned: PlannedFlags, environ: Mapping[str, str]) -> None:
        super().__init__(run, given)
        self.planned, self.environ = planned, environ
        self.data_parallel_size = run.data_parallel_size if run.is_divisible else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.planned[name]

    def say(self, name: str) -> str:
        try:
            return self.run.say(name)
        except KeyError:
            return self.planned.say(name)

    def name(self, name: str) -> str:
        try:
            return self.run.flag(name)
        except KeyError:
            return self.planned.name(name)


def asked_for_sharding(s: Settings) -> bool:
    return bool(s.given & {"use_torch_fsdp2", "use_megatron_fsdp"})


def sharding_flag(s: Settings) -> str:
    return "--use-megatron-fsdp" if s.use_megatron_fsdp else "--use-torch-fsdp2"


def replicas(s: Settings) -> int | None:
    return None if s.data_parallel_size is None else s.data_parallel_size * s.context_parallel_size
