# SPDX-License-Identifier: Apache-2.0
"""The products of all experts: a linear layer for each expert, on rows sorted by expert.

    forward            Y_e = X_e W_e^T        [rows of e, in] x [in, out]
    input gradient     dX_e = dY_e W_e        [rows of e, out] x [out, in]
    weight gradient    G_e += dY_e^T X_e      [out, rows of e] x [rows of e, in]

One product after the other; or all in one call of torch's grouped_mm, which spares the host the wait for the numbers of
rows; or of bmm where all experts have as many rows. They are products as tensor_parallel/products.py describes them, of
a stack of weights [experts, out, in]; `ends` [experts] int32 says where each expert's rows end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.fp8 import Operand
from megatron.core.kernels.launching import by_kernel
from megatron.core.tensor_parallel.fp8_products import GRAD, INPUT, FP8Matmul
from megatron.core.tensor_parallel.packed_products import OrderedCopies
from megatron.core.tensor_parallel.products import Kept, Product, accumulates_weight_grads, add_weight_grad
from megatron.core.transformer.transformer_config import TransformerConfig

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class ExpertByExpert(Product):
    """One matrix product for each expert, on every device; the host waits for the numbers of rows."""

    name = "one product for each expert"
    copies: OrderedCopies | None = None
    """In generation: what the rows of an expert are multiplied by instead of its weight, where that is faster."""

    def __init__(self, *, accumulates: bool = True) -> None:
        self.accumulates = accumulates

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """Rows of all experts [n, in] -> [n, out]."""
        assert bias is None and ends is not None, "an expert's bias is added outside, row by row"
        if self.copies is None or not self.copies.suit(x, weight):
            return self._multiply_rows(x, weight.transpose(1, 2), ends)
        parts = enumerate(x.split(count_rows(ends)))
        found = [self.copies.multiply(part, weight, index=index) for index, part in parts if len(part)]
        return torch.cat(found) if found else x.new_empty(0, weight.shape[1])

    def input_grad(self, grad: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        """Output gradients [n, out] -> input gradients [n, in]."""
        assert ends is not None
        return self._multiply_rows(grad.contiguous(), weight, ends)

    def weight_grad(
        self, grad: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, ends: Tensor | None = None
    ) -> Tensor | None:
        """Output gradients [n, out] and inputs [n, in] -> [experts, out, in], or None when added to main_grad."""
        assert ends is not None
        rows_per_expert = count_rows(ends)
        # One product for each expert, straight into its slice of the gradient buffer.
        parts = zip(grad.split(rows_per_expert), x.split(rows_per_expert), strict=True)
        if main_grad is None:
            return torch.stack([grad_rows.t() @ x_rows for grad_rows, x_rows in parts])
        for into, (grad_rows, x_rows) in zip(main_grad, parts, strict=True):
            if len(x_rows):  # a product over no rows adds zeros, at the price of a kernel
                add_weight_grad(into, grad_rows, x_rows)
        return None

    def _multiply_rows(self, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        """[n, in] x [experts, in, out] -> [n, out]."""
        out = x.new_empty(x.shape[0], matrices.shape[2])
        rows_per_expert = count_rows(ends)
        for part, into, matrix in zip(x.split(rows_per_expert), out.split(rows_per_expert), matrices, strict=True):
            # Written in place: joining the experts' results would copy them once more.
            torch.mm(part, matrix, out=into)
        return out


class GroupedMatmul(ExpertByExpert):
    """The products of all experts in one call of grouped_mm: the host need not know how many rows each has."""

    name = "grouped_mm"

    def weight_grad(
        self, grad: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, ends: Tensor | None = None
    ) -> Tensor | None:
        """Output gradients [n, out] and inputs [n, in] -> [experts, out, in], or None when added to main_grad."""
        if not x.shape[0]:  # grouped_mm refuses operands without rows
            return super().weight_grad(grad, x, weight, main_grad, ends)
        assert _grouped_mm is not None and ends is not None
        grad = grad.contiguous()
        if main_grad is not None:
            return _add_weight_grads(grad, x, ends, main_grad)
        result: Tensor = _grouped_mm(grad.t(), x, offs=ends)
        return result

    def _multiply_rows(self, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        assert _grouped_mm is not None
        if not x.shape[0]:
            return x.new_empty(0, matrices.shape[2])
        result: Tensor = _grouped_mm(x, matrices, offs=ends)
        return result


def _is_mixed(grad: Tensor, x: Tensor, ends: Tensor, main_grad: Tensor) -> bool:
    """Return True for 16-bit operands and a sum in float32."""
    return grad.dtype == x.dtype != main_grad.dtype == torch.float32


@by_kernel("megatron.core.kernels.expert_weight_grads:add_weight_grads", "grad", "x", "main_grad", fits=_is_mixed)
def _add_weight_grads(grad: Tensor, x: Tensor, ends: Tensor, main_grad: Tensor) -> None:
    # grouped_mm cannot add to what is there: a temporary as large as the weights.
    assert _grouped_mm is not None
    main_grad.add_(_grouped_mm(grad.t(), x, offs=ends))


class BatchedMatmul(ExpertByExpert):
    """The products of experts that all have the same number of rows, in one call of torch's bmm: the host waits for
    nothing."""

    name = "bmm"

    def weight_grad(
        self, grad: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, ends: Tensor | None = None
    ) -> Tensor | None:
        """Output gradients [n, out] and inputs [n, in] -> [experts, out, in], or None when added to main_grad."""
        experts = weight.shape[0]
        grads, inputs = (rows.reshape(experts, -1, rows.shape[-1]) for rows in (grad, x))
        if main_grad is None:
            return torch.bmm(grads.transpose(1, 2), inputs)
        if main_grad.dtype == grad.dtype:
            main_grad.baddbmm_(grads.transpose(1, 2), inputs)
        else:
            main_grad.add_(torch.bmm(grads.transpose(1, 2), inputs))
        return None

    def _multiply_rows(self, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        return torch.bmm(x.reshape(matrices.shape[0], -1, x.shape[-1]), matrices).flatten(0, 1)


class FP8Experts(FP8Matmul):
    """The products of all experts in FP8, one after the other. With one scale for a whole matrix, all experts of a
    layer share it; blocks of rows, as weight gradients have them, end with an expert's rows."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """Rows of all experts [n, in] -> [n, out]."""
        assert bias is None and ends is not None, "an expert's bias is added outside, row by row"
        if self.falls_back:
            return self._exact.forward(x, weight, ends=ends)
        return self._multiply_rows(self._round(INPUT, x), weight, ends, x.dtype, over_rows=False)

    def forward_keeping(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None
    ) -> tuple[Tensor, Kept]:
        """`forward`, and the rows in 8 bits where the weight gradient reads them so."""
        assert bias is None and ends is not None, "an expert's bias is added outside, row by row"
        if not self.has_smaller_form:
            return self.forward(x, weight, ends=ends), x
        rounded = self._round(INPUT, x)
        y = self._multiply_rows(rounded, weight, ends, x.dtype, over_rows=False)
        if self.recipe.has_one_scale(INPUT):
            return y, self.recipe.pack(rounded)
        # Blocks of tokens end with an expert's rows, so that an expert's scales follow the previous expert's.
        parts = x.split(count_rows(ends))
        of_experts = [self.recipe.pack(self._round_for_weight_grad(rounded, part)) for part in parts]
        return y, tuple(
            torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors)
            for tensors in zip(*of_experts, strict=True)
        )

    def input_grad(self, grad: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        """Output gradients [n, out] -> input gradients [n, in]."""
        assert ends is not None
        if self.falls_back:
            return self._exact.input_grad(grad, weight, ends)
        return self._multiply_rows(self._round_grad(grad), weight, ends, grad.dtype, over_rows=True)

    def weight_grad(
        self, grad: Tensor, x: Kept, weight: Tensor, main_grad: Tensor | None, ends: Tensor | None = None
    ) -> Tensor | None:
        """Output gradients [n, out] and inputs [n, in], or what forward_keeping kept of them -> [experts, out, in], or
        None when added to main_grad."""
        assert ends is not None
        if self.falls_back:
            return self._exact.weight_grad(grad, x, weight, main_grad, ends)
        if not self.recipe.rounds_weight_grad:
            assert isinstance(x, Tensor)
            return ExpertByExpert(accumulates=self.accumulates).weight_grad(grad, x, weight, main_grad, ends)
        into = torch.zeros_like(weight, dtype=torch.float32) if main_grad is None else main_grad
        rows_per_expert = count_rows(ends)
        grads, inputs = self._list_grads(grad, rows_per_expert), self._list_inputs(x, rows_per_expert)
        for of_expert, rows, left, right in zip(into, rows_per_expert, grads, inputs, strict=True):
            if rows:
                self._add_product(left.transposed, right.transposed, of_expert)
        return into.to(weight.dtype) if main_grad is None else None

    def _list_grads(self, grad: Tensor, rows_per_expert: list[int]) -> Iterator[Operand]:
        """Output gradients of each expert [rows of e, out], rounded to be summed over them."""
        # A full matrix has one scale for all experts' rows; blocks along the rows belong to one expert.
        if self.recipe.has_one_scale(GRAD):
            yield from _split_rows(self._round_grad_again(grad).transposed, rows_per_expert)
            return
        for part in grad.split(rows_per_expert):
            yield self._round(GRAD, part, over_rows=True).transposed

    def _list_inputs(self, x: Kept, rows_per_expert: list[int]) -> Iterator[Operand]:
        """Inputs of each expert [rows of e, in], rounded to be summed over them."""
        has_one_scale = self.recipe.has_one_scale(INPUT)
        if isinstance(x, Tensor) and not has_one_scale:
            for part in x.split(rows_per_expert):
                yield self._round(INPUT, part, over_rows=True).transposed
        elif isinstance(x, Tensor):
            yield from _split_rows(self._round(INPUT, x), rows_per_expert)
        else:
            multiple = self.recipe.rows_of_weight_grad
            yield from _split_rows(self.recipe.unpack(x), [-(-rows // multiple) * multiple for rows in rows_per_expert])

    def _multiply_rows(
        self, rounded: Operand, weight: Tensor, ends: Tensor, dtype: torch.dtype, *, over_rows: bool
    ) -> Tensor:
        """Rounded rows [n, k] times each expert's matrix, in `dtype`; over_rows: summed over the matrix's rows."""
        matrices = self._round_weight(weight, over_rows=over_rows)
        rows, width = rounded.values.shape[0], matrices.values.shape[1]
        result = torch.empty(rows, width, dtype=dtype, device=rounded.values.device)
        rows_per_expert = count_rows(ends)
        parts = zip(_split_rows(rounded, rows_per_expert), result.split(rows_per_expert), strict=True)
        for index, (part, into) in enumerate(parts):
            if len(into):
                into.copy_(self._multiply(part, matrices.select_matrix(index), dtype))
        return result


def _split_rows(rounded: Operand, rows_per_expert: list[int]) -> Iterator[Operand]:
    """The operands [rows of e, k] of a matrix [n, k] that was rounded whole, or expert by expert."""
    start = blocks = 0
    for index, rows in enumerate(rows_per_expert):
        inverse, factor = rounded.inverse, rounded.factor
        if rounded.block is not None:
            count = -(-rows // rounded.block[0])
            inverse = inverse[blocks : blocks + count]
            blocks += count
        if factor is not None and factor.dim():  # one for each expert
            factor = factor[index]
        yield Operand(rounded.values[start : start + rows], inverse, rounded.block, factor)
        start += rows


def count_rows(ends: Tensor) -> list[int]:
    """Rows of each expert, of where they end, int32 [experts]; on the host, which waits for the device."""
    stops = [0, *ends.tolist()]
    return [stop - start for start, stop in zip(stops, stops[1:], strict=False)]


def choose_expert_product(
    config: TransformerConfig, widths: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Product:
    """A new product for one layer of all local experts: bmm where all have as many rows, grouped_mm where it is wanted
    and takes such weights.

    widths: inputs and outputs of an expert on this process. dtype: of the weights.
    """
    if config.moe_pad_expert_input_to_capacity:
        return BatchedMatmul(accumulates=accumulates_weight_grads(config))
    grouped = config.moe_grouped_gemm and grouped_mm_works(widths, dtype, device)
    return (GroupedMatmul if grouped else ExpertByExpert)(accumulates=accumulates_weight_grads(config))


@functools.cache
def grouped_mm_works(widths: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Try the three products of training on a few rows; returns whether GroupedMatmul computes what ExpertByExpert
    does.

    widths, dtype, device: see choose_expert_product.
    """
    # Which shapes and formats a device takes is documented nowhere and changes between releases: ask it.
    if _grouped_mm is None or device.type == "meta":
        return False
    inputs, outputs = widths
    # Separate operands, as in training: a product's result may have padded rows, which a kernel takes where it refuses
    # rows without padding.
    x, grad = (_first_and_last_column(16, width, dtype, device) for width in (inputs, outputs))
    weight = torch.ones(2, outputs, inputs, dtype=dtype, device=device)
    # The second expert without rows, as it happens in training.
    ends = torch.tensor([16, 16], dtype=torch.int32, device=device)

    def multiply_all(product: Product) -> list[Tensor | None]:
        return [
            product.forward(x, weight, ends=ends),
            product.input_grad(grad, weight, ends),
            product.weight_grad(grad, x, weight, None, ends),
        ]

    try:
        found = multiply_all(GroupedMatmul())
    except RuntimeError:  # not for this device, these widths or this dtype; NotImplementedError is one
        return False
    return all(
        result is not None and expected is not None and torch.equal(result, expected)
        for result, expected in zip(found, multiply_all(ExpertByExpert()), strict=True)
    )


def _first_and_last_column(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, width] with ones in the first and last column, else zeros: products with them are exact in any dtype, in
    whatever order a kernel adds them up."""
    matrix = torch.zeros(rows, width, dtype=dtype, device=device)
    matrix[:, 0] = matrix[:, -1] = 1.0
    return matrix
