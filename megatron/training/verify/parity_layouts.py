"""A layout in a few letters, "tp2,sp,pp2,dp2": its flags, its processes, and its parts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.core.errors import ConfigError

# dp has no flag: it is whatever the other axes leave over.
_SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
}
_SWITCHES = {
    "sp": ("--sequence-parallel",),
    "dist-opt": ("--use-distributed-optimizer",),
    "overlap": ("--overlap-grad-reduce",),
    "overlap-all": ("--overlap-grad-reduce", "--overlap-param-gather"),
    "fsdp2": ("--use-torch-fsdp2",),
}


@dataclass(frozen=True)
class Layout:
    """How a run is divided: "tp2,sp,pp2,dp2"."""

    text: str
    flags: tuple[str, ...]
    sizes: dict[str, int] = field(hash=False)
    """Axis -> processes, for tp, pp, cp and dp."""

    @property
    def world_size(self) -> int:
        """The number of processes that the layout takes."""
        return math.prod(self.sizes.values())


def parse_layout(text: str) -> Layout:
    """`tp2,sp,pp2` -> flags and sizes. Terms: tpN ppN cpN dpN epN etpN vppN sp dist-opt overlap overlap-all fsdp2, or
    any flag (`--name`, `--name value`). `1` and the empty text are one process. Raises ConfigError for another term."""
    flags: list[str] = []
    # ep and etp are absent: experts are divided within the processes that these four make.
    sizes = dict.fromkeys(("tp", "pp", "cp", "dp"), 1)
    for term in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([a-z]+)([1-9][0-9]{0,4})", term)
        if term == "1":
            continue
        if match and (match[1] in _SIZES or match[1] == "dp"):
            if match[1] in sizes:
                sizes[match[1]] = int(match[2])
            if match[1] != "dp":
                flags += [_SIZES[match[1]], match[2]]
        elif term in _SWITCHES:
            flags += _SWITCHES[term]
        elif term.startswith("--"):
            flags += term.split()
        else:
            known = ", ".join([*(f"{name}N" for name in _SIZES), "dpN", *_SWITCHES])
            raise ConfigError(f"--layouts {text!r}: {term!r} is not known; use {known}, or a flag such as --name=value")
    return Layout(text or "1", tuple(flags), sizes)


def split_layout(layout: Layout) -> list[Layout]:
    """The layout's axes one at a time, each with the terms that only make sense with it: to find the guilty one."""
    terms = [term.strip() for term in layout.text.split(",")]
    companions = {"tp": ("sp",), "pp": ("vpp",), "dp": ("dist-opt", "overlap", "overlap-all", "fsdp2")}
    parts = []
    for axis, size in layout.sizes.items():
        if size > 1:
            own = [axis, *companions.get(axis, ())]
            kept = [term for term in terms if re.sub(r"[0-9]+$", "", term) in own]
            # The axis alone comes first: if it differs already, the terms added to it are innocent.
            parts += [kept[:count] for count in range(1, len(kept) + 1)]
    alone = dict.fromkeys(",".join(kept) for kept in parts)
    return [parse_layout(text) for text in alone if text != layout.text]


def find_guilty_parts(layout: Layout, differs: Callable[[Layout], bool]) -> list[str]:
    """Texts of the smallest parts of a layout that already differ; the layout itself when only their combination
    does."""
    found: list[str] = []
    for part in split_layout(layout):
        inside = any(set(text.split(",")) <= set(part.text.split(",")) for text in found)
        if not inside and differs(part):
            found.append(part.text)
    return found or [layout.text]


def choose_padding(layouts: Sequence[Layout], divisible_by: int) -> Mapping[str, int]:
    """Layout's text -> --make-vocab-size-divisible-by with which all of them pad the vocabulary alike: the padding rows
    take part in the softmax, as upstream's do."""
    unit = 1
    for layout in layouts:
        # The vocabulary is padded to a multiple of this times tp.
        unit = math.lcm(unit, divisible_by * layout.sizes["tp"])
    return {layout.text: unit // layout.sizes["tp"] for layout in layouts}
