# SPDX-License-Identifier: Apache-2.0
"""Attention by its definition in float64, for comparison: no blocks, no kernels, no tricks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.enums import AttnMaskType
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True)
class Case:
    """One kind of attention: what a config says of it, and what a query sees."""

    name: str
    config: dict[str, Any]
    mask: bool = False
    """A mask that is not causal, another one for every sample."""
    mask_type: AttnMaskType = AttnMaskType.causal
    bounds: Sequence[int] | None = None
    """Of documents."""

    @property
    def batch(self) -> int:
        """Samples: a packed sequence is one."""
        return 1 if self.bounds else 2

    def given_mask(self, length: int) -> Tensor | None:
        """bool [b, 1, s, s], in which every token sees itself."""
        generator = torch.Generator().manual_seed(7)
        hidden = torch.rand(self.batch, 1, length, length, generator=generator) < 0.3
        return hidden & ~torch.eye(length, dtype=torch.bool) if self.mask else None

    def packed(self) -> PackedSeqParams | None:
        """The documents."""
        return None if self.bounds is None else PackedSeqParams(cu_seqlens_q=torch.tensor(self.bounds))

    def is_seen(self, queries: int, keys: int) -> Tensor:
        """bool [b, s, t], pair by pair from the words of the documentation; the queries are the last of the keys."""
        window, chunk = self.config.get("window_size"), self.config.get("attention_chunk_size")
        mask, is_full = self.given_mask(keys), window is None and chunk is None
        replaces_causal = mask is not None and is_full and self.mask_type is AttnMaskType.causal
        is_causal = not replaces_causal and self.mask_type is not AttnMaskType.no_mask
        seen = torch.zeros(self.batch, queries, keys, dtype=torch.bool)
        for row in range(queries):
            at = row + keys - queries
            for key in range(keys):
                document = [max(bound for bound in self.bounds or (0,) if bound <= place) for place in (at, key)]
                is_near = window is None or at - key <= window[0]
                if chunk is not None:
                    is_near = (at - document[0]) // chunk == (key - document[1]) // chunk
                seen[:, row, key] = (key <= at or not is_causal) and is_near and document[0] == document[1]
        return seen if mask is None else seen & ~mask[:, 0, keys - queries :]


WINDOW: dict[str, Any] = {"window_size": (5, 0)}
SINKS: dict[str, Any] = {"softmax_type": "learnable"}
CHUNKS: dict[str, Any] = {"attention_chunk_size": 5}
CAP: dict[str, Any] = {"attn_logit_softcapping": 1.5, "softmax_scale": 0.4}
BOUNDS = (0, 3, 4, 11, 12, 16)
"""Documents within a piece of a rank, over pieces of several ranks, and of one token."""
CASES = [
    Case("causal", {}),
    Case("causal, local", {"attention_backend": "local"}),
    Case("everything", {}, mask_type=AttnMaskType.no_mask),
    Case("everything, local", {"attention_backend": "local"}, mask_type=AttnMaskType.no_mask),
    Case("everything, with sinks", SINKS, mask_type=AttnMaskType.no_mask),
    Case("mask", {}, mask=True),
    Case("mask, by torch's math kernel", {"attention_backend": "unfused"}, mask=True),
    Case("mask that hides more than the causal one", {}, mask=True, mask_type=AttnMaskType.padding_causal),
    Case("window", WINDOW),
    Case("window and mask", WINDOW | CAP, mask=True),
    Case("documents", {}, bounds=BOUNDS),
    Case("documents, local", {"attention_backend": "local"}, bounds=BOUNDS),
    Case("window in documents, with sinks", WINDOW | SINKS, bounds=BOUNDS),
    Case("chunks", CHUNKS),
    Case("chunks, local, bounded scores", CHUNKS | CAP | {"attention_backend": "local"}),
    Case("chunks, by the flash kernel", CHUNKS | {"attention_backend": "flash"}),
    Case("chunks and mask", CHUNKS, mask=True),
    Case("chunks in documents, with sinks", CHUNKS | SINKS, bounds=BOUNDS),
    Case("sinks of zero", {"softmax_type": "off-by-one"}),
    Case("bounded scores", CAP),
    Case("bounded scores, local", CAP | SINKS | {"attention_backend": "local"}),
    Case("all at once", WINDOW | SINKS | CAP),
    Case("all at once with a mask", WINDOW | SINKS | CAP, mask=True),
]


def plain_attention(
    case: Case, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, grad: Tensor
) -> dict[str, Tensor]:
    """Output and gradients in float64: query [s, b, n, d], key [t, b, g, d], value [t, b, g, dv], grad [s, b, n * dv].

    sinks: [n], learned; zeros where the case says so.
    """
    given = {"query": query, "key": key, "value": value} | ({} if sinks is None else {"sinks": sinks})
    leaves = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    repeats = query.shape[2] // key.shape[2]
    k, v = (leaves[name].repeat_interleave(repeats, dim=2) for name in ("key", "value"))
    scores = torch.einsum("sbnd,tbnd->bnst", leaves["query"], k)
    scores = scores * case.config.get("softmax_scale", query.shape[-1] ** -0.5)
    bound = case.config.get("attn_logit_softcapping")
    if bound is not None:
        scores = bound * (scores / bound).tanh()
    weights = scores.exp() * case.is_seen(query.shape[0], key.shape[0]).unsqueeze(1)
    total = weights.sum(-1)
    if "softmax_type" in case.config:
        total = total + leaves.get("sinks", torch.zeros(query.shape[2]).double()).exp().view(-1, 1)
    output = torch.einsum("bnst,tbnd->sbnd", weights / total.unsqueeze(-1), v).flatten(2)
    output.backward(grad.double())
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"output": output.detach()} | grads


def draw(shape: Sequence[int], seed: int) -> Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
