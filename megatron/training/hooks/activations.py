# SPDX-License-Identifier: Apache-2.0
"""Tensors that flow through the model in one step, at points whose layout is known: activations, and the gradients of
them.

    module hooks on every rank  ->  PointRecord: a slice, and which tokens and channels it is
    records of all ranks        ->  join_points  ->  Point: [samples * s, channels], as one process has it

A point is the output of a module (or its input, where the residual stream enters). Every slice says where it is by
index vectors, so that joining knows nothing of tensor, sequence, context, data or pipeline parallelism:

    tokens     sample * s + position. Microbatch m of replica d has samples (m * replicas + d) * b ... + b - 1 of the
               global batch. Of each sequence a context-parallel rank has two pieces, and with sequence parallelism a
               tensor-parallel rank has a part of these. Packed, b sequences are one of b * s.
    channels   the weight's rows where a layer's outputs are divided, else all
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core.auxiliary_loss import is_recomputing
from megatron.core.context_parallel.sharding import list_positions_of_rank
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.placement import Split, get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.run import Run

DATA = ("tokens", "labels", "loss_mask", "position_ids")
"""Points before the model: what the ranks read."""
_NORMS = ("input_layernorm", "post_self_attn_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


class PointRecord(NamedTuple):
    """Record of one process at a point in one step, over its microbatches."""

    module: str
    """Its name in the whole model; empty for data."""
    part: str
    """output, input, query, key, value, or a name of DATA."""
    what: str
    """The class of the module, and over which axes it communicates in forward and backward."""
    tokens: Tensor
    channels: Tensor
    """int64: which tokens and channels of the whole these are."""
    values: Tensor
    """float32 [tokens, channels]."""
    grads: Tensor | None
    """Of the same shape, of the mean loss; None where no gradient came, which is zero where others have one."""
    sums_grads: bool
    """Channels that several ranks hold have a part of the gradient on each of them."""
    length: int
    """Tokens of a sequence."""


@dataclass
class Point:
    """One point of the whole model."""

    module: str
    part: str
    what: str
    values: Tensor
    """float32 [samples * s, channels]; where several ranks hold an element, the first one's."""
    grads: Tensor | None
    contrary: dict[str, Tensor] = field(default_factory=dict)
    """`values` or `grads` with the elements of those ranks that differ most from the first holder's."""
    holders: list[tuple[int, PointRecord]] = field(default_factory=list)
    """Ranks and what they hold, without values."""
    length: int = 1
    """Tokens of a sequence."""

    @property
    def name(self) -> str:
        """`output of decoder.layers.1.mlp.linear_fc2`."""
        return f"{self.part} of {self.module}" if self.module else self.part


# ---- on every rank


@dataclass
class _Watched:
    """A point while the step runs."""

    module: str
    part: str
    what: str
    find_channels: Callable[[Tensor], Tensor]
    """A slice [rows, b, channels] -> the numbers of its channels in the whole."""
    sums_grads: bool = False
    values: list[Tensor] = field(default_factory=list)
    grads: dict[int, Tensor] = field(default_factory=dict)
    """By microbatch; those whose activation nothing depends on (experts without tokens) have none."""


class ActivationRecorder:
    """Hooks on the modules of a run's chunks; open it around one training step.

    Nothing is recorded where samples share sequences (--hybrid-context-parallel).
    """

    def __init__(self, run: Run) -> None:
        self._run, self._groups, self._length = run, run.groups, run.seq_length
        self._micro_batch_size = run.batch_size.micro_batch_size
        self._seen: list[_Watched] = []
        self._handles: list[RemovableHandle] = []
        self._joining: list[Norm] = []
        if run.plans is None:
            for chunk in run.model:
                self._watch_chunk(chunk.module)
        # A rank's loss is its microbatches' mean, times the ranks that share the sequence; gradients are averaged over
        # these and the replicas afterwards. A loss per token is divided by all tokens in the end, on one process too.
        shares = 1 if run.config.model.calculate_per_token_loss else run.groups.dp.size() * run.groups.cp.size()
        self._scale = 1.0 / (shares * float(run.optimizer.loss_scale))

    def close(self) -> None:
        """Take the hooks off the modules."""
        while self._handles:
            self._handles.pop().remove()
        while self._joining:
            self._joining.pop().joins_stream = True

    def list_records(self) -> list[PointRecord]:
        """Return what was seen, in forward order; points whose shape does not fit the layout are left out."""
        records = []
        for watched in self._seen:
            shapes = {value.shape for value in watched.values}
            length, sequences = watched.values[0].shape[:2]
            tokens = find_tokens(self._run, length, sequences, len(watched.values)) if len(shapes) == 1 else None
            # In packed rows angles run on from one sample to the next: only their differences mean something.
            is_rotated_on = watched.part in ("query", "key") and sequences < self._micro_batch_size
            if tokens is None or is_rotated_on:
                continue
            channels = watched.find_channels(watched.values[0])
            values = torch.cat([value.flatten(0, 1) for value in watched.values])
            grads = None
            if watched.grads:
                pieces = [watched.grads.get(i, torch.zeros_like(value)) for i, value in enumerate(watched.values)]
                grads = torch.cat([piece.flatten(0, 1) for piece in pieces]) * self._scale
            records.append(
                PointRecord(
                    watched.module, watched.part, watched.what, tokens, channels, values, grads, watched.sums_grads,
                    self._length,
                )
            )  # fmt: skip
        return records

    # ---- which modules

    def _watch_chunk(self, model: nn.Module) -> None:
        self._watch_data(model)
        for path, module in model.named_modules():
            name = find_global_name(model, path)
            if isinstance(module, DotProductAttention):
                self._watch_attention(module, name)
            elif isinstance(module, ColumnParallelLinear):
                self._watch_output(module, name, *_find_column_channels(module))
            elif isinstance(module, (LanguageModelEmbedding, RowParallelLinear, MoELayer, TopKRouter)):
                self._watch_output(module, name)
            elif isinstance(module, (TransformerLayer, TransformerBlock)):
                for norm in _NORMS if isinstance(module, TransformerLayer) else ("final_layernorm",):
                    if isinstance(getattr(module, norm, None), nn.Module):
                        self._watch_norm(getattr(module, norm), f"{name}.{norm}", norm)
                # A chunk without layers hands on what it was given; a layer's output is named by the layer.
                if isinstance(module, TransformerLayer):
                    self._watch_output(module, name)

    def _watch_data(self, model: nn.Module) -> None:
        watched = {part: _Watched("", part, "", _all_channels) for part in DATA}

        def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("tokens", "position_ids"), args, strict=False)) | kwargs
            for part, value in given.items():
                if part in watched and isinstance(value, Tensor) and value.dim() == 2:
                    self._keep(watched[part], value.t())

        self._handles.append(model.register_forward_pre_hook(read, with_kwargs=True))

    def _watch_norm(self, norm: nn.Module, name: str, attribute: str) -> None:
        if isinstance(norm, Norm):  # a kernel that adds what reaches the stream from two sides would show one of them
            norm.joins_stream = False
            self._joining.append(norm)
        # Between attention and MLP the residual stream is the output of no module.
        if attribute == "pre_mlp_layernorm":
            entering = _Watched(name, "input", type(norm).__name__, _all_channels)
            self._handles.append(norm.register_forward_pre_hook(lambda module, args: self._keep(entering, args[0])))
        self._watch_output(norm, name)

    def _watch_attention(self, core: DotProductAttention, name: str) -> None:
        tp, groups = self._groups.tp, core.config.num_query_groups
        sharers = max(1, tp.size() // groups)
        what = _describe(core, self._groups)
        firsts = {
            "query": lambda heads: tp.rank() * heads,
            # With fewer query groups than ranks, several ranks hold one group's key and value.
            "key": lambda heads: tp.rank() // sharers * heads,
        }
        watched = [
            _Watched(
                name, part, what, _of_heads(firsts["query" if part == "query" else "key"]),
                sums_grads=part != "query" and sharers > 1,
            )
            for part in ("query", "key", "value")
        ]  # fmt: skip

        def read(module: nn.Module, args: tuple[Any, ...]) -> None:
            for point, tensor in zip(watched, args, strict=False):
                self._keep(point, tensor)

        self._handles.append(core.register_forward_pre_hook(read))
        self._watch_output(core, name, lambda x: tp.rank() * x.shape[-1] + torch.arange(x.shape[-1]))

    def _watch_output(
        self,
        module: nn.Module,
        name: str,
        find_channels: Callable[[Tensor], Tensor] | None = None,
        sums_grads: bool = False,
    ) -> None:
        what = _describe(module, self._groups)
        watched = _Watched(name, "output", what, find_channels or _all_channels, sums_grads)

        def read(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(module, TopKRouter):
                # [T, k] of the tokens that came in as [s, b, h].
                self._keep(watched, output.weights, tuple(args[0].shape[:2]))
                return
            self._keep(watched, output[0] if isinstance(output, tuple) else output)

        self._handles.append(module.register_forward_hook(read))

    def _keep(self, watched: _Watched, tensor: Tensor, leading: tuple[int, ...] | None = None) -> None:
        """A copy of the activation, because layers work in place, and of its gradient when that comes.

        leading: [s, b], where the tensor is [s * b, ...].
        """
        leading = tuple(tensor.shape[:2]) if leading is None else leading

        def copy(x: Tensor) -> Tensor:
            return x.detach().to("cpu", torch.float32, copy=True).reshape(*leading, -1)

        # A recomputed forward is not another microbatch, and backward goes through the graph of the first one.
        if is_recomputing():
            return
        if not watched.values:
            self._seen.append(watched)
        microbatch = len(watched.values)
        watched.values.append(copy(tensor))

        def keep_grad(grad: Tensor) -> None:
            watched.grads.setdefault(microbatch, copy(grad))

        if tensor.requires_grad:
            tensor.register_hook(keep_grad)
        # A view that is written to afterwards, as the residual is added in place, loses its place in the graph: the
        # gradient then comes only to the memory that it is a view of.
        base = tensor._base
        if base is None or not base.requires_grad or base.numel() != tensor.numel():
            return
        if base.is_contiguous() and tensor.is_contiguous():
            base.register_hook(keep_grad)


@contextlib.contextmanager
def record_activations(run: Run) -> Iterator[ActivationRecorder]:
    """Record what flows through the run's model in the step inside of the block."""
    recorder = ActivationRecorder(run)
    try:
        yield recorder
    finally:
        recorder.close()


def find_tokens(run: Run, length: int, sequences: int, microbatches: int) -> Tensor | None:
    """Find the tokens of slices [length, sequences], one for each microbatch; None where they are neither the rank's
    tokens nor, divided over tensor-parallel ranks, its part of them."""
    cp, tp, dp = run.groups.cp, run.groups.tp, run.groups.dp
    packed, rest = divmod(run.batch_size.micro_batch_size, sequences)
    positions = list_positions_of_rank(packed * run.seq_length, cp.rank(), cp.size())
    if rest or len(positions) not in (length, length * tp.size()):
        return None
    own = positions if length == len(positions) else positions[tp.rank() * length :][:length]
    first = (torch.arange(microbatches) * dp.size() + dp.rank()) * sequences
    # Rows of packed sequences are numbered as if each were one long sequence: what follows each other stays so.
    rows = first[:, None] + torch.arange(sequences)
    return (rows[:, None, :] * packed * run.seq_length + own[None, :, None]).flatten()


def _all_channels(piece: Tensor) -> Tensor:
    return torch.arange(piece.shape[-1])


def _of_heads(find_first: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    # Of [s, b, n * d] only the width is left, which is enough: heads are as wide on every rank.
    return lambda piece: find_first(piece.shape[-1]) + torch.arange(piece.shape[-1])


def _find_column_channels(layer: ColumnParallelLinear) -> tuple[Callable[[Tensor], Tensor], bool]:
    """Return how a column layer's outputs are divided, and whether ranks share some of them: as the rows of its
    weight."""
    group, size = layer.tp_group, layer.output_size
    # A tied output layer has no weight; its rows are divided evenly.
    split = Split(0, "tp", group.size(), group.rank())
    if layer.weight is not None:
        split = next((split for split in get_placement(layer.weight, "").splits if split.dim == 0), split)
    if layer.gather_output:
        return _all_channels, False
    channels = torch.cat([torch.arange(start, start + length) for start, length in split.boxes(size)])
    return lambda piece: channels, bool(split.replicated_parts(size))


def _describe(module: nn.Module, groups: ProcessGroupCollection) -> str:
    """Return what a module is, and what it communicates."""
    kind = type(module).__name__
    tp, cp, ep = groups.tp.size() > 1, groups.cp.size() > 1, groups.tp_ep.size() > 1
    parallel = getattr(getattr(module, "config", None), "sequence_parallel", False)
    if isinstance(module, ColumnParallelLinear) and tp:
        gathers = type(module.plan).__name__ == "GatherInput"
        travel = "gathers its input over tp in forward, " if gathers else ""
        return f"{kind}, which {travel}sums its input gradient over tp in backward"
    if isinstance(module, RowParallelLinear) and tp:
        travel = (
            ", gathers its output gradient over tp in backward" if type(module.plan).__name__ == "ScatterOutput" else ""
        )
        return f"{kind}, which sums its output over tp in forward{travel}"
    if isinstance(module, LanguageModelEmbedding) and tp:
        return f"{kind}, which sums its output over tp in forward" + (" and divides the sequence" if parallel else "")
    if isinstance(module, DotProductAttention) and cp:
        return f"{kind}, which exchanges over cp ({module.backend.name})"
    if isinstance(module, MoELayer) and ep:
        return f"{kind}, which sends tokens to their experts and back over ep and etp"
    return kind


# ---- together


def join_points(shares: Sequence[Sequence[PointRecord]]) -> dict[str, Point]:
    """All ranks' records as whole tensors, by the point's name, in forward order where one process had all."""
    held: dict[tuple[str, str], list[tuple[int, PointRecord]]] = {}
    for rank, records in enumerate(shares):
        for record in records:
            held.setdefault((record.module, record.part), []).append((rank, record))
    points = {}
    for (module, part), holders in held.items():
        contrary: dict[str, Tensor] = {}
        values, contrary["values"] = _join([(r, r.values) for _, r in holders], sums=False)
        grads = None
        if any(record.grads is not None for _, record in holders):
            pieces = [(r, torch.zeros_like(r.values) if r.grads is None else r.grads) for _, r in holders]
            grads, contrary["grads"] = _join(pieces, sums=holders[0][1].sums_grads)
        empty = torch.empty(0)
        kept = [(rank, record._replace(values=empty, grads=None)) for rank, record in holders]
        first = holders[0][1]
        point = Point(module, part, first.what, values, grads, contrary, kept, first.length)
        points[point.name] = point
    return points


def _join(pieces: Sequence[tuple[PointRecord, Tensor]], *, sums: bool) -> tuple[Tensor, Tensor]:
    """The whole, and the whole with the values of those holders that differ most from the first one's."""
    shape = [1 + max(int(getattr(record, index).max()) for record, _ in pieces) for index in ("tokens", "channels")]
    # Elements that nobody has stay nan, which is equal to nothing.
    whole, contrary = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    filled = torch.zeros(shape, dtype=torch.bool)
    for record, values in pieces:
        place = find_place(record)
        known, first, furthest = filled[place], whole[place], contrary[place]
        if sums:
            whole[place] = contrary[place] = torch.where(known, first + values, values)
        else:
            whole[place] = torch.where(known, first, values)
            # Not `>`: a NaN of a later holder differs most.
            further = ~((values - first).abs() <= (furthest - first).abs())
            contrary[place] = torch.where(~known | further, values, furthest)
        filled[place] = True
    return whole, contrary


def find_place(record: PointRecord) -> tuple[Tensor, Tensor]:
    """Return a record's position in the full tensor, as an index."""
    return record.tokens[:, None], record.channels[None, :]
