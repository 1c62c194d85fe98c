# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a batch as the reference system counts them, and as the model multiplies."""

from __future__ import annotations

import pytest

from megatron.planner.batch_flops import count_batch_flops
from tests.support.gpt_models import read_config

SIZES = """--hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 16
    --position-embedding-type none --normalization RMSNorm --swiglu --disable-bias-linear --mamba-head-dim 16
    --mamba-num-groups 2 --mamba-state-dim 16 --linear-num-key-heads 2 --linear-num-value-heads 4
    --linear-key-head-dim 16 --linear-value-head-dim 16 --ffn-hidden-size 256"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 32 --moe-router-topk 2"


def count(pattern: str, flags: str = "", *, as_reference: bool) -> int:
    flags += f" {EXPERTS}" if "E" in pattern else ""
    config = read_config(f"--hybrid-layer-pattern {pattern} {SIZES} {flags}").model
    return count_batch_flops(
        config, seq_length=128, padded_vocab_size=512, global_batch_size=2, as_reference=as_reference
    )


def test_the_reference_systems_figure() -> None:
    """Which its formula has for this pattern, with a depth of multi-token prediction."""
    assert count("MEM*-G/M*", as_reference=True) == 505_675_776


@pytest.mark.parametrize(
    ("pattern", "flags", "differs"),
    [("*-", "", False), ("E", "", False), ("M", "", True), ("M", "--mamba-num-heads 4", True), ("G", "", True)],
)
def test_where_both_counts_differ(pattern: str, flags: str, differs: bool) -> None:
    found = [count(pattern, flags, as_reference=as_reference) for as_reference in (True, False)]
    assert (found[0] != found[1]) == differs


def test_its_inner_width_is_fixed_and_ours_is_the_models() -> None:
    heads = "--mamba-num-heads 4"
    # Only the outputs for step sizes follow the number of heads there.
    fewer = count("M", as_reference=True) - count("M", heads, as_reference=True)
    assert fewer == 3 * 256 * 2 * 64 * (8 - 4)
    assert count("M", heads, as_reference=False) < 0.8 * count("M", as_reference=False)
