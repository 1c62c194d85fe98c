# SPDX-License-Identifier: Apache-2.0
"""Every layout is the same run: one table of layouts, each compared with one process over five steps.

Losses agree to 1e-5 (relative), the first iteration's gradients and every updated weight to 1e-4 of the tensor's
largest element after gathering, and processes that hold the same elements agree bit for bit. Everything is the real
thing: flags, setup, MockGPTDataset, the step; every rank has at least two microbatches, so that gradients accumulate.
The usual table has layouts of up to four processes, most of them with one style of model.

    MEGATRON_ALL_LAYOUTS=1 bash tests/run.sh tests/parallel/test_layouts.py      all, of 8 processes, over ten steps
"""

from __future__ import annotations

import functools
import os

import pytest

from megatron.training.verify.comparison import compare, find_largest_differences
from megatron.training.verify.parity import RankTrace, Trace, join, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import OPTIONS, STYLES, own_rank, training

ITERATIONS = 10 if os.environ.get("MEGATRON_ALL_LAYOUTS") else 5
MICRO_BATCH = "--micro-batch-size 3"  # four microbatches for one replica
TWO = "--micro-batch-size=2"  # so that three replicas share the batch
ONE = "--micro-batch-size=1"  # so that four do
# With tied embeddings, learned positions and biases; with untied ones, RoPE and fewer key-value heads than four ranks;
# with latent attention, and with experts beside it; with mixers that have a state.
SMALL = {
    "gpt2": [
        "tp2", "tp2,sp,--loss-chunk-size=3", "tp4", "pp2", "pp2,vpp2", "pp2,--pipeline-schedule=zb-v", "tp2,pp2",
        "cp2,--cp-comm-type=a2a", "cp4", "dp2", f"dp3,dist-opt,overlap-all,{TWO}",
        "dp2,fsdp2,--loss-chunk-size=5", "pp2,dp2,fsdp2",
    ],
    "llama": [
        "tp2,sp", "tp4", "tp2,sp,--tp-comm-overlap,--deterministic-mode", "pp2,--decoder-first-pipeline-num-layers=1",
        "pp2,--pipeline-schedule=zb-h1", "pp4", "cp2", "cp2,--cp-comm-type=all_gather", "tp2,sp,cp2",
        "pp2,cp2,--use-tp-pp-dp-mapping",
        f"dp3,{TWO}", "dp2,dist-opt", f"dp4,dist-opt,overlap-all,--ddp-num-buckets=3,{ONE}",
        f"dp4,--use-megatron-fsdp,--num-distributed-optimizer-instances=2,{ONE}", "tp2,dp2",
    ],
    "latent": [
        "tp2", "tp2,sp", "cp2", "cp2,--cp-comm-type=all_gather", "cp2,--cp-comm-type=a2a",
        "cp4,--cp-comm-type=a2a+p2p,--hierarchical-context-parallel-sizes 2 2", "pp2,vpp2",
        "pp2,--pipeline-schedule=zb-v", "dp2,dist-opt", "dp2,fsdp2",
        "tp2,sp,pp2,--pipeline-schedule=zb-h1,--recompute-granularity selective,--recompute-modules mla_up_proj",
    ],
    "states": [
        "tp2,sp", "cp2", "tp2,cp2", "pp2,--pipeline-schedule=zb-v", "dp2,dist-opt", "dp2,fsdp2",
        "pp2,--recompute-granularity full,--recompute-method block,--recompute-num-layers 1",
    ],
    "beside": ["tp2,sp", "cp2", "pp2,dp2,dist-opt"],
    "shapes": ["tp2,sp", "tp2,pp2,dp2,dist-opt"],
    "phi": ["tp2,sp,pp2,--recompute-granularity selective,--recompute-modules layernorm", "dp2,dist-opt"],
    "kimi": ["tp2,sp,pp2", "dp2,dist-opt"],
    "sparse": [
        "tp2", "cp2,--cp-comm-type=all_gather", "tp2,sp,cp2,--cp-comm-type=all_gather", "pp2", "dp2,dist-opt",
        "pp2,--recompute-granularity full,--recompute-method uniform,--recompute-num-layers 1",
    ],
    "chosen": ["tp2,sp,pp2", "dp2,fsdp2", "cp2,--cp-comm-type=all_gather"],
    "compressed": ["tp2,sp", "cp2", "tp2,pp2"],
    "streams": [
        "tp2", "cp2", "pp2", "pp2,--pipeline-schedule=zb-v", "dp2,dist-opt",
        "tp2,sp,pp2,--recompute-granularity full,--recompute-method uniform,--recompute-num-layers 1",
    ],
    "mean": ["tp2,sp,pp2", "cp2", "dp2,fsdp2"],
    "deepseek": ["tp2,sp,ep2,etp1,--moe-token-dispatcher-type=alltoall", "tp2,pp2,ep2,etp1"],
}  # fmt: skip
LARGE = [
    "tp4,sp", "pp4,--pipeline-schedule=zb-h1", "pp2,--pipeline-schedule=gpipe",
    "cp4,--cp-comm-type=a2a+p2p,--hierarchical-context-parallel-sizes 2 2",
    f"dp3,dist-opt,overlap,{TWO}",
    f"dp4,dist-opt,--num-distributed-optimizer-instances=2,{ONE}",
    "tp2,sp,pp2", "tp2,sp,dp2,dist-opt", f"tp2,dp4,{ONE}", "tp4,sp,dp2",
    "tp4,sp,--tp-comm-overlap,--tp-comm-overlap-rs-dgrad",
    "tp2,sp,pp2,--pipeline-schedule=zb-h1,--tp-comm-overlap",
    f"dp3,fsdp2,{TWO}", f"dp4,fsdp2,{ONE}", "tp2,sp,dp2,fsdp2", "cp2,dp2,fsdp2",
    "dp2,fsdp2,--data-parallel-sharding-strategy=optim_grads",
    "tp2,sp,pp2,dp2,fsdp2", f"pp2,vpp2,dp2,fsdp2,{ONE}",
    f"pp2,vpp2,dp2,fsdp2,--data-parallel-sharding-strategy=optim_grads,{ONE}",
    f"pp2,dp4,fsdp2,--num-distributed-optimizer-instances=2,{ONE}",
    "pp4,dp2,fsdp2,--megatron-fsdp-enable-fine-grained-param-gather",
    "tp2,pp2,dp2", "tp2,pp2,dp2,--use-tp-pp-dp-mapping", "cp2,pp2,dp2,--use-tp-pp-dp-mapping",
    "tp2,sp,cp2,pp2", f"tp2,sp,pp2,vpp2,dp2,dist-opt,{ONE}",
    "tp2,sp,pp2,--pipeline-schedule=zb-v,dp2,dist-opt,overlap-all",
    f"pp2,vpp2,dp2,dist-opt,overlap-all,--overlap-param-gather-with-optimizer-step,{ONE}",
]  # fmt: skip
ROWS = [(style, layout) for style, layouts in SMALL.items() for layout in layouts]
if os.environ.get("MEGATRON_ALL_LAYOUTS"):
    every = dict.fromkeys([*sum((SMALL[style] for style in STYLES), []), *LARGE])
    ROWS = [(style, layout) for layout in every for style in [*STYLES, "latent"]]
    ROWS += [("deepseek", layout) for layout in SMALL["deepseek"]]


def share(style: str, text: str) -> RankTrace:
    """One rank's part of the run; the whole run where the layout is one process."""
    config, recipe = training(f"{(STYLES | OPTIONS)[style]} {MICRO_BATCH}", text)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=ITERATIONS)


@functools.cache
def reference(style: str) -> Trace:
    return join([share(style, "1")])


@pytest.mark.flags("--tensor-model-parallel-size", "--sequence-parallel", "--use-torch-fsdp2")
@pytest.mark.parametrize(("style", "layout"), ROWS)
def test_layout_is_the_same_run(style: str, layout: str) -> None:
    shares = run_distributed(share, parse_layout(layout).world_size, style, layout, timeout=240.0)
    trace = join(shares)
    sizes = find_largest_differences(reference(style), trace)
    print(f"{style} {layout}:", {what: f"{size:.1e}" for what, size in sizes.items()})
    assert compare(reference(style), trace) == []


@pytest.mark.parametrize(("style", "layout"), [("sandwich", "tp2,sp,pp2"), ("parallel", "pp2")])
def test_model_options_do_not_depend_on_the_layout(style: str, layout: str) -> None:
    """The second has bfloat16 layers and float32 between the stages, which changes nothing either."""
    test_layout_is_the_same_run(style, layout)


def test_the_reference_learns() -> None:
    losses = [losses["lm loss"] for losses in reference("gpt2").losses]
    assert losses[-1] < losses[0] - 0.03, losses
