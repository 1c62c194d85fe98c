"""The values of all flags while they are derived and checked, before they become a RunConfig."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron.training.flags.declarations import Flag


class Settings:
    """Every flag's value by `dest`: `settings.micro_batch_size`. Flags that are only planned have a value, too.

    environ: the environment variables, for the rules that concern them.
    data_parallel_size: None while the layout does not fit the number of processes.
    """

    def __init__(self, flags: Iterable[Flag], given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.flags = {flag.dest: flag for flag in flags}
        self.values = {dest: flag.default for dest, flag in self.flags.items()} | dict(given)
        self.given = frozenset(given)
        self.environ = environ
        self.notes: list[str] = []
        self.world_size = 1
        self.data_parallel_size: int | None = None

    def __getattr__(self, dest: str) -> Any:
        try:
            return self.__dict__["values"][dest]
        except KeyError:
            raise AttributeError(dest) from None

    def derive(self, **values: Any) -> None:
        """Replace values by what follows from others."""
        self.values.update(values)

    def say(self, dest: str) -> str:
        """A setting as the user writes it: `--micro-batch-size 2`, `--no-rope-fusion`."""
        return self.flags[dest].spelling_for(self.values[dest])

    def name(self, dest: str) -> str:
        """A setting's flag: `--micro-batch-size`."""
        return self.flags[dest].name

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)
