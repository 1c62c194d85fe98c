# SPDX-License-Identifier: Apache-2.0
"""Every optimizer under several processes is the run of one process."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from megatron.training.verify.comparison import Tolerances, compare
from megatron.training.verify.parity import RankTrace, Trace, join, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.checkpoint_contents import assert_bit_equal, saved
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import OPTIONS, STYLES, own_rank, training
from tests.parallel.test_layout_checkpoints import run_on

SMALL_STATE = "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
ONE_GROUP = "--num-query-groups 1"  # its key and value are held whole by both ranks
# Odd sizes and few tokens: gradients of lower rank than the matrices' sides leave part of the bases open.
SOAP = """--optimizer soap --soap-precondition-frequency 1 --lr 1e-3 --lr-warmup-iters 0 --hidden-size 36
    --kv-channels 10 --ffn-hidden-size 84 --seq-length 12 --max-position-embeddings 12 --calculate-per-token-loss"""
# Flags, layout, and what rounding may do: the sign that Lion takes of a mean near zero may turn, a moment may round to
# the neighbouring bfloat16 number.
CASES = [
    ("--optimizer sgd --decoupled-lr 1e-2 --lr 5e-2", "tp2,pp2", Tolerances()),
    ("--optimizer sgd --decoupled-lr 1e-2 --lr 5e-2", "dp2,fsdp2", Tolerances()),
    ("--optimizer lion --lr 1e-4", "dp2,dist-opt,overlap-all,--ddp-num-buckets=3", Tolerances(weight=1e-2)),
    ("--optimizer muon", "tp2,pp2", Tolerances(weight=1e-3)),
    ("--optimizer dist_muon --muon-nesterov", "tp2,dp2,--ddp-num-buckets=3,overlap-all", Tolerances(weight=1e-3)),
    ("--optimizer dist_muon --muon-scalar-optimizer lion --lr 1e-4", "dp3", Tolerances(weight=1e-2)),
    (SOAP, "tp2,pp2", Tolerances()),
    (f"{SOAP} {ONE_GROUP}", "tp2,sp,dp2,dist-opt,--ddp-num-buckets=3", Tolerances()),
    (SOAP, "cp3,dist-opt", Tolerances()),
    (f"--optimizer muon --muon-tp-mode distributed {ONE_GROUP}", "tp2,sp", Tolerances(weight=1e-3)),
    (SMALL_STATE, "dp2,dist-opt", Tolerances(loss=1e-3, grad=5e-2, weight=3e-2)),
]


def share(flags: str, layout: str) -> RankTrace:
    config, recipe = training(f"{STYLES['llama']} {flags}", layout)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=10 if "soap" in flags else 4)


@functools.cache
def reference(flags: str) -> Trace:
    return join([share(flags, "1")])


@pytest.mark.flags("--optimizer", "--muon-tp-mode")
@pytest.mark.parametrize(("flags", "layout", "tolerances"), CASES, ids=str)
def test_layout_is_the_same_run(flags: str, layout: str, tolerances: Tolerances) -> None:
    trace = join(run_distributed(share, parse_layout(layout).world_size, flags, layout))
    assert compare(reference(flags), trace, tolerances) == []


def clipped_share(flags: str, layout: str) -> RankTrace:
    config, recipe = training(f"--qk-clip --init-method-std 0.2 {flags}", layout)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=3)


@pytest.mark.flags("--qk-clip")
def test_heads_are_clipped_alike_in_every_layout() -> None:
    """Largest scores are those of all replicas, query groups are shared by ranks, slices end inside of heads."""
    flags = "--group-query-attention --num-query-groups 2 --qk-clip-threshold 0.5"
    tolerances = Tolerances(weight=5e-3)  # the keys' biases have no gradient but rounding
    for layout in ("tp4,pp2", "tp2,dp2,dist-opt,--ddp-num-buckets=3,overlap-all"):
        trace = join(run_distributed(clipped_share, parse_layout(layout).world_size, flags, layout))
        assert compare(clipped_reference(flags), trace, tolerances) == []
    loose = clipped_reference(flags.replace("0.5", "500"))
    assert any("linear_qkv" in text for text in compare(clipped_reference(flags), loose, tolerances))


@functools.cache
def clipped_reference(flags: str) -> Trace:
    return join([clipped_share(flags, "1")])


@pytest.mark.flags("--muon-tp-mode")
def test_blockwise_muon_takes_each_shard_for_a_matrix() -> None:
    flags = "--optimizer muon --muon-tp-mode blockwise"
    trace = join(run_distributed(share, 2, flags, "tp2"))
    differing = compare(reference("--optimizer muon"), trace, Tolerances(loss=1e-2))
    assert any("linear_fc1" in text and "weight" in text for text in differing)
    assert not trace.disagreements
    assert compare(reference("--optimizer muon"), join([share(flags, "1")])) == []


@pytest.mark.usefixtures("no_yardstick")
@pytest.mark.parametrize(
    ("style", "optimizer", "kind", "layout"),
    [
        ("llama", "muon", "momentum_buffer", "tp2"),
        ("llama", "soap --soap-precondition-frequency 1", "soap_left_basis", "tp2"),
        # Three processes divide the state of four experts: what two of them share is saved and loaded by both.
        ("deepseek", "soap --soap-precondition-frequency 1", "soap_left_basis", "dp2,ep2"),
    ],
)
def test_state_moves_between_layouts(style: str, optimizer: str, kind: str, layout: str, tmp_path: Path) -> None:
    model = (STYLES | OPTIONS)[style]
    flags = f"{model} --optimizer {optimizer} --bf16 --train-iters 2 --lr-warmup-iters 1 --save-interval 100"
    run_on(layout, f"{flags} --save {tmp_path}/first")
    assert run_on("dp3,dist-opt", f"{flags} --load {tmp_path}/first --save {tmp_path}/second") == []
    first = saved(tmp_path / "first", 2)
    assert any(kind in name for name in first)
    assert_bit_equal(first, saved(tmp_path / "second", 2))
