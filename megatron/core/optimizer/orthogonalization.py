# SPDX-License-Identifier: Apache-2.0
"""The nearest matrix with orthonormal rows or columns, approximately, by matrix products only.

An odd polynomial p(s) = a s + b s^3 + c s^5 applied to a matrix acts on its singular values and leaves the singular
vectors alone; a few of them in a row bring every singular value near 1 (Newton-Schulz iteration; Bernstein and
Newhouse, 2024, Old Optimizer, New Norm; Jordan et al., 2024, Muon). With the Gram matrix G = X X^T:

    X <- a X + (b G + c G^2) X
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron.core.device import is_cuda

Coefficients = tuple[float, float, float]

COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    # Jordan et al., 2024: the steepest at zero that stays bounded; one for all steps.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # Cesista, Jiacheng and Jordan, 2025, Squeezing 1-2% Efficiency Gains Out of Muon: five, optimised together.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., 2025, The Polar Express: the best for each step, given the ones before.
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
}
_EPSILON = 1e-7


class NewtonSchulz(NamedTuple):
    """A Newton-Schulz iteration: its coefficients, its dtype, and the iteration itself."""

    coefficients: tuple[Coefficients, ...]
    """Of each step; the last ones repeat where there are more steps."""
    steps: int
    precision: Literal["low", "medium", "high"]
    """low: everything in bfloat16. medium, high: float32, whose products a GPU may make from TensorFloat-32
    (torch.set_float32_matmul_precision, to which the two are the same on a GPU)."""
    use_syrk: bool = False
    """Compute half of each symmetric product, by blocks; the other half is its mirror image."""

    def orthogonalize(self, matrix: Tensor) -> Tensor:
        """[m, n] float32 -> [m, n] float32 with singular values near 1."""
        # The Gram matrix has the side of the first dimension; transposed, it is the smaller of the two.
        if matrix.shape[0] > matrix.shape[1]:
            return self.iterate(matrix.t()).t()
        return self.iterate(matrix)

    def iterate(
        self, matrix: Tensor, total: Callable[[Tensor], Tensor] = lambda part: part, counted: Tensor | None = None
    ) -> Tensor:
        """The same for a matrix of which processes may hold some columns each: [m, n / processes].

        total: sum over the processes. counted [n / processes]: 1 for the columns that this process counts, 0 for those
        that another one holds as well; all when None.
        """
        x = matrix.bfloat16() if self.precision == "low" else matrix
        own = x if counted is None else x * counted.to(x.dtype)
        with _set_float32_precision(self.precision, x.device):
            # The Frobenius norm is at least the largest singular value, and the polynomials converge only from values
            # up to 1.
            x = x / total(own.float().square().sum()).sqrt().clamp(min=_EPSILON).to(x.dtype)
            for step in range(self.steps):
                a, b, c = self.coefficients[min(step, len(self.coefficients) - 1)]
                own = x if counted is None else x * counted.to(x.dtype)
                if self.use_syrk:
                    gram = total(multiply_by_transpose(own))
                    x = torch.addmm(x, b * gram + c * multiply_by_transpose(gram), x, beta=a)
                    continue
                gram = total(own @ own.t())
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.float()


def multiply_by_transpose(x: Tensor, blocks: int = 4) -> Tensor:
    """x x^T, [m, n] -> [m, m]: of so many blocks of rows each pair is multiplied once, (blocks + 1) / (2 blocks) of the
    work."""
    result = x.new_empty(x.shape[0], x.shape[0])
    end = 0
    for rows in x.chunk(blocks):
        start, end = end, end + rows.shape[0]
        torch.mm(rows, x[:end].t(), out=result[start:end, :end])
        result[:start, start:end] = result[start:end, :start].t()
    return result


@contextlib.contextmanager
def _set_float32_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Set how torch computes products of float32 matrices on a GPU while the context is open."""
    # Not on CPUs: those with matrix units (AMX) would make "medium" products of bfloat16, whose rounding shows as a
    # difference between layouts after a few steps; all others would make them of float32.
    if precision == "low" or not is_cuda(device):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
