# SPDX-License-Identifier: Apache-2.0
"""Core attention among ranks: every exchange, with values of another width than keys, against the definition."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.collectives import all_gather_object
from megatron.core.context_parallel.sharding import shard_sequence
from megatron.core.transformer.core_attention.block_kernels import PlainKernel, Rule
from megatron.core.transformer.core_attention.cuda import CUDAAttention
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.core_attention.flash import FlashKernel
from megatron.core.transformer.core_attention.interface import AttentionBackend
from megatron.core.transformer.core_attention.ring import RingAttention
from tests.parallel.harness import run_distributed
from tests.parallel.test_context_parallel import EXCHANGES, Layout, build_groups, model_config
from tests.support import flash_stand_in
from tests.support.plain_attention import CASES, Case, draw, plain_attention
from tests.support.sequence_shards import join_sequence

LENGTH, KEY_WIDTH, VALUE_WIDTH, GROUPS = 16, 24, 16, 3
HEADS = {2: 6, 4: 12}
"""By the ranks that share a sequence, which have to share the heads too: 3 groups neither of them can."""


def whole_tensors(case: Case, heads: int) -> dict[str, Tensor]:
    """Of the whole sequence."""
    shapes = {
        "query": (heads, KEY_WIDTH),
        "key": (GROUPS, KEY_WIDTH),
        "value": (GROUPS, VALUE_WIDTH),
        "grad": (heads * VALUE_WIDTH,),
    }
    return {name: draw([LENGTH, case.batch, *shape], seed) for seed, (name, shape) in enumerate(shapes.items())}


def attend(layout: Layout, case: Case, heads: int, *, as_on_gpu: bool = False) -> dict[str, Tensor]:
    """Output and gradients of the whole sequence, put together from all ranks. as_on_gpu: with its kernels, of which
    the flash kernel is by definition."""
    groups = build_groups(layout)
    rank, size = groups.cp.rank(), groups.cp.size()
    config = model_config(
        layout, num_attention_heads=heads, num_query_groups=GROUPS, kv_channels=KEY_WIDTH, **case.config
    )
    core = DotProductAttention(config, 1, pg_collection=groups)
    if as_on_gpu:
        take_gpu_kernels(core)
    if core.softmax_offset is not None:
        core.softmax_offset.data = draw([heads], 9)
    own = {name: shard_sequence(x, rank, size).requires_grad_() for name, x in whole_tensors(case, heads).items()}
    mask = case.given_mask(LENGTH)
    mask = None if mask is None else shard_sequence(mask, rank, size, dim=2)
    output = core(own["query"], own["key"], own["value"], mask, case.mask_type, packed_seq_params=case.packed())
    output.backward(own["grad"])
    parts: dict[str, Any] = {"output": output.detach()} | {x: own[x].grad for x in ("query", "key", "value")}
    found = {name: join_sequence(all_gather_object(part, groups.cp)) for name, part in parts.items()}
    if core.softmax_offset is not None:  # as data parallelism does: a sum over the ranks that share a sequence
        found["sinks"] = torch.stack(all_gather_object(core.softmax_offset.grad, groups.cp)).sum(0)
    return found


def take_gpu_kernels(core: DotProductAttention) -> None:
    """In place of the CPU's, wherever they are in the exchanges; soft-capping stays with the plain kernel."""
    on_gpu = CUDAAttention(core.options, "auto", torch.device("cpu"), flex_problem="no compiler")
    place: Any = core
    while not isinstance(place, RingAttention):
        name = next(name for name in ("backend", "inner") if hasattr(place, name))
        if isinstance(getattr(place, name), AttentionBackend):
            setattr(place, name, on_gpu)
            return
        place = getattr(place, name)
    if core.options.softcap is None:
        place.kernel = FlashKernel(core.options.scale)


def attend_all(layout: Layout, heads: int) -> list[dict[str, Tensor]]:
    return [attend(layout, case, heads) for case in CASES]


def attend_as_on_gpu(layout: Layout, heads: int) -> tuple[list[dict[str, Tensor]], list[bool]]:
    """Of the cases of the default backend; and whether the plain kernel made a mask."""
    found, masked = [], []
    with pytest.MonkeyPatch.context() as patch:
        flash_stand_in.install(patch)
        plain = PlainKernel._find_hidden

        def note(q: Tensor, k: Tensor, rule: Rule) -> Tensor | None:
            masked[-1] = masked[-1] or rule.mask is not None
            return plain(q, k, rule)

        patch.setattr(PlainKernel, "_find_hidden", staticmethod(note))
        for case in CASES:
            masked.append(False)
            found.append(attend(layout, case, heads, as_on_gpu="attention_backend" not in case.config))
    return found, masked


@functools.cache
def definition(heads: int) -> list[dict[str, Tensor]]:
    expected = []
    for case in CASES:
        whole = whole_tensors(case, heads)
        sinks = draw([heads], 9) if case.config.get("softmax_type") == "learnable" else None
        expected.append(plain_attention(case, whole["query"], whole["key"], whole["value"], sinks, whole["grad"]))
    return expected


def compare(found: list[dict[str, Tensor]], heads: int) -> None:
    for case, ours, theirs in zip(CASES, found, definition(heads), strict=True):
        assert ours.keys() == theirs.keys()
        for tensor, value in theirs.items():
            torch.testing.assert_close(
                ours[tensor].double(), value, rtol=1e-4, atol=1e-5,
                msg=lambda m, where=(case.name, tensor): f"{where}: {m}",
            )  # fmt: skip


@pytest.mark.parametrize("name", ["p2p", "p2p of 4", "all_gather of 4", "a2a", "a2a+p2p"])
def test_attention_as_on_a_gpu_is_the_definition(name: str) -> None:
    """Documents, chunks and windows without masks, in rings too."""
    layout = EXCHANGES[name]
    heads = HEADS[layout["cp"]]
    for found, masked in run_distributed(attend_as_on_gpu, layout["cp"], layout, heads):
        compare(found, heads)
        for case, has_mask in zip(CASES, masked, strict=True):
            is_plain = case.mask or "attn_logit_softcapping" in case.config or "attention_backend" in case.config
            assert is_plain or not has_mask, case.name


@pytest.mark.parametrize("name", EXCHANGES)
def test_attention_among_ranks_is_the_definition(name: str) -> None:
    layout = EXCHANGES[name]
    heads = HEADS[layout["cp"]]
    for found in run_distributed(attend_all, layout["cp"], layout, heads):
        compare(found, heads)
