"""Every optimizer under several processes is the run of one process."""

from __future__ import annotations

import functools

import pytest

from megatron.training.parity import Share, Tolerances, Trace, compare, join, run_share
from megatron.training.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import STYLES, own_rank, training

SMALL_STATE = "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
# Flags, layout, and what rounding may do: the sign that Lion takes of a mean near zero may turn, a moment may round to
# the neighbouring bfloat16 number.
CASES = [
    ("--optimizer sgd --decoupled-lr 1e-2 --lr 5e-2", "tp2,pp2", Tolerances()),
    ("--optimizer sgd --decoupled-lr 1e-2 --lr 5e-2", "dp2,fsdp2", Tolerances()),
    ("--optimizer lion --lr 1e-4", "dp2,dist-opt,overlap-all,--ddp-num-buckets=3", Tolerances(weight=1e-2)),
    (SMALL_STATE, "dp2,dist-opt", Tolerances(loss=1e-3, grad=5e-2, weight=3e-2)),
]


def share(flags: str, layout: str) -> Share:
    config, tokenizer, task = training(f"{STYLES['llama']} {flags}", layout)
    return run_share(config, tokenizer, task, rank=own_rank(config), iterations=4)


@functools.cache
def reference(flags: str) -> Trace:
    return join([share(flags, "1")])


@pytest.mark.parametrize(("flags", "layout", "tolerances"), CASES, ids=str)
def test_layout_is_the_same_run(flags: str, layout: str, tolerances: Tolerances) -> None:
    trace = join(run_distributed(share, parse_layout(layout).world_size, flags, layout))
    assert compare(reference(flags), trace, tolerances) == []
