# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts is the same run in every layout: experts on one process, dealt out, cut, and with everything
else that divides a model. Compared with one process as in test_layouts.py.

    MEGATRON_ALL_LAYOUTS=1 bash tests/run.sh tests/parallel/test_expert_parallel.py      the full table
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import pytest
import torch

from megatron.core.distributed.sharded_params import get_local_shard
from megatron.core.placement import get_placement
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.checkpoint.restore import load_checkpoint
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.checkpoint.trained_model import load_trained_model
from megatron.training.hooks.measures import list_routers
from megatron.training.step import train_step
from megatron.training.verify.comparison import compare, find_largest_differences
from megatron.training.verify.parity import RankTrace, Trace, join, open_local_run, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, own_rank, training

ITERATIONS = 4
FIRST = "decoder.layers.0"
ALLTOALL = "--moe-token-dispatcher-type=alltoall"
MUON = "--optimizer=muon"
SOAP = "--optimizer=soap --soap-precondition-frequency=1"
ONE = "--micro-batch-size=1"  # so that four replicas share the batch
INSTANCES = "--num-distributed-optimizer-instances=2"
FINE = "--megatron-fsdp-enable-fine-grained-param-gather"
LAST = "--moe-token-drop-policy=position"
WIDE = "--use-mup --mup-base-hidden-size=8"
SIX = "--num-experts=6"
OF_THE_RUN = (ONE, "--calculate-per-token-loss", MUON, SOAP, SIX)
SMALL = [
    "dp2,ep2", f"tp2,sp,{MUON}", f"tp2,sp,ep2,etp1,{ALLTOALL}", f"dp4,ep2,dist-opt,overlap-all,{ONE}",
    f"pp2,dp2,ep2,{ALLTOALL},--pipeline-schedule=zb-h1,--use-tp-pp-dp-mapping,--recompute-granularity=full,"
    "--recompute-method=uniform,--recompute-num-layers=1", f"tp2,sp,dp2,ep2,{ALLTOALL},dist-opt",
    f"tp2,sp,dp2,etp1,dist-opt,overlap-all,{INSTANCES}", "tp2,sp,etp1,dist-opt",
    f"dp2,ep2,fsdp2,{ALLTOALL}",
    f"dp4,ep2,fsdp2,{INSTANCES},{ONE}", f"dp3,dist-opt,{SOAP}",
]  # fmt: skip
LARGE = [
    f"dp4,ep2,fsdp2,{FINE},{ONE}",
    f"tp2,sp,{SOAP}", f"tp2,sp,dp2,ep2,dist-opt,{SOAP}", f"dp4,ep2,dist-opt,{SOAP},{INSTANCES},{ONE}",
    f"dp2,ep2,{SOAP}", f"dp2,ep2,{MUON}", f"dp4,ep2,dist-opt,{MUON},{ONE}", f"tp2,sp,{MUON},--muon-tp-mode=distributed",
    f"dp4,ep2,dist-opt,{INSTANCES},{ONE}", f"dp4,ep4,dist-opt,overlap-all,{INSTANCES},{ONE}",
    "dp3,dist-opt,--num-distributed-optimizer-instances=3", f"dp4,dist-opt,{INSTANCES},{MUON},{ONE}",
    "dp3,fsdp2", f"dp3,ep3,fsdp2,{SIX},{ALLTOALL}", "tp2,sp,dp2,ep2,fsdp2", "tp2,dp2,ep4,etp1,fsdp2",
    f"tp2,sp,dp2,etp1,ep2,fsdp2,{ALLTOALL}", f"cp2,dp2,ep2,fsdp2,{INSTANCES}", "cp2,ep2,fsdp2",
    f"pp2,dp2,ep2,fsdp2,{ALLTOALL}", f"pp2,vpp2,dp2,ep2,fsdp2,{ONE}",
    f"dp4,fsdp2,{INSTANCES},{ONE}", f"dp4,ep4,fsdp2,{INSTANCES},{ONE}",
    "dp2,ep2,fsdp2,--data-parallel-sharding-strategy=optim_grads,--calculate-per-token-loss",
    "dp2,fsdp2,--suggested-communication-unit-size=1000000,--init-model-with-meta-device",
    "dp2,ep2,fsdp2,--recompute-granularity=full,--recompute-method=uniform,--recompute-num-layers=1",
    "dp2", "dp3,dist-opt", "pp2", "tp2", "tp2,sp", "tp2,ep2,etp1,--ddp-average-in-collective", "cp2,ep2", "cp2",
    f"dp2,ep2,{ALLTOALL},dist-opt,overlap-all", f"tp2,dp2,ep4,etp1,{ALLTOALL}", "tp2,sp,dp2,ep2",
    f"tp4,sp,ep2,etp2,{ALLTOALL}", f"pp2,vpp2,dp2,ep2,overlap,{ONE}",
    f"tp2,sp,pp2,dp2,ep2,etp1,{ALLTOALL},dist-opt,overlap-all", f"tp2,sp,cp2,dp2,ep4,{ALLTOALL},dist-opt",
    f"dp2,ep2,{ALLTOALL},--calculate-per-token-loss", "tp2,sp,pp2,--pipeline-schedule=zb-v,dp2,ep2",
    "cp2,pp2,--use-tp-pp-dp-mapping", f"pp2,dp2,ep2,{ALLTOALL},--pipeline-schedule=zb-h1",
]  # fmt: skip
LARGE += [
    f"{layout},--recompute-granularity=selective,--recompute-modules {parts}"
    for layout in ("tp2,sp,ep2,etp1", f"dp2,ep2,{ALLTOALL}", "dp2,fsdp2", "pp2,--pipeline-schedule=zb-v,dp2,ep2")
    for parts in ("moe", "moe_act shared_experts layernorm")
]
LARGE_TOO = bool(os.environ.get("MEGATRON_ALL_LAYOUTS"))
LAYOUTS = SMALL + (LARGE if LARGE_TOO else [])


def share(text: str, style: str = "moe") -> RankTrace:
    """One rank's part of the run; the whole run where the layout is one process."""
    config, recipe = training(EXPERTS[style], text)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=ITERATIONS)


@functools.cache
def reference(flags: str = "1", style: str = "moe") -> Trace:
    return join([share(flags, style)])


@pytest.mark.flags("--expert-model-parallel-size", "--expert-tensor-parallel-size")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_the_same_run(layout: str) -> None:
    alone = ",".join(term for term in layout.split(",") if term in OF_THE_RUN) or "1"
    trace = join(run_distributed(share, parse_layout(layout).world_size, layout, timeout=240.0))
    sizes = find_largest_differences(reference(alone), trace)
    print(f"{layout}:", {what: f"{size:.1e}" for what, size in sizes.items()})
    assert compare(reference(alone), trace) == []
    cut = {split.axis: split.num_shards for split in trace.placements[f"{FIRST}.mlp.experts.linear_fc1.weight"].splits}
    sizes = {axis: int(size) for axis, size in re.findall(r"\b(ep|etp|tp)([0-9])", layout)}
    assert cut["ep"] == sizes.get("ep", 1)
    assert cut.get("etp", 1) == sizes.get("etp", sizes.get("tp", 1))


@pytest.mark.flags("--moe-token-drop-policy", "--use-mup")
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("tp2,ep2,etp1", "1"), (f"dp2,ep2,{ALLTOALL}", "1"), (f"tp2,sp,cp2,ep2,{LAST},{WIDE}", f"{LAST},{WIDE}"),
        # Without shared experts, what comes back from the experts is what the residual is added to.
        (f"dp2,ep2,fsdp2,{FINE},{ALLTOALL}", "1"),
    ],
)  # fmt: skip
def test_choices_that_concern_all_tokens_do_not_depend_on_the_layout(layout: str, flags: str) -> None:
    """Full experts drop tokens of the whole microbatch, and a bias follows the tokens of the whole step."""
    trace = join(run_distributed(share, parse_layout(layout).world_size, layout, "picky", timeout=240.0))
    assert compare(reference(flags, "picky"), trace) == []


def test_global_balance_counts_the_tokens_of_all_replicas() -> None:
    """Two replicas with two sequences each are balanced as one process with all four."""
    balance = "--moe-router-load-balancing-type=global_aux_loss,--moe-aux-loss-coeff=1,--global-batch-size=4"
    trace = join(run_distributed(share, 2, f"dp2,{balance},--micro-batch-size=2", timeout=240.0))
    assert compare(reference(f"1,{balance},--micro-batch-size=4"), trace) == []


@pytest.mark.flags("--moe-expert-rank-capacity-factor")
def test_what_full_ranks_drop_depends_on_the_experts_ranks_alone() -> None:
    bounded = "--moe-expert-rank-capacity-factor=0.8"
    layouts = (f"dp2,ep2,{ALLTOALL},{bounded}", f"tp2,sp,ep2,etp1,{bounded}")
    first, second = (join(run_distributed(share, 2, layout, timeout=240.0)) for layout in layouts)
    assert compare(first, second) == []
    assert compare(reference(), first) != []


@pytest.mark.parametrize("layout", ["tp2,sp", *([f"tp4,ep2,etp2,{ALLTOALL}", "tp2,dp2,ep2"] if LARGE_TOO else [])])
def test_biases_of_divided_experts_count_once(layout: str) -> None:
    trace = join(run_distributed(share, parse_layout(layout).world_size, f"{layout},--add-bias-linear", timeout=240.0))
    assert compare(reference("1,--add-bias-linear"), trace) == []


@pytest.mark.flags("--moe-latent-size", "--moe-pad-expert-input-to-capacity")
@pytest.mark.parametrize("layout", ["tp2,ep2,etp1", f"tp2,sp,{ALLTOALL}", f"dp2,ep2,{ALLTOALL}"])
def test_narrow_experts_do_not_depend_on_the_layout(layout: str) -> None:
    """Projections to latent vectors are whole on every rank, and each rank has gradients of its own tokens."""
    trace = join(run_distributed(share, 2, layout, "narrow", timeout=240.0))
    assert compare(reference("1", "narrow"), trace) == []


# ---- bytes, logs, checkpoints


def expert_bytes(*layouts: str) -> list[tuple[int, int, int]]:
    """For each layout: bytes of this process's weights of experts, of its gradients of them, and elements of their
    moments."""
    found = []
    for text in layouts:
        config, recipe = training(EXPERTS["moe"], text)
        with open_local_run(config, recipe, own_rank(config)) as run:
            chunk = run.model[0]
            experts = {
                get_placement(p, n).name: p for n, p in chunk.module.named_parameters() if get_placement(p, n).is_expert
            }
            state = run.optimizer.named_state()
            found.append(
                (
                    sum(get_local_shard(param).nbytes for param in experts.values()),
                    sum(param.main_grad.nbytes for param in experts.values()),  # type: ignore[attr-defined]
                    sum(state[name]["exp_avg"].numel() for name in experts if name in state),
                )
            )
    return found


def test_each_process_holds_its_share_of_the_experts() -> None:
    (whole,) = expert_bytes("1")
    assert whole == (2 * 4 * 3 * 24 * 32 * 4, 2 * 4 * 3 * 24 * 32 * 4, 2 * 4 * 3 * 24 * 32)
    half, quarter = (tuple(number // part for number in whole) for part in (2, 4))
    assert run_distributed(expert_bytes, 2, "dp2,ep2") == [[half]] * 2
    # FSDP divides further what expert parallelism has left; and nothing where each process has experts of its own.
    layouts = ["dp4,ep4,fsdp2", "dp4,ep2,fsdp2", f"dp4,ep2,fsdp2,{INSTANCES}"]
    for found in run_distributed(expert_bytes, 4, *(f"{layout},{ONE}" for layout in layouts)):
        assert found == [quarter, quarter, half]


def first_loss(flags: str, text: str, directory: str, saves: bool = False) -> float:
    """The first step's loss; where `saves` says so, the weights before it are saved, else they are loaded."""
    config, recipe = training(f"{flags} --{'save' if saves else 'load'} {directory}", text)
    with open_local_run(config, recipe, own_rank(config)) as run:
        if saves:
            save_checkpoint(run)
        else:
            load_checkpoint(run)
        run.hooks.on_step_start(run)
        return float(train_step(run, run.data.open("train", 0)).losses["lm loss"])


@pytest.mark.flags("--moe-use-upcycling")
@pytest.mark.parametrize("layout", ["tp2,ep2,etp1", "dp2,ep2,fsdp2"])
def test_experts_made_of_a_dense_model_in_any_layout(tmp_path: Path, layout: str) -> None:
    dense = "--squared-relu --ffn-hidden-size 48"
    expected = first_loss(dense, "1", str(tmp_path), True)
    flags = f"{dense} --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 24 --moe-layer-freq 2"
    upcycled = f"{flags} --moe-use-upcycling --moe-upcycling-granularity 2"
    found = run_distributed(first_loss, 2, upcycled, layout, str(tmp_path))
    assert found == pytest.approx([expected] * 2, rel=1e-6)


def traced_loss(flags: str, text: str) -> float:
    """The loss of the second step."""
    config, recipe = training(f"{EXPERTS['moe']} {flags}", text)
    with open_local_run(config, recipe, own_rank(config)) as run:
        run.hooks.on_train_start(run)
        batches = run.data.open("train", 0)
        for _ in range(2):
            run.hooks.on_step_start(run)
            result = train_step(run, batches)
            run.hooks.on_step_end(run, result)
        return float(result.losses["lm loss"])


@pytest.mark.flags("--moe-enable-routing-replay")
@pytest.mark.parametrize("layouts", [("1", "tp2,ep2,etp1"), (f"cp2,ep2,{ALLTOALL}", "1")])
def test_choices_are_replayed_in_another_layout(tmp_path: Path, layouts: tuple[str, str]) -> None:
    """By a router that is limited to groups, and would choose others."""
    limited = "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-enable-routing-replay"
    losses = []
    for text, flags in zip(layouts, ("", limited), strict=True):
        flags = f"{flags} --moe-routing-trace-path {tmp_path}"
        losses += [traced_loss(flags, text)] if text == "1" else run_distributed(traced_loss, 2, flags, text)
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


LOGGED = ("load_balancing_loss", "z_loss", "expert_load", "expert_entropy", "expert_bias", "tokens_dropped")


def biases_and_losses(text: str, directory: str, save: bool) -> tuple[list[torch.Tensor], dict[str, float], float]:
    """Three steps, after loading or, where `save` says so, before saving: biases of the routers, the last step's
    logged losses and its loss."""
    flags = f"{EXPERTS['picky']} --save {directory} --save-interval 99 --moe-per-layer-logging"
    config, recipe = training(flags if save else f"{flags} --load {directory}", text)
    with open_local_run(config, recipe, own_rank(config)) as run:
        if not save:
            load_checkpoint(run)
        batches = run.data.open("train", run.progress.consumed_train_samples)
        for _ in range(3):  # an odd number: a bias that went up and down is not where it began
            run.hooks.on_step_start(run)
            result = train_step(run, batches)
            run.hooks.on_step_end(run, result)
        row = run.metrics.read()[-1]
        logged = {name: row[name] for name in row.values if name.partition(" layer")[0] in LOGGED}
        biases = [router.expert_bias.detach().clone() for router in list_routers(run) if router.expert_bias is not None]
        if save:
            save_checkpoint(run)
        return biases, logged, float(result.losses["lm loss"])


@pytest.mark.flags("--moe-per-layer-logging")
def test_checkpoints_and_logs_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    """A run that was saved with experts dealt out goes on with all on one process, and the other way round."""
    dealt_out = f"dp2,ep2,{ALLTOALL},dist-opt"
    first = run_distributed(biases_and_losses, 2, dealt_out, str(tmp_path), True)
    alone = biases_and_losses("1", str(tmp_path / "one"), True)
    for other in first:
        assert_same(other, alone)
    assert {name for name in alone[1] if "layer" in name} == {f"{name} layer {n}" for name in LOGGED for n in (1, 3)}
    assert {name for name in alone[1] if "layer" not in name} == {"load_balancing_loss", "z_loss", "expert_load"}
    assert all(0 < value < 10 for value in alone[1].values())
    assert all(alone[1][f"expert_entropy layer {n}"] < 1 < alone[1][f"expert_load layer {n}"] for n in (1, 3))
    assert any(bias.abs().max() > 0 for bias in alone[0])
    trained = load_trained_model(tmp_path)
    loaded = [module for module in trained.model.modules() if isinstance(module, TopKRouter)]
    torch.testing.assert_close([router.expert_bias.detach() for router in loaded], alone[0])
    further = biases_and_losses("1", str(tmp_path), False)
    for other in run_distributed(biases_and_losses, 2, dealt_out, str(tmp_path / "one"), False):
        assert_same(other, further)


def assert_same(found: tuple, expected: tuple) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    assert found[2] == pytest.approx(expected[2], rel=1e-5)
