# SPDX-License-Identifier: Apache-2.0
"""Core attention on one rank: every backend, with values of another width than keys, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.core_attention import query_blocks, sdpa
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.core_attention.interface import Visible
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.plain_attention import CASES, Case, draw, plain_attention

LENGTH, HEADS = 16, 6
WIDTHS = {"narrower values": (24, 16), "wider values": (8, 24), "one width": (16, 16)}


def core_attention(query_width: int, query_groups: int = 3, **options: Any) -> DotProductAttention:
    """Its learned sinks, where it has any, drawn."""
    config = TransformerConfig(
        num_layers=1, hidden_size=48, num_attention_heads=HEADS, num_query_groups=query_groups,
        kv_channels=query_width, attention_dropout=0.0, **options,
    )  # fmt: skip
    core = DotProductAttention(config, 1, pg_collection=ProcessGroupCollection.single())
    if core.softmax_offset is not None:
        core.softmax_offset.data = draw([HEADS], 4)
    return core


def check(core: DotProductAttention, case: Case, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Output and all gradients are those of the definition."""
    grad = draw([query.shape[0], case.batch, HEADS * value.shape[-1]], 5)
    expected = plain_attention(case, query, key, value, core.softmax_offset, grad)
    own = {"query": query, "key": key, "value": value}
    for x in own.values():
        x.requires_grad_()
    mask = case.given_mask(key.shape[0])
    mask = None if mask is None else mask[:, :, -query.shape[0] :]
    output = core(*own.values(), mask, case.mask_type, packed_seq_params=case.packed())
    assert output.shape == grad.shape
    output.backward(grad)
    found = {"output": output} | {name: x.grad for name, x in own.items()}
    if core.softmax_offset is not None:
        found["sinks"] = core.softmax_offset.grad
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        torch.testing.assert_close(
            found[name].double(), theirs, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several blocks."""
    monkeypatch.setattr(query_blocks, "_BLOCK", 5)
    monkeypatch.setattr(query_blocks, "_CPU_SCORES", 60)
    monkeypatch.setattr(query_blocks, "_CPU_BLOCK", 5)
    monkeypatch.setattr(sdpa, "_SMALLEST_BLOCK", 5)


@pytest.mark.parametrize("query_groups", [6, 3])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_is_the_definition(case: Case, widths: str, query_groups: int) -> None:
    query_width, value_width = WIDTHS[widths]
    core = core_attention(query_width, query_groups, **case.config)
    query = draw([LENGTH, case.batch, HEADS, query_width], 1)
    key = draw([LENGTH, case.batch, query_groups, query_width], 2)
    value = draw([LENGTH, case.batch, query_groups, value_width], 3)
    check(core, case, query, key, value)


@pytest.mark.parametrize("queries", [7, 1])
@pytest.mark.parametrize("case", [case for case in CASES if not case.bounds], ids=lambda case: case.name)
def test_with_keys_of_earlier_calls(case: Case, queries: int) -> None:
    """As with a cache: the queries are the last of the positions."""
    core = core_attention(24, **case.config)
    query, key = draw([queries, case.batch, HEADS, 24], 1), draw([LENGTH, case.batch, 3, 24], 2)
    check(core, case, query, key, draw([LENGTH, case.batch, 3, 16], 3))


def test_the_flash_kernel_takes_narrower_values() -> None:
    check(
        core_attention(24, attention_backend="flash"), CASES[0], draw([LENGTH, 2, HEADS, 24], 1),
        draw([LENGTH, 2, 3, 24], 2), draw([LENGTH, 2, 3, 16], 3),
    )  # fmt: skip


def test_upstreams_arguments_of_the_core() -> None:
    """A scale and a dropout of its own; a bias on scores is refused."""
    q, k, v = draw([4, 1, HEADS, 8], 1), draw([4, 1, 3, 8], 2), draw([4, 1, 3, 8], 3)
    config = core_attention(8).config
    groups = ProcessGroupCollection.single()
    scaled = DotProductAttention(config, 1, softmax_scale=0.7, pg_collection=groups)
    torch.testing.assert_close(scaled(q, k, v), core_attention(8)(0.7 * 8**0.5 * q, k, v))
    dropping = DotProductAttention(config, 1, attention_dropout=0.5, pg_collection=groups)
    assert not torch.equal(dropping(q, k, v), dropping(q, k, v))
    with pytest.raises(ConfigError, match="attention_bias is not supported"):
        scaled(q, k, v, attention_bias=torch.zeros(1))


def test_blocks_of_what_is_visible() -> None:
    """Every query is in one block, with all the keys that it sees and few others."""
    for window, keys in ((None, 16), (3, 16), (3, 21), (30, 16)):
        visible = Visible(window=window)
        rows = []
        whole = visible.build_mask(16, keys, torch.device("cpu"))
        for queries, seen in visible.blocks(16, keys, 5):
            rows += range(queries.start, queries.stop)
            part = visible.cut(queries, seen).build_mask(
                queries.stop - queries.start, seen.stop - seen.start, whole.device
            )
            outside = whole[queries].clone()
            if part is not None:
                assert torch.equal(part, outside[:, seen])
            outside[:, seen] = True
            assert outside.all()
        assert rows == list(range(16))
