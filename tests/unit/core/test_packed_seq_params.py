# SPDX-License-Identifier: Apache-2.0
"""Packed documents: their bounds, the attention among them, and batches made from samples that name documents."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.errors import DataError
from megatron.core.packed_seq_params import PackedSeqParams, pack_batch
from megatron.core.sequences.token_layout import TokenLayout
from tests.support.gpt_models import SEQUENCE_LENGTH, build_model, token_batch


def test_bounds_become_documents() -> None:
    params = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 3, 5]))
    documents = params.layout(8)
    assert documents.bounds == (0, 3, 5, 8)  # no empty ones; what is left over is one more
    assert documents.starts.tolist() == [0, 0, 0, 3, 3, 5, 5, 5]
    assert list(documents.segments(2, 7)) == [(0, 2, 3), (3, 3, 5), (5, 5, 7)]
    assert list(documents.segments(3, 5)) == [(3, 3, 5)]


def test_documents_that_are_padded_in_memory_lie_where_the_padded_bounds_say() -> None:
    params = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 5]), cu_seqlens_q_padded=torch.tensor([0, 4, 8]))
    assert params.layout(8).bounds == (0, 4, 8)


@pytest.mark.parametrize("bounds", [[1, 8], [0, 5, 3], [0, 9], []])
def test_bounds_that_describe_no_documents_are_refused(bounds: list[int]) -> None:
    with pytest.raises(DataError, match="must rise from 0 to at most the 8 tokens"):
        PackedSeqParams(cu_seqlens_q=torch.tensor(bounds)).layout(8)
    with pytest.raises(DataError, match="needs qkv_format thd"):
        PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=torch.tensor([0, 8])).layout(8)


def test_samples_with_documents_become_one_sequence() -> None:
    tokens = torch.arange(8).view(2, 4)
    batch = {"tokens": tokens, "cu_seqlens": torch.tensor([[0, 1, 4, 4, 4], [0, 4, 4, 4, 4]], dtype=torch.int32)}
    batch |= {"max_seqlen": torch.tensor([3, 4]), "attention_mask": torch.zeros(2, 1, 4, 4, dtype=torch.bool)}
    packed, params = pack_batch(batch)
    assert packed.keys() == {"tokens"}
    assert packed["tokens"].tolist() == [list(range(8))]
    assert params is not None and params.layout(8) == TokenLayout.of_documents((0, 1, 4, 8))
    assert params.max_seqlen_q == 4
    # Bounds that the device has are read from their copy on the host.
    away = dataclasses.replace(params, cu_seqlens_q=torch.empty(11, dtype=torch.int32, device="meta"))
    assert away.layout(8) == params.layout(8)
    assert pack_batch({"tokens": tokens}) == ({"tokens": tokens}, None)


@pytest.mark.parametrize("backend", ["auto", "local", "unfused"])
@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_documents_are_trained_as_if_alone(positions: str, backend: str) -> None:
    """Each document's losses in the packed sequence are those of the document by itself."""
    flags = f"--position-embedding-type {positions} --attention-backend {backend} --num-query-groups 2"
    model = build_model(f"{flags} --group-query-attention")
    ids, _, labels = token_batch(batch=1)
    bounds = [0, 5, 6, SEQUENCE_LENGTH]
    places = torch.cat([torch.arange(end - start) for start, end in zip(bounds, bounds[1:], strict=False)])[None]
    params = PackedSeqParams(cu_seqlens_q=torch.tensor(bounds))
    found = model(ids, places, labels=labels, packed_seq_params=params)
    for start, end in zip(bounds, bounds[1:], strict=False):
        own = slice(start, end)
        alone = model(ids[:, own], places[:, own], labels=labels[:, own])
        torch.testing.assert_close(found[:, own], alone, rtol=1e-4, atol=1e-5)
