# SPDX-License-Identifier: Apache-2.0
"""Alerts: what is worth one, that it reaches a command and an address, and that no step waits for it."""

from __future__ import annotations

import http.server
import json
import math
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.config.logging import LoggerConfig
from megatron.training.hooks import alerts
from megatron.training.hooks.alerts import AlertsHook, Courier, Watch
from megatron.training.metrics import MetricsRow


def build_row(iteration: int, loss: float = 4.0, rate: float = 1000.0) -> MetricsRow:
    return MetricsRow(iteration, {"lm loss": loss, "tokens_per_second": rate}, {"lm loss": loss})


def look(rows: list[MetricsRow]) -> list[tuple[str, int]]:
    watch = Watch()
    return [(alert["alert"], alert["iteration"]) for row in rows for alert in watch.look(row)]


def test_what_is_worth_an_alert() -> None:
    calm = [build_row(i, 4.0 + 0.01 * (i % 3), 1000.0 + i % 5) for i in range(1, 41)]
    assert look(calm) == []
    assert look([*calm, build_row(41, 4.3)]) == [], "less than a tenth above the usual"
    assert look([*calm, build_row(41, 9.0), build_row(42, 9.0), build_row(43, 4.0), build_row(44, 9.0)]) == [
        ("spike", 41), ("spike", 44)
    ], "told once until it is over"  # fmt: skip
    assert look([*calm, build_row(41, math.nan), build_row(42, math.nan)]) == [("nan", 41)]
    assert look([*calm, *(build_row(i, 4.0, 700.0) for i in range(41, 300))]) == [("slow", 43)]
    assert look([*calm, build_row(41, 4.0, 10.0), *calm]) == [], "one slow step is an evaluation, or chance"
    assert look([build_row(1, 4.0), build_row(2, 400.0)]) == [], "nothing is usual yet"


@pytest.mark.flags("--alert-webhook", "--alert-command")
def test_delivery_to_a_command_and_an_address(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    received: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if len(received) == 1 else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script, told = tmp_path / "take.py", tmp_path / "told; touch no"
    script.write_text("import sys; open(sys.argv[1], 'a').write(sys.stdin.read()); print('noise')")
    courier = Courier(f"{sys.executable} {script} '{told}'", f"http://127.0.0.1:{server.server_address[1]}/x")
    sent = [{"alert": "nan", "text": "$(touch x) `id` \n"}, {"alert": "slow", "text": "b"}]
    for alert in sent:
        courier.send(alert)
    courier.close()
    server.shutdown()
    server.server_close()
    assert [json.loads(line) for line in told.read_text().splitlines()] == sent == received
    output = capfd.readouterr()
    assert "--alert-webhook did not take the alert (HTTPError" in output.err and "noise" not in output.out


def test_nothing_waits_for_a_command_that_hangs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alerts, "LIMIT_SECONDS", 0.5)
    courier = Courier(f"{sys.executable} -c 'import time; time.sleep(600)'", None)
    began = time.monotonic()
    for number in range(200):
        courier.send({"alert": "nan", "iteration": number})
    assert time.monotonic() - began < 60, "as good as at once"
    assert "dropped" in capfd.readouterr().err
    courier.close(seconds=3.0)
    courier._thread.join(10.0)
    assert not courier._thread.is_alive(), "it goes on with what waits"


@pytest.mark.flags("--alert-stall-seconds")
def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(Courier, "send", lambda self, alert: told.append(alert))
    hook = AlertsHook(LoggerConfig(alert_webhook="http://127.0.0.1:9/", alert_stall_seconds=1.0), "7")
    noted: list[str] = []
    events = SimpleNamespace(add=lambda kind, iteration, text: noted.append(text))
    run: Any = SimpleNamespace(is_first_rank=True, events=events, progress=SimpleNamespace(iteration=12))
    hook.on_train_start(run)
    deadline = time.monotonic() + 60
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
    hook.on_close(run)
    assert told[0]["alert"] == "stall" and told[0]["iteration"] == 12 and told[0]["job"] == "7" and len(told) == 1
    assert noted == [told[0]["text"]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alert_command": "no-such-program-here x"}, "names no program that can be run"),
        ({"alert_command": "echo 'open"}, "close its quotes"),
        ({"alert_webhook": "file:///etc/passwd"}, "begins with https:// or http://"),
    ],
)
def test_what_cannot_deliver_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        LoggerConfig(**settings)
