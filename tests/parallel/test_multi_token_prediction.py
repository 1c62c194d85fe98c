# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction is the same run in every layout: beside the loss or on a stage of its own, with the embedding
and the output layer that it shares. Compared with one process as in test_layouts.py.

    MEGATRON_ALL_LAYOUTS=1 bash tests/run.sh tests/parallel/test_multi_token_prediction.py      the full table
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch

from megatron.training.step import train_step
from megatron.training.verify.comparison import compare, find_largest_differences
from megatron.training.verify.parity import RankTrace, Trace, join, open_local_run, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.checkpoint_contents import assert_bit_equal, saved
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import FURTHER, own_rank, training
from tests.parallel.test_layout_checkpoints import DROPOUT, run_on

ITERATIONS = 4
APART = "--pipeline-model-parallel-layout="
ALLTOALL = "--moe-token-dispatcher-type=alltoall"
ROWS = [
    ("tied", "tp2,sp"), ("tied", "pp2,--pipeline-schedule=zb-v"), ("tied", f"pp3,{APART}Ett|ttmm|L"),
    ("untied", "cp2"), ("untied", "pp2,vpp2"), ("untied", "dp2,fsdp2"), ("experts", f"dp2,ep2,{ALLTOALL}"),
    ("experts", "pp2,dist-opt"), ("experts", "pp2,--freeze-base-for-mtp"), ("tied", "tp2,sp,cp2,--mtp-hsm"),
    ("streams", "tp2,sp,pp2"),
]  # fmt: skip
if os.environ.get("MEGATRON_ALL_LAYOUTS"):
    ROWS += [(style, layout) for style in FURTHER for layout in (
        "tp2", "tp2,sp", "tp2,sp,pp2", "cp2", "cp4,--cp-comm-type=a2a", "cp2,--calculate-per-token-loss", "pp2",
        "pp2,vpp2",
        "pp2,--pipeline-schedule=zb-v", "pp2,--pipeline-schedule=zb-h1", "pp2,--decoder-first-pipeline-num-layers=1",
        "pp2,--defer-embedding-wgrad-compute", "dp2,dist-opt,overlap-all", "dp3,dist-opt,--micro-batch-size=2",
        "tp2,pp2,dp2,dist-opt", "dp2,overlap,--mtp-detach-heads", "pp2,cp2,--mtp-use-repeated-layer",
        "tp2,--recompute-granularity=full,--recompute-method=uniform,--recompute-num-layers=1",
        "tp2,--recompute-granularity=full,--recompute-method=uniform,--recompute-num-layers=1,"
        "--distribute-saved-activations",
        "pp2,--recompute-granularity=selective",
    )]  # fmt: skip
    ROWS += [("tied", f"{layout},--mtp-hsm") for layout in ("tp2", "cp2", "dp2", f"pp3,{APART}Ett|ttmm|L")]
    ROWS += [("tied", f"{layout},{APART}Et|tt|tmm|L") for layout in ("pp2", "pp4", "pp2,--pipeline-schedule=zb-v,dp2")]
    ROWS += [("untied", f"pp3,{APART}Ett|ttm|L"), ("untied", f"tp2,sp,pp3,{APART}Ett|ttm|L")]
    ROWS += [(style, f"dp2,fsdp2{more}") for style in ("tied", "untied")
             for more in ("", ",--mtp-use-repeated-layer", ",--mtp-detach-heads")]  # fmt: skip
    ROWS += [("experts", layout) for layout in ("cp2,ep2", f"tp2,sp,ep2,etp1,{ALLTOALL}", "tp2,sp,pp2,dp2,ep2")]
    ROWS += [(style, f"{layout},--freeze-base-for-mtp") for style, layout in (
        ("tied", "pp2,dp2,dist-opt"), ("untied", "dp2,fsdp2"), ("experts", "tp2,sp"),
        ("tied", f"pp3,{APART}Ett|ttmm|L"),
        ("experts", "pp2,dp2,ep2,dist-opt,overlap-all,--micro-batch-size=1"),
    )]  # fmt: skip
CHANGES_THE_RUN = ("--micro-batch-size", "--calculate-per-token-loss", "--mtp-", "--freeze-")


def share(style: str, text: str) -> RankTrace:
    """One rank's part of the run; the whole run where the layout is one process."""
    config, recipe = training(FURTHER[style], text)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=ITERATIONS)


@functools.cache
def reference(style: str, flags: str) -> Trace:
    return join([share(style, flags)])


@pytest.mark.flags("--mtp-num-layers", "--mtp-standalone", "--mtp-hsm", "--pipeline-model-parallel-layout")
@pytest.mark.parametrize(("style", "layout"), ROWS)
def test_layout_is_the_same_run(style: str, layout: str) -> None:
    alone = reference(style, ",".join(term for term in layout.split(",") if term.startswith(CHANGES_THE_RUN)) or "1")
    trace = join(run_distributed(share, parse_layout(layout).world_size, style, layout, timeout=240.0))
    print(f"{style} {layout}:", {what: f"{size:.1e}" for what, size in find_largest_differences(alone, trace).items()})
    assert compare(alone, trace) == []
    own = [name for name in trace.grads if name.startswith("mtp.layers.0.")]
    assert len(own) > 10 and all(trace.grads[name].any() for name in own)


@pytest.mark.flags("--mtp-detach-heads")
def test_detached_heads_are_clipped_by_themselves() -> None:
    """So that the rest of the model is the run without them, in what is reported as well."""
    plain = FURTHER["tied"].replace("--mtp-num-layers 2", "").replace("--mtp-loss-scaling-factor 0.5", "")
    detached, without = (
        trace_rank(*training(flags, "1,--clip-grad=0.1"), rank=0, iterations=ITERATIONS)
        for flags in (f"{FURTHER['tied']} --mtp-detach-heads", plain)
    )
    assert min(without.grad_norms) > 0.1
    assert (detached.losses, detached.grad_norms) == (without.losses, without.grad_norms)


def logged(style: str, text: str) -> dict[str, float]:
    """The fourth iteration's losses, as the log has them, and the shares of right guesses."""
    config, recipe = training(FURTHER[style], f"{text},--lr=0.02,--min-lr=0.02")
    with open_local_run(config, recipe, own_rank(config)) as run:
        batches = run.data.open("train", 0)
        for _ in range(4):
            run.hooks.on_step_start(run)
            run.hooks.on_step_end(run, train_step(run, batches))
        row = run.metrics.read()[-1]
        return row.losses | {name: row[name] for name in row.values if name.endswith("acceptance_rate")}


@pytest.mark.parametrize(("style", "layout"), [("tied", "tp2,sp,cp2"), ("experts", f"pp3,{APART}Ett|ttm|L")])
def test_losses_in_the_log_do_not_depend_on_the_layout(style: str, layout: str) -> None:
    alone = logged(style, "1")
    depths = range(1, 3 if style == "tied" else 2)
    losses = ["lm loss", *(f"mtp_{depth} loss" for depth in depths)]
    rates = [f"mtp_{depth}_{of}acceptance_rate" for of in ("", "cumulative_") for depth in depths]
    assert list(alone) == losses + rates and len({alone[name] for name in losses}) == len(losses)
    assert all(1 < alone[name] < 6 for name in losses)
    assert 0 < max(alone[name] for name in rates) < 90
    for other in run_distributed(logged, parse_layout(layout).world_size, style, layout, timeout=240.0):
        assert other == pytest.approx(alone, rel=1e-5)


def test_checkpoints_move_between_layouts_and_resume(tmp_path: Path) -> None:
    """Saved with the layers on a stage of their own, loaded with everything in one place and the other way round; and
    a run that is interrupted is the uninterrupted one, dropout included."""
    flags = f"{FURTHER['tied']} --lr-decay-iters 10 --lr-warmup-iters 1 --save-interval 100 {DROPOUT}"
    apart = f"pp3,{APART}Ett|ttmm|L"
    norms = run_on(apart, f"{flags} --train-iters 3 --save {tmp_path}/whole")
    first = run_on(apart, f"{flags} --train-iters 2 --save {tmp_path}/first")
    rest = run_on(apart, f"{flags} --train-iters 3 --load {tmp_path}/first --save {tmp_path}/rest")
    assert first + rest == norms
    assert_bit_equal(saved(tmp_path / "whole", 3), saved(tmp_path / "rest", 3))
    source = tmp_path / "first"
    for layout in ("1", "tp2"):
        assert run_on(layout, f"{flags} --train-iters 2 --load {source} --save {tmp_path}/{layout}") == []
        assert_bit_equal(saved(tmp_path / "first", 2), saved(tmp_path / layout, 2))
        source = tmp_path / layout


@pytest.mark.flags("--freeze-base-for-mtp")
def test_layers_for_further_tokens_are_added_to_a_trained_model(tmp_path: Path) -> None:
    """The stage without such a layer has nothing to train; nothing of the base changes, in memory or in files."""
    flags = f"{FURTHER['untied']} --lr-decay-iters 10 --lr-warmup-iters 1 --save-interval 100"
    run_on("1", f"{flags.replace('--mtp-num-layers 1', '')} --train-iters 2 --save {tmp_path}/base")
    flags += f" --freeze-base-for-mtp --save {tmp_path}/both --load {tmp_path}/both"
    start = f"--pretrained-checkpoint {tmp_path}/base --dist-ckpt-strictness log_all"
    run_on("pp2,dist-opt", f"{flags} --train-iters 2 {start}")
    run_on("dp2,dist-opt", f"{flags} --train-iters 3")
    base, first, both = saved(tmp_path / "base", 2), saved(tmp_path / "both", 2), saved(tmp_path / "both", 3)
    weights = [key for key in base if not key.startswith("optimizer.")]
    assert all(torch.equal(base[key], both[key]) for key in weights)
    own = [key for key in both if key.startswith("mtp.")]
    assert own and not any(torch.equal(first[key], both[key]) for key in own)
    assert {key.partition("exp_avg.")[2] for key in both if ".exp_avg." in key} == set(own)
