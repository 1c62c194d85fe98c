# SPDX-License-Identifier: Apache-2.0
"""--elastic-layouts: the layout of a run that is started again with as many processes as there are."""

from __future__ import annotations

import re

from megatron.core.mesh import size_problems
from megatron.training.flags.declarations import flags_by_spelling
from megatron.training.flags.given import ParsedFlags

_AXES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
}
_LAYOUT = re.compile(rf"(?:({'|'.join(_AXES)})([1-9][0-9]{{0,4}}))+")
_AXIS = re.compile(r"([a-z]+)([0-9]+)")


def add_elastic_layout(parsed: ParsedFlags, world_size: int) -> None:
    """Enter the sizes of the first layout of --elastic-layouts that this number of processes and the global batch fit;
    what fits nowhere is a problem."""
    entry = parsed.given.get("elastic_layouts")
    if entry is None:
        return
    sizes = {axis: flags_by_spelling()[name] for axis, name in _AXES.items()}
    written = [parsed.given[flag.dest].written for flag in sizes.values() if flag.dest in parsed.given]
    if written:
        parsed.misspelt(f"--elastic-layouts says what {written[0]} says, too; leave one out", *sizes.values())
        return
    layouts, reasons = [], []
    for text in str(entry.value).replace(" ", "").split(","):
        if not _LAYOUT.fullmatch(text):
            parsed.misspelt(
                f"{entry.written}: {text!r} is no layout; give sizes such as tp2pp2, of {', '.join(_AXES)}", entry.flag
            )
            return
        layout = {axis: int(size) for axis, size in _AXIS.findall(text)}
        problem = _find_problem(parsed, layout, world_size)
        if problem is None:
            for axis, flag in sizes.items():
                parsed.give(flag, flag.name, [str(layout.get(axis, 1))], "--elastic-layouts")
            parsed.notes.append(f"--elastic-layouts: {text} for {world_size} process{'es' if world_size > 1 else ''}")
            return
        layouts.append(layout)
        reasons.append(f"{text}: {problem}")
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    parsed.misspelt(
        f"{entry.written} has no layout for {processes} ({'; '.join(reasons)}); add one, or start "
        f"{_name_nearest(parsed, layouts, world_size)}",
        *sizes.values(),
    )


def _name_nearest(parsed: ParsedFlags, layouts: list[dict[str, int]], world_size: int) -> str:
    """The numbers of processes around this one that some layout fits, for a sentence. Looks 4096 steps either way."""
    ways = range(world_size - 1, max(0, world_size - 4096), -1), range(world_size + 1, world_size + 4096)
    fits = (
        next((n for n in way if any(_find_problem(parsed, layout, n) is None for layout in layouts)), None)
        for way in ways
    )
    return " or ".join(str(n) for n in fits if n is not None) or "another number"


def _find_problem(parsed: ParsedFlags, layout: dict[str, int], world_size: int) -> str | None:
    """Return why so many processes cannot have this layout, in few words; None where they can."""
    given = {axis: layout.get(axis, 1) for axis in _AXES}
    per_copy = given["tp"] * given["pp"] * given["cp"]
    if size_problems(world_size, given | {"etp": given["tp"]}):
        return f"{per_copy} processes for a copy" if world_size % per_copy else "no room for the experts"
    batch, micro = (parsed.given.get(name) for name in ("global_batch_size", "micro_batch_size"))
    unit = world_size // per_copy * (micro.value if micro is not None else 1)
    if batch is not None and batch.value % unit:
        return f"a global batch of {batch.value} is not divisible by {unit}"
    return None
