# SPDX-License-Identifier: Apache-2.0
"""Layouts on a GPU that does nothing: what a step asks of the device, of the host's time and of the other ranks.

Numbers are proven on the CPU; here are the kernels, waits, memory and collectives that only a GPU has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.fake_device.device import build

# All layouts are trained by the first test.
pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).resolve().parents[2]
MICROBATCHES = 4
DENSE = f"""
    --num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --num-query-groups 4
    --group-query-attention --seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000 --lr 1e-4 --mock-data
    --tokenizer-type NullTokenizer --bf16 --swiglu --normalization RMSNorm --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0 --position-embedding-type rope --untie-embeddings-and-output-weights
    --micro-batch-size 2 --global-batch-size {2 * MICROBATCHES}
"""
EXPERTS_OF_DENSE = """--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 704 --moe-grouped-gemm
    --moe-permute-fusion --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"""
EXPERTS = f"{DENSE} {EXPERTS_OF_DENSE}"
ALLTOALL = "--moe-token-dispatcher-type=alltoall"
SIX_LAYERS = "--num-layers 6"

REQUESTS = {
    "1": ("1", DENSE), "six layers": ("1", f"{DENSE} {SIX_LAYERS}"), "tp2,sp": ("tp2,sp", DENSE),
    "vpp2": ("pp2,vpp2", DENSE), "zb-v": ("pp2,--pipeline-schedule=zb-v", DENSE),
    "dp2": ("dp2,dist-opt,overlap-all", DENSE), "fsdp2": ("dp2,--use-torch-fsdp2", DENSE), "cp2": ("cp2", DENSE),
    "moe": ("1", EXPERTS), "moe, six layers": ("1", f"{EXPERTS} {SIX_LAYERS}"), "ep2": (f"dp2,ep2,{ALLTOALL}", EXPERTS),
    "tp2,pp2,ep2": (f"tp2,sp,pp2,dp2,ep2,etp1,{ALLTOALL}", EXPERTS), "pp2": ("pp2", DENSE),
    "tp overlap": ("tp2,sp,--tp-comm-overlap", DENSE), "linked": ("tp2,sp", DENSE, "linked"),
}  # fmt: skip
ALL_HEADS = DENSE.replace("--num-query-groups 4", "").replace("--group-query-attention", "")
LATENT = "--multi-latent-attention --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 \
    --v-head-dim 64"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
LEVERS = {
    "all recomputed": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "some recomputed": f"{SELECTIVE} layernorm mlp_act",
    "loss in chunks": "--loss-chunk-size 128",
    "fp8": "--fp8-format hybrid --fp8-recipe tensorwise",
}
REQUESTS |= {name: ("1", f"{DENSE} {flags}") for name, flags in LEVERS.items()}
REQUESTS |= {
    "activations of experts recomputed": ("1", f"{EXPERTS} {SELECTIVE} moe_act"),
    "hybrid": ("1", f"{DENSE.replace('--num-layers 4', '--hybrid-layer-pattern M-*-')}"),
    "latent heads recomputed": ("1", f"{ALL_HEADS} {LATENT} {SELECTIVE} mla_up_proj"),
}
if os.environ.get("MEGATRON_ALL_LAYOUTS"):
    REQUESTS |= {
        "tp2": ("tp2", DENSE),
        "tp2,pp2,dp2": ("tp2,sp,pp2,dp2,dist-opt,overlap-all", DENSE),
        "tp overlap, gradients": ("tp2,sp,--tp-comm-overlap,--tp-comm-overlap-rs-dgrad", DENSE),
        "tp2,vpp2": ("tp2,sp,pp2,vpp2", DENSE), "zb-h1": ("pp2,--pipeline-schedule=zb-h1", DENSE),
        "cp2,pp2": ("cp2,pp2", DENSE), "cp all-to-all": ("cp2,--cp-comm-type=a2a", DENSE),
        "latent attention": ("1", f"{ALL_HEADS} {LATENT}"),
        "cp gathered": ("cp2,--cp-comm-type=all_gather", DENSE), "pp2,ep2": (f"pp2,dp2,ep2,{ALLTOALL}", EXPERTS),
        "ep2 gathered": ("dp2,ep2", EXPERTS), "experts, fsdp2": ("dp2,--use-torch-fsdp2", EXPERTS),
    }  # fmt: skip

PARTS = "attn_norm qkv_linear core_attn attn_proj mlp_norm mlp_fc1 mlp_act"
OFFLOADED = {
    "activations on the host": (
        "1",
        f"""{DENSE} --fine-grained-activation-offloading --offload-modules {PARTS} --recompute-granularity selective
        --recompute-modules layernorm""",
    ),
    "inputs of layers on the host": (
        "1", f"{DENSE} --fine-grained-activation-offloading --offload-modules attn_norm",
    ),
    # Its loss scale depends on values; gradients are summed as the weights are.
    "float16": ("1", DENSE.replace("--bf16", "--fp16")),
    "state on the host": ("1", f"{DENSE} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"),
}  # fmt: skip
"""They wait, or hold, as no other does."""

TWO_LAYERS = f"{DENSE} --num-layers 2 --global-batch-size 4"
FEW_BITS = {
    "delayed": ("1", f"{TWO_LAYERS} --fp8-format hybrid --fp8-recipe delayed"),
    "gathered in 8 bits": ("dp2,dist-opt", f"{TWO_LAYERS} --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather"),
    "blocks": ("1", f"{TWO_LAYERS} --fp8-format hybrid --fp8-recipe blockwise"),
    "rows": ("1", f"{TWO_LAYERS} --fp8-format hybrid --fp8-recipe rowwise"),
    "mxfp8": ("1", f"{TWO_LAYERS} --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-emulation"),
    "whole matrices, few logits": (
        "1", f"{TWO_LAYERS} --fp8-format hybrid --fp8-recipe tensorwise --loss-chunk-size 128",
    ),
    "nvfp4": ("1", f"{TWO_LAYERS} --fp4-format e2m1 --fp8-emulation"),
}  # fmt: skip
LONG = "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1"
HELD = {
    "attention written out": ("1", f"{TWO_LAYERS} --attention-backend local"),
    "heads normed and gated": ("1", f"{TWO_LAYERS} --qk-layernorm --attention-output-gate"),
    "a gated shared expert": (
        "1", f"{TWO_LAYERS} {EXPERTS_OF_DENSE} --moe-shared-expert-intermediate-size 704 --moe-shared-expert-gate",
    ),
    "states handed over": (
        "cp2", f"{DENSE.replace('--num-layers 4', '--hybrid-layer-pattern M-')} {LONG} --global-batch-size 2",
    ),
    "streams in zb-h1": ("pp2", f"{DENSE} --enable-hyper-connections --pipeline-schedule zb-h1", "stages"),
    "streams mixed again": ("1", f"{DENSE} --enable-hyper-connections --mhc-recompute-layer-num 2"),
}  # fmt: skip
"""What only the planner's formula is about."""

GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"
RECORDED = {
    "graphs": ("1", f"{DENSE} {GRAPHS}"), "graphs, six layers": ("1", f"{DENSE} {SIX_LAYERS} {GRAPHS}"),
    "graphs, pp2": ("pp2", f"{DENSE} {GRAPHS}"), "graphs, tp2,sp": ("tp2,sp", f"{DENSE} {GRAPHS}"),
    "graphs of attention": ("1", f"{DENSE} {GRAPHS} --cuda-graph-modules attn"),
    "graphs, all recomputed": ("1", f"{DENSE} {GRAPHS} {LEVERS['all recomputed']}"),
}  # fmt: skip
if os.environ.get("MEGATRON_ALL_LAYOUTS"):
    RECORDED |= {
        "graphs, vpp2": ("pp2,vpp2", f"{DENSE} {GRAPHS}"),
        "graphs, some recomputed": ("1", f"{DENSE} {GRAPHS} {LEVERS['some recomputed']}"),
        "graphs of MLPs": ("1", f"{DENSE} {GRAPHS} --cuda-graph-modules mlp"),
        "graphs of routers": ("1", f"{EXPERTS} {GRAPHS} --cuda-graph-modules attn moe_router"),
    }

EXCHANGE = "tolist in megatron/core/transformer/moe/token_dispatcher.py:dispatch"
GATHERED = "item in megatron/core/transformer/moe/token_dispatcher.py:_permute_to_experts"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every layout did, all in one process."""
    library = build(tmp_path_factory.mktemp("fake_device"))
    if library is None:
        pytest.skip("no C++ compiler")
    requests = {
        name: (layout, " ".join(flags.split()), *which)
        for name, (layout, flags, *which) in (REQUESTS | OFFLOADED | FEW_BITS | HELD | RECORDED).items()
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_device", library], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=json.dumps(requests), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def of_layout(seen: dict[str, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    assert isinstance(seen[name], list), f"{name}: {seen[name]}"
    return seen[name]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_step_without_a_log_line_waits_for_sizes_of_experts_only(seen: Any, name: str) -> None:
    for rank in of_layout(seen, name):
        exchanges = ("ep" in name or "gathered" in name) and "cp" not in name
        assert set(rank["waits"]) <= ({EXCHANGE, GATHERED} if exchanges else set())


@pytest.mark.parametrize("name", REQUESTS)
def test_weights_and_optimizer_take_18_bytes_each_and_setting_up_no_more(seen: Any, name: str) -> None:
    for rank in of_layout(seen, name):
        # With FSDP the main parameters are the only ones, and divided as everything else.
        each = 16 / 2 if "fsdp" in name else 6 + 12 / (2 if name in ("dp2", "tp2,pp2,dp2") else 1)
        expected = rank["parameters"] * each
        assert rank["live_bytes"] == pytest.approx(expected, rel=0.03)
        assert rank["setup_peak_bytes"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", [*REQUESTS, *OFFLOADED, *FEW_BITS, *HELD, *RECORDED])
def test_a_step_holds_what_the_formula_says(seen: Any, name: str) -> None:
    within = 0.01 if name == "fp8" or name in FEW_BITS else 0.03
    for rank in of_layout(seen, name):
        assert rank["step_peak_bytes"] == pytest.approx(rank["planned_peak_bytes"], rel=within), rank["peak_holders"]


@pytest.mark.parametrize("name", ["graphs", "graphs, pp2", "graphs of attention"])
def test_memory_that_graphs_keep_is_in_the_formula(seen: Any, name: str) -> None:
    """Without weights and state, beside which it is little."""
    for rank in of_layout(seen, name):
        found, planned = (rank[of] - rank["live_bytes"] for of in ("step_peak_bytes", "planned_peak_bytes"))
        assert planned == pytest.approx(found, rel=0.04), rank["peak_holders"]


@pytest.mark.parametrize("name", REQUESTS)
def test_ranks_meet_in_the_same_order(seen: Any, name: str) -> None:
    """NCCL waits for ever where members of a group begin its collectives in different orders."""
    by_group: dict[tuple[int, ...], list[list[Any]]] = defaultdict(list)
    sent, received = defaultdict(list), defaultdict(list)
    for number, rank in enumerate(of_layout(seen, name)):
        own: dict[tuple[int, ...], list[Any]] = defaultdict(list)
        for operation, ranks, *what in rank["collectives"]:
            if operation == "send":
                sent[tuple(ranks)].append(what)
            elif operation == "recv_":
                received[tuple(ranks)].append(what)
            else:
                assert number in ranks
                own[tuple(ranks)].append([operation, *what])
        for ranks, sequence in own.items():
            by_group[ranks].append(sequence)
    for ranks, sequences in by_group.items():
        assert len(sequences) == len(ranks), f"{ranks}: {len(sequences)} of them take part"
        assert all(sequence == sequences[0] for sequence in sequences), ranks
    assert sent == received


@pytest.mark.parametrize("name", ["dp2", "tp2,sp", "fsdp2"])
def test_no_collectives_are_begun_in_a_row(seen: Any, name: str) -> None:
    """With a single queue of the GPU each of them would hold up the kernels behind it."""
    for rank in of_layout(seen, name):
        assert len(rank["back_to_back"]) <= 1, rank["back_to_back"]


@pytest.mark.parametrize("name", sorted({"tp overlap", "tp overlap, gradients", "cp2", "ep2", "pp2"} & set(REQUESTS)))
def test_two_are_under_way_at_most(seen: Any, name: str) -> None:
    """A chunk and the one behind it, what goes and what comes, tokens and their weights."""
    for rank in of_layout(seen, name):
        assert len(rank["back_to_back"]) <= 2, rank["back_to_back"]


@pytest.mark.flags("--tp-comm-overlap")
def test_chunks_are_not_copied(seen: Any) -> None:
    """Products read chunks where they lie, and write them where they belong."""
    whole, chunked = (of_layout(seen, name)[0]["kernels"] for name in ("tp2,sp", "tp overlap"))
    assert chunked["copy_"] == whole["copy_"]
    # Of the two row layers of each of four layers, once: dY in the order of X.
    assert chunked["clone"] - whole["clone"] == 2 * 4 * MICROBATCHES


def test_linked_gpus_communicate_inside_of_products(seen: Any) -> None:
    """Also without a flag: of four layers, forward and for input gradients, nothing else is gathered or scattered."""
    for plain, linked in zip(of_layout(seen, "tp2,sp"), of_layout(seen, "linked"), strict=True):
        kernels, layers = linked["kernels"], 2 * 4 * MICROBATCHES
        assert kernels["fused_all_gather_matmul"] >= 2 * layers and kernels["fused_matmul_reduce_scatter"] >= layers
        assert not {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"} & set(plain["kernels"])
        assert len(linked["collectives"]) <= len(plain["collectives"]) - 3 * layers


LAYER_KERNELS = 25


@pytest.mark.parametrize(
    ("four", "six", "budget"), [("1", "six layers", LAYER_KERNELS), ("moe", "moe, six layers", 74)]
)
def test_kernels_of_a_layer(seen: Any, four: str, six: str, budget: int) -> None:
    """Forward and backward of one microbatch: each kernel costs the host about ten microseconds."""
    fewer, more = (sum(of_layout(seen, name)[0]["kernels"].values()) for name in (four, six))
    assert (more - fewer) / 2 / MICROBATCHES <= budget


def test_kernels_of_a_layer_in_fp8(seen: Any) -> None:
    """Beside four products three ways: a cast of each input and output gradient, twice of what attention returns; of
    each weight a cast in a step, and a transpose in each microbatch."""
    plain, rounded = (of_layout(seen, name)[0]["kernels"] for name in ("1", "fp8"))
    passes = 4 * MICROBATCHES  # of a layer
    assert rounded["cast_matrix"] == (4 + 4 + 1) * passes + 4 * 4
    assert rounded["turn_matrix"] == 4 * passes
    # The output layer's stays in 16 bits.
    assert rounded["addmm"] == MICROBATCHES and rounded["add_weight_grad"] == 4 * passes
    added = (sum(rounded.values()) - sum(plain.values())) / passes
    assert added + LAYER_KERNELS <= 40


def test_scales_of_all_layers_are_found_at_once(seen: Any) -> None:
    """One all-reduce of the step's maxima, and as many kernels for any number of layers."""
    for rank in of_layout(seen, "gathered in 8 bits"):
        assert sum(name == "allreduce_" and elements == 2 * 4 * 3 for name, _, elements, _ in rank["collectives"]) == 1
        assert rank["kernels"]["_foreach_copy_"] == 3


def test_heads_of_latent_attention_are_joined_by_one_kernel(seen: Any) -> None:
    """In each of four layers, and again in backward, where they are computed again."""
    (rank,) = of_layout(seen, "latent heads recomputed")
    kernels = rank["kernels"]
    assert (kernels["join_heads"], kernels["separate_heads"]) == (2 * 4 * MICROBATCHES, 4 * MICROBATCHES)
    assert "addcmul_" not in kernels, "rotated in elementary operations"


@pytest.mark.flags("--loss-chunk-size")
def test_logits_of_chunks_are_not_there_at_once(seen: Any) -> None:
    (rank,), (plain,) = of_layout(seen, "loss in chunks"), of_layout(seen, "1")
    logits = 2 * 1024 * 32000 * 2
    saved = plain["step_peak_bytes"] - rank["step_peak_bytes"]
    assert saved == pytest.approx(logits * 7 / 8, rel=0.03)
    # Of eight chunks, forward and again in backward; one without.
    assert (rank["kernels"]["loss_forward"], rank["kernels"]["loss_backward"]) == (16 * MICROBATCHES, 8 * MICROBATCHES)


@pytest.mark.flags("--fine-grained-activation-offloading", "--offload-modules")
def test_copies_of_activations_are_hidden_behind_kernels(seen: Any) -> None:
    """Nobody waits on the host, each value travels once each way, but for the last layer's, with which backward begins,
    and what backward waits for has begun kernels before."""
    (rank,), (plain,) = of_layout(seen, "activations on the host"), of_layout(seen, "1")
    copies = rank["copies"]
    assert rank["waits"] == {} and rank["races"] == []
    assert copies["to the host"] * 3 == copies["to the device"] * 4 > 0
    assert copies["waited for"] == copies["hidden"]
    # Of 2048 tokens in each of three layers, 2 bytes an element: norms, attention and both sides of the MLP.
    tokens, layers = 2048, 3
    moved = 2 * layers * tokens * (2 * 1024 + 1536 + 1024 + 3 * 2816)
    saved = plain["step_peak_bytes"] - rank["step_peak_bytes"]
    # The outputs of norms are not there, either; while backward is in a layer, that and what is fetched ahead are.
    assert 0.8 * moved < saved < 1.3 * moved


def test_the_computation_waits_for_the_bus_alone(seen: Any) -> None:
    """What the bus carries in the time of a layer costs nothing; of more, all but the last layer's is on the bus."""
    (plain,), (few,), (many,) = (
        of_layout(seen, name) for name in ("1", "inputs of layers on the host", "activations on the host")
    )
    assert few["races"] == [] and few["seconds"] == pytest.approx(plain["seconds"], rel=0.02)
    assert few["step_peak_bytes"] < plain["step_peak_bytes"]
    moved = 2 * 4 * 2048 * (2 * 1024 + 1536 + 1024 + 3 * 2816)
    assert many["seconds"] < plain["seconds"] + 2 * MICROBATCHES * moved / 50e9


@pytest.mark.flags("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d")
def test_state_on_the_host_leaves_weights_and_gradients_on_the_device(seen: Any) -> None:
    """6 of 18 bytes; the host waits for gradients, chunk after chunk, and for nothing else."""
    (rank,) = of_layout(seen, "state on the host")
    assert rank["live_bytes"] == pytest.approx(6 * rank["parameters"], rel=0.03)
    assert rank["setup_peak_bytes"] <= 8.1 * rank["parameters"]
    chunks = rank["copies"]["to the device"]
    scalars = "copy to the host in megatron/core/optimizer/megatron_optimizer.py:_update"
    assert rank["waits"] == {scalars: 1, "Event.synchronize": chunks}
    assert rank["copies"]["to the host"] == chunks + 1


@pytest.mark.flags("--cuda-graph-impl")
def test_recorded_layers_launch_their_graphs_and_nothing_else(seen: Any) -> None:
    """A layer costs two launches in each microbatch, whatever is in it, and the host waits for nothing."""
    plain, four, six = (of_layout(seen, name)[0] for name in ("1", "graphs", "graphs, six layers"))
    assert four["waits"] == six["waits"] == {}
    assert four["kernels"] == six["kernels"]
    # Whole layers are computed again by the graphs of backward, without a wait or a generator's state.
    (recomputed,) = of_layout(seen, "graphs, all recomputed")
    assert recomputed["waits"] == {} and recomputed["replays"][1] > four["replays"][1]
    for layers, rank in ((4, four), (6, six), (4, recomputed)):
        assert rank["replays"][0] == 2 * layers * MICROBATCHES
    # Each kernel that the host does not launch any more is in a graph; what enters and leaves the layers is copied.
    copies = 3 * MICROBATCHES
    missing = sum(plain["kernels"].values()) - sum(four["kernels"].values())
    assert missing <= four["replays"][1] <= missing + copies
    for rank in of_layout(seen, "graphs, pp2") + of_layout(seen, "graphs, tp2,sp"):
        assert rank["waits"] == {}
        assert rank["replays"][0] in (2 * 2 * MICROBATCHES, 2 * 4 * MICROBATCHES)
    # Collectives of tensor parallelism are launched by the graphs; embedding, head and gradients have theirs beside.
    before, now = (len(of_layout(seen, name)[0]["collectives"]) for name in ("tp2,sp", "graphs, tp2,sp"))
    assert now < before / 2
