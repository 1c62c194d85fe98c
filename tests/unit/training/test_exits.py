# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in one process: the iteration is finished and saved; signals are heard in the middle of long calls."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from megatron.core.datasets.index_cache import IndexCache
from megatron.core.errors import command_line
from megatron.training.hooks import exits
from megatron.training.hooks.exits import ExitHook
from megatron.training.hooks.signals import SignalWatch
from megatron.training.run import Evaluation, Hook, Phase, Run, StepResult
from tests.support.tiny_training import differing, finish, prepare, train_tiny


def with_hooks(run: Run, *hooks: Hook) -> Run:
    run.hooks.hooks += hooks  # type: ignore[attr-defined]
    return run


def exit_hook(run: Run) -> ExitHook:
    (found,) = (hook for hook in run.hooks.hooks if isinstance(hook, ExitHook))  # type: ignore[attr-defined]
    return found


class Press(Hook):
    """The signal at a moment of an iteration (from 1)."""

    phase = Phase.MEASURE

    def __init__(self, iteration: int, moment: str = "on_step_start", number: int = signal.SIGINT) -> None:
        self.iteration, self.moment, self.number = iteration, moment, number

    def on_step_start(self, run: Run) -> None:
        if self.moment == "on_step_start" and run.progress.iteration + 1 == self.iteration:
            self.press(run)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        if self.moment == "on_evaluate" and run.progress.iteration == self.iteration:
            self.press(run)

    def on_save(self, run: Run) -> None:
        if self.moment == "on_save" and run.progress.iteration == self.iteration:
            self.press(run)

    def press(self, run: Run) -> None:
        os.kill(os.getpid(), self.number)
        agreement = exit_hook(run)._agreement
        assert agreement is not None
        while agreement._asked is None:
            time.sleep(0.001)


def test_ctrl_c_finishes_the_iteration_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--save", tmp_path, "--load", tmp_path, "--save-interval", "100")
    before = signal.getsignal(signal.SIGINT)
    run = finish(with_hooks(prepare(*flags), Press(3)))
    assert (run.progress.iteration, run.interrupted) == (3, True)
    assert signal.getsignal(signal.SIGINT) is before
    printed = capsys.readouterr()
    expected = f"interrupted: finishing the iteration, then saving to {tmp_path}; press Ctrl-C again to leave at once\n"
    assert printed.err == expected
    assert printed.out.index("checkpoint: saved") < printed.out.index("interrupted after iteration 3\n")
    resumed = train_tiny(*flags)
    assert (resumed.progress.iteration, resumed.interrupted) == (6, False)
    assert differing(resumed, train_tiny()) == []


def test_an_interrupt_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """By the run that ended in order, which hands its words on; else by the program."""
    for words, told in ((("interrupted after iteration 3",), ""), ((), "interrupted\n")):

        @command_line
        def main(words: tuple[str, ...] = words) -> int:
            raise KeyboardInterrupt(*words)

        assert main() == 130
        assert capsys.readouterr().err == told


def test_a_warning_of_ours_is_told_without_our_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = warnings.formatwarning

    @command_line
    def main() -> None:
        (tmp_path / "file").touch()
        IndexCache(str(tmp_path / "file" / "cache"), "name", "description", ()).load_or_build(dict)
        warnings.warn("of a user's script", RuntimeWarning, stacklevel=1)

    with warnings.catch_warnings():
        # pytest keeps warnings for itself; a program writes them to standard error.
        warnings.showwarning = lambda *parts: print(warnings.formatwarning(*parts[:4]), end="", file=sys.stderr)
        assert main() == 0
    ours, *others = capsys.readouterr().err.splitlines()
    assert ours.startswith(f"warning: index cache {tmp_path}") and "index_cache.py" not in ours
    assert "test_exits.py" in others[0] and warnings.formatwarning is theirs


def test_without_save_it_says_that_nothing_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    run = finish(with_hooks(prepare(), Press(2)))
    assert (run.progress.iteration, run.interrupted) == (2, True)
    assert "then ending; nothing is saved without --save; press" in capsys.readouterr().err


def test_in_an_evaluation_or_a_save(tmp_path: Path) -> None:
    """Both are finished; the evaluation at the end is left out."""
    flags = ("--save-interval", "2", "--eval-interval", "2", "--eval-iters", "1")
    evaluations: list[int] = []

    class Watch(Hook):
        def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
            evaluations.append(run.progress.iteration)

    for moment in ("on_evaluate", "on_save"):
        run = finish(with_hooks(prepare("--save", tmp_path / moment, *flags), Press(2, moment), Watch()))
        assert run.interrupted and run.progress.iteration == 2
        assert (tmp_path / moment / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert evaluations == [2, 2]


def test_after_the_last_save_ctrl_c_ends_the_evaluation_at_once(tmp_path: Path) -> None:
    flags = ("--save", tmp_path, "--save-interval", "100", "--eval-interval", "100", "--eval-iters", "1")

    class Late(Hook):
        phase = Phase.CONTROL

        def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        finish(with_hooks(prepare(*flags), Late()))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"


@pytest.mark.flags("--exit-signal-handler", "--exit-signal")
def test_the_signal_of_the_flag_is_no_interruption() -> None:
    """Also where it is that of Ctrl-C: exit code 0."""
    for name in ("SIGUSR1", "SIGINT"):
        flags = ("--exit-signal-handler", "--exit-signal", name)
        run = finish(with_hooks(prepare(*flags), Press(2, number=signal.Signals[name])))
        assert (run.progress.iteration, run.interrupted) == (2, False)
        assert run.stop_reason == f"exiting program after signal {name}"


def test_the_second_press_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the signal that torchrun adds to the first one is no second press."""
    clock, codes = [0.0], []
    run = prepare("--train-iters", "1")
    hook = exit_hook(run)

    class Pressing(Hook):
        def on_step_end(self, run: Run, result: StepResult) -> None:
            for now in (10.0, 10.4, 12.0):
                clock[0] = now
                hook._receive(signal.SIGINT)
                codes.append(None)

    monkeypatch.setattr(exits.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(exits.os, "_exit", codes.append)
    finish(with_hooks(run, Pressing()))
    assert codes == [None, None, 130, None]


def test_a_signal_is_heard_while_the_main_thread_is_outside_of_python() -> None:
    events: list[str] = []
    watch = SignalWatch(lambda number: events.append(number.name))
    watch.open({signal.SIGUSR1})
    try:
        started = threading.Event()
        sender = threading.Thread(target=lambda: (started.wait(), os.kill(os.getpid(), signal.SIGUSR1)))
        sender.start()
        started.set()
        # A second or so in one call that lets other threads run and no handler.
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 1_500_000)
        events.append("returned")
        sender.join()
    finally:
        watch.close()
    assert events == ["SIGUSR1", "returned"]
