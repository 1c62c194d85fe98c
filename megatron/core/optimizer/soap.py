# SPDX-License-Identifier: Apache-2.0
"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al., 2024, algorithms 3 and 4).

    g' = Ql^T g Qr                                       the gradient in the basis
    m = beta1 m + (1 - beta1) g,    v = beta2 v + (1 - beta2) g'^2
    w = (1 - lr weight_decay) w - lr Ql (Ql^T m Qr / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) Qr^T
    L = beta2 L + (1 - beta2) g g^T,    R = beta2 R + (1 - beta2) g^T g
    every f updates Ql = orthonormal((L + s(L)) Ql), Qr = orthonormal((R + s(R)) Qr),    s(X) = SHIFT mean(diagonal(X))

Ql and Qr begin as unit matrices, so that the first f updates are Adam's. Each change is one step of orthogonal
iteration (algorithm 4), which turns the columns to the eigenvectors. Before it the columns are brought into the order
of falling eigenvalues, and v with them: in another order the iteration moves them to other eigenvectors than those
whose v they have. A side longer than LONGEST keeps the unit matrix, as in the paper.

Eigenvectors are open where gradients have a lower rank than a side is long, and Adam's division would make full
updates of whatever rounding put there. Therefore L and R are float64, in which a product of two float32 numbers is
exact, and the shift lets directions without gradient stay where they are: the bases are smooth functions of the
gradients, and rounding in these stays rounding in the update.

Every process that updates something of a matrix computes all of it, from the shards of the tensor-parallel ranks and
the slices of the distributed optimizer; m and v are divided like the matrix, L, R, Ql and Qr are unsharded. Weights of
experts are stacks of matrices, each with separate bases: of a stack, a process computes the matrices of which it
updates something, all in one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor
from megatron.core.optimizer.group_state import GroupState, Member
from megatron.core.optimizer.update_rules import UpdatedGroup, UpdateRule
from megatron.core.optimizer.whole_matrices import (
    assemble_matrices,
    find_cutting_group,
    is_ours,
    locate_member,
    take_stack,
)
from megatron.core.placement import Placement, get_placement
from megatron.core.process_groups_config import ProcessGroupCollection

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

LONGEST = 10_000
"""Rows or columns of a matrix up to which that side has a basis."""

SHIFT = 0.01
"""Added to every eigenvalue of a preconditioner before its basis changes, in units of their mean."""


class Soap(UpdateRule):
    """The rule of --optimizer soap for matrices. groups: the process groups that may have cut them."""

    kinds = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
        self.interval = config.soap_precondition_frequency
        self.groups = groups
        self._bases: dict[str, _Bases] = {}
        self._stack_starts: dict[str, int] = {}

    @classmethod
    def from_config(cls, config: OptimizerConfig, groups: ProcessGroupCollection) -> Soap:
        return cls(config, groups)

    def begin(self, states: Sequence[GroupState]) -> None:
        for state in states:
            for member in state.members:
                if is_ours(state, member):
                    placement = get_placement(member.param, member.name)
                    rows, columns = placement.full_shape[-2:]
                    stack = () if member.param.dim() == 2 else (len(_find_own_matrices(state, member)),)
                    self._bases[member.name] = _Bases(rows, columns, state.buffer.device, stack)
                    if stack:
                        before = placement.boxes()[0][0][0]  # matrices of the processes before this one
                        self._stack_starts[member.name] = before + _find_own_matrices(state, member).start

    def whole_state(self) -> dict[str, dict[str, Tensor]]:
        return {name: bases.tensors for name, bases in self._bases.items()}

    def stack_starts(self) -> dict[str, int]:
        return self._stack_starts

    def update(self, group: UpdatedGroup, step: Tensor, divisor: Tensor | None, found_inf: Tensor) -> None:
        # The host must know whether the basis changes in this step; a rule that does not keep still has waited already.
        number = int(step.item())
        for state in group.states:
            found = assemble_matrices(state, lambda shard: (shard.grad, *(shard.state[kind] for kind in self.kinds)), 3)
            for member, tensors in found:
                placement, start = get_placement(member.param, member.name), 0
                if member.param.dim() == 3:
                    own = _find_own_matrices(state, member)
                    tensors = [tensor[own.start : own.stop] for tensor in tensors]
                    placement, start = take_stack(placement, len(own)), own.start
                grad, mean, square = (self._gather(tensor, placement) for tensor in tensors)
                if divisor is not None:
                    grad = grad / divisor
                bases = self._bases[member.name]
                change = self._advance(bases, grad, mean, square, number, group)
                # After the update, in the order of the paper's algorithm 3.
                bases.update_grams(grad, group.options["betas"][1])
                if number % self.interval == 0:
                    bases.update_bases(square)
                # Every rank that updates a piece has computed the full matrix; keeping the local shard spares a
                # broadcast.
                self._write(state, member, [placement.take(x) for x in (change, mean, square)], group, start)

    def _advance(
        self, bases: _Bases, grad: Tensor, mean: Tensor, square: Tensor, step: int, group: UpdatedGroup
    ) -> Tensor:
        """Advance m and v in place; the change of the matrix for a learning rate of 1."""
        beta1, beta2 = group.options["betas"]
        mean.lerp_(grad, 1.0 - beta1)
        square.lerp_(bases.rotate(grad).square_(), 1.0 - beta2)
        root = (square / (1.0 - beta2**step)).sqrt_().add_(group.options["eps"])
        return bases.rotate_back((bases.rotate(mean) / (1.0 - beta1**step)).div_(root))

    def _gather(self, shard: Tensor, placement: Placement) -> Tensor:
        """The full matrix, or stack of matrices, of which this is a tensor-parallel rank's shard; in new memory."""
        cut = [split for split in placement.splits if split.num_shards > 1]
        assert len(cut) <= 1, f"{placement.name} is cut along two dimensions"
        if not cut:
            return shard.clone()
        group = find_cutting_group(cut[0], self.groups)
        gathered = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
        all_gather_into_tensor(gathered, shard.contiguous(), group)
        return placement.join(gathered.chunk(group.size()))

    def _write(
        self, state: GroupState, member: Member, shards: list[Tensor], group: UpdatedGroup, first_matrix: int
    ) -> None:
        """Keep of the change, m and v what this process updates. first_matrix: of a stack, the one they begin with."""
        lr, decay = group.options["lr"], group.options["weight_decay"]
        change, mean, square = (shard.reshape(-1) for shard in shards)
        begin = member.slot.start + first_matrix * math.prod(shards[0].shape[-2:])
        for piece, place in state.pieces([locate_member(member)]):
            part = slice(piece[0] - begin, piece[1] - begin)
            state.values(piece, place).mul_(1.0 - lr * decay).add_(change[part], alpha=-lr)
            state.tensors["exp_avg"][place] = mean[part]
            state.tensors["exp_avg_sq"][place] = square[part]


def _find_own_matrices(state: GroupState, member: Member) -> range:
    """The matrices of a stack [matrices, rows, columns] of which this process updates something."""
    size = math.prod(member.param.shape[1:])
    pieces = [piece for piece, _ in state.pieces([locate_member(member)])]
    return range((pieces[0][0] - member.slot.start) // size, -((member.slot.start - pieces[-1][1]) // size))


class _Bases:
    """Preconditioners and bases of one matrix, [rows, rows] and [columns, columns], or of a stack of them; none on a
    side too long."""

    def __init__(self, rows: int, columns: int, device: torch.device, stack: tuple[int, ...] = ()) -> None:
        self.tensors: dict[str, Tensor] = {}
        for side, size in (("left", rows), ("right", columns)):
            # A basis takes size^2 memory, and to change it size^3 operations.
            if size <= LONGEST:
                shape = (*stack, size, size)
                self.tensors[f"soap_{side}_gram"] = torch.zeros(shape, dtype=torch.float64, device=device)
                self.tensors[f"soap_{side}_basis"] = torch.eye(size, device=device).expand(shape).contiguous()

    def rotate(self, matrix: Tensor) -> Tensor:
        """Ql^T matrix Qr, in new memory."""
        left, right = (self.tensors.get(f"soap_{side}_basis") for side in ("left", "right"))
        turned = matrix if left is None else left.mT @ matrix
        # Without any basis `turned` is the caller's matrix, and the caller squares the result in place.
        return turned.clone() if right is None else turned @ right

    def rotate_back(self, matrix: Tensor) -> Tensor:
        """Ql matrix Qr^T."""
        left, right = (self.tensors.get(f"soap_{side}_basis") for side in ("left", "right"))
        turned = matrix if left is None else left @ matrix
        return turned if right is None else turned @ right.mT

    def update_grams(self, grad: Tensor, beta: float) -> None:
        """Advance the preconditioners L and R by one gradient, [.., rows, columns] in float32."""
        wide = grad.double()
        for side, matrix in (("left", wide), ("right", wide.mT)):
            gram = self.tensors.get(f"soap_{side}_gram")
            if gram is not None:
                gram.lerp_(matrix @ matrix.mT, 1.0 - beta)

    def update_bases(self, square: Tensor) -> None:
        """Turn the bases Ql and Qr towards the eigenvectors of L and R, largest eigenvalues first.

        square: v, [.., rows, columns] in the bases; put into the columns' new order in place.
        """
        for dim, side in ((-2, "left"), (-1, "right")):
            gram = self.tensors.get(f"soap_{side}_gram")
            if gram is None:
                continue
            basis = self.tensors[f"soap_{side}_basis"]
            wide = basis.double()
            mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
            turned = (gram @ wide).add_(wide * mean, alpha=SHIFT)
            # A column's Rayleigh quotient: the eigenvalue, once it is an eigenvector.
            order = (wide * turned).sum(dim=-2).argsort(descending=True, stable=True)
            basis.copy_(torch.linalg.qr(turned.take_along_dim(order.unsqueeze(-2), -1))[0])
            # A column of Ql belongs to a row of v, one of Qr to a column.
            square.copy_(square.take_along_dim(order.unsqueeze(-3 - dim), dim))
