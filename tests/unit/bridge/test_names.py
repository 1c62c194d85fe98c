# SPDX-License-Identifier: Apache-2.0
"""The names in users' documents: `from megatron.bridge import AutoBridge`, `python -m megatron.bridge.convert`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_class_is_ours() -> None:
    from megatron.bridge import AutoBridge
    from megatron.hf.auto_bridge import AutoBridge as OURS

    assert AutoBridge is OURS  # type: ignore[comparison-overlap]


def test_the_command_is_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", "--source", "hf", "--target", "hf"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("megatron.bridge.convert", run_name="__main__")
    assert end.value.code == 2
    assert "the following arguments are required: --input-path, --output-path" in capsys.readouterr().err


def test_another_package_of_that_name_can_be_installed_beside_it() -> None:
    assert sorted(path.name for path in (ROOT / "megatron/bridge").glob("*.py")) == ["AutoBridge.py", "convert.py"]
