# SPDX-License-Identifier: Apache-2.0
"""--simulate-fault: what fails in a run's life, brought about once, to see what the run does about it."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.crash_points import fill_disk
from megatron.core.errors import ConfigError, say
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.training.config.container import RunConfig
from megatron.training.config.reliability import SimulatedFault
from megatron.training.run import Hook, HookContext, Run, Step

if TYPE_CHECKING:
    from megatron.training.data.loading import Batch

_NOTES = "simulated_faults"
_USUAL_FACTOR = 2.0
# The highest bit of the fraction: another number by a half, and still a number.
_FRACTION_BITS = {2: (torch.int16, {torch.bfloat16: 6, torch.float16: 9}), 4: (torch.int32, {torch.float32: 22})}


class StrikeNotes:
    """Notes of the faults that have struck in the life of a run, restarts included."""

    def __init__(self, save: str | None) -> None:
        # Without --save, where all attempts of one launcher meet: they have the same parent.
        self._path = Path(save or tempfile.gettempdir()) / (_NOTES if save else f"{_NOTES}_{os.getppid()}")

    def is_first_time(self, fault: str) -> bool:
        """Note the fault before it strikes: afterwards nobody may be there to do it."""
        self._path.mkdir(parents=True, exist_ok=True)
        try:
            (self._path / hashlib.sha256(fault.encode()).hexdigest()[:16]).open("x").close()
        except FileExistsError:
            return False
        return True


class SimulatedFaultsHook(Hook):
    """Brings the faults of this rank about: most before the first micro-batch of their iteration."""

    def __init__(self, faults: Sequence[SimulatedFault], save: str | None) -> None:
        self._faults = list(faults)
        self._notes = StrikeNotes(save)
        self._slow_factor = 1.0
        self._worked_until = 0.0

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> SimulatedFaultsHook | None:
        """Return the hook for --simulate-fault; None where it is not asked for."""
        faults = config.reliability.faults
        return cls(faults, config.checkpoint.save) if faults else None

    def on_train_start(self, run: Run) -> None:
        """Keep only this rank's faults. Raises ConfigError for a tensor that no rank has."""
        rank = run.groups.world.rank()
        self._faults = [fault for fault in self._faults if fault.rank == rank]
        for fault in self._faults:
            if fault.kind in ("nan", "bitflip"):
                _find_parameter(run, fault)
        self._worked_until = time.process_time()
        for chunk in run.model:
            chunk.module.register_forward_pre_hook(self._be_slow)

    def wrap_step(self, step: Step) -> Step:
        """The same step, whose first micro-batch meets the faults of the iteration."""

        def fail(run: Run, batches: Iterator[Batch]) -> None:
            step(run, self._strike_first(run, batches))

        return fail

    def on_gradients(self, run: Run) -> None:
        """Flip a bit of a gradient, which replicas hold alike by now."""
        self._strike(run, run.progress.iteration + 1, lambda f: (f.value or "").startswith("grad:"))

    def _strike_first(self, run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
        self._strike(run, run.progress.iteration + 1, lambda f: not (f.value or "").startswith("grad:"))
        # Not `yield from`, which would close the run's iterator with this one.
        for batch in batches:  # noqa: UP028
            yield batch

    def _strike(self, run: Run, iteration: int, is_meant: Callable[[SimulatedFault], bool]) -> None:
        for fault in [fault for fault in self._faults if fault.iteration <= iteration and is_meant(fault)]:
            # A slow rank stays slow, also when the run is started again.
            if fault.kind == "slow":
                self._slow_factor = float(fault.value or _USUAL_FACTOR)
                continue
            self._faults.remove(fault)
            if fault.iteration == iteration and self._notes.is_first_time(str(fault)):
                say(f"note: --simulate-fault {fault}", sys.stderr)
                _STRIKES[fault.kind](run, fault)

    def _be_slow(self, *_: Any) -> None:
        if self._slow_factor > 1.0:
            # What this process has worked, not what it has waited for others.
            time.sleep((self._slow_factor - 1.0) * max(0.0, time.process_time() - self._worked_until))
            self._worked_until = time.process_time()


def _find_parameter(run: Run, fault: SimulatedFault) -> tuple[nn.Module, nn.Parameter]:
    """The parameter that a fault names, or the first one, and its module."""
    name = (fault.value or "").rpartition(":")[2]
    for chunk in run.model:
        for path, parameter in chunk.module.named_parameters():
            if not name or find_global_name(chunk.module, path) == name:
                return chunk.module.get_submodule(path.rpartition(".")[0]), parameter
    raise ConfigError(
        f"--simulate-fault {fault}: rank {fault.rank} has no parameter {name}; docs/models.md says how they are named"
    )


def _raise(run: Run, fault: SimulatedFault) -> None:
    raise RuntimeError(f"--simulate-fault {fault}")


def _make_nan(run: Run, fault: SimulatedFault) -> None:
    """Spoil what the parameter's module gives, once."""
    module, _ = _find_parameter(run, fault)

    def spoil(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        handle.remove()
        parts = output if isinstance(output, tuple) else (output,)
        spoilt = tuple(part * float("nan") if isinstance(part, Tensor) else part for part in parts)
        return spoilt if isinstance(output, tuple) else spoilt[0]

    handle = module.register_forward_hook(spoil)


def _flip_bit(run: Run, fault: SimulatedFault) -> None:
    _, parameter = _find_parameter(run, fault)
    is_gradient = (fault.value or "").startswith("grad:")
    values: Tensor = parameter.main_grad if is_gradient else parameter.data  # type: ignore[attr-defined]
    integers, bits = _FRACTION_BITS[values.element_size()]
    first = values.view(-1)[:1].view(integers)
    first.bitwise_xor_(1 << bits[values.dtype])


_STRIKES: dict[str, Callable[[Run, SimulatedFault], None]] = {
    "kill": lambda run, fault: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda run, fault: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": _raise,
    "nan": _make_nan,
    "bitflip": _flip_bit,
    "disk": lambda run, fault: fill_disk(),
    "network": lambda run, fault: time.sleep(float(fault.value or 0.0)),
}
