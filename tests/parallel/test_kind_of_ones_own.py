# SPDX-License-Identifier: Apache-2.0
"""A kind of layer that a program registers, from examples/custom_mixer.py, under everything a run may ask of layers:
what it has cost is its file with one call, and the row of flags here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples import custom_mixer  # noqa: F401  registers the letter S, in each process
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.sequences.state import SequenceState
from megatron.core.transformer.execution import compilation
from megatron.planner.memory import count_parameters
from megatron.training.verify.comparison import compare
from megatron.training.verify.parity import RankTrace, Trace, join, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel import test_layout_checkpoints
from tests.parallel.checkpoint_contents import assert_bit_equal, saved
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import own_rank, training
from tests.unit.inference.test_unequal_prompts import assert_same_probabilities, model_of, read, read_alone, texts_of

ROW = "--num-layers 8 --hybrid-layer-pattern S-*S-S*- --position-embedding-type none --disable-bias-linear"

FULL = "--recompute-granularity full,--recompute-method"
LAYOUTS = [
    *("tp2,sp", "pp2", "pp2,--hybrid-layer-pattern=S-|*S|-S|*-", "pp2,--pipeline-schedule=zb-v"),
    *("dp2,dist-opt,overlap-all", "dp2,fsdp2", "tp2,sp,pp2,dp2,dist-opt"),
    f"1,{FULL} uniform,--recompute-num-layers 2",
    f"tp2,pp2,{FULL} block,--recompute-num-layers 1",
    "1,--recompute-granularity selective,--recompute-modules layernorm mlp",
]


def share(layout: str, flags: str = "") -> RankTrace:
    """One rank's part of a run of a few steps."""
    config, recipe = training(f"{ROW} --micro-batch-size 3 {flags}", layout)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=4)


@pytest.fixture(scope="module")
def expected() -> Trace:
    """The run on one process."""
    return join([share("1")])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_under_every_layout(layout: str, expected: Trace) -> None:
    shares = run_distributed(share, parse_layout(layout).world_size, layout, timeout=240.0)
    assert compare(expected, join(shares)) == []


def share_compiled(layout: str) -> tuple[RankTrace, int]:
    """The same with compiled regions, and how many graphs there were."""
    compilation.BACKEND = "aot_eager"
    return share(layout, "--compile"), torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_it_trains_beside_compiled_regions(expected: Trace) -> None:
    ranks = run_distributed(share_compiled, 2, "tp2,sp", timeout=400.0)
    assert compare(expected, join([part for part, _ in ranks])) == []
    assert all(graphs > 0 for _, graphs in ranks)


def train_on(flags: str, layout: str) -> list[float]:
    """See test_layout_checkpoints."""
    return test_layout_checkpoints.train_on(f"{ROW} {flags}", layout)


def test_it_saves_and_goes_on_under_any_layout(tmp_path: Path) -> None:
    def run(layout: str, iterations: int, directory: str, *flags: str) -> list[float]:
        more = f"--train-iters {iterations} --lr-warmup-iters 1 --lr-decay-iters 4 --save {tmp_path / directory}"
        world_size = parse_layout(layout).world_size
        return run_distributed(train_on, world_size, f"{more} {' '.join(flags)}", layout)[0]

    layout, load = "tp2,sp,pp2", f"--load {tmp_path}/first"
    whole = run(layout, 4, "whole")
    assert run(layout, 2, "first") + run(layout, 4, "second", load) == whole
    assert_bit_equal(saved(tmp_path / "whole", 4), saved(tmp_path / "second", 4))
    assert run("dp2,dist-opt", 2, "moved", load) == []
    assert_bit_equal(saved(tmp_path / "first", 2), saved(tmp_path / "moved", 2))
    assert "decoder.layers.3.mixer.decay" in saved(tmp_path / "first", 2)


@torch.no_grad()
def test_it_generates_from_states_of_constant_size() -> None:
    model = model_of(ROW)
    assert_same_probabilities(model)
    state = SequenceState(2, 64)
    for new in ([[1, 2, 3], [4]], [[5], [6]], [[7, 8], [9, 1, 2, 3]]):
        read(model, state, new)
        assert [[x.shape for (x,) in row.recurrent.values()] for row in state.rows] == [[(32,)] * 3] * 2
    # Another batch in its place begins from nothing.
    state.rewind([0, 0])
    torch.testing.assert_close(read(model, state, [[7, 8], [9]])[1], read_alone(model, [9]), rtol=0, atol=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 5, "sampling": Sampling(greedy=True)}
    batch = texts_of(3, 7)
    assert generate(model, batch, **options) == generate(model, batch, use_cache=False, **options)


@torch.no_grad()
def test_documents_of_a_row_do_not_see_each_other() -> None:
    model, texts = model_of(ROW), texts_of(3, 1, 8)
    bounds = torch.tensor([0, 3, 4, 12])
    ids = torch.tensor([sum(texts, [])])
    logits = model(ids, ids, None, packed_seq_params=PackedSeqParams(cu_seqlens_q=bounds))[0]
    for text, end in zip(texts, bounds[1:].tolist(), strict=True):
        torch.testing.assert_close(logits[end - 1].log_softmax(-1), read_alone(model, text), rtol=0, atol=1e-5)


def test_it_is_counted() -> None:
    model = model_of(ROW)
    held = sum(param.numel() for param in model.parameters()) - model.embedding.word_embeddings.weight.numel()
    decays = 3 * model.config.hidden_size  # like biases they do not count
    assert count_parameters(model.config, padded_vocab_size=64, untied=False).decoder.sum_of_all == held - decays
