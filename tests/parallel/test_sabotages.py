# SPDX-License-Identifier: Apache-2.0
"""Mistakes put into parallel code on purpose: the report of a comparison begins where each was made."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest

from megatron.training.verify.comparison import find_differences
from megatron.training.verify.parity import RankTrace, Trace, join, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from megatron.training.verify.report import write_report
from tests.parallel import sabotages
from tests.parallel.harness import run_distributed
from tests.parallel.sabotages import Sabotage, change_model
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training

SETTINGS = "--global-batch-size 4 --micro-batch-size 1 --adam-eps 1e-5"


class Case(NamedTuple):
    """A mistake, the run it is put into, and what the report must name first."""

    style: str
    layout: str
    sabotage: Sabotage
    first: str
    """The tensor of the first finding."""
    words: tuple[str, ...]
    """What the first lines say, besides."""
    iterations: int = 1


FC1, FC2 = "decoder.layers.2.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"
CASES = {
    "input gradient of a column layer is not summed": Case(
        "gpt2", "tp2", sabotages.drop_plan(2, "linear_fc1"),
        "output of decoder.layers.2.pre_mlp_layernorm", (f"in the backward pass of the first iteration, in {FC1}",),
    ),
    "output of a row layer is not summed": Case(
        "gpt2", "tp2", sabotages.drop_plan(1, "linear_fc2"),
        f"output of {FC2}", (f"in the forward pass of the first iteration, in {FC2}", "sums its output over tp"),
    ),
    "weight gradient from a rank's own tokens": Case(
        "llama", "tp2,sp", change_model(sabotages.take_own_tokens), f"{FC1}.weight", ("its product or accumulation",)
    ),
    "gradient of a norm is not summed": Case(
        "llama", "tp2,sp", sabotages.skip_sum(lambda name: name == "decoder.layers.1.input_layernorm.weight"),
        "decoder.layers.1.input_layernorm.weight", ("its sum over tp",),
    ),
    "gradients of norms are averaged": Case(
        "llama", "tp2,sp", sabotages.change_partial_sums(sabotages.average_norms),
        "decoder.final_layernorm.weight",
        ("its sum over tp", "exactly those that have gradients that are summed over tp, each 0.5 times"),
    ),
    "keys and values of two ranks are not summed": Case(
        "llama", "tp4", sabotages.skip_shared_parts, "decoder.layers.3.self_attention.linear_qkv.weight",
        ("the sum over tp of the keys and values", "exactly those that have parts that several ranks of tp hold"),
    ),
    "a bucket is not reduced": Case(
        "gpt2", "dp2,--overlap-grad-reduce,--ddp-num-buckets=5", sabotages.skip_bucket(2),
        "", ("its reduction over the replicas in bucket 3 of 6",), 3,
    ),
    "angles of one context-parallel rank are shifted": Case(
        "llama", "cp2", sabotages.shift_angles,
        "query of decoder.layers.0.self_attention.core_attention",
        ("rotary positions", "self_attention.linear_qkv", "only on rank 1 (cp 1)"),
    ),
    "expert biases count a replica's own tokens": Case(
        "picky", "dp2", sabotages.count_over("none"),
        "decoder.layers.0.mlp.router.expert_bias", ("the first update", "finish_step"), 2,
    ),
    "expert biases count a tensor-parallel rank's own tokens": Case(
        "picky", "tp2", sabotages.count_over("none"),
        "decoder.layers.0.mlp.router.expert_bias", ("the first update", "finish_step"),
    ),
    "tied embedding is not summed over stages": Case(
        "gpt2", "pp2", sabotages.skip_sum(lambda name: "word_embeddings" in name),
        "embedding.word_embeddings.weight", ("its sum over embd",),
    ),
    "a zero-bubble schedule drops a weight gradient": Case(
        "gpt2", "tp2,pp2,--pipeline-schedule=zb-h1", change_model(sabotages.drop_weight_gradient),
        "decoder.layers.2.self_attention.linear_proj.weight", ("its product or accumulation", "0 times"),
    ),
    "parameters of a bucket are not gathered": Case(
        "gpt2", "dp2,dist-opt,--ddp-num-buckets=5", sabotages.skip_gather,
        "", ("the first update (iteration 2)", "gathering"), 3,
    ),
    "hidden states change on their way to the next stage": Case(
        "llama", "pp2", sabotages.send_halves,
        "output of decoder.layers.2.input_layernorm", ("agrees:  output of decoder.layers.1", "rank 0 sends to rank 1"),
    ),
}  # fmt: skip


def share(style: str, layout: str, iterations: int, name: str | None) -> RankTrace:
    """One rank's part of a run with a mistake; None: without one."""
    config, recipe = training(f"{(STYLES | EXPERTS)[style]} {SETTINGS}", layout)
    recipe = recipe if name is None else CASES[name].sabotage(recipe)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=iterations, in_detail=True)


@functools.cache
def reference(style: str, iterations: int) -> Trace:
    return join([share(style, "1", iterations, None)])


@pytest.mark.parametrize(
    ("style", "layout"),
    [
        ("llama", "tp4"),
        ("llama", "tp2,sp,cp2,--recompute-granularity=selective"),
        ("gpt2", "pp2,vpp2,dp2,dist-opt"),
        ("picky", "dp2,ep2"),
    ],
)
def test_a_sound_layout_is_the_same_run_in_every_detail(style: str, layout: str) -> None:
    right = reference(style, 1)
    found = join(run_distributed(share, parse_layout(layout).world_size, style, layout, 1, None))
    assert find_differences(right, found) == [] and found.disagreements == []
    # Everything was compared, with the gradients of all of it.
    assert found.points.keys() == right.points.keys() and len(right.points) > 4 * 12
    assert all(point.grads is not None for point in found.points.values() if point.module)


@pytest.mark.parametrize("name", CASES)
def test_the_report_begins_where_the_mistake_is(name: str) -> None:
    case = CASES[name]
    right = reference(case.style, case.iterations)
    world_size = parse_layout(case.layout).world_size
    found = join(run_distributed(share, world_size, case.style, case.layout, case.iterations, name))
    findings = find_differences(right, found)
    report = write_report(right, found, findings)
    print(*report, sep="\n")
    assert not case.first or findings[0].tensor == case.first
    assert all(word in "\n".join(report[:5]) for word in case.words), report[:5]
    assert len(report) < 25
