# SPDX-License-Identifier: Apache-2.0
"""Hangs, numbers gone bad, and faults that are brought about on purpose to see what a run does about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs, PathText


@dataclass(frozen=True)
class FaultKind:
    """One kind of --simulate-fault."""

    value: str
    """Meaning of the third value, in words; empty where there is none."""
    needs_value: bool
    pattern: str
    """Pattern that it must match."""


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


_INJECTS = Needs(
    "--fault-injector-ranks or --fault-injector-num-ranks",
    lambda run: run.fault_injector_ranks is not None or run.fault_injector_num_ranks is not None,
)
_RERUNS = Needs("--rerun-mode validate_results", lambda run: run.rerun_mode == "validate_results")
_STRAGGLER = Needs("--log-straggler", lambda run: run.log_straggler)


INJECTED_TYPES = (
    "WORKLOAD_EXC", "ASYNC_EXC", "SIGNAL_EXC", "OS_ABORT", "LOCK_GIL", "SEGFAULT", "SIGINT", "SIGKILL", "SIGTERM",
    "SIGSTOP",
)  # fmt: skip


def split_list(text: str | None) -> list[str]:
    """`1,2 3` as its words."""
    return re.split(r"[,\s]+", text.strip(", ")) if text and text.strip(", ") else []


def find_injection_problems(settings: ReliabilityConfig) -> Iterator[str]:
    """Say what is wrong with the flags --fault-injector-*, in a sentence for each."""
    flag_ = "--fault-injector"
    ranks, types = split_list(settings.fault_injector_ranks), split_list(settings.fault_injector_fault_types)
    shares = split_list(settings.fault_injector_fault_probabilities)
    if settings.fault_injector_ranks is not None and settings.fault_injector_num_ranks is not None:
        yield f"{flag_}-ranks names the ranks and {flag_}-num-ranks draws them; give one of the two"
    if settings.fault_injector_ranks is not None and not (ranks and all(re.fullmatch("[0-9]{1,7}", r) for r in ranks)):
        yield f"{flag_}-ranks {settings.fault_injector_ranks} is not a list of ranks such as 1,3"
    for name in types:
        if name.upper() in ("GPU_ERROR", "GPU_SLEEP"):
            yield f"{flag_}-fault-types {name}: faults of GPUs are not simulated; use SIGKILL, or SIGSTOP for a hang"
        elif name.upper() not in INJECTED_TYPES:
            yield f"{flag_}-fault-types {name}: there is no such type; choose from {', '.join(INJECTED_TYPES)}"
    if shares:
        are_numbers = all(re.fullmatch(_NUMBER, share) for share in shares)
        if not are_numbers or len(shares) != len(types) or sum(map(float, shares)) <= 0:
            yield (
                f"{flag_}-fault-probabilities {settings.fault_injector_fault_probabilities} is not one number for "
                f"each of the {len(types)} {flag_}-fault-types, not all of them 0"
            )
    if settings.fault_injector_ranks is None and settings.fault_injector_num_ranks is None:
        return
    if (settings.fault_injector_fault_delay is None) == (settings.fault_injector_mtti_seconds is None):
        yield (
            f"when the fault comes is said by one of {flag_}-fault-delay SECONDS and {flag_}-mtti-seconds MEAN; give "
            "one of the two"
        )


@dataclass(kw_only=True)
class ReliabilityConfig(CheckedConfig):
    """Faults: what finds them, and how to rehearse them."""

    usual_kind = "report"

    hang_timeout: float | None = flag(
        None, minimum=0.0, unit="seconds", needs=Needs("several processes", lambda run: run.world_size > 1)
    )
    """A step that makes no progress for so long is taken for hung: the rank that the others wait for is named, and the
    job ends with exit code 75, to be started again. When not given, it follows from the first steps; 0: never."""
    preflight: bool = False
    """Before the first step, try the machines of all ranks as `python -m megatron doctor` does, the groups of the
    layout, and the disk of --save with its room for the run's checkpoints. A check that fails ends the run with exit
    code 1, and names the host."""
    # kind "numerics": NaNs and flipped bits change what is computed.
    simulate_fault: list[str] = flag(
        default_factory=list, nargs="+", metavar="KIND:RANK,ITERATION[,VALUE]", repeats=True, kind="numerics"
    )
    """Bring a fault about, once in the life of a run, restarts included: kill, stop or exception; slow (from then on,
    by a factor, 2 if not given); nan and bitflip (VALUE names the tensor); disk (the next save finds no room); network
    (no communication for so many seconds). May be given several times."""

    nan_policy: Literal["stop", "skip", "rollback"] = flag("stop", kind="numerics")
    """When a loss or a gradient is not a number: stop; skip the iteration's data, with weights and learning rate as
    before; or go back to the newest checkpoint and skip them on the way. The last two look at every step's values
    before they are used, for which the host waits. With --rerun-mode they act on what is wrong a second time, too."""
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = flag("disabled", kind="report")
    """Compute a step again: when its loss or gradient is not a number, to tell a passing fault of a device from a
    lasting one or a correct result (exit codes 16 and 17); or every step, to report how far its results differ."""
    error_injection_rate: int = flag(0, minimum=0, kind="numerics", needs=_RERUNS)
    """Reject a result about every so many, to try --rerun-mode; 0: none."""
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = flag(
        "transient_error", kind="numerics",
        needs=(_RERUNS, Needs("--error-injection-rate", lambda run: run.error_injection_rate > 0)),
    )  # fmt: skip
    """Outcome of computing again for the injected errors."""
    result_rejected_tracker_filename: PathText | None = flag(None, kind="report")
    """Append a line here for each result that was rejected; when a run begins, iterations whose results one rank has
    found wrong twice are passed over."""

    fault_injector_ranks: str | None = flag(None, metavar="RANK,...", kind="numerics")
    """Ranks that meet a fault of --fault-injector-fault-types, once in the life of a run; upstream's spelling of
    --simulate-fault, by time instead of iteration."""
    fault_injector_num_ranks: int | None = flag(None, minimum=1, kind="numerics")
    """Draw so many ranks, all but the first one, instead of naming them."""
    fault_injector_fault_types: str | None = flag(None, metavar="TYPE,...", kind="numerics", needs=_INJECTS)
    """Kinds of faults, of which each rank draws one: WORKLOAD_EXC, ASYNC_EXC, SIGNAL_EXC, OS_ABORT, LOCK_GIL, SEGFAULT,
    SIGINT, SIGKILL, SIGTERM, SIGSTOP; all of them when not given."""
    fault_injector_fault_probabilities: str | None = flag(None, metavar="P,...", kind="numerics", needs=_INJECTS)
    """Shares of the types in what is drawn, relative to each other."""
    fault_injector_fault_delay: float | None = flag(None, minimum=0.0, unit="seconds", kind="numerics", needs=_INJECTS)
    """The fault comes so long after training, or --fault-injector-delay-start-iteration, has begun."""
    fault_injector_delay_start_iteration: int | None = flag(None, minimum=1, kind="numerics", needs=_INJECTS)
    """Count the time to the fault from the start of this iteration, counted from 1."""
    fault_injector_mtti_seconds: float | None = flag(None, above=0.0, unit="seconds", kind="numerics", needs=_INJECTS)
    """Draw the time to the fault: an exponential distribution with this mean."""
    fault_injector_offset_seconds: float | None = flag(
        None, minimum=0.0, unit="seconds", kind="numerics",
        needs=Needs("--fault-injector-mtti-seconds", lambda run: run.fault_injector_mtti_seconds is not None),
    )  # fmt: skip
    """Added to the time that --fault-injector-mtti-seconds draws."""
    fault_injector_seed: int | None = flag(None, minimum=0, kind="numerics", needs=_INJECTS)
    """Of what is drawn; other draws in every run when not given."""

    log_straggler: bool = False
    """Report, every --log-interval iterations, the ranks that are fastest and slowest in forward passes and in fetching
    data, and name a rank that stays far slower than the others."""
    straggler_ctrlr_port: int = flag(65535, minimum=1, maximum=65535, needs=_STRAGGLER)
    """Port on this machine, of the first rank: a connection to it switches the reports on or off."""
    straggler_minmax_count: int = flag(1, minimum=1, unit="ranks", needs=_STRAGGLER)
    """List so many of the slowest and of the fastest ranks, where there are more ranks; 1: none."""
    disable_straggler_on_startup: bool = flag(False, needs=_STRAGGLER)
    """Report only when switched on by --straggler-ctrlr-port."""

    gpu_sniff_test_interval: int | None = flag(None, minimum=1, unit="iterations")
    """Iterations between measurements of each rank's device and groups, as in --preflight, which name the ranks that
    are far from the median; they take about a second."""

    def rules(self) -> Iterator[str]:
        """Each fault can be read, and what is injected is said in one way."""
        yield from find_injection_problems(self)
        for text in self.simulate_fault:
            try:
                parse_fault(text)
            except ValueError as error:
                yield f"{self.flag('simulate_fault')} {text}: {error}"

    @property
    def faults(self) -> tuple[SimulatedFault, ...]:
        """The faults of --simulate-fault."""
        return tuple(parse_fault(text) for text in self.simulate_fault)
