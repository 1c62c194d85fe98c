# SPDX-License-Identifier: Apache-2.0
"""--alert-command and --alert-webhook: tell somebody of a loss that is no number, a spike, slow steps, or silence.

An alert is a JSON object: "alert" (nan, spike, slow, stall or error), "iteration", "value", "usual", "text", "host" and
"job". It is delivered from a separate thread with a time limit, so that no step waits for it; what fails there is a
warning. The first rank delivers; each kind is told once until values are usual again.
"""

from __future__ import annotations

import json
import math
import queue
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core.errors import NonFiniteError, say
from megatron.training.config.container import RunConfig
from megatron.training.config.logging import LoggerConfig
from megatron.training.metrics import MetricsRow
from megatron.training.run import Hook, HookContext, Phase, Run, StepResult

LIMIT_SECONDS = 30.0
"""Of one delivery."""
_CLOSING_SECONDS = 35.0
_HISTORY = 100
"""Steps that say what is usual."""
_LEAST_HISTORY = 20
_WIDTHS = 8.0
"""A spike is so many median deviations above the median, and..."""
_SPIKE_SHARE = 0.1
"""...by this share of it."""
_SLOW_STEPS = 5
_SLOW_SHARE = 0.8
"""Of the usual throughput, in the median of the last steps."""
_WAITING = 64
"""Alerts that wait to be delivered; further ones are dropped."""


class Watch:
    """Values of a run as they come, and which of them are not usual."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._rates: deque[float] = deque(maxlen=_HISTORY)
        self._last_rates: deque[float] = deque(maxlen=_SLOW_STEPS)
        self._open: set[str] = set()

    def look(self, row: MetricsRow) -> list[dict[str, Any]]:
        """Return the alerts that a step's values are worth, without those that are told already."""
        found: dict[str, dict[str, Any]] = {}
        loss = next(iter(row.losses.values()), math.nan)
        if row.has_nan:
            found["nan"] = {"value": None, "text": f"a loss of iteration {row.iteration} is not a number"}
        elif row.losses:
            if len(self._losses) >= _LEAST_HISTORY:
                usual = statistics.median(self._losses)
                width = statistics.median(abs(value - usual) for value in self._losses)
                if loss - usual > max(_WIDTHS * width, _SPIKE_SHARE * abs(usual)):
                    text = f"the loss of iteration {row.iteration} is {loss:.4g}, usual is {usual:.4g}"
                    found["spike"] = {"value": loss, "usual": usual, "text": text}
            self._losses.append(loss)
        rate = row["tokens_per_second"]
        if math.isfinite(rate):
            self._last_rates.append(rate)
            now = statistics.median(self._last_rates)
            if len(self._rates) >= _LEAST_HISTORY:
                usual = statistics.median(self._rates)
                if len(self._last_rates) == _SLOW_STEPS and now < _SLOW_SHARE * usual:
                    text = f"{now:.4g} tokens per second at iteration {row.iteration}, usual are {usual:.4g}"
                    found["slow"] = {"value": now, "usual": usual, "text": text}
            # What is slow does not become usual while it is told.
            if "slow" not in found:
                self._rates.append(rate)
        new = [
            {"alert": kind, "iteration": row.iteration, **values}
            for kind, values in found.items()
            if kind not in self._open
        ]
        self._open = set(found)
        return new

    def is_told(self, kind: str) -> bool:
        """True for an alert that the last step was worth."""
        return kind in self._open


class Courier:
    """A thread that hands alerts to a command, to an address, or to both."""

    def __init__(self, command: str | None, webhook: str | None) -> None:
        self._command, self._webhook = shlex.split(command or ""), webhook
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_WAITING)
        self._has_dropped, self._is_closed = False, False
        self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
        self._thread.start()

    def send(self, alert: dict[str, Any]) -> None:
        """Have an alert delivered; returns at once. One too many is dropped."""
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            if not self._has_dropped:
                say("warning: alerts are dropped: those before them are still being delivered", sys.stderr)
            self._has_dropped = True

    def close(self, seconds: float = _CLOSING_SECONDS) -> None:
        """Wait, so long at most, until everything is delivered; what then still waits is dropped."""
        try:
            self._waiting.put(None, timeout=seconds)
            self._thread.join(seconds)
        except queue.Full:
            pass
        self._is_closed = True

    def _work(self) -> None:
        while (alert := self._waiting.get()) is not None and not self._is_closed:
            content = json.dumps(alert).encode() + b"\n"
            for name, deliver in (("--alert-command", self._run), ("--alert-webhook", self._post)):
                try:
                    deliver(content)
                except Exception as error:  # an observer never ends a run, whatever its command or its network does
                    reason = " ".join(str(error).split())[:200]
                    say(f"warning: {name} did not take the alert ({type(error).__name__}: {reason})", sys.stderr)

    def _run(self, content: bytes) -> None:
        if self._command:
            # No shell: values are on its input and never part of a command. Its output would disturb the run's.
            subprocess.run(
                self._command, input=content, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                timeout=LIMIT_SECONDS, check=True,
            )  # fmt: skip

    def _post(self, content: bytes) -> None:
        if self._webhook is not None:
            request = urllib.request.Request(self._webhook, content, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=LIMIT_SECONDS):
                pass


class AlertsHook(Hook):
    """Looks at every row of the first rank, and at the clock."""

    phase = Phase.WRITE

    def __init__(self, config: LoggerConfig, job: str) -> None:
        self._config, self._job = config, job
        self._watch = Watch()
        self._courier: Courier | None = None
        self._run: Run | None = None
        self._moved_at = time.monotonic()
        self._is_closed = threading.Event()
        self._is_stalled = False

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> AlertsHook | None:
        """Return the hook for --alert-command and --alert-webhook; None where neither is given."""
        logger = config.logger
        return cls(logger, context.place.job) if logger.alert_command or logger.alert_webhook else None

    def on_train_start(self, run: Run) -> None:
        """Begin to watch the clock."""
        if run.is_first_rank:
            self._run, self._moved_at = run, time.monotonic()
            self._courier = Courier(self._config.alert_command, self._config.alert_webhook)
            threading.Thread(target=self._watch_clock, name="alerts clock", daemon=True).start()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Note that the run moves."""
        self._moved_at, self._is_stalled = time.monotonic(), False

    def on_evaluate(self, run: Run, evaluation: Any) -> None:
        """Note that the run moves."""
        self._moved_at = time.monotonic()

    def on_save(self, run: Run) -> None:
        """Note that the run moves."""
        self._moved_at = time.monotonic()

    def on_metrics(self, run: Run, rows: Sequence[MetricsRow]) -> None:
        """Tell of what is not usual."""
        for row in rows if self._courier is not None else ():
            for alert in self._watch.look(row):
                self._tell(run, alert)

    def on_error(self, run: Run, error: Exception) -> None:
        """Tell of the error that ends the run."""
        if self._courier is not None:
            text = f"{type(error).__name__}: {error}"[:2000]
            kind, iteration = "error", run.progress.iteration
            # Found within the step, which then has no row.
            if isinstance(error, NonFiniteError) and not self._watch.is_told("nan"):
                kind, iteration = "nan", error.iteration or iteration + 1
            self._tell(run, {"alert": kind, "iteration": iteration, "value": None, "text": text})

    def on_close(self, run: Run) -> None:
        """Deliver what waits."""
        self._is_closed.set()
        if self._courier is not None:
            self._courier.close()

    def _watch_clock(self) -> None:
        limit = self._config.alert_stall_seconds
        while not self._is_closed.wait(min(5.0, limit / 4)):
            silent = time.monotonic() - self._moved_at
            if silent > limit and not self._is_stalled and self._run is not None:
                self._is_stalled = True
                iteration = self._run.progress.iteration
                text = f"no step has ended for {silent:.0f} s; iteration {iteration} was the last"
                self._tell(
                    self._run, {"alert": "stall", "iteration": iteration, "value": silent, "usual": limit, "text": text}
                )

    def _tell(self, run: Run, alert: dict[str, Any]) -> None:
        if run.events is not None and alert["alert"] != "error":
            run.events.add("alert", alert["iteration"], alert["text"])
        if self._courier is not None:
            self._courier.send({**alert, "host": socket.gethostname(), "job": self._job})
