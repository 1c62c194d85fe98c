"""Prints settings: every value and where it came from."""

from __future__ import annotations

import shutil
from itertools import groupby
from typing import Any, TextIO

from megatron.training.config.container import RunConfig
from megatron.training.flags.declarations import Flag, declared_flags


def print_settings(config: RunConfig, out: TextIO) -> None:
    """Every value of the run with its source, one per line, under the headings of --help."""
    flags = declared_flags()
    values = {flag.name: shown_value(flag, getattr(getattr(config, flag.config or ""), flag.dest)) for flag in flags}
    name_width = max(map(len, values))
    value_width = min(max(map(len, values.values())), max(12, shutil.get_terminal_size().columns - name_width - 20))
    processes = f"{config.world_size} process{'es' if config.world_size > 1 else ''}"
    print(
        f"# {processes} (WORLD_SIZE, {config.sources['WORLD_SIZE']}), data-parallel size {config.data_parallel_size}",
        file=out,
    )
    for group, members in groupby(flags, key=lambda flag: flag.group):
        print(f"\n# {group}", file=out)
        for flag in members:
            value = values[flag.name]
            print(f"{flag.name:<{name_width}}  {value:<{value_width}}  {config.sources[flag.name]}", file=out)
    for name, extra in config.extra.items():
        print(f"{'--' + name.replace('_', '-'):<{name_width}}  {extra!s:<{value_width}}  script", file=out)
    for note in config.notes:
        print(f"note: {note}", file=out)


def shown_value(flag: Flag, value: Any) -> str:
    """A value as it would be typed; `-` where there is none."""
    if value is None:
        return "-"
    if flag.is_switch:
        return "true" if value else "false"
    return flag.text_of(value)
