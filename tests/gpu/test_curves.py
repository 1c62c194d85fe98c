# SPDX-License-Identifier: Apache-2.0
"""Whole runs of tiny models: a GPU's losses are the CPU's, and runs repeat bit for bit.

What the CPU's part of it proves, without a GPU, is in tests/functional/test_gpu_command.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.curves import CURVES, compare_curves


@pytest.fixture
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_curves_on_a_gpu(nothing_left_behind: None, no_yardstick: None) -> None:
    found = dict(compare_curves(is_tiny=True))
    assert list(found) == [*(curve.name for curve in CURVES), "twice", "saved and resumed"]
    wrong = {name: outcome["said"] for name, outcome in found.items() if not outcome["is_right"]}
    assert not wrong, wrong
