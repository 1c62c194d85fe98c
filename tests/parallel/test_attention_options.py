# SPDX-License-Identifier: Apache-2.0
"""Windows, sinks, bounded scores, output gates and layers with other positions: every layout is the same run.

Attention alone through each exchange of context parallelism, then whole runs, and a checkpoint that moves.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.collectives import all_gather_object
from megatron.core.context_parallel.sharding import shard_sequence
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.training.verify.comparison import compare
from megatron.training.verify.parity import RankTrace, Trace, join, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.checkpoint_contents import assert_bit_equal, saved
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import own_rank, training
from tests.parallel.test_context_parallel import (
    BATCH,
    BOUNDS,
    EXCHANGES,
    LENGTH,
    Layout,
    build_groups,
    model_config,
)
from tests.parallel.test_layout_checkpoints import run_on
from tests.support.sequence_shards import join_sequence

WINDOW: dict[str, Any] = {"window_size": (3, 0)}
SINKS = {"softmax_type": "learnable"}
CAP = {"attn_logit_softcapping": 1.5, "softmax_scale": 0.6}
# (options, key-value heads, what is seen)
CASES = [
    (WINDOW, 4, "causal"),
    (WINDOW | {"attention_backend": "unfused"}, 2, "mask"),
    (WINDOW | CAP, 2, "mask"),
    (WINDOW | SINKS, 2, "documents"),
    (SINKS, 4, "causal"),
    (SINKS | CAP | {"attention_backend": "local"}, 1, "causal"),
    (WINDOW | SINKS | CAP, 2, "causal"),
    (WINDOW | {"window_size": (9, 0), "softmax_type": "off-by-one"}, 4, "causal"),
]


def attend(layout: Layout, options: dict[str, Any], query_groups: int, seen: str) -> dict[str, Tensor]:
    """Output and gradients of the whole sequence, put together from all ranks."""
    groups = build_groups(layout)
    rank, size = groups.cp.rank(), groups.cp.size()
    attention = DotProductAttention(
        model_config(layout, num_query_groups=query_groups, kv_channels=8, **options), 1, pg_collection=groups
    )
    generator = torch.Generator().manual_seed(1)
    offset = attention.softmax_offset
    if offset is not None:
        torch.nn.init.normal_(offset, generator=generator)
    shapes = {"query": 4, "key": query_groups, "value": query_groups, "grad": 4}
    batch = 1 if seen == "documents" else BATCH
    whole = {name: torch.randn(LENGTH, batch, count, 8, generator=generator) for name, count in shapes.items()}
    mask = (torch.rand(BATCH, 1, LENGTH, LENGTH, generator=generator) < 0.3).triu(1)
    mask |= torch.ones(LENGTH, LENGTH).triu(4).bool()
    own = {name: shard_sequence(x, rank, size).requires_grad_() for name, x in whole.items()}
    visible = {
        "causal": {},
        "mask": {"attention_mask": shard_sequence(mask, rank, size, dim=2)},
        "documents": {"packed_seq_params": PackedSeqParams(cu_seqlens_q=torch.tensor(BOUNDS))},
    }
    output = attention(own["query"], own["key"], own["value"], **visible[seen])
    output.backward(own["grad"].flatten(2))
    parts = {"output": output.detach()} | {name: own[name].grad for name in ("query", "key", "value")}
    found = {name: join_sequence(all_gather_object(part, groups.cp)) for name, part in parts.items()}
    if offset is not None:  # as data parallelism does: a sum over the ranks that share a sequence
        found["sinks"] = torch.stack(all_gather_object(offset.grad, groups.cp)).sum(0)
    return found


def all_cases(layout: Layout) -> list[dict[str, Tensor]]:
    return [attend(layout, *case) for case in CASES]


@functools.cache
def all_cases_of_one_process() -> list[dict[str, Tensor]]:
    return all_cases({})


@pytest.mark.parametrize("name", ["all_gather", "a2a", "p2p of 4", "a2a+p2p"])
def test_attention_equals_one_process(name: str) -> None:
    layout = EXCHANGES[name]
    for found in run_distributed(all_cases, layout["cp"], layout):
        for case, ours, theirs in zip(CASES, found, all_cases_of_one_process(), strict=True):
            assert ours.keys() == theirs.keys()
            for tensor, value in theirs.items():
                torch.testing.assert_close(
                    ours[tensor], value, rtol=1e-4, atol=1e-5, msg=lambda m, where=(case, tensor): f"{where}: {m}"
                )


# ---- whole runs

STYLE = """--normalization RMSNorm --swiglu --ffn-hidden-size 48 --group-query-attention --num-query-groups 2
    --disable-bias-linear --untie-embeddings-and-output-weights --window-size 4,0 --window-attn-skip-freq 2
    --softmax-type learnable --attn-logit-softcapping 2 --final-logit-softcapping 3 --attention-output-gate
    --position-embedding-type yarn --yarn-original-max-position-embeddings 8 --rotary-scaling-factor 2
    --rotary-base-local 100 --no-rope-freq 4 --attn-temperature-scale 0.7 --attn-temperature-floor 3 --qk-l2-norm
    --qk-l2-norm-layers rotary --init-method-std 0.2"""
ITERATIONS = 3


def share(text: str) -> RankTrace:
    """One rank's part of the run; the whole run where the layout is one process."""
    config, recipe = training(STYLE, text)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=ITERATIONS)


@functools.cache
def reference() -> Trace:
    return join([share("1")])


@pytest.mark.parametrize("layout", ["tp4", "pp2,vpp2", "cp2", "tp2,sp,cp2,--cp-comm-type=a2a", "dp2,dist-opt"])
def test_layout_is_the_same_run(layout: str) -> None:
    shares = run_distributed(share, parse_layout(layout).world_size, layout, timeout=240.0)
    assert compare(reference(), join(shares)) == []


def test_the_sinks_learn() -> None:
    """They are parameters with gradients of their own."""
    names = [name for name in reference().grads if name.endswith("softmax_offset")]
    assert len(names) == 4
    assert all(reference().grads[name].abs().max() > 0 for name in names)


def test_a_checkpoint_moves_to_another_layout(tmp_path: Path) -> None:
    flags = f"{STYLE} --train-iters 2 --lr-warmup-iters 1 --save-interval 100"
    assert len(run_on("tp2", f"{flags} --save {tmp_path}/first")) == 2
    assert run_on("pp2", f"{flags} --load {tmp_path}/first --save {tmp_path}/second") == []
    assert_bit_equal(saved(tmp_path / "first", 2), saved(tmp_path / "second", 2))
