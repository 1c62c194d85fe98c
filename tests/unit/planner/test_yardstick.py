# SPDX-License-Identifier: Apache-2.0
"""MFU on a machine without a data sheet: what a matrix product reaches, also when other programs had the processor."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.planner import throughput
from megatron.planner.throughput import Yardstick, measure_peak_flops
from tests.support.tiny_training import train_tiny

CPU = torch.device("cpu")


class Clock:
    """Every look at it takes a millisecond, but some take a second: then another program had the processor."""

    def __init__(self, interrupted: range) -> None:
        self.now, self.looks, self.interrupted = 0.0, 0, interrupted

    def perf_counter(self) -> float:
        self.looks += 1
        self.now += 1.0 if self.looks in self.interrupted else 1e-3
        return self.now


def measured(monkeypatch: pytest.MonkeyPatch, interrupted: range) -> float:
    monkeypatch.setattr(throughput, "time", Clock(interrupted))
    return measure_peak_flops(CPU, torch.float32)


def test_an_interruption_does_not_shorten_the_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product took a second, which was longer than all the time that was meant for measuring."""
    quiet, disturbed = measured(monkeypatch, range(0)), measured(monkeypatch, range(2, 5))
    assert disturbed == pytest.approx(2 * 128**3 / 1e-3)
    assert quiet >= disturbed


def test_a_step_that_beats_the_yardstick_has_it_measured_again() -> None:
    found = iter([2e8, 1e11, 9e10])
    yardstick = Yardstick("measured", measure=lambda: next(found))
    assert yardstick.utilisation(1e8) == 0.5
    assert yardstick.utilisation(6e10) == pytest.approx(0.6), "not 300"
    assert yardstick.utilisation(5e10) == pytest.approx(0.5) and len(list(found)) == 1, "measured only when beaten"


def test_a_step_that_stays_faster_is_not_clipped_and_measuring_ends() -> None:
    calls: list[int] = []
    yardstick = Yardstick("measured", measure=lambda: calls.append(1) or 1e9)
    assert [yardstick.utilisation(2e9) for _ in range(3)] == [2.0] * 3
    assert len(calls) < 10


def test_unknown_is_said() -> None:
    assert Yardstick("nothing").utilisation(1e9) is None
    assert Yardstick("sheet", 1e12).utilisation(None) is None
    unmeasurable = Yardstick("measured", measure=lambda: 1 / 0)
    assert unmeasurable.flops is None and unmeasurable.utilisation(1e9) is None


def test_an_unknown_gpu_is_measured_by_large_products_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played by the CPU with small ones; the last one finds no memory."""
    asked: list[tuple[int, bool]] = []
    multiply = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        asked.append((len(a), a.unique().numel() > len(a)))
        if len(a) == 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB.")
        return multiply(a, b, **options)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(throughput, "_SIZES_ON_GPU", (16, 32, 64))
    monkeypatch.setattr(throughput, "time", Clock(range(0)))
    monkeypatch.setattr(throughput.device_module, "is_cpu", lambda device: False)
    monkeypatch.setattr(throughput.device_module, "device_name", lambda: "NVIDIA Unheard-of")
    state = torch.get_rng_state()
    yardstick = throughput.build_yardstick(CPU, torch.bfloat16)
    assert {size for size, _ in asked} == {16, 32, 64} and all(is_random for _, is_random in asked)
    assert (yardstick.flops or 0) > 0 and torch.equal(torch.get_rng_state(), state), "the run's numbers stay its own"
    assert yardstick.source == (
        "matrix product measured at start, because no data sheet of NVIDIA Unheard-of is known here"
    )


def test_the_log_says_n_a(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megatron.training.hooks.measures.build_yardstick", lambda device, dtype: Yardstick("nothing"))
    train_tiny("--train-iters", "1", "--log-interval", "1")
    output = capsys.readouterr().out
    assert "| MFU (%): n/a |" in output and re.search("MFU is not known$", output, re.MULTILINE)
