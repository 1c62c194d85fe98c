# SPDX-License-Identifier: Apache-2.0
"""Role of a parameter and its division over processes: stated once, and everything else is derived from it.

Initialisation, checkpoints and resharding, weight conversion, gradient synchronisation, the gradient norm and the
memory planner all read the `Placement` that a parameter carries; there is no second list of what is column parallel.
Weight decay, the choice of an update rule, separate learning rates and counts read its `kind`.

    full tensor --take()--> shard of one process          shards of all processes --join()--> full tensor

| case                                  | how it is said                                                             |
|---------------------------------------|----------------------------------------------------------------------------|
| column or row parallel                | one Split of dim 0 or dim 1                                                |
| gate and up in one matrix             | Split with parts (gate, up): each part is cut, a shard holds a half of each|
| fewer key-value heads than shards     | parts that a range of shards cuts (queries) or holds whole (key, value)    |
| experts                               | two Splits: dim 0 over "ep", another dim over "etp"                        |
| padded vocabulary                     | valid_rows: rows after it are padding, of any number                       |
| tied embedding on the last stage      | is_copy: not saved, not counted; gradients are summed over "embd"          |
| per-head updates (Muon)               | local_parts(): names and ranges of the parts inside the shard              |
| rows of queries, keys and values      | named_parts(): names and ranges of the parts of the whole tensor           |

Pure arithmetic on shapes: needs neither torch.distributed nor, to be imported, torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron.core.errors import TopologyError

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""(start, length) for every dimension of a tensor."""

Kind = Literal[
    "matrix", "router", "embedding", "positions", "head", "head_bias", "filter", "vector", "norm", "qk_norm", "adapter"
]  # fmt: skip
"""Role of a parameter in the network.

    matrix      weight of a linear layer inside the network; a stack of them for experts
    router      matrix that chooses experts
    embedding   a row for each token of the vocabulary
    positions   a row for each position
    head        output layer, hidden states to logits: a row for each token; also where it is a copy of the embedding
    head_bias   its bias: a number for each token
    filter      filters of a convolution, one for each channel
    vector      bias, scale, attention sink: one number for each channel, head or expert
    norm        weight or bias of a normalisation of the hidden states
    qk_norm     weight or bias of a normalisation of queries or keys
    adapter     matrix of low rank, or change of rows' lengths, that is trained in place of a weight
"""


@dataclass(frozen=True)
class Part:
    """A sub-block along the split dimension, `size` long."""

    size: int
    shards: tuple[int, int] | None = None
    """The shards [first, last) that share this part; all of them when None."""
    replicated: bool = False
    """True: each of these shards holds the part whole. False: they cut it evenly."""
    name: str = ""


class DimRange(NamedTuple):
    """A stretch of one dimension that a shard holds."""

    start: int
    """Start in the full tensor."""
    local_start: int
    """Start in the shard."""
    length: int
    owned: bool
    """False where an earlier shard holds the same elements: they are saved and counted there."""


class Piece(NamedTuple):
    """A rectangular block of the full tensor and where it lies in the shard."""

    box: Box
    local_box: Box
    owned: bool


@dataclass(frozen=True)
class Split:
    """Dimension `dim` is cut into `num_shards` over the processes of `axis`; this process holds shard `index`."""

    dim: int
    axis: str
    """Name of the process group: "tp", "ep", "etp"."""
    num_shards: int
    index: int
    parts: tuple[Part, ...] | None = None
    """Sub-blocks that are cut one by one, in order; the whole dimension is one part when None."""

    def runs(self, size: int) -> list[DimRange]:
        """Return what this shard holds of a dimension that is `size` long, in the shard's order; neighbours are
        merged."""
        runs: list[DimRange] = []
        for _, run in self._part_runs(size):
            last = runs[-1] if runs else None
            # So that a plain split is one slice, however many parts it has.
            if last and last.owned == run.owned and last.start + last.length == run.start:
                runs[-1] = last._replace(length=last.length + run.length)
            else:
                runs.append(run)
        return runs

    def boxes(self, size: int) -> list[tuple[int, int]]:
        """(start, length) in the full dimension of everything this shard holds."""
        return [(run.start, run.length) for run in self.runs(size)]

    def local_parts(self, size: int) -> list[tuple[str, int, int]]:
        """(name, start, length) inside the shard of each part it holds something of."""
        return [(part.name, run.local_start, run.length) for part, run in self._part_runs(size)]

    def replicated_parts(self, size: int) -> list[tuple[int, int | None]]:
        """(length, start in this shard) of every part that several shards hold whole; start None where it is not held.

        The same list on all shards except for the starts. Each holder's gradient of such a part is a partial sum.
        """
        # By the start in the full tensor, which is the same on all shards.
        held = {run.start: run.local_start for part, run in self._part_runs(size) if part.replicated}
        parts = self.list_parts(size)
        starts = itertools.accumulate((part.size for part in parts), initial=0)
        return [(part.size, held.get(start)) for part, start in zip(parts, starts, strict=False) if part.replicated]

    def local_size(self, size: int) -> int:
        """Length of this shard along the dimension."""
        return sum(run.length for _, run in self._part_runs(size))

    def list_parts(self, size: int) -> tuple[Part, ...]:
        """The parts, or the whole dimension as one."""
        return self.parts if self.parts is not None else (Part(size),)

    def check(self, name: str, size: int) -> None:
        """Raise TopologyError when a dimension of this size cannot be cut this way."""
        where = f"{name or 'a parameter'}: dimension {self.dim} of size {size}"
        if not 0 <= self.index < self.num_shards:
            raise TopologyError(
                f"{where} is cut into {self.num_shards} shards over {self.axis}; found shard {self.index}"
            )
        parts = self.list_parts(size)
        if sum(part.size for part in parts) != size:
            raise TopologyError(f"{where} has parts of {[part.size for part in parts]}, which add up to another size")
        for part in parts:
            first, last = part.shards or (0, self.num_shards)
            if not 0 <= first < last <= self.num_shards:
                raise TopologyError(f"{where} has a part on shards [{first}, {last}) of {self.num_shards}")
            if not part.replicated and part.size % (last - first):
                what = f"part {part.name!r} of size {part.size}" if self.parts else f"size {size}"
                raise TopologyError(
                    f"{where} cannot be split over {self.axis}: {what} does not divide by {last - first}"
                )

    def _part_runs(self, size: int) -> Iterator[tuple[Part, DimRange]]:
        start = local_start = 0
        for part in self.list_parts(size):
            first, last = part.shards or (0, self.num_shards)
            if first <= self.index < last:
                length = part.size if part.replicated else part.size // (last - first)
                offset = 0 if part.replicated else (self.index - first) * length
                # Of several holders the first is the owner, so that the part is saved and counted once.
                owned = not part.replicated or self.index == first
                yield part, DimRange(start + offset, local_start, length, owned)
                local_start += length
            start += part.size


@dataclass(frozen=True)
class Placement:
    """One parameter: its name and shape in the whole model, and which part of it this process holds.

    Raises TopologyError when the shape cannot be cut as the splits say.
    """

    name: str
    """Name in the whole model, layers by global number: decoder.layers.7.mlp.linear_fc1.weight."""
    full_shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    """At most one for each dimension; none: every process of the model-parallel groups holds it whole."""
    valid_rows: int | None = None
    """Rows of dimension 0 that mean something (the vocabulary); the rest is padding. All when None."""
    is_copy: bool = False
    """True for a copy of a parameter that another stage owns (tied embeddings): it is neither saved nor counted."""
    partial_grad_axes: tuple[str, ...] = ()
    """Axes over which each process computes a partial sum of the gradient, to be summed before the update."""
    kind: Kind | None = None
    """Role of the parameter; when None, the one that its name and shape suggest (`suggest_kind`). Never None
    afterwards."""
    parallel_dim: int | None = None
    """The dimension that its layer divides over the ranks that share it, also where there is only one and so no split;
    None where the layer divides none."""

    def __post_init__(self) -> None:
        if self.kind is None:
            # Past the freezing: this is still construction.
            object.__setattr__(self, "kind", suggest_kind(self.name, self.full_shape))
        dims = [split.dim for split in self.splits]
        if len(set(dims)) != len(dims) or any(not 0 <= dim < len(self.full_shape) for dim in dims):
            raise TopologyError(f"{self.name}: splits of dimensions {dims} do not fit the shape {self.full_shape}")
        for split in self.splits:
            split.check(self.name, self.full_shape[split.dim])
        if self.valid_rows is not None and not 0 < self.valid_rows <= self.full_shape[0]:
            raise TopologyError(f"{self.name}: {self.valid_rows} valid rows do not fit the shape {self.full_shape}")

    # ---- shapes and blocks

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this process's shard."""
        # Derived, never stored: a stored shape could contradict the splits.
        shape = list(self.full_shape)
        for split in self.splits:
            shape[split.dim] = split.local_size(shape[split.dim])
        return tuple(shape)

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The full shape without padding rows."""
        rows = self.full_shape[:1] if self.valid_rows is None else (self.valid_rows,)
        return (*rows, *self.full_shape[1:])

    @property
    def index(self) -> tuple[int, ...]:
        """The shard's coordinate: one index for each split."""
        return tuple(split.index for split in self.splits)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes the parameter is cut over."""
        return tuple(split.axis for split in self.splits)

    @property
    def is_expert(self) -> bool:
        """True if this is a weight of experts: other processes hold the same shard than of dense layers."""
        return "ep" in self.axes

    @property
    def is_hidden_matrix(self) -> bool:
        """True if this is a matrix between hidden states, not a table of tokens or positions nor the output layer: what
        Muon orthogonalises and what muP scales with the width."""
        return self.kind in ("matrix", "router")

    @property
    def is_vocabulary(self) -> bool:
        """True if this has a row for each token: the word embedding and the output layer."""
        return self.kind in ("embedding", "head", "head_bias")

    @property
    def is_vector(self) -> bool:
        """True if this has one number for each channel, head or expert, whatever its shape: biases, norms, scales."""
        kinds = ("vector", "head_bias", "norm", "qk_norm")
        return self.kind in kinds or (self.kind == "adapter" and len(self.full_shape) == 1)

    def marks(self) -> dict[str, Any]:
        """Return what programs written for upstream read on a parameter: its attributes there, by name."""
        cuts = [split.dim for split in self.splits if split.axis in ("tp", "etp")]
        dim = cuts[0] if cuts else self.parallel_dim
        return {
            "tensor_model_parallel": dim is not None,
            "partition_dim": -1 if dim is None else dim,
            "partition_stride": 1,
            "sequence_parallel": "tp" in self.partial_grad_axes,
            # Upstream's all-reduce over the replicas of dense weights: not for what expert parallelism divides.
            "allreduce": not any(split.axis == "ep" and split.num_shards > 1 for split in self.splits),
        }

    def coordinates(self) -> list[tuple[int, ...]]:
        """The coordinates of all shards, the last split running fastest."""
        return list(itertools.product(*(range(split.num_shards) for split in self.splits)))

    def pieces(self) -> list[Piece]:
        """Every rectangular block this process holds: in the full tensor, in the shard, and whether it is the owner."""
        by_dim = {split.dim: split.runs(self.full_shape[split.dim]) for split in self.splits}
        whole = [[DimRange(0, 0, size, True)] for size in self.full_shape]
        # Cuts of several dimensions are independent: every combination of their runs is a block.
        runs = [by_dim.get(dim, whole[dim]) for dim in range(len(self.full_shape))]
        return [
            Piece(
                tuple((run.start, run.length) for run in block),
                tuple((run.local_start, run.length) for run in block),
                all(run.owned for run in block),
            )
            for block in itertools.product(*runs)
        ]

    def boxes(self) -> list[Box]:
        """For every block this process holds: (start, length) per dimension of the full tensor, for checkpoints."""
        return [piece.box for piece in self.pieces()]

    def local_parts(self, dim: int = 0) -> list[tuple[str, int, int]]:
        """(name, start, length) of the parts along `dim` of the shard, such as heads that Muon updates one by one."""
        for split in self.splits:
            if split.dim == dim:
                return split.local_parts(self.full_shape[dim])
        return [("", 0, self.full_shape[dim])]

    def named_parts(self, dim: int = 0) -> list[tuple[str, int, int]]:
        """(name, start, length) of the parts along `dim` of the whole tensor, such as each query group's query, key and
        value; one without a name where it has no parts."""
        size = self.full_shape[dim]
        # Of the whole tensor: which rank asks makes no difference.
        parts = next((split.list_parts(size) for split in self.splits if split.dim == dim), (Part(size),))
        starts = itertools.accumulate((part.size for part in parts), initial=0)
        return [(part.name, start, part.size) for part, start in zip(parts, starts, strict=False)]

    # ---- values

    def take(self, full: Tensor) -> Tensor:
        """This process's shard of the full tensor; it may be a view of it.

        Where rows are padded, `full` may have any padding: valid rows are kept, other padding becomes zeros.
        """
        # Before cutting, because the shards' bounds count the padding rows of this layout.
        full = self._with_our_padding(full)
        pieces = self.pieces()
        # The usual case needs no memory: a view will do.
        if len(pieces) == 1:
            return full[_slices(pieces[0].box)]
        shard = full.new_empty(self.local_shape)
        for piece in pieces:
            shard[_slices(piece.local_box)] = full[_slices(piece.box)]
        return shard

    def join(self, shards: Mapping[tuple[int, ...], Tensor] | Sequence[Tensor]) -> Tensor:
        """The full tensor from all shards: the inverse of `take`.

        shards: by coordinate (one index for each split), or a list in the order of `coordinates()`. Elements that
        several shards hold are taken from the first of them.
        """
        coordinates = self.coordinates()
        # A list comes from an all-gather, in the order of the ranks.
        if not isinstance(shards, Mapping):
            if len(shards) != len(coordinates):
                raise ValueError(f"{self.name}: {len(coordinates)} shards make the full tensor; found {len(shards)}")
            shards = dict(zip(coordinates, shards, strict=True))
        # Empty memory will do: the owned pieces of all shards together cover every element.
        full = shards[coordinates[0]].new_empty(self.full_shape)
        for coordinate in coordinates:
            shard = self.at(coordinate)
            if tuple(shards[coordinate].shape) != shard.local_shape:
                found = tuple(shards[coordinate].shape)
                raise ValueError(f"{self.name}: shard {coordinate} has shape {found}; expected {shard.local_shape}")
            for piece in shard.pieces():
                if piece.owned:
                    full[_slices(piece.box)] = shards[coordinate][_slices(piece.local_box)]
        return full

    def _with_our_padding(self, full: Tensor) -> Tensor:
        shape = tuple(full.shape)
        if shape == self.full_shape:
            return full
        if self.valid_rows is None or shape[1:] != self.full_shape[1:] or shape[0] < self.valid_rows:
            raise ValueError(f"{self.name}: the full tensor has shape {shape}; expected {self.full_shape}")
        # The number of padding rows depends on the layout, which may have been another when `full` was made.
        padded = full.new_zeros(self.full_shape)
        padded[: self.valid_rows] = full[: self.valid_rows]
        return padded

    # ---- relatives

    def at(self, coordinate: Sequence[int]) -> Placement:
        """The same parameter on the process that holds the shard at this coordinate."""
        splits = zip(self.splits, coordinate, strict=True)
        return dataclasses.replace(self, splits=tuple(dataclasses.replace(s, index=i) for s, i in splits))

    def renamed(self, name: str) -> Placement:
        """The same cut under another name."""
        return dataclasses.replace(self, name=name)

    def element(self, index: int) -> Placement:
        """One element, by its number in the shard, of a stack along dimension 0: a tensor with a separate name."""
        runs = [split.runs(self.full_shape[0]) for split in self.splits if split.dim == 0]
        first = runs[0][0].start if runs and runs[0] else 0
        return Placement(
            name=f"{self.name}{first + index}",
            full_shape=self.full_shape[1:],
            splits=tuple(dataclasses.replace(s, dim=s.dim - 1) for s in self.splits if s.dim > 0),
            partial_grad_axes=self.partial_grad_axes,
            kind=self.kind,
            parallel_dim=None if self.parallel_dim is None else self.parallel_dim - 1,
        )


def make_grouped_parts(num_groups: int, blocks: Sequence[Part], num_shards: int) -> tuple[Part, ...]:
    """The parts of a matrix made of equal groups of blocks, such as (queries, key, value) for every query group.

    With at least as many groups as shards a shard holds whole groups. With fewer, several shards share a group: they
    cut its blocks, and each holds a copy of those marked `replicated`. Raises TopologyError when neither works.

        >>> [p.shards for p in make_grouped_parts(2, [Part(4, name="q"), Part(2, replicated=True, name="k")], 4)]
        [(0, 2), (0, 2), (2, 4), (2, 4)]
    """
    if num_groups % num_shards and num_shards % num_groups:
        raise TopologyError(f"{num_groups} groups cannot be shared by {num_shards} shards; one must divide the other")
    shards_per_group = max(1, num_shards // num_groups)
    groups_per_shard = max(1, num_groups // num_shards)
    parts = []
    for group in range(num_groups):
        # One of the two factors is 1.
        first = group // groups_per_shard * shards_per_group
        for block in blocks:
            shards = (first, first + shards_per_group)
            parts.append(Part(block.size, shards, block.replicated and shards_per_group > 1, block.name))
    return tuple(parts)


def place(param: Tensor, placement: Placement) -> None:
    """Attach the placement to the parameter. Raises ValueError when the parameter has another shape."""
    if tuple(param.shape) != placement.local_shape:
        raise ValueError(f"{placement.name}: shape {tuple(param.shape)}; its placement says {placement.local_shape}")
    # An attribute of the parameter, so that all code that has the parameter can read it; no table has to be kept in
    # step.
    param.placement = placement  # type: ignore[attr-defined]
    marks = placement.marks()
    vars(param).update(marks)
    for index, part in enumerate(getattr(param, "parts", ())):
        place(part, placement.element(index))
        part.allreduce = marks["allreduce"]


def get_placement(param: Tensor, name: str | None = None) -> Placement:
    """The parameter's placement.

    A parameter that was never placed (of a plain torch module) counts as held whole by every process, when the caller
    gives its name; without a name it is a mistake and raises ValueError. What it is follows from its name and shape,
    or from upstream's mark for tables and output layers, the attribute `is_embedding_or_output_parameter`.
    """
    placement = getattr(param, "placement", None)
    if placement is not None:
        assert isinstance(placement, Placement)
        return placement
    if name is None:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} carries no Placement; give it one with place()")
    is_marked = getattr(param, "is_embedding_or_output_parameter", False)
    return Placement(name, tuple(param.shape), kind="embedding" if is_marked else None)


def suggest_kind(name: str, shape: Sequence[int]) -> Kind:
    """Return the kind of a parameter that was not declared, by upstream's names and its shape.

    >>> suggest_kind("decoder.layers.0.self_attention.q_layernorm.weight", (64,))
    'qk_norm'
    """
    # Before the test for vectors, which these are, too.
    if "q_layernorm." in name or "k_layernorm." in name:
        return "qk_norm"
    if len(shape) < 2 or name.endswith(".bias"):
        return "vector"
    # So that a name ends alike with a prefix and without one.
    path = f".{name}"
    if path.endswith(".output_layer.weight"):
        return "head"
    return "embedding" if path.endswith(".word_embeddings.weight") else "matrix"


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in box)
