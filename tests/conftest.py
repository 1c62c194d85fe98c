# SPDX-License-Identifier: Apache-2.0
"""What every test may use: where the reference data is, and skipping of GPU tests on machines without one."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every program that a test starts and then stops with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How long one example takes says how busy the machine is, not whether the code is right. Everyone's runs try new
# examples; those of CI are always the same, because a commit must not fail for what another one brought.
hypothesis.settings.register_profile("ours", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("ours")


# A file that takes models from another test file cannot be read where that one has skipped itself.
if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = [
        f"{folder}/test_{name}.py"
        for folder, names in {
            "functional": "complete_examples",
            "parallel": "hugging_face_runs",
            "unit/hf": """bridge converted_prediction converted_text_model documented_conversions hugging_face_runs
                quantised_weights upstream_source""",
            "unit/training/recipes": "attention_families moe_families",
        }.items()
        for name in names.split()
    ]


@pytest.fixture(scope="session")
def golden_data() -> Path:
    """The small reference files that belong to the repository: tests/golden/data."""
    return ROOT / "tests" / "golden" / "data"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The large reference data that does not: $MEGATRON_GOLDEN, or shared/golden beside the checkout. Skips without."""
    named = os.environ.get("MEGATRON_GOLDEN")
    path = Path(named) if named else ROOT.parent / "shared" / "golden"
    if not path.is_dir():
        pytest.skip(f"no reference data at {path}; set MEGATRON_GOLDEN to the directory that holds it")
    return path


@pytest.fixture(autouse=True)
def no_groups_left_behind() -> Iterator[None]:
    """Process groups that a test made current are not the next test's. Nothing is imported for this."""
    yield
    module = sys.modules.get("megatron.core.process_groups_config")
    if module is not None:
        module.ProcessGroupCollection.clear_current()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; torch is imported only when such a test was collected."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def no_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run does not measure how fast the device could be: 16-bit products take a CPU seconds."""
    from megatron.planner.throughput import Yardstick

    monkeypatch.setattr(
        "megatron.training.hooks.measures.build_yardstick", lambda device, dtype: Yardstick("assumed", 1e12)
    )
