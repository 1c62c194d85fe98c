# SPDX-License-Identifier: Apache-2.0
"""The whole model as upstream's ranks divide it: which parameters each model chunk has, and where they lie in its flat
buffer."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.errors import CheckpointError
from megatron.core.plan.letters import split_letters
from megatron.core.upstream_checkpoints.flat_layout import LAYER, BucketSlot, Cut, Parameter, SavedLayout, find_cut


@dataclass(frozen=True)
class ModelOutline:
    """The whole model as upstream's ranks divide it."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the full parameters, by their names; experts in stacks."""
    layout: SavedLayout
    args: Mapping[str, Any]
    """Upstream's settings."""

    def list_parameters(self, layers: range, *, first: bool, last: bool, experts: bool | None) -> list[Parameter]:
        """Of a model chunk with these layers, in no particular order.

        first, last: of all chunks. experts: only experts' parameters, only the others, or (None) both. Raises
        CheckpointError where a tensor cannot be cut.
        """
        found: list[Parameter] = []
        for name, shape in self.shapes.items():
            layer = LAYER.fullmatch(name)
            here = int(layer["number"]) in layers if layer else first if name.startswith("embedding.") else last
            if here and experts in (None, self.is_expert(name)):
                found += self._parameters_of(name, shape)
        table = "embedding.word_embeddings.weight"
        copies = self._list_copies() if experts is not True and table in self.shapes else []
        if copies:
            found = [dataclasses.replace(each, is_alone=each.name == table) for each in found]
            original = self._parameters_of(table, self.shapes[table])[0]
            found += [dataclasses.replace(original, name=name, is_alone=True) for name in copies if last]
        return found

    def _list_copies(self) -> list[str]:
        """Return what the last pipeline stage calls its copies of the first stage's table."""
        if self.layout.pp == 1:
            return []
        predicts = any(name.startswith("mtp.") for name in self.shapes)
        is_tied = not self.args.get("untie_embeddings_and_output_weights", False)
        return ["embedding.copy"] * predicts + ["output_layer.weight"] * is_tied

    @staticmethod
    def is_expert(name: str) -> bool:
        """Return whether this is a stack of experts."""
        return ".mlp.experts." in name

    def ranks_of(self, name: str) -> int:
        """Return how many ranks share the tensor, or each expert in it."""
        return self.layout.etp if self.is_expert(name) and self.layout.ep > 1 else self.layout.tp

    def cut_of(self, name: str) -> Cut:
        """Return how they share it."""
        return find_cut(name, self.args)

    def _parameters_of(self, name: str, shape: tuple[int, ...]) -> list[Parameter]:
        is_expert = self.is_expert(name)
        shard = self.cut_of(name).shard_shape(shape[1:] if is_expert else shape, self.ranks_of(name))
        if shard is None or (is_expert and shape[0] % self.layout.ep):
            raise CheckpointError(f"{name} {shape} cannot be cut over the ranks that upstream's settings name")
        if not is_expert:
            return [Parameter(name, shard)]
        return [Parameter(name, shard, expert) for expert in range(shape[0] // self.layout.ep)]

    def divide(
        self,
        place: Callable[[int, int, int, list[Parameter]], list[BucketSlot] | None],
        arrange: Callable[..., list[Parameter]],
        *,
        experts: bool | None,
    ) -> dict[tuple[int, int], list[tuple[Parameter, BucketSlot]]] | None:
        """Return which parameters each (stage, chunk) has, and where they lie in its buffer; None where that cannot be.

        place: finds slots for a stage, a chunk, the number of its buffer and its parameters as registered. A chunk
        without parameters (experts) has no buffer, and the next one takes its number. Layers are assigned in order; how
        many each chunk has is said by letters with cuts, or follows from the size of its buffer.
        """
        numbers = [int(found["number"]) for found in map(LAYER.fullmatch, self.shapes) if found]
        total, chunks = max(numbers, default=-1) + 1, self.layout.order_of_chunks
        segments = split_letters(self.args.get("hybrid_layer_pattern") or "").segments

        def divide_from(
            position: int, done: int, buffers: Mapping[int, int]
        ) -> dict[tuple[int, int], list[tuple[Parameter, BucketSlot]]] | None:
            last, (stage, chunk) = position == len(chunks) - 1, chunks[position]
            counts = [total - done] if last else _likely_first(total, len(chunks), total - done)
            if len(segments) == len(chunks) > 1:
                counts = [len(segments[position])]
            for count in counts:
                layers = range(done, done + count)
                ordered = arrange(self.list_parameters(layers, first=position == 0, last=last, experts=experts))
                used = buffers.get(stage, 0)
                slots, after = place(stage, chunk, used, ordered), {**buffers, stage: used + bool(ordered)}
                # Fewer layers may seem to fit where a table has a separate bucket: then the other stages tell.
                rest = None if slots is None else {} if last else divide_from(position + 1, done + count, after)
                if slots is not None and rest is not None:
                    return {chunks[position]: list(zip(ordered, slots, strict=True)), **rest}
            return None

        return divide_from(0, 0, {})


def _likely_first(total: int, chunks: int, left: int) -> list[int]:
    """The numbers of layers that a chunk may have, the even share first."""
    even = total // chunks
    return sorted(range(left + 1), key=lambda count: (abs(count - even), count))


def expert_of(parameter: Parameter, ep_rank: int, experts_per_rank: int) -> int | None:
    """Its place among all experts, on this expert-parallel rank."""
    return None if parameter.expert is None else ep_rank * experts_per_rank + parameter.expert


def iterate_ranks(layout: SavedLayout, stage: int, *, experts: bool) -> Iterable[tuple[int, int, int]]:
    """(number of the model-parallel rank, expert-parallel rank, tensor-parallel rank) of a stage's ranks."""
    ep, tp = (layout.ep, layout.etp) if experts else (1, layout.tp)
    for ep_rank, tp_rank in itertools.product(range(ep), range(tp)):
        yield (stage * ep + ep_rank) * tp + tp_rank, ep_rank, tp_rank
