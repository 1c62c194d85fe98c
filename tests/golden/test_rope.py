# SPDX-License-Identifier: Apache-2.0
"""Rotary angles and their application against the reference's numbers (plain, partial interleaved, Llama 3, YaRN)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.rotary import apply_rotary

CASES = ("rope_plain64", "rope_half_interleaved", "llama3_s8")


@pytest.mark.parametrize("case", CASES)
def test_rotary_embedding(case: str, golden_data: Path) -> None:
    recorded = json.loads((golden_data / "rope.json").read_text())[case]
    arguments, expected = recorded["args"], recorded["result"]
    rope = RotaryEmbedding(**arguments)
    torch.testing.assert_close(rope.inv_freq, torch.tensor(expected["inv_freq"]), rtol=1e-6, atol=1e-8)
    embedding = rope(32)
    torch.testing.assert_close(embedding[31, 0, 0], torch.tensor(expected["emb_row31"]), rtol=1e-5, atol=1e-5)
    # The reference applied it to t[s, 2, 3, d] = sin(0.37 * i + 0.1).
    width = arguments["kv_channels"]
    numbers = torch.arange(32 * 2 * 3 * width, dtype=torch.float64)
    x = torch.sin(numbers * 0.37 + 0.1).float().view(32, 2, 3, width)
    rotated = apply_rotary(x, rope.build_rotation(32))
    torch.testing.assert_close(rotated[31, 1].flatten(), torch.tensor(expected["apply_row31"]), rtol=1e-4, atol=1e-4)
    assert rotated.sum().item() == pytest.approx(expected["apply_out_sum"], abs=1e-2)


@pytest.mark.parametrize("case", ["yarn_s4", "yarn_dsv3"])
def test_yarn_rotary_embedding(case: str, golden_data: Path) -> None:
    recorded = json.loads((golden_data / "rope.json").read_text())[case]
    arguments, expected = recorded["args"], recorded["result"]
    rope = YarnRotaryEmbedding(**arguments)
    torch.testing.assert_close(rope.plain_inv_freq, torch.tensor(expected["inv_freq"]), rtol=1e-6, atol=1e-8)
    assert rope.mscale == pytest.approx(expected["mscale"], rel=1e-7)
    embedding = rope(48)
    torch.testing.assert_close(embedding[1, 0, 0], torch.tensor(expected["emb_row1"]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(embedding[47, 0, 0], torch.tensor(expected["emb_last"]), rtol=1e-5, atol=1e-5)
    # The reference applied it to t[s, 2, 3, d] = sin(0.37 * i + 0.2).
    width = arguments["kv_channels"]
    numbers = torch.arange(48 * 2 * 3 * width, dtype=torch.float64)
    x = torch.sin(numbers * 0.37 + 0.2).float().view(48, 2, 3, width)
    rotated = apply_rotary(x, rope.build_rotation(48))
    torch.testing.assert_close(rotated[47, 1].flatten(), torch.tensor(expected["apply_last"]), rtol=1e-4, atol=1e-4)
