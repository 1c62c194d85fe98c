# SPDX-License-Identifier: Apache-2.0
"""Each kind of core attention on a GPU that does nothing: its kernels, what it makes the host wait for, its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_device.attention import GROUPS, HEADS, KINDS, LENGTH, WIDTH
from tests.fake_device.device import build

ROOT = Path(__file__).resolve().parents[2]
OPERATOR, FLASH = "_scaled_dot_product_flash_attention", "_flash_attention_forward"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CALLS = {
    "plain": {OPERATOR: 1}, "latent": {OPERATOR: 1}, "new token": {OPERATOR: 1}, "documents": {FLASH: 1},
    "chunks": {FLASH: 1}, "window": {FLASH: 1}, "sinks": {FLASH: 1}, "earlier keys": {FLASH: 1},
    # One for each document, and for each piece of keys that a ring's queries see.
    "float32 documents": {EFFICIENT: 5}, "ring": {FLASH: 2}, "ring of documents": {FLASH: 2},
    "ring with a window": {FLASH: 4}, "latent by cuDNN": {EFFICIENT: 1}, "latent by flash 3": {FLASH: 1},
    "latent by flex": {}, "latent documents by flash 4": {FLASH: 1}, "documents by flex": {}, "window by flex": {},
    "ring of latent heads by flash 3": {FLASH: 2},
}  # fmt: skip
"""Kind -> forward kernels of one call on the first rank, each of which has one for backward."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each kind asked of the device."""
    library = build(tmp_path_factory.mktemp("fake_device"))
    if library is None:
        pytest.skip("no C++ compiler")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_device.attention", library], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel_and_no_waits(seen: dict[str, dict[str, Any]], kind: str) -> None:
    kernels, waits = seen[kind]["kernels"], seen[kind]["waits"]
    assert {name: count for name, count in kernels.items() if "attention" in name and "backward" not in name} == (
        CALLS[kind]
    )
    backward = sum(count for name, count in kernels.items() if "attention" in name and "backward" in name)
    assert backward == sum(CALLS[kind].values())
    assert not waits


def test_two_widths_are_padded_for_kernels_of_one_width_only(seen: dict[str, dict[str, Any]]) -> None:
    padded = {kind for kind in KINDS if "constant_pad_nd" in seen[kind]["kernels"]}
    assert padded == {"latent"}
    by_flex = {kind: calls for kind in KINDS if (calls := seen[kind]["flex"])}
    assert by_flex == {"latent by flex": [[128, 64]], "documents by flex": [[128, 128]], "window by flex": [[128, 128]]}
    assert seen["latent by cuDNN"]["name"].endswith("by cuDNN with two widths")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"float32 documents", "latent by cuDNN"}))
def test_memory_grows_with_the_tokens(seen: dict[str, dict[str, Any]], kind: str) -> None:
    """Results, gradients and sums in float32; a mask of all queries and keys would be as much, and no key is
    repeated."""
    allowed = LENGTH * WIDTH * (2 * 4 * (HEADS + 2 * GROUPS) + 4 * 3 * HEADS)
    assert seen[kind]["bytes"] < allowed < LENGTH**2
    assert "repeat_interleave" not in seen[kind]["kernels"] and "triu" not in seen[kind]["kernels"]


def test_the_log_names_the_kernels(seen: dict[str, dict[str, Any]]) -> None:
    assert "the first that can of cuDNN, flash, efficient, math" in seen["plain"]["name"]
    assert seen["window"]["name"] == "torch's flash kernel, a window of 128 tokens"
    assert seen["sinks"]["name"] == "torch's flash kernel, sinks"
    assert "not by the flash kernel: it takes 16-bit numbers, not float32" in seen["float32 documents"]["name"]
    assert "ranks, the GPU's flash kernel" in seen["ring"]["name"]
