# SPDX-License-Identifier: Apache-2.0
"""Compiled regions under every kind of layout: the run without the compiler, in graphs that neither break nor become
more after the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.transformer import compiled_regions
from megatron.core.transformer.execution import compilation
from megatron.training.verify.comparison import compare
from megatron.training.verify.parity import RankTrace, join, trace_rank
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training

SIZES = "--num-layers 2 --global-batch-size 8"
# Of two processes; between them everything that once broke graphs, or could not be inside one.
LAYOUTS = [
    ("gpt2", "tp2,--hidden-dropout=0.1"),
    ("llama", "tp2,sp,--tp-comm-overlap,--recompute-granularity=selective,--recompute-modules mlp layernorm"),
    ("llama", "cp2"),
    ("gpt2", "pp2,--pipeline-schedule=zb-h1"),
    ("gpt2", "dp2,dist-opt,overlap-all"),
    ("llama", "dp2,fsdp2,--recompute-granularity=full,--recompute-method=uniform,--recompute-num-layers=1"),
    ("moe", "dp2,ep2,--moe-token-dispatcher-type=alltoall,--overlap-moe-expert-parallel-comm"),
]


def train(style: str, layout: str, flags: str) -> RankTrace:
    """One rank's part of two steps."""
    config, recipe = training(f"{(STYLES | EXPERTS)[style]} {SIZES} {flags}", layout)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=2)


def eager_and_compiled(layouts: list[tuple[str, str]]) -> list[tuple[RankTrace, RankTrace, dict[str, Any]]]:
    """For each layout both runs of this rank, and what the compiler counted. What one layout has had compiled serves
    the next ones."""
    compilation.BACKEND, compiled_regions.FUSED_BY_HAND_ON_CPU = "aot_eager", frozenset()
    torch._dynamo.config.recompile_limit = 64  # for all layouts together
    counters, found = torch._dynamo.utils.counters, []
    for style, layout in layouts:
        counters.clear()
        eager = train(style, layout, "")
        assert not counters["frames"], "nothing is compiled unasked"
        compiled = train(style, layout, "--compile")
        counted = {name: dict(counters[name]) for name in ("graph_break", "unimplemented", "frames", "stats")}
        found.append((eager, compiled, counted))
    return found


@pytest.mark.flags("--compile")
def test_compiled_regions_go_with_every_layout() -> None:
    ranks = run_distributed(eager_and_compiled, 2, LAYOUTS, timeout=400.0)
    assert all(4 <= rank[0][2]["stats"]["unique_graphs"] <= 8 for rank in ranks)
    for number, (style, layout) in enumerate(LAYOUTS):
        eager, compiled = (join([rank[number][which] for rank in ranks]) for which in (0, 1))
        assert compare(eager, compiled) == [], (style, layout)
        for *_, counted in (rank[number] for rank in ranks):
            assert not counted["graph_break"] and not counted["unimplemented"], (style, layout, counted)
            assert counted["frames"].get("ok") == counted["frames"].get("total"), (style, layout, counted)
            # Of nine functions, with and without gradients, for the first shape and for any other.
            assert counted["stats"].get("unique_graphs", 0) <= 16, (style, layout, counted)
