# SPDX-License-Identifier: Apache-2.0
"""Layouts in a few letters, and how two runs are compared: what differs first, where, by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.placement import Placement, Split
from megatron.training.hooks.activations import PointRecord, join_points
from megatron.training.verify.comparison import compare, find_differences
from megatron.training.verify.parity import HeldParameter, RankTrace, Trace, join
from megatron.training.verify.parity_layouts import ParityLayout, choose_padding, find_smallest_part, parse_layout
from megatron.training.verify.report import write_report

FULL = torch.arange(1.0, 13.0).view(4, 3)


def shares(factor: float = 1.0, second_bias: float = 1.0) -> list[RankTrace]:
    """Two tensor-parallel ranks: a weight cut in two, whose gradient is `factor` times itself, and a bias."""
    found = []
    for rank in range(2):
        cut, bias = Placement("cut", (4, 3), (Split(0, "tp", 2, rank),)), Placement("bias", (2,))
        own = cut.take(FULL)
        held = [
            HeldParameter(cut, factor * own, own),
            HeldParameter(bias, torch.ones(2), torch.full((2,), second_bias if rank else 1.0)),
        ]
        found.append(RankTrace([{"lm loss": 2.0}], [3.0], held))
    return found


def test_layouts() -> None:
    layout = parse_layout("tp2,sp,pp2,vpp3,dp2,dist-opt,--cp-comm-type a2a p2p")
    assert layout.world_size == 8
    assert layout.flags == (
        "--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2",
        "--num-virtual-stages-per-pipeline-rank", "3", "--use-distributed-optimizer", "--cp-comm-type",
        "a2a", "p2p",
    )  # fmt: skip
    assert layout.terms == ["tp2", "sp", "pp2", "vpp3", "dp2", "dist-opt", "--cp-comm-type a2a p2p"]
    assert parse_layout("1").world_size == 1
    with pytest.raises(ConfigError, match="'tp0' is not known; use tpN, "):
        parse_layout("tp0")


def test_the_smallest_part_that_differs_is_found_among_axes_and_flags() -> None:
    def find(text: str, *needed: str, companions: Mapping[str, str] = {}) -> str:
        def still(part: ParityLayout) -> bool:
            # A term without its companion is refused, which shows nothing.
            legal = all(companions.get(term, term) in part.terms for term in part.terms)
            return legal and set(needed) <= set(part.terms)

        return find_smallest_part(parse_layout(text), still).text

    assert find("tp2,sp,pp2", "sp", companions={"sp": "tp2"}) == "tp2,sp"
    assert find("tp2,sp,pp2", "tp2") == "tp2"
    assert find("tp2,pp2,dp2", "tp2", "pp2", "dp2") == "tp2,pp2,dp2", "only their combination"
    schedule, buckets = "--pipeline-schedule=zb-h1", "--ddp-num-buckets=5"
    assert find(f"tp2,pp2,{schedule}", schedule, companions={schedule: "pp2"}) == f"pp2,{schedule}"
    assert find(f"dp2,dist-opt,overlap-all,{buckets}", "dp2", buckets) == f"dp2,{buckets}"
    assert find("dp2,--seed=99", "--seed=99") == "--seed=99"


def test_all_layouts_pad_the_vocabulary_alike() -> None:
    padding = choose_padding([parse_layout(text) for text in ("1", "tp2", "tp3,dp2")], 4)
    assert padding == {"1": 24, "tp2": 12, "tp3,dp2": 8}


def test_shards_are_joined_and_equal_runs_do_not_differ() -> None:
    trace = join(shares())
    assert torch.equal(trace.weights["cut"], FULL) and trace.disagreements == []
    assert compare(trace, join(shares())) == []
    tiny = join(shares())
    tiny.weights["cut"] = FULL * (1 + 1e-6)
    assert compare(trace, tiny) == []


def test_a_gradient_that_is_too_large_is_named_with_its_place_and_factor() -> None:
    (difference,) = compare(join(shares()), join(shares(factor=2.0)))
    assert difference == (
        "gradient of the first iteration of cut: element [3, 2] is 24 instead of 12 (relative 1.0e+00), "
        "in shard 1 of 2 over tp; the whole tensor is 2 times what it should be"
    )


def test_what_is_not_a_number_differs() -> None:
    broken = join(shares(factor=math.nan))
    assert any(text.startswith("gradient of the first iteration of cut") for text in compare(join(shares()), broken))
    lost = Trace([{"lm loss": math.nan}], [3.0])
    assert compare(Trace([{"lm loss": 2.0}], [3.0]), lost)[0].startswith("lm loss at iteration 1: nan instead of 2.0")


def test_replicas_that_disagree_are_named() -> None:
    (difference,) = compare(join(shares()), join(shares(second_bias=1.0 + 1e-7)))
    assert difference == "rank 1 has another weight of bias than rank 0"


def record(tokens: list[int], channels: list[int], value: float, grad: float, *, sums: bool = False) -> PointRecord:
    shape = (len(tokens), len(channels))
    index = torch.tensor(tokens), torch.tensor(channels)
    return PointRecord("layer", "output", "Linear", *index, torch.full(shape, value), torch.full(shape, grad), sums, 2)


def test_activations_are_joined_from_any_pieces() -> None:
    (point,) = join_points([[record([0, 3], [0], 1.0, 5.0)], [record([1, 2], [0], 2.0, 6.0)]]).values()
    assert point.name == "output of layer"
    assert point.values.flatten().tolist() == [1.0, 2.0, 2.0, 1.0]
    # The second rank holds the first channel, too, and the sum of both gradients belongs to it.
    shared = [[record([0], [0, 1], 1.0, 5.0, sums=True)], [record([0], [0], 1.0, 6.0, sums=True)]]
    (point,) = join_points(shared).values()
    assert point.grads is not None and point.grads.tolist() == [[11.0, 5.0]]


def test_the_holder_that_is_furthest_off_is_compared() -> None:
    right = Trace([], [], points=join_points([[record([0, 1], [0], 1.0, 1.0)]]))
    wrong = join_points([[record([0, 1], [0], 1.0, 1.0)], [record([0, 1], [0], 3.0, 1.0)]])
    (difference,) = compare(right, Trace([], [], points=wrong, coordinates=[{}, {}]))
    assert difference == (
        "output of layer: element [sample 0, position 0, channel 0] is 3 instead of 1 (relative 2.0e+00), "
        "on all ranks that hold it; its holders differ from each other"
    )


def test_a_report_says_how_much_it_hides() -> None:
    names = [f"layers.{number}.weight" for number in range(20)]
    placements = {name: Placement(name, (2,)) for name in names}
    right, wrong = (
        Trace([{}], [], grads={name: torch.full((2,), value) for name in names}, placements=placements)
        for value in (1.0, 2.0)
    )
    findings = find_differences(right, wrong)
    assert [item.tensor for item in findings] == names[::-1], "gradients come in backward order"
    short, whole = (write_report(right, wrong, findings, show_all=show_all) for show_all in (False, True))
    assert short[1:3] == ["    agrees:  losses", "    differs: gradient of the first iteration of layers.19.weight"]
    assert short[4] == "             all 20 of them differ, each 2 times what it should be"
    assert short[-1] == "    and 11 more; --all shows them" and len(short) == 15
    assert not any("more" in line for line in whole) and len(whole) == 25
