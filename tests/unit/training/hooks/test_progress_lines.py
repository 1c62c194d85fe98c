# SPDX-License-Identifier: Apache-2.0
"""The progress line: what fits into a terminal, what programs find in a file, and how long the rest will take."""

from __future__ import annotations

import io
import math
import re
import types
from pathlib import Path

import pytest

from megatron.core.byte_progress import ByteProgress
from megatron.core.num_microbatches_calculator import build_num_microbatches_calculator
from megatron.training.data.samples import count_samples_of_iterations
from megatron.training.hooks import console, progress_lines
from megatron.training.hooks.progress_lines import (
    Clock,
    Interval,
    Pace,
    format_count,
    format_duration,
    format_number,
    format_progress_line,
    format_short_line,
)
from megatron.training.hooks.terminal_view import RichView, draw_curve
from megatron.training.metrics import MetricsRow
from megatron.training.run import Evaluation, Hook, Run, StepResult
from tests.support.tiny_training import finish, prepare, train_tiny

DOCUMENT = Path(__file__).parents[4] / "docs" / "logging.md"
DAY = 86400.0


def build_row(iteration: int = 1200000, **values: float | None) -> MetricsRow:
    """A step of a large run."""
    usual = {
        "consumed_samples": 10**9, "lm loss": 12.3456, "grad_norm": 12.345, "lr": 1e-5, "global_batch_size": 4096,
        "skipped": False, "loss_scale": 1.0, "iteration_time_seconds": 10.0, "tokens_per_second": 123.4e3,
        "tflops": 450.0, "mfu": 0.451, "memory_bytes": 60 * 2**30, "peak_memory_bytes": 73.2 * 2**30,
    }  # fmt: skip
    row = MetricsRow(iteration, usual | values)
    row.losses = {name: row[name] for name in row.values if name.endswith("loss")}
    return row


def format_short(*rows: MetricsRow, columns: int = 120, texts: tuple[str, ...] = (), stop: float | None = None) -> str:
    interval = Interval()
    for row in rows:
        interval.add(row)
    clock = Clock(12.1 * DAY, 12.1 * DAY, stop)
    return format_short_line(rows[-1], interval, 2000000, clock, texts, columns)


# ---- the short line


def test_the_largest_run_fits_into_120_columns() -> None:
    line = format_short(build_row())
    assert line == (
        "1200000/2000000  loss 12.3456  grad norm 12.345  lr 1.000E-05  123.4k tok/s  MFU 45.1%  73.2 GiB  ran 12d02h  "
        "ETA 12d02h"
    )
    assert len(line) == 120


def test_fields_stay_in_their_columns() -> None:
    values = ({"lm loss": 1.5, "grad_norm": 0.0423, "mfu": 0.003}, {"lm loss": 0.0, "grad_norm": 1234.5},
              {"lm loss": 123.4567, "tokens_per_second": 12.0}, {"iteration": 7, "lr": 0.0})  # fmt: skip
    lines = [format_short(build_row(**changes)) for changes in ({}, *values)]  # type: ignore[arg-type]
    for label in ("loss", "grad norm", "lr", "tok/s", "MFU", "GiB", "ran", "ETA"):
        assert len({line.index(f"{label}") for line in lines}) == 1, label


def test_a_narrow_terminal_gets_fewer_fields_and_never_a_second_row() -> None:
    for columns in range(30, 121):
        line = format_short(build_row(), columns=columns)
        assert len(line) <= columns and "\n" not in line
        assert line.startswith("1200000/2000000  loss 12.3456")
    left_out = [label for label in ("ran", "GiB", "MFU", "lr", "grad norm", "tok/s", "ETA")
                if label not in format_short(build_row(), columns=80)]  # fmt: skip
    assert left_out == ["ran", "GiB", "MFU", "lr"]


def test_what_is_unusual_or_asked_for_follows_within_the_width() -> None:
    row = build_row(skipped=True, loss_scale=65536.0, params_norm=123.4, num_zeros_in_grad=12, mfu=None)
    row.values["mtp_1 loss"] = row.losses["mtp_1 loss"] = 4.5
    text = "communication (MB sent per rank): " + ", ".join(f"axis{number} 1234.5" for number in range(12))
    shown = format_short(build_row(), row, texts=(text,), stop=3.1 * 3600)
    assert all(len(line) <= 120 for line in shown.splitlines())
    words = " ".join(shown.split())
    for part in ("stop in 3h06m", "skipped iterations 1", "loss scale 6.554e+04", "params norm 123.400", "zeros 12",
                 text):  # fmt: skip
        assert part in words
    plain = format_short(build_row())
    assert not any(word in plain for word in ("skipped", "nan", "loss scale", "norm 0", "zeros"))


def test_an_interval_without_a_counted_loss_keeps_the_columns() -> None:
    skipped = format_short(build_row(skipped=True))
    assert "loss     nan  grad norm" in skipped and "skipped iterations 1" in skipped


@pytest.mark.parametrize(
    ("value", "text"),
    [(12.3456, "12.3456"), (1.0, " 1.0000"), (123.456, "123.456"), (1234567.0, "1234567"), (0.0123, "0.01230"),
     (12345678.0, "1.2E+07"), (0.00001, "1.0E-05"), (float("inf"), "    inf"), (-1.5, "-1.5000"), (0.0, " 0.0000")],
)  # fmt: skip
def test_numbers_have_the_same_width(value: float, text: str) -> None:
    assert format_number(value, 7, 4) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (987, "987"), (999.97, "1.000k"), (12340, "12.34k"), (123400, "123.4k"), (1.2e6, "1.200M"),
     (5e9, "5.000G")],
)  # fmt: skip
def test_counts_have_four_digits(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.7, "1m00s"), (86, "1m26s"), (3700, "1h01m"), (86399, "23h59m"), (12.13 * DAY, "12d03h")],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# ---- the long line, and both in the documentation


def normalise(line: str) -> str:
    """The line without its numbers and without the spaces before them."""
    line = re.sub(r"\b(\d+[dhms](\d+[hms])?)\b", "DURATION", line)
    line = re.sub(r"\d+(\.\d+)?([Ee][+-]\d+)?[kM]?\b|\bn/a\b|\bnan\b(?! iter)", "N", line)
    return re.sub(r"\s+", " ", line).strip()


@pytest.mark.flags("--progress-line")
@pytest.mark.usefixtures("no_yardstick")
def test_both_lines_are_those_of_the_documentation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # whatever terminal the tests run in
    samples = re.findall(r"```\n(.*?)\n```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    for form, sample in (("short", samples[0]), ("full", samples[1])):
        train_tiny("--progress-line", form, "--log-interval", "3")
        lines = [line for line in capsys.readouterr().out.splitlines() if re.search(r"\b3/ *6\b", line)]
        assert [normalise(line) for line in lines] == [normalise(sample)]


def test_auto_is_short_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        monkeypatch.setattr(console.sys.stdout, "isatty", lambda answer=is_terminal: answer)
        assert [console.ConsoleHook(1, form).is_short for form in ("auto", "short", "full")] == [
            is_terminal, True, False,
        ]  # fmt: skip


def test_programs_that_read_upstreams_line_read_this_one() -> None:
    interval, row = Interval(), build_row()
    interval.add(row)
    line = format_progress_line(row, interval, 2000000, Clock(62.0, 12.1 * DAY, 3600.0))
    assert re.search(r"iteration +(\d+)/ *(\d+) \|", line)[1] == "1200000"  # type: ignore[index]
    assert re.search(r"elapsed.*?: ([\d.]+)", line)[1] == "10000.0", "the time of an iteration comes first"  # type: ignore[index]
    # Every field behind the date is a name, one colon and a value.
    fields = dict(field.split(":") for field in line.split("|")[1:-1])
    assert float(fields[" lm loss"]) == pytest.approx(12.3456)
    assert [name.strip() for name in fields][-3:] == ["elapsed", "ETA", "stop in"]
    assert fields[" elapsed"].strip() == "1m02s"


def test_the_mean_loss_is_of_the_steps_that_count() -> None:
    interval = Interval()
    for loss, skipped in ((2.0, False), (math.nan, True), (math.nan, False), (5.0, True), (4.0, False)):
        interval.add(build_row(**{"lm loss": loss, "skipped": skipped}))
    assert interval.mean_losses == {"lm loss": 3.0}, "one step is both skipped and NaN"


def test_perplexity_is_finite_for_an_untrained_model_and_none_of_nan() -> None:
    perplexities = Evaluation("test", {"a": 1000.0, "b": math.nan, "dpo loss": 0.7}, final=True).perplexities
    assert perplexities["a"] == math.exp(20) and math.isnan(perplexities["b"]) and len(perplexities) == 2


# ---- how long the rest takes


@pytest.mark.parametrize(
    "options",
    [{}, {"rampup_batch_size": (2, 2, 30)}, {"rampup_batch_size": (2, 2, 33)}, {"decrease_batch_size_if_needed": True}],
)
def test_samples_of_the_next_iterations_are_those_that_steps_take(options: dict[str, object]) -> None:
    size = 7 if "decrease_batch_size_if_needed" in options else 8
    batch = build_num_microbatches_calculator(
        global_batch_size=size, micro_batch_size=2, data_parallel_size=1, **options  # type: ignore[arg-type]
    )  # fmt: skip
    starts = [0]
    for _ in range(20):
        starts.append(starts[-1] + batch.running_global_batch_size(starts[-1]))
    for first in range(20):
        for iterations in range(20 - first):
            taken = count_samples_of_iterations(batch, starts[first], iterations)
            assert taken == starts[first + iterations] - starts[first]


def test_the_pace_is_that_of_recent_steps_with_the_share_of_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress_lines, "time", types.SimpleNamespace(monotonic=lambda: now))
    pace = Pace()
    assert pace.seconds_per_sample is None
    for seconds, samples in [(90.0, 10)] + [(4.0, 10)] * 100 + [(2.0, 20)] * 100:
        now += seconds
        pace.step_ended()
        pace.add(build_row(iteration_time_seconds=seconds, global_batch_size=samples))
    assert pace.seconds_per_sample == pytest.approx(0.1), "neither the first step nor those long ago"
    now += 600.0  # an evaluation: as much time as all counted steps
    pace.step_ended()
    pace.add(build_row(iteration_time_seconds=0.0, global_batch_size=0))
    assert pace.seconds_per_sample == pytest.approx(0.2, rel=0.02)
    assert pace.elapsed_seconds == pytest.approx(90 + 600 + 600)


class TellTime(Hook):
    """Every step takes a second; keeps the fields of time of each line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 5000.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now, strftime=lambda _: "now")
        monkeypatch.setattr(progress_lines, "time", clock)
        monkeypatch.setattr("megatron.core.device.measure_seconds_between", lambda start, end: 1.0)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.now += 1.0


def read_times(out: str, name: str) -> list[str]:
    return re.findall(rf"\| {name}: (\w+) ", out)


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ("", ["5s", "4s", "3s", "2s", "1s", "0s"]),
        ("--train-iters 400 --exit-interval 2", ["6m39s", "6m38s"]),
        # Steps of 2, 2, 4, 6, 8, 8, 8, 8 samples: 44 are left after the first one, at 2 in a second.
        ("--rampup-batch-size 2 2 12 --global-batch-size 8 --train-iters 8",
         ["22s", "21s", "13s", "8s", "5s", "3s", "1s", "0s"]),
    ],
)  # fmt: skip
def test_the_line_says_how_long_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, left: list[str]
) -> None:
    run = prepare("--log-interval", "1", *flags.split())
    run.hooks.hooks.append(TellTime(monkeypatch))  # type: ignore[attr-defined]
    finish(run)
    out = capsys.readouterr().out
    assert read_times(out, "ETA") == left
    assert read_times(out, "stop in") == (["1s", "0s"] if "exit" in flags else [])


def test_a_resumed_run_counts_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = ("--save", tmp_path, "--load", tmp_path, "--log-interval", "1", "--save-interval", "2")
    for stop in ("4", "6"):
        run = prepare(*save, "--exit-interval", stop)
        run.hooks.hooks.append(TellTime(monkeypatch))  # type: ignore[attr-defined]
        finish(run)
    assert read_times(capsys.readouterr().out, "ETA") == ["5s", "4s", "3s", "2s", "1s", "0s"]


# ---- bytes of files


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_progress_is_quiet_at_first_then_says_rate_and_time_left(stream: io.StringIO) -> None:
    now = 0.0
    progress = ByteProgress("reading", 4_000_000, stream, clock=lambda: now)
    with progress:
        now = 1.9
        progress.add(1_000_000)
        assert stream.getvalue() == ""
        now = 10.0
        progress.add(1_000_000)
        line = stream.getvalue()
        assert " 50%  2.0 MB of 4.0 MB, 200.0 KB/s, 10s left" in line
        assert ("[##########----------]" in line) == line.startswith("\r\x1b[K") == stream.isatty()
        progress.add(1)
        assert stream.getvalue() == line
    assert stream.getvalue().endswith("\r\x1b[K" if stream.isatty() else "\n")


# ---- views that take the place of lines


@pytest.mark.flags("--progress-line")
@pytest.mark.parametrize("view", ["bar", "rich"])
def test_a_view_takes_the_place_of_lines_on_a_terminal(
    view: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    train_tiny("--progress-line", view, "--log-interval", "2")
    assert re.search(r"\b2/ *6\b.*tok/s", capsys.readouterr().out), "a file has short lines"
    monkeypatch.setattr(console.sys.stdout, "isatty", lambda: True)
    train_tiny("--progress-line", view, "--log-interval", "2")
    drawn = capsys.readouterr().out
    assert "tok/s" not in drawn
    assert ("[####" in drawn) == (view == "bar")
    assert ("iteration 6 of 6" in drawn and "grad norm" in drawn) == (view == "rich")


def test_names_in_brackets_are_no_markup() -> None:
    rich_console = pytest.importorskip("rich.console")
    screen = rich_console.Console(file=io.StringIO(), width=80, force_terminal=True)
    view = RichView(3, 10, lambda: 60.0, console=screen)
    losses = {"[red]lm[/nothing] loss": 2.0}
    view.show_row(MetricsRow(4, {**losses, "grad_norm": 1.5}, losses))
    screen.print(view.render())
    assert "[red]lm[/nothing] loss 2.0000" in screen.file.getvalue()
    assert draw_curve([1.0, math.nan, 8.0, 4.5]) == "▁ █▅"
