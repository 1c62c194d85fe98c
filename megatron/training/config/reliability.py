# SPDX-License-Identifier: Apache-2.0
"""Hangs, and faults that are brought about on purpose to see what a run does about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs


@dataclass(frozen=True)
class FaultKind:
    """One kind of --simulate-fault."""

    value: str
    """What the third value is, in words; empty where there is none."""
    needs_value: bool
    pattern: str
    """What it must match."""


_NUMBER = r"[0-9]+(\.[0-9]+)?"
FAULT_KINDS = {
    "kill": FaultKind("", False, ""),
    "stop": FaultKind("", False, ""),
    "exception": FaultKind("", False, ""),
    "slow": FaultKind("a factor", False, _NUMBER),
    "nan": FaultKind("the name of a parameter", False, r"[\w.]+"),
    "bitflip": FaultKind("weight:NAME or grad:NAME", False, r"(weight|grad):[\w.]+"),
    "disk": FaultKind("", False, ""),
    "network": FaultKind("a number of seconds", True, _NUMBER),
}


@dataclass(frozen=True)
class SimulatedFault:
    """One fault: what happens to which rank in which iteration."""

    kind: str
    rank: int
    iteration: int
    """Counted from 1, as the log does."""
    value: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank},{self.iteration}" + ("" if self.value is None else f",{self.value}")


def parse_fault(text: str) -> SimulatedFault:
    """Read KIND:RANK,ITERATION[,VALUE]. Raises ValueError with a sentence about what is wrong."""
    kind, _, rest = text.partition(":")
    if kind not in FAULT_KINDS:
        raise ValueError(f"there is no fault {kind!r}; choose from {', '.join(FAULT_KINDS)}")
    row = FAULT_KINDS[kind]
    form = f"{kind}:RANK,ITERATION" + (f",{row.value}" if row.needs_value else f"[,{row.value}]" if row.value else "")
    match = re.fullmatch(r"([0-9]{1,7}),([0-9]{1,12})(?:,(.+))?", rest)
    value = match[3] if match else None
    is_right = match is not None and int(match[2]) > 0
    if value is None:
        is_right = is_right and not row.needs_value
    else:
        is_right = is_right and bool(row.value) and re.fullmatch(row.pattern, value) is not None
    if not is_right or match is None:
        raise ValueError(f"it is not {form}, with ranks counted from 0 and iterations from 1")
    return SimulatedFault(kind, int(match[1]), int(match[2]), value)


_STRAGGLER = Needs("--log-straggler", lambda run: run.log_straggler)


@dataclass(kw_only=True)
class ReliabilityConfig(CheckedConfig):
    """Faults: what finds them, and how to rehearse them."""

    usual_kind = "report"

    hang_timeout: float | None = flag(
        None, minimum=0.0, unit="seconds", needs=Needs("several processes", lambda run: run.world_size > 1)
    )
    """A step that makes no progress for so long is taken for hung: the rank that the others wait for is named, and the
    job ends with exit code 75, to be started again. When not given, it follows from the first steps; 0: never."""
    # kind "numerics": NaNs and flipped bits change what is computed.
    simulate_fault: list[str] = flag(
        default_factory=list, nargs="+", metavar="KIND:RANK,ITERATION[,VALUE]", repeats=True, kind="numerics"
    )
    """Bring a fault about, once in the life of a run, restarts included: kill, stop or exception; slow (from then on,
    by a factor, 2 if not given); nan and bitflip (VALUE names the tensor); disk (the next save finds no room); network
    (no communication for so many seconds). May be given several times."""

    log_straggler: bool = False
    """Report, every --log-interval iterations, the ranks that are fastest and slowest in forward passes and in fetching
    data, and name a rank that stays far slower than the others."""
    straggler_ctrlr_port: int = flag(65535, minimum=1, maximum=65535, needs=_STRAGGLER)
    """Port on this machine, of the first rank: whoever connects to it switches the reports on or off."""
    straggler_minmax_count: int = flag(1, minimum=1, unit="ranks", needs=_STRAGGLER)
    """List so many of the slowest and of the fastest ranks, where there are more ranks; 1: none."""
    disable_straggler_on_startup: bool = flag(False, needs=_STRAGGLER)
    """Report only when switched on by --straggler-ctrlr-port."""

    def problems(self) -> Iterator[str]:
        """Each fault can be read."""
        for text in self.simulate_fault:
            try:
                parse_fault(text)
            except ValueError as error:
                yield f"{self.flag('simulate_fault')} {text}: {error}"

    @property
    def faults(self) -> tuple[SimulatedFault, ...]:
        """The faults of --simulate-fault."""
        return tuple(parse_fault(text) for text in self.simulate_fault)
