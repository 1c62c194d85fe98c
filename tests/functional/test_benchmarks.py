# SPDX-License-Identifier: Apache-2.0
"""Benchmarks measure what they say; how fast is nothing for a test."""

from __future__ import annotations

import functools
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import checkpointing, experts, generality, guards, hyper_connections, memory, mixers, overlap, serving
from benchmarks.train_step import Sizes
from megatron.training.launch.local_job import run_locally
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed, server


@pytest.fixture(autouse=True)
def fork_from_the_server_of_the_tests() -> None:
    server()


FULL = "--recompute-granularity full,--recompute-method uniform,--recompute-num-layers 1"


@functools.cache
def activations_of_one_process() -> tuple[float, float]:
    """Bytes of a layer, and of the ends."""
    (small,) = run_locally(memory.measure, 1, ("1", memory.LAYERS))
    (large,) = run_locally(memory.measure, 1, ("1", 2 * memory.LAYERS))
    per_layer = (large.activations - small.activations) / memory.LAYERS
    return per_layer, small.activations - memory.LAYERS * per_layer


@pytest.mark.parametrize("text", ["tp2,sp", f"tp2,sp,{FULL}", "dp2,fsdp2"])
def test_memory_is_what_was_planned(text: str) -> None:
    layout = parse_layout(text)
    plan = memory.planned(layout, 0, *activations_of_one_process())
    found = run_locally(memory.measure, layout.world_size, (text, memory.LAYERS))[0]
    assert found[:3] == pytest.approx(plan[:3], rel=0.01), "alignment costs less"
    assert found.activations == pytest.approx(plan.activations, rel=0.01)


def test_the_straight_line_is_the_same_model() -> None:
    torch.manual_seed(0)
    sizes = Sizes(vocab=128, hidden=32, layers=2, heads=2, ffn=48, batch=2, sequence=16)
    ours = generality.General(sizes)
    straight = generality.StraightLine(sizes, ours.weights)
    tokens = torch.randint(0, sizes.vocab, (sizes.batch, sizes.sequence + 1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for _ in range(3):
        assert straight.step(ids, labels) == pytest.approx(ours.step(ids, labels), rel=1e-6)


def test_layers_of_experts_that_are_compared_are_the_same() -> None:
    variants = experts.build_variants(experts.Sizes(tokens=10, hidden=16, inner=8))
    expected = variants["loop"]()
    for name in ("ours", "ours grouped"):
        torch.testing.assert_close(variants[name](), expected)
    for name in ("dense", "products"):
        variants[name]()


@pytest.mark.parametrize("letter", mixers.KINDS)
def test_mixers_that_are_compared(letter: str) -> None:
    """A layer keeps what its plan says, within 3 %, and everything that is timed runs."""
    held, formula = mixers.measure_memory(letter, 512)
    assert held == pytest.approx(formula, rel=0.03)
    found = mixers.measure_speed(letter, 32, 1) | {"generation": mixers.measure_generation(letter, 1)}
    assert all(value > 0 for value in found.values())


def test_streams_that_are_compared() -> None:
    found = hyper_connections.measure(hidden=64, tokens=16, streams=2, rounds=1)
    assert len(found) == 2 and all(0 < lower <= ratio <= upper for ratio, lower, upper in found.values())


def test_generation_that_is_compared(tmp_path: Path) -> None:
    """Both models write the same tokens, and what is timed runs."""
    pytest.importorskip("transformers")
    sizes = serving.Sizes.tiny()
    models = serving.build_models(sizes, tmp_path)
    ratios = serving.compare_equal_lengths(models, sizes, sizes.batch, 1)
    mixed = serving.compare_mixed(models, sizes, 1)
    assert len(mixed) == 3
    shared, linear = serving.compare_prefix(models.ours, sizes, 1), serving.measure_linear(sizes, 1)
    assert all(value > 0 for value in [*ratios, *chain(*mixed.values()), *shared, *linear])
    passes, _ = serving.measure_arrival(models.ours, sizes)
    assert passes == 1, "the budget of the first pass is shared with the prompt that came later"


def test_latent_attention_holds_the_bytes_of_the_formula() -> None:
    found = experts.measure_latent_attention()
    *equal, (latent, ordinary) = found.values()
    assert all(measured == formula for measured, formula in equal) and 3 * latent < ordinary


def test_saves_of_both_kinds_are_measured(tmp_path: Path) -> None:
    state = checkpointing.build_state(2, 0)
    assert sum(tensor.data.nbytes for tensor in state.values()) == pytest.approx(2e6, rel=0.05)
    (found,) = run_locally(checkpointing.measure, 1, (0.1, 1, str(tmp_path)))
    # What checksums cost is a difference of two times, and may be anything.
    assert min(found._replace(checksums=1.0)) > 0 and list(tmp_path.iterdir()) == []


def test_what_a_link_exposes() -> None:
    """A link of 1000 bytes a second carries two collectives of 20 bytes one after the other."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    link = overlap.Link(rate={"gradients": 1000.0, "parameters": None}, clock=lambda: now[0], sleep=sleep)

    class Done:
        def wait(self) -> None:
            pass

    first = link.carry("gradients", torch.zeros(5), Done())
    second = link.carry("gradients", torch.zeros(5), Done())
    assert (first.arrives_at, second.arrives_at) == pytest.approx((100.02, 100.04))
    now[0] += 0.01  # computation hides this much
    second.wait()
    assert link.exposed["gradients"] == pytest.approx(0.03)
    first.wait()
    assert link.exposed["gradients"] == pytest.approx(0.03), "it has arrived before the second"


def compare_guards() -> tuple[list[guards.Sides], dict[str, tuple[float, float]]]:
    """On each of two processes."""
    sizes = guards.Sizes(1, 32, 128, 4)
    return guards.compare_steps(dist.get_rank(), sizes, 3, 2), guards.measure_parts(dist.get_rank(), sizes, 100)


def test_guards_are_compared_step_by_step_with_none() -> None:
    pairs, parts = run_distributed(compare_guards, 2)[0]
    assert len(pairs) == 3 and all(seconds > 0 for pair in pairs for seconds in pair)
    assert len(parts) == 5 and all(0 < processor < 5 for processor, _ in parts.values()), parts
    # The 6th and the 15th of 20 values: between them the median lies in 95 of 100 cases.
    assert guards.find_interval(range(20, 0, -1)) == (10.5, 6, 15)
