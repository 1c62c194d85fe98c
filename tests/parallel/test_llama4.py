# SPDX-License-Identifier: Apache-2.0
"""Llama 4's kind of model, with chunks, layers without positions, experts in some layers: layouts are the same run."""

from __future__ import annotations

import functools

import pytest

from megatron.training.verify.comparison import compare
from megatron.training.verify.parity import RankTrace, Trace, join, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import own_rank, training

STYLE = """--normalization RMSNorm --swiglu --ffn-hidden-size 48 --group-query-attention --num-query-groups 2
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --rotary-interleaved
    --attention-chunk-size 5 --no-rope-freq 4 --window-attn-skip-freq 4 --attn-temperature-scale 0.7
    --attn-temperature-floor 3 --qk-l2-norm --qk-l2-norm-layers rotary --num-experts 4 --moe-router-topk 1
    --moe-layer-freq [0,1]*2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 24
    --moe-router-score-function sigmoid --moe-apply-probs-on-input --init-method-std 0.2"""


def share(text: str) -> RankTrace:
    """One rank's part of the run; the whole run where the layout is one process."""
    config, recipe = training(STYLE, text)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=2)


@functools.cache
def reference() -> Trace:
    return join([share("1")])


@pytest.mark.parametrize("layout", ["cp2", "tp2,sp,pp2,ep2,--expert-tensor-parallel-size=1"])
def test_layout_is_the_same_run(layout: str) -> None:
    shares = run_distributed(share, parse_layout(layout).world_size, layout, timeout=240.0)
    assert compare(reference(), join(shares)) == []
