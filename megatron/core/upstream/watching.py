# SPDX-License-Identifier: Apache-2.0
"""Doors for upstream's ways to find slow ranks and wrong results: a user's loop looks for neither."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

from megatron.core.errors import UnsupportedError


class StragglerDetector:
    """The one object of its class, a context manager that measures nothing: loops put it around their parts."""

    _instance: ClassVar[StragglerDetector | None] = None
    enabled = False

    def __new__(cls) -> StragglerDetector:
        """The one there is."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __call__(self, bdata: bool = False) -> StragglerDetector:
        """Itself. bdata: the part loads data."""
        return self

    def __enter__(self) -> StragglerDetector:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise UnsupportedError(
            "StragglerDetector measures nothing here; pretrain_gpt.py --log-straggler names slow ranks"
        )

    def report(self, *args: Any, **kwargs: Any) -> bool:
        """False: nothing was measured."""
        return False


# Upstream's checkpoints hold values of these three, which are made of their classes when a program loads a file.
class RerunMode(enum.StrEnum):
    """Ways in which upstream's machine checks results; the one here is disabled."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_determinism_stats"


class RerunState(enum.IntEnum):
    """Moments of upstream's machine; the one here is never under way."""

    NOT_RUNNING_YET = 0
    INITIAL_RUN = 1
    RERUNNING_IN_PLACE = 2
    WILL_RERUN_FROM_CHECKPOINT = 3
    RERUNNING_FROM_CHECKPOINT = 4
    RERUNNING_AGAIN_FROM_CHECKPOINT = 5


class RerunDiagnostic(enum.StrEnum):
    """Verdicts on a result."""

    CORRECT_RESULT = "correct_result"
    TRANSIENT_ERROR = "transient_error"
    PERSISTENT_ERROR = "persistent_error"


class RerunDataIterator:
    """An iterator that keeps what it was made from as `iterable`."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable
        self._iterator = iter(iterable)

    def __iter__(self) -> RerunDataIterator:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)


class RerunStateMachine:
    """Runs each step once: results are judged where they are, and never computed again to find a fault."""

    mode = RerunMode.DISABLED

    def __init__(self) -> None:
        self._has_run = False

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        """True once per step, so that `while machine.should_run_forward_backward(data): ...` runs it once."""
        self._has_run = not self._has_run
        return self._has_run

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """(False, False, 0): no fault was found."""
        return False, False, 0

    def validate_result(
        self, result: Any, rejection_func: Callable[[Any], bool], message: str = "", tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:  # fmt: skip
        """Warn where rejection_func(result) is true; fatal: raise RuntimeError. tolerance: between runs of a step, of
        which there is one."""
        if bool(rejection_func(result)):
            text = f"{message or 'a result was rejected'}: {result}"
            if fatal:
                raise RuntimeError(text)
            warnings.warn(text, stacklevel=2)


class CurrentRerunStateMachine:
    """The machine that get_rerun_state_machine() returns: one per process, as upstream has it."""

    machine: ClassVar[RerunStateMachine | None] = None


def get_rerun_state_machine() -> RerunStateMachine:
    """The process's machine, made when first asked for."""
    if CurrentRerunStateMachine.machine is None:
        CurrentRerunStateMachine.machine = RerunStateMachine()
    return CurrentRerunStateMachine.machine


def destroy_rerun_state_machine() -> None:
    """Forget the machine."""
    CurrentRerunStateMachine.machine = None
