# SPDX-License-Identifier: Apache-2.0
"""Checksums of weights see every changed bit; drifts are put into words."""

from __future__ import annotations

import pytest
import torch

from megatron.training.hooks import replicas
from megatron.training.hooks.replicas import Key, compute_checksum, describe_drift
from tests.support.run_flags import run_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_every_flipped_bit_changes_the_checksum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CHUNK", 4)
    values = torch.tensor([1.0, -0.0, float("nan"), 3.5, 0.0, 1e-3]).to(dtype).view(2, 3)
    expected = compute_checksum(values)
    assert compute_checksum(values.clone()) == expected, "NaN is a value like others"
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits = 8 * values.element_size()
    for place in range(6):
        for bit in range(bits):
            changed = values.clone()
            word = 1 << bit
            if integers is not torch.uint8 and bit == bits - 1:
                word -= 1 << bits
            changed.view(-1).view(integers)[place] ^= word
            assert compute_checksum(changed) != expected, (place, bit)
    assert compute_checksum(values.flip(0)) != expected, "the same values at other places"


def test_drift_in_words() -> None:
    first: Key = ("layers.0.weight", (0,), 0)
    # Slices of one tensor count as one tensor; rank 1 is outvoted twice.
    sums = [
        {first: 1, ("layers.0.weight", (0,), 8): 5},
        {first: 2, ("layers.0.weight", (0,), 8): 6, ("norm", (), 0): 7},
    ]
    sums += [{first: 1, ("layers.0.weight", (0,), 8): 5, ("norm", (), 0): 8}, {("norm", (), 0): 8}, {}]
    text = describe_drift([(f"host{rank}", found) for rank, found in enumerate(sums)])
    assert text == (
        "rank 1 (host1) holds other bits of layers.0.weight than ranks 0, 2; "
        "rank 1 (host1) holds other bits of norm than ranks 2, 3"
    )
    two = [("a", {("x", (), 0): 1, ("y", (), 0): 1}), ("b", {("x", (), 0): 2, ("y", (), 0): 2})]
    assert describe_drift(two) == (
        "rank 0 (a) and rank 1 (b) hold different bits of x and 1 more, and no majority tells which of them drifted"
    )


@pytest.mark.flags("--check-weight-hash-across-dp-replicas-interval")
def test_one_process_has_nothing_to_compare() -> None:
    notes = run_config("--check-weight-hash-across-dp-replicas-interval 2").notes
    assert any("has no effect without several processes" in note for note in notes)
