# SPDX-License-Identifier: Apache-2.0
"""A layout in a few letters, "tp2,sp,pp2,dp2": its flags, its processes, and its parts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.core.errors import ConfigError

SIZE_FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
}
"""Term of a layout -> flag; dp has none: it is whatever the other axes leave over."""
_SWITCHES = {
    "sp": ("--sequence-parallel",),
    "dist-opt": ("--use-distributed-optimizer",),
    "overlap": ("--overlap-grad-reduce",),
    "overlap-all": ("--overlap-grad-reduce", "--overlap-param-gather"),
    "fsdp2": ("--use-torch-fsdp2",),
}


@dataclass(frozen=True)
class ParityLayout:
    """Division of a run over processes: "tp2,sp,pp2,dp2"."""

    text: str
    flags: tuple[str, ...]
    sizes: dict[str, int] = field(hash=False)
    """Axis -> processes, for tp, pp, cp and dp."""

    @property
    def world_size(self) -> int:
        """The number of processes that the layout takes."""
        return math.prod(self.sizes.values())

    @property
    def terms(self) -> list[str]:
        """Its parts, as they were written."""
        return [term for part in self.text.split(",") if (term := part.strip()) not in ("", "1")]


def parse_layout(text: str) -> ParityLayout:
    """`tp2,sp,pp2` -> flags and sizes. Terms: tpN ppN cpN dpN epN etpN vppN sp dist-opt overlap overlap-all fsdp2, or
    any flag (`--name`, `--name value`). `1` and the empty text are one process. Raises ConfigError for another term."""
    flags: list[str] = []
    # ep and etp are absent: experts are divided within the processes that these four make.
    sizes = dict.fromkeys(("tp", "pp", "cp", "dp"), 1)
    for term in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([a-z]+)([1-9][0-9]{0,4})", term)
        if term == "1":
            continue
        if match and (match[1] in SIZE_FLAGS or match[1] == "dp"):
            if match[1] in sizes:
                sizes[match[1]] = int(match[2])
            if match[1] != "dp":
                flags += [SIZE_FLAGS[match[1]], match[2]]
        elif term in _SWITCHES:
            flags += _SWITCHES[term]
        elif term.startswith("--"):
            flags += term.split()
        else:
            known = ", ".join([*(f"{name}N" for name in SIZE_FLAGS), "dpN", *_SWITCHES])
            raise ConfigError(f"--layouts {text!r}: {term!r} is not known; use {known}, or a flag such as --name=value")
    return ParityLayout(text or "1", tuple(flags), sizes)


def find_smallest_part(layout: ParityLayout, still: Callable[[ParityLayout], bool]) -> ParityLayout:
    """Leave out terms (axes, switches and flags alike) as long as what was seen of the layout is still seen.

    still(part): whether it is; False for a part that cannot run. In the result every term is needed.
    """
    terms = layout.terms
    # From the end, where the terms stand that refine others: `sp` can go without `tp2`, not the other way round.
    position = len(terms) - 1
    while position >= 0:
        part = parse_layout(",".join(terms[:position] + terms[position + 1 :]))
        if len(terms) > 1 and still(part):
            terms = part.terms
            # What was needed by the term that went may go now.
            position = len(terms)
        position -= 1
    return parse_layout(",".join(terms))


def choose_padding(layouts: Sequence[ParityLayout], divisible_by: int) -> Mapping[str, int]:
    """Layout's text -> --make-vocab-size-divisible-by with which all of them pad the vocabulary alike: the padding rows
    take part in the softmax, as upstream's do."""
    unit = 1
    for layout in layouts:
        # The vocabulary is padded to a multiple of this times tp.
        unit = math.lcm(unit, divisible_by * layout.sizes["tp"])
    return {layout.text: unit // layout.sizes["tp"] for layout in layouts}
