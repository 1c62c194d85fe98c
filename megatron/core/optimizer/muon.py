# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum, orthogonalised (Jordan et al., 2024; Liu et al., 2025, Muon is Scalable for LLM Training).

    m = momentum m + (1 - momentum) g          u = m, or with Nesterov momentum m + (1 - momentum) g
    w = (1 - lr weight_decay) w - lr scale orthogonal(u)

An orthogonal factor needs the whole matrix, which processes may have cut:

| cut by                                  | the whole comes together                                                  |
|-----------------------------------------|---------------------------------------------------------------------------|
| tensor parallelism, mode duplicated     | gathered; each process computes all of it and keeps its shard              |
| tensor parallelism, mode distributed    | not at all: only the small Gram matrices are summed                       |
| tensor parallelism, mode blockwise      | not at all: each shard is orthogonalised alone, another algorithm         |
| the distributed optimizer               | each process computes the matrices that its slice meets; of those that    |
|                                         | reach over the end of a slice, the pieces of u are summed into whole ones |
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor, all_reduce
from megatron.core.optimizer.group_state import FlatShard
from megatron.core.optimizer.orthogonalization import COEFFICIENTS, NewtonSchulz
from megatron.core.optimizer.update_rules import UpdatedGroup, UpdateRule
from megatron.core.optimizer.whole_matrices import assemble_matrices, find_cutting_group, locate_member, take_single
from megatron.core.placement import Placement, Split, get_placement
from megatron.core.process_groups_config import Group, ProcessGroupCollection

# Put here by a table of upstream's names; declared for type checkers.
get_megatron_muon_optimizer: Any

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

Rows = list[tuple[int, int]]
"""(start, length) of the rows that are orthogonalised together."""


class Muon(UpdateRule):
    """The rule of --optimizer muon for matrices. groups: the process groups that may have cut them."""

    kinds = ("momentum_buffer",)

    def __init__(self, config: OptimizerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(momentum=config.muon_momentum, nesterov=config.muon_nesterov)
        self.config = config
        self.groups = groups
        self.newton_schulz = NewtonSchulz(
            COEFFICIENTS[config.muon_coefficient_type],
            config.muon_num_ns_steps,
            config.muon_fp32_matmul_prec,  # type: ignore[arg-type]
            config.muon_use_syrk,
        )

    @classmethod
    def from_config(cls, config: OptimizerConfig, groups: ProcessGroupCollection) -> Muon:
        return cls(config, groups)

    def update(self, group: UpdatedGroup, step: Tensor, divisor: Tensor | None, found_inf: Tensor) -> None:
        options = group.options

        def direction(shard: FlatShard) -> list[Tensor]:
            """Advance the momentum; u."""
            # In place: the gradient is not needed after the momentum has taken it in.
            grad = shard.grad if divisor is None else shard.grad.div_(divisor)
            mean = shard.state["momentum_buffer"].lerp_(grad, 1.0 - options["momentum"])
            return [torch.lerp(grad, mean, options["momentum"]) if options["nesterov"] else mean]

        for state in group.states:
            # Every process computes all of each matrix that it holds a piece of, and keeps its piece: nothing has to be
            # sent back.
            for member, (matrix,) in assemble_matrices(state, direction, 1):
                change = self.orthogonal(matrix, get_placement(member.param, member.name)).reshape(-1)
                for piece, place in state.pieces([locate_member(member)]):
                    values = state.values(piece, place)
                    values.mul_(1.0 - options["lr"] * options["weight_decay"])
                    first = piece[0] - member.slot.start
                    values.add_(change[first : first + values.numel()], alpha=-options["lr"])

    # ---- orthogonal(u) times its scale

    def orthogonal(self, matrix: Tensor, placement: Placement) -> Tensor:
        """The scaled orthogonal factor of the whole matrix of which `matrix` is this process's shard: its shard. Of a
        stack [experts, out, in] each matrix by itself."""
        if matrix.dim() == 3:
            single = take_single(placement)
            return torch.stack([self.orthogonal(part, single) for part in matrix])
        cut = [split for split in placement.splits if split.num_shards > 1]
        assert len(cut) <= 1, f"{placement.name} is cut along two dimensions"
        # Also where the matrix is whole: then the shard is the matrix.
        if not cut or self.config.muon_tp_mode == "blockwise":
            return self._orthogonalize_rows(matrix, self._list_shard_rows(placement))
        group = find_cutting_group(cut[0], self.groups)
        if self.config.muon_tp_mode == "distributed":
            return self._orthogonalize_distributed(matrix, placement, cut[0], group)
        gathered = matrix.new_empty(group.size() * matrix.shape[0], matrix.shape[1])
        all_gather_into_tensor(gathered, matrix.contiguous(), group)
        whole = self._orthogonalize_rows(placement.join(gathered.chunk(group.size())), self._list_whole_rows(placement))
        return placement.take(whole)

    def _orthogonalize_rows(self, matrix: Tensor, blocks: list[Rows]) -> Tensor:
        """Each block of rows by itself."""
        if len(blocks) == 1:
            return self.newton_schulz.orthogonalize(matrix) * self._compute_scale(*matrix.shape)
        result = torch.empty_like(matrix)
        for rows in blocks:
            block = _take_rows(matrix, rows)
            _put_rows(result, rows, self.newton_schulz.orthogonalize(block) * self._compute_scale(*block.shape))
        return result

    def _orthogonalize_distributed(self, matrix: Tensor, placement: Placement, split: Split, group: Group) -> Tensor:
        """Only Gram matrices over the dimension that is not cut travel."""

        def total(part: Tensor) -> Tensor:
            summed = part.float()
            # The sum is in place, and `part` may still be needed.
            summed = summed.clone() if summed is part else summed
            all_reduce(summed, group)
            return summed.to(part.dtype)

        counted = torch.zeros(matrix.shape[split.dim], device=matrix.device)
        for run in split.runs(placement.full_shape[split.dim]):
            # Keys and values of few query groups lie on several ranks; a Gram matrix must count each of their rows
            # once.
            if run.owned:
                counted[run.local_start : run.local_start + run.length] = 1.0
        # Columns are cut: G = X X^T is a sum over columns, and each rank adds its columns' part.
        if split.dim == 1:
            scale = self._compute_scale(matrix.shape[0], placement.full_shape[1])
            return self.newton_schulz.iterate(matrix, total, counted) * scale
        result = torch.empty_like(matrix)
        heights = [sum(length for _, length in rows) for rows in self._list_whole_rows(placement)]
        for rows, height in zip(self._list_shard_rows(placement), heights, strict=True):
            block, own = _take_rows(matrix, rows), _take_rows(counted, rows)
            # Rows are cut: the transposed block has its columns cut, which is the case above.
            found = self.newton_schulz.iterate(block.t(), total, own).t()
            _put_rows(result, rows, found * self._compute_scale(height, matrix.shape[1]))
        return result

    def _list_shard_rows(self, placement: Placement) -> list[Rows]:
        split = self._find_qkv_split(placement)
        if split is None:
            return [[(0, placement.local_shape[0])]]
        return _group_rows(split.local_parts(placement.full_shape[0]))

    def _list_whole_rows(self, placement: Placement) -> list[Rows]:
        split = self._find_qkv_split(placement)
        if split is None:
            return [[(0, placement.full_shape[0])]]
        return _group_rows(placement.named_parts())

    def _find_qkv_split(self, placement: Placement) -> Split | None:
        """Find the split of queries, keys and values that are one matrix, where each is to be orthogonalised for
        itself."""
        for split in placement.splits:
            if split.dim == 0 and any(part.name == "query" for part in split.parts or ()):
                return split if self.config.muon_split_qkv else None
        return None

    def _compute_scale(self, rows: int, columns: int) -> float:
        """Return what the size of an update depends on: rows are outputs, columns are inputs.

        spectral: elements as large in every shape (Liu et al., 2025, who take --muon-extra-scale-factor 0.2 to be as
        large as Adam's). unit_rms_norm: Bernstein and Newhouse (2024). shape_scaling: Jordan et al. (2024).
        """
        match self.config.muon_scale_mode:
            case "spectral":
                factor = math.sqrt(max(rows, columns))
            case "unit_rms_norm":
                factor = math.sqrt(rows / columns)
            case _:
                factor = math.sqrt(max(1.0, rows / columns))
        return factor * self.config.muon_extra_scale_factor


def _take_rows(matrix: Tensor, rows: Rows) -> Tensor:
    return torch.cat([matrix[start : start + length] for start, length in rows])


def _put_rows(matrix: Tensor, rows: Rows, values: Tensor) -> None:
    for (start, length), part in zip(rows, values.split([length for _, length in rows]), strict=True):
        matrix[start : start + length] = part


def _group_rows(parts: list[tuple[str, int, int]]) -> list[Rows]:
    """Rows of parts of one name belong together; in the order in which the names first come."""
    found: dict[str, Rows] = {}
    for name, start, length in parts:
        found.setdefault(name, []).append((start, length))
    return list(found.values())
