# SPDX-License-Identifier: Apache-2.0
"""Interface of every implementation of core attention, softmax(scale * Q K^T) V.

    AttentionInputs    query, key, value, what is visible, sinks, whether dropout is drawn
    Visible            causal, within a window or a chunk, by a mask, within documents; and how to cut that to blocks
    CoreAttention      inputs -> [s, b, n * dv]; backends compute it on one rank, exchanges among ranks around a backend
    AttentionOptions   what a layer's config says about it, once per layer
    KeptByShape        what follows only from shapes, kept on the device

Legend: s queries, t keys, b batch, n query heads, g key-value heads (groups), d width of a query and of a key, dv width
of a value.

**Positions.** Where attention is causal, the queries are the last s of the t positions of the keys. That covers a
sequence by itself (s = t), one new token with a cache (s = 1), and a block of queries with the keys up to its end, so
that blocks need no positions.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.core.enums import AttnMaskType
from megatron.core.plan.read import read_plan
from megatron.core.sequences.token_layout import Segment, TokenLayout
from megatron.core.transformer.transformer_config import TransformerConfig

_ALL = slice(None)
Made = TypeVar("Made")


@dataclass(frozen=True)
class Visible:
    """Keys that a query sees: all that none of the six rules hides."""

    causal: bool = True
    """A query sees no key after its position."""
    window: int | None = None
    """A query sees so many keys before its position; None for all. Only where causal."""
    mask: Tensor | None = None
    """bool [b or 1, 1, s or 1, t], True where a key is hidden."""
    documents: TokenLayout | None = None
    """A query sees only keys of its document; the keys begin where the packed sequence does. Only where causal, without
    a mask, and with b = 1."""
    chunk: int | None = None
    """Sequences, or documents, are divided into chunks of so many tokens from their beginning, and a query sees only
    keys of its chunk; None for no division. The keys begin where the sequence does. Only where causal."""
    chosen: Tensor | None = None
    """int32 [s, b, k], the keys that a query has chosen among those that the other rules leave it, by their places, and
    -1 where they are fewer; None: all."""

    @classmethod
    def build(
        cls,
        attention_mask: Tensor | None,
        mask_type: AttnMaskType = AttnMaskType.causal,
        window: int | None = None,
        chunk: int | None = None,
    ) -> Visible:
        """Return what upstream's arguments of attention mean.

        A mask takes the place of the causal rule, except with padding_causal or in a layer with a window or chunks,
        where it only hides more. Without one attention is causal unless the mask type is no_mask.
        """
        if attention_mask is not None and attention_mask.dim() == 2:
            # [b, s]: which tokens are padding. Upstream's causal kernels do not look at it; left in, padding after the
            # text changes nothing that is read.
            is_causal = mask_type in (AttnMaskType.causal, AttnMaskType.causal_bottom_right)
            attention_mask = None if is_causal else attention_mask[:, None, None, :]
        if attention_mask is not None and not attention_mask.is_floating_point():
            attention_mask = attention_mask.bool()  # programs give whole numbers, too
        is_row = attention_mask is not None and attention_mask.shape[-2] == 1 < attention_mask.shape[-1]
        # A mask of one row hides keys from every query alike, and cannot say what is causal: the rule stays.
        if is_row and mask_type is AttnMaskType.causal:
            mask_type = AttnMaskType.padding_causal
        # With a window the causal rule stays: a window is counted backwards from a query's position.
        if window is not None or chunk is not None or mask_type is AttnMaskType.padding_causal:
            return cls(True, window, attention_mask, chunk=chunk)
        return cls(attention_mask is None and mask_type is not AttnMaskType.no_mask, None, attention_mask)

    def build_mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """bool [s, t] or [b or 1, 1, s or 1, t], True where a query may not see a key; None where it sees every key."""
        assert self.documents is None and self.chunk is None, "documents and chunks are computed one by one"
        if self.chosen is not None:
            # What lies outside of these keys goes to a place before or after them.
            places = self.chosen.transpose(0, 1).long().clamp_(-1, keys).add_(1)  # [b, s, k]
            hidden = torch.ones(*places.shape[:2], keys + 2, dtype=torch.bool, device=device)
            return hidden.scatter_(2, places, False)[:, None, :, 1:-1]
        # One query, the last position, sees every key: so does each step of generation, without a mask to be made.
        if not self.causal or (queries == 1 and self.window_reaches(keys)):
            return self.mask
        # A window that hides nothing is left out: the mask stays a plain triangle.
        band = build_causal_mask(queries, keys, device, None if self.window_reaches(keys) else self.window)
        return band if self.mask is None else band | self.mask

    def window_reaches(self, keys: int) -> bool:
        """Return whether every query sees back to the first of these keys."""
        return self.window is None or keys <= self.window + 1

    def find_first_seen(self, positions: Tensor) -> Tensor:
        """For queries at these positions of the whole sequence, int64 [s], the first position that each sees."""
        # These rules hide from the front, and the causal one from the back: what is seen is one stretch of keys.
        starts = torch.zeros_like(positions) if self.documents is None else self.documents.starts[positions]
        if self.chunk is not None:
            starts = positions - (positions - starts) % self.chunk
        return starts if self.window is None else torch.maximum(starts, positions - self.window)

    def segments(self, first: int, end: int) -> Iterator[Segment]:
        """The queries [first, end), divided where documents and chunks end; each with where its keys begin."""
        documents = TokenLayout.of_documents((0, end)) if self.documents is None else self.documents
        # Chunks are counted from the beginning of the document, so that a document is the same alone.
        return documents.segments(first, end, self.chunk)

    def blocks(self, queries: int, keys: int, size: int) -> Iterator[tuple[slice, slice]]:
        """Blocks of at most `size` queries, each with the keys that its queries see any of."""
        before = keys - queries  # keys of earlier calls, from a cache
        for first in range(0, queries, size):
            end = min(first + size, queries)
            if not self.causal:  # a mask may show any key to any query
                yield slice(first, end), slice(0, keys)
                continue
            # The first query of the block sees furthest back, the last one furthest forward: their union is one slice.
            start = 0 if self.window is None else max(0, before + first - self.window)
            yield slice(first, end), slice(start, before + end)

    def cut(self, queries: slice, keys: slice) -> Visible:
        """The same for some of the queries and of the keys; where causal, the last of each are at one position."""
        is_counted = self.documents is not None or self.chunk is not None
        assert not is_counted or not keys.start, "documents and chunks are counted from the first key"
        if self.chosen is not None:
            return dataclasses.replace(self, chosen=self.chosen[queries] - (keys.start or 0))
        if self.mask is None:
            return self
        # A mask of one row, such as one of padding, is for all queries.
        rows = queries if self.mask.shape[-2] > 1 else _ALL
        return dataclasses.replace(self, mask=self.mask[..., rows, keys])


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one call of core attention: queries, keys, values, and what is visible."""

    query: Tensor
    """[s, b, n, d]."""
    key: Tensor
    """[t, b, g, d]."""
    value: Tensor
    """[t, b, g, dv]."""
    visible: Visible = dataclasses.field(default_factory=Visible)
    sinks: Tensor | None = None
    """float32 [n]: for each head the score of one further key, which has no value; None without one."""
    training: bool = False
    """True if dropout, where the config has any, is drawn."""
    is_part: bool = False
    """True if these are one of several documents or chunks, whose lengths are others in every call."""

    def build_mask(self) -> Tensor | None:
        """`Visible.build_mask` of these queries and keys."""
        return self.visible.build_mask(self.query.shape[0], self.key.shape[0], self.query.device)

    def cut(self, queries: slice, keys: slice) -> AttentionInputs:
        """The inputs of attention of some of the queries to some of the keys; see `Visible.cut`."""
        return dataclasses.replace(
            self,
            query=self.query[queries],
            key=self.key[keys],
            value=self.value[keys],
            visible=self.visible.cut(queries, keys),
        )

    def by_segment(self) -> Iterator[AttentionInputs]:
        """The queries of each document or chunk with the keys of the same: causal attention of one sequence each.

        The work is the sum over the documents and chunks, not the square of the whole sequence.
        """
        # Inside of one the rule that divides them is the causal rule, so that kernels without a mask will do.
        visible = dataclasses.replace(self.visible, documents=None, chunk=None)
        undivided = dataclasses.replace(self, visible=visible, is_part=True)
        first = self.key.shape[0] - self.query.shape[0]
        for start, begin, stop in self.segments():
            yield undivided.cut(slice(begin - first, stop - first), slice(start, stop))

    def segments(self) -> Iterator[Segment]:
        """Yield where the documents or chunks of the queries lie, counted in the keys."""
        # Fewer queries than keys are the last of the positions: a rank's piece, with the keys gathered up to its end.
        end = self.key.shape[0]
        return self.visible.segments(end - self.query.shape[0], end)


class KeptByShape(Generic[Made]):
    """Tensors that attention needs on the device and that follow only from shapes, such as the bounds of chunks: made
    once for all calls of one shape.

    A CUDA graph goes on reading it where it lies, so that what training uses is never let go of: training has few
    shapes. Of evaluation and of generation, which has another length with every token, the last is kept.
    """

    def __init__(self) -> None:
        self._of_training: dict[Hashable, Made] = {}
        self._last: tuple[Hashable, Made] | None = None

    def find(self, key: Hashable, build: Callable[[], Made], *, training: bool) -> Made:
        """Return what `build` has returned for this key, or returns now."""
        if training:
            if key not in self._of_training:
                self._of_training[key] = build()
            return self._of_training[key]
        if self._last is None or self._last[0] != key:
            self._last = key, build()
        return self._last[1]


class CoreAttention(Protocol):
    """softmax(scale * Q K^T) V over what is visible."""

    name: str
    """For the log: which implementation, in words."""

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """query [s, b, n, d], key [t, b, g, d], value [t, b, g, dv] -> [s, b, n * dv], in the dtype of the query.

        Among the ranks of an exchange, these are a rank's queries and keys in the order of
        `context_parallel/sharding.py`; a mask has this rank's queries and all keys in the order of the sequence, and
        documents are the full sequence's.
        """
        ...


class AttentionBackend(ABC):
    """Core attention on one rank, which has all the keys; documents and chunks are computed one after another."""

    name: str

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention."""
        if inputs.visible.documents is None and inputs.visible.chunk is None:
            return self.attend(inputs)
        return torch.cat([self.attend(segment) for segment in inputs.by_segment()])

    @abstractmethod
    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention of inputs without documents and chunks: the same shapes as `CoreAttention.__call__`."""


@dataclass(frozen=True)
class AttentionOptions:
    """The settings of a layer's config that concern core attention."""

    scale: float
    """Factor on the scores, such as 1 / sqrt(d)."""
    layer_number: int
    dropout: float
    softmax_in_fp32: bool
    query_key_layer_scaling: bool
    masked_softmax_fusion: bool
    window: int | None
    """Keys before its position that a query sees; None for all."""
    chunk: int | None
    """Tokens of a chunk; a query sees only keys of its chunk. None for no chunks."""
    softcap: float | None
    """Bound on the scores, score -> softcap * tanh(score / softcap), before masks and sinks."""
    has_sinks: bool = False
    """True if each head has a further key without value."""
    deterministic: bool = False
    """Only kernels whose gradients are the same in every run (--deterministic-mode)."""

    @classmethod
    def from_config(cls, config: TransformerConfig, layer_number: int) -> AttentionOptions:
        """Read the options of layer `layer_number`, counted from 1, from the config."""
        options = read_plan(config).layer(layer_number).options
        return cls(
            scale=config.attention_scale,
            layer_number=layer_number,
            dropout=config.attention_dropout,
            # Layer scaling is undone inside the softmax, where float16 would overflow again.
            softmax_in_fp32=config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling,
            query_key_layer_scaling=config.apply_query_key_layer_scaling,
            masked_softmax_fusion=config.masked_softmax_fusion,
            window=options.window,
            chunk=options.chunk,
            softcap=config.attn_logit_softcapping,
            has_sinks=config.softmax_type != "vanilla",
            deterministic=config.deterministic_mode,
        )


def build_causal_mask(queries: int, keys: int, device: torch.device, window: int | None = None) -> Tensor:
    """bool [s, t], True where a query may not look: the queries are the last of the key positions, and with a window
    see only as many keys before theirs."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    future = every.triu(keys - queries + 1)
    return future if window is None else future | every.tril(keys - queries - window - 1)
