# SPDX-License-Identifier: Apache-2.0
"""A linear layer's three products in FP8 or NVFP4, and the state of their scales.

    forward            Y  = X W^T       scales along `in`
    input gradient     dX = dY W        scales along `out`
    weight gradient    G += dY^T X      scales along the tokens

Each operand is rounded to 8 bits (megatron/core/fp8.py) or 4 (megatron/core/fp4.py), where scales belong to stretches
of the sum once for each direction in which it is summed; where a matrix has one scale, once for both. A weight is
rounded once per step. In NVFP4 output gradients are rounded at random, and operands of weight gradients transformed.

Products run on the device's kernel, or are emulated in float32 from the same 8-bit values, with the same result up to
the order of sums. Results have the dtype of the operands that came in.

With delayed scaling, amax of each operand is the greatest of the whole step: of all microbatches, and of all processes
of the pipeline stage (`tp_dp_cp`, Transformer Engine's group, which the ranks of experts are a part of). Scales are
thus the same in every layout. Transformer Engine, which changes them with every microbatch, begins with the scale 1;
here an operand without a history is scaled by its current amax, in the first step the full matrix's. The other recipes
look at what a process multiplies, alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import fp4
from megatron.core.collectives import all_reduce
from megatron.core.device import current_device, device_name
from megatron.core.errors import ConfigError
from megatron.core.fp8 import (
    E4M3,
    E5M2,
    MX_BLOCK,
    SCALED_BLOCK,
    Operand,
    compute_scale,
    find_amax,
    make_rows_contiguous,
    multiply_emulated,
    quantise_blocks,
    quantise_tensor,
)
from megatron.core.kernels import launching
from megatron.core.operation_table import EMULATED, ONE_SCALE, Case, OperationWay, choose
from megatron.core.process_groups_config import Group
from megatron.core.tensor_parallel.products import Kept, Matmul, Product

OPERANDS = ("input", "weight", "grad")
INPUT, WEIGHT, GRAD = range(3)
STATISTICS = ("amax", "signal", "noise", "overflow", "underflow", "elements")
"""Sums taken over an operand with --log-fp8-stats; the first is a maximum. signal and noise are sums of squares;
overflow counts values beyond the format's greatest one, underflow those that became 0."""


@dataclass(frozen=True, kw_only=True)
class FP8Recipe:
    """Conversion of operands to 8-bit or 4-bit numbers, and the choice of who multiplies them. The fields follow the
    flags `--fp8-...`."""

    name: str
    """Of --fp8-recipe, or of --fp4-recipe."""
    hybrid: bool = False
    margin: int = 0
    interval: int = 1
    history_length: int = 1
    takes_largest: bool = False
    """Of the remembered amaxes; otherwise the last one."""
    rounds_weight_grad: bool = True
    way: OperationWay = EMULATED
    """Row of `linear` that multiplies."""
    measures: bool = False
    """True if to sum up STATISTICS."""
    may_fall_back: bool = False
    """True if a layer may go over to 16 bits during the run, which checkpoints then keep."""
    replicas: int = 1
    """By how much output gradients are larger here than in one process: a process divides its loss by its microbatches,
    and the mean over replicas comes later. Histories and scales are kept as in one process."""

    def format_of(self, operand: int) -> torch.dtype:
        """The dtype of one of OPERANDS."""
        return E5M2 if self.hybrid and operand == GRAD else E4M3

    def has_one_scale(self, operand: int) -> bool:
        """Return whether rounding is the same for either direction of the sum."""
        has_square_blocks = self.name in ("blockwise", "nvfp4")
        return self.name in ONE_SCALE or (has_square_blocks and operand == WEIGHT)

    @property
    def is_native(self) -> bool:
        """True if the tensor cores multiply the low-precision values."""
        return self.way is not EMULATED

    @property
    def largest_in_e4m3(self) -> float:
        """The greatest value that an operand in E4M3 may have."""
        return fp4.LARGEST if self.name == "nvfp4" else torch.finfo(E4M3).max

    @property
    def rows_of_weight_grad(self) -> int:
        """Of whose multiples a sum over tokens has rows; the last ones are filled."""
        return fp4.BLOCK if self.name == "nvfp4" else 1

    @property
    def kept_block(self) -> tuple[int, int] | None:
        """Tokens and inputs that share a scale where a sum over tokens reads an input."""
        return {"blockwise": (SCALED_BLOCK, 1), "mxfp8": (MX_BLOCK, 1), "nvfp4": (fp4.BLOCK, 1)}.get(self.name)

    def pack(self, rounded: Operand) -> tuple[Tensor, ...]:
        """The tensors of an input that are saved for backward."""
        return fp4.pack(rounded) if self.name == "nvfp4" else rounded.pack()

    def unpack(self, kept: tuple[Tensor, ...]) -> Operand:
        """The input [tokens, in] that `pack` made tensors of, rounded as a sum over tokens has it."""
        if self.name == "nvfp4":
            return fp4.unpack(kept, (fp4.BLOCK, 1))
        return Operand.unpack(kept, self.kept_block)

    def describe(self) -> str:
        """For the log: `FP8 hybrid, delayed scales, emulated in float32`."""
        if self.name == "nvfp4":
            return f"NVFP4, {self.way.name}"
        return f"FP8 {'hybrid' if self.hybrid else 'e4m3'}, {self.name} scales, {self.way.name}"


def choose_way(recipe: str, *, emulates: bool, device: torch.device) -> OperationWay:
    """Return the row of `linear` that multiplies on the device.

    emulates: --fp8-emulation. Raises ConfigError for a GPU that cannot, unless it is to be emulated there.
    """
    asked = frozenset(("emulation",) if emulates else ())
    choice = choose("linear", Case(recipe, device, asked=asked))
    if not choice.ways:
        flag = "--fp4-recipe" if recipe == "nvfp4" else "--fp8-recipe"
        native, obstacle = next(iter(choice.passed_over.items()))
        raise ConfigError(
            f"{flag} {recipe} has no products on {device_name()}: {native}: {obstacle}; use another recipe or --bf16 "
            "alone, or add --fp8-emulation, which computes the same numbers more slowly"
        )
    return choice.way


class HasScales(nn.Module):
    """A part of a linear layer, or of several, whose buffers are scales of 8-bit operands and what they follow from:
    the same on all processes of a pipeline stage, and kept in checkpoints under the layer's name."""


class FP8Matmul(Product, HasScales):
    """The products of one weight [out, in] in FP8."""

    amax_history: Tensor
    """[3, length], with delayed scaling: amax of each of OPERANDS in the last steps, the last one first; for gradients
    as it would be in one process."""
    amax: Tensor
    """[3], with delayed scaling: what of the history gives the scale of each of OPERANDS; 0 before the first step. Not
    the scale itself, so that a run may go on with another format or margin."""
    steps: Tensor
    """int64, with delayed scaling: how many steps have ended."""
    fallen_back: Tensor
    """int64, where that may happen: 1 when the layer multiplies in 16 bits."""

    def __init__(
        self,
        recipe: FP8Recipe,
        *,
        exact: Product | None = None,
        accumulates: bool = True,
        out_dtype: torch.dtype | None = None,
        keeps_rounded_input: bool = True,
        sharers: tuple[Group, Group] | None = None,
    ) -> None:
        """exact: the same product in the dtype of its operands; torch's when None. keeps_rounded_input: until backward
        in 8 bits, where the weight gradient reads it in 8 bits. sharers: processes that have parts of one matrix of
        tokens, and of one weight."""
        HasScales.__init__(self)
        self.recipe, self.accumulates, self.out_dtype = recipe, accumulates, out_dtype
        # A row's scale is of all tokens that a weight gradient sums, of which a rank may have a part.
        self.has_smaller_form = keeps_rounded_input and recipe.rounds_weight_grad and recipe.name != "rowwise"
        self.turns_input = self.has_smaller_form
        """True if an input is saved for backward in the order in which the weight gradient reads it."""
        self.name = recipe.describe()
        self._exact = Matmul(accumulates=accumulates, out_dtype=out_dtype) if exact is None else exact
        self.falls_back = False
        """True if products are exact ones from now on: what `fallen_back` says, on the host."""
        if recipe.may_fall_back:
            self.register_buffer("fallen_back", torch.zeros((), dtype=torch.int64, device=current_device()))
        if recipe.name == "delayed":
            # On the device itself: they have values also where parameters have no memory yet.
            device = current_device()
            self.register_buffer("amax_history", torch.zeros(len(OPERANDS), recipe.history_length, device=device))
            self.register_buffer("amax", torch.zeros(len(OPERANDS), device=device))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self._multiply_natively = recipe.way.load()
        # In the first step of this process, operands without a history have the scales of whole matrices.
        self._sharers = sharers
        # The greatest values of the step under way, and of those that kernels have found the bits.
        self._noted: list[Tensor | None] = [None] * len(OPERANDS)
        self._noted_bits: list[Tensor | None] = [None] * len(OPERANDS)
        self._states: Any = None
        self._statistics: list[Tensor | None] = [None] * len(OPERANDS)
        # The last output gradients, which two products read one after the other, how often they had been written to,
        # and what they were rounded to.
        self._grad: tuple[Tensor, int, Operand] | None = None
        # The weight in 8 bits, and which weight that was: its memory, how often that had been written to, and whether
        # it was rounded in training.
        self._weight: tuple[tuple[int, int, bool], Operand] | None = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """Multiply x [..., in] by the weight, and add the bias: -> [..., out]."""
        if self.falls_back:
            return self._exact.forward(x, weight, bias)
        return self._multiply_rounded(self._round(INPUT, x.reshape(-1, x.shape[-1])), x, weight, bias)

    def _multiply_rounded(self, rounded: Operand, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Y of an input x [..., in] that is rounded [tokens, in] already."""
        dtype = x.dtype if self.out_dtype is None else self.out_dtype
        y = self._multiply(rounded, self._round_weight(weight), dtype, bias)
        # Not view(): readers of the output may overwrite it, which autograd forbids for views.
        reshaped: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
        return reshaped

    def forward_keeping(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None
    ) -> tuple[Tensor, Kept]:
        """`forward`, and the input in 8 bits where the weight gradient reads it so."""
        if not self.has_smaller_form:
            return self.forward(x, weight, bias, ends), x
        rows = x.reshape(-1, x.shape[-1])  # [s, b, in] -> [tokens, in]
        rounded = self._round(INPUT, rows)
        y = self._multiply_rounded(rounded, x, weight, bias)
        return y, self.recipe.pack(self._round_for_weight_grad(rounded, rows))

    def _round_for_weight_grad(self, rounded: Operand, rows: Tensor) -> Operand:
        """[tokens, in] as a sum over tokens rounds it; rounded: as a sum over `in` does."""
        return rounded if self.recipe.has_one_scale(INPUT) else self._round(INPUT, rows, over_rows=True).transposed

    def input_grad(self, grad: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        """Output gradients [tokens, out] -> input gradients [tokens, in]."""
        if self.falls_back:
            return self._exact.input_grad(grad, weight)
        return self._multiply(self._round_grad(grad), self._round_weight(weight, over_rows=True), grad.dtype)

    def weight_grad(
        self, grad: Tensor, x: Kept, weight: Tensor, main_grad: Tensor | None, ends: Tensor | None = None
    ) -> Tensor | None:
        """grad [tokens, out], x [..., in] or what forward_keeping kept of it -> [out, in], or None when added to
        main_grad."""
        if self.falls_back or not self.recipe.rounds_weight_grad:
            assert isinstance(x, Tensor)
            return self._exact.weight_grad(grad, x, weight, main_grad)
        if isinstance(x, Tensor):
            right = self._round(INPUT, x.reshape(-1, x.shape[-1]), over_rows=True)
        else:
            right = self.recipe.unpack(x).transposed
        operands = self._round_grad_again(grad), right
        if main_grad is None:
            return self._multiply(*operands, weight.dtype, sums_fast=False)
        self._add_product(*operands, main_grad)
        return None

    def _takes_kernel(self, matrix: Tensor) -> bool:
        return self.recipe.is_native and launching.uses_kernels(matrix)

    def _add_product(self, a: Operand, b: Operand, into: Tensor) -> None:
        """into [m, n] += a [m, k] times b [n, k] transposed, for weight gradients."""
        if self.recipe.name in ONE_SCALE and into.dtype == torch.float32 and self._takes_kernel(into):
            from megatron.core.kernels import fp8_weight_grad

            left, right = (make_rows_contiguous(operand.values) for operand in (a, b))
            fp8_weight_grad.add_product(left, right, (a.inverse, b.inverse), into)
        else:
            into.add_(self._multiply(a, b, torch.float32, sums_fast=False))

    # ---- operands

    def _multiply(
        self, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None, *, sums_fast: bool = True
    ) -> Tensor:
        if self.recipe.is_native:
            # Weight gradients are sums over all tokens, into float32 or rounded once at their end.
            product: Tensor = self._multiply_natively(a, b, dtype, sums_fast=sums_fast)
            return product if bias is None else product.add_(bias)
        product = multiply_emulated(a, b)
        return (product if bias is None else product.add_(bias)).to(dtype)

    def _round(self, operand: int, matrix: Tensor, *, over_rows: bool = False) -> Operand:
        """A matrix [rows, columns] in 8 bits, to be summed over its columns; over_rows: over its rows, and then
        transposed."""
        transposes_first = over_rows and not self.recipe.has_one_scale(operand)
        matrix = matrix.transpose(-2, -1) if transposes_first else matrix
        # Weight gradients alone sum over tokens, which is why operands are transposed first.
        if transposes_first and self.recipe.name == "nvfp4":
            matrix = fp4.transform(matrix)
        rounded = self._round_along_columns(operand, matrix, turns=over_rows)
        return rounded.transposed if over_rows and not transposes_first else rounded

    def _round_along_columns(self, operand: int, matrix: Tensor, *, turns: bool = False) -> Operand:
        """turns: a sum over rows reads the matrix, where it has one scale."""
        recipe, dtype = self.recipe, self.recipe.format_of(operand)
        if recipe.name == "blockwise":
            rounded = quantise_blocks(matrix, dtype, (SCALED_BLOCK if operand == WEIGHT else 1, SCALED_BLOCK))
        elif recipe.name == "nvfp4":
            block = (fp4.BLOCK if operand == WEIGHT else 1, fp4.BLOCK)
            rounded = fp4.quantise_nvfp4(matrix, block, at_random=operand == GRAD)
        elif recipe.name == "mxfp8":
            rounded = quantise_blocks(matrix, dtype, (1, MX_BLOCK), mx=True)
        elif recipe.name == "rowwise":
            rounded = quantise_blocks(matrix, dtype, (1, max(1, matrix.shape[-1])))
        else:
            rounded = self._round_by_one_scale(operand, matrix, turns=turns)
        if recipe.measures and self.training:
            self._measure(operand, matrix, rounded)
        return rounded

    def _round_by_one_scale(self, operand: int, matrix: Tensor, *, turns: bool) -> Operand:
        dtype, margin, is_delayed = self.recipe.format_of(operand), self.recipe.margin, self.recipe.name == "delayed"
        if self._takes_kernel(matrix):
            from megatron.core.kernels import fp8_cast

            self._states = self._states or fp8_cast.LaunchStates()
            # All matrices of a stack have one scale: their rows are quantised as one matrix's.
            shape, matrix = matrix.shape, matrix.flatten(0, -2)
            earlier, factor, noted = None, 1.0, None
            if is_delayed and self._sharers is not None:
                earlier = self._replace_amax(operand, find_amax(matrix))
            elif is_delayed:
                earlier, factor = self.amax[operand], float(self.recipe.replicas if operand == GRAD else 1)
                noted = self._find_bits(operand, matrix.device)
            # Of a weight two copies would be kept for a whole step.
            turns = operand == GRAD or (operand == INPUT and (turns or self.turns_input))
            values, turned, inverse = fp8_cast.quantise_matrix(
                matrix, dtype, self._states.take(matrix.device), earlier, factor=factor, margin=margin, noted=noted,
                turns=turns,
            )  # fmt: skip
            return Operand(values.view(shape), inverse, turned=turned)
        amax = find_amax(matrix)
        amax = self._replace_amax(operand, amax) if is_delayed else amax
        return quantise_tensor(matrix, dtype, compute_scale(amax, dtype, margin=margin))

    def _find_bits(self, operand: int, device: torch.device) -> Tensor | None:
        """The place where a kernel notes the bits of an amax; None in validation, which leaves no trace in a step."""
        if self.training and self._noted_bits[operand] is None:
            self._noted_bits[operand] = self._states.take(device)
        return self._noted_bits[operand] if self.training else None

    def _round_grad(self, grad: Tensor) -> Operand:
        """Output gradients for the input gradient, noted for the weight gradient, which follows."""
        rounded = self._round(GRAD, grad)
        if self.recipe.has_one_scale(GRAD) and self.recipe.rounds_weight_grad:
            self._grad = grad, grad._version, rounded
        return rounded

    def _round_grad_again(self, grad: Tensor) -> Operand:
        """The same gradients for the weight gradient: [tokens, out], rounded for a sum over the tokens."""
        noted, self._grad = self._grad, None
        if noted is not None and _is_same_memory(noted[0], grad) and noted[1] == grad._version:
            return noted[2].transposed
        return self._round(GRAD, grad, over_rows=True)

    def _replace_amax(self, operand: int, own: Tensor) -> Tensor:
        """Delayed scaling: record an operand's amax for later steps, and return the amax of earlier ones."""
        if self.training:  # a validation between two steps must leave no trace in them
            noted = self._noted[operand]
            self._noted[operand] = own if noted is None else torch.maximum(noted, own)
        if self._sharers is not None:
            all_reduce(own := own.clone(), self._sharers[operand == WEIGHT], op="max")
        earlier = self.amax[operand] * self.recipe.replicas if operand == GRAD else self.amax[operand]
        # No step has ended yet, or none had values of this operand.
        return torch.where(earlier > 0, earlier, own)

    def _round_weight(self, weight: Tensor, *, over_rows: bool = False) -> Operand:
        """The weight in 8 bits, rounded once per step where its gradients lie in flat buffers."""
        if not self.recipe.has_one_scale(WEIGHT):
            return self._round(WEIGHT, weight.detach(), over_rows=over_rows)
        # A training step has to see the weight itself, and cannot take what an evaluation before it has rounded.
        which = (weight.data_ptr(), weight._version, self.training)
        if self._weight is None or self._weight[0] != which:
            self._weight = which, self._round(WEIGHT, weight.detach())
        rounded = self._weight[1]
        # Without a buffer nobody says when a step ends (`end_step`), and divided parameters are soon gone.
        if not hasattr(weight, "main_grad"):
            self._weight = None
        return rounded.transposed if over_rows else rounded

    def fall_back(self) -> None:
        """Compute exact products from the next step on. Called between steps."""
        self.fallen_back.fill_(1)
        self.falls_back, self.has_smaller_form, self._weight = True, False, None

    def recall_fallback(self) -> None:
        """Fall back where a checkpoint says that the layer has; the host waits for the device."""
        if self.recipe.may_fall_back and self.fallen_back.item():
            self.fall_back()

    # ---- statistics

    def _measure(self, operand: int, matrix: Tensor, rounded: Operand) -> None:
        exact, found = matrix.detach().float(), rounded.dequantise()
        is_e4m3 = rounded.values.dtype == E4M3
        largest = self.recipe.largest_in_e4m3 if is_e4m3 else torch.finfo(rounded.values.dtype).max
        # Block scales of NVFP4 are rounded, too: what is less than half a step beyond the largest value is not cut off.
        tolerance = 1 / 6 if self.recipe.name == "nvfp4" else 2.0**-12
        noise = (exact - found).square()
        # Scales and their inverses are rounded: amax itself may come back a little smaller.
        saturated = (rounded.values.float().abs() == largest) & (exact.abs() > found.abs() * (1 + tolerance))
        counted = torch.stack(
            [
                find_amax(exact).double(),
                exact.square().sum(dtype=torch.float64),
                noise.sum(dtype=torch.float64),
                saturated.sum().double(),
                ((found == 0) & (exact != 0)).sum().double(),
                torch.full((), exact.numel(), dtype=torch.float64, device=exact.device),
            ]
        )
        before = self._statistics[operand]
        self._statistics[operand] = counted if before is None else add_statistics(before, counted)

    def take_statistics(self, device: torch.device) -> Tensor:
        """[3, 6] float64, STATISTICS of OPERANDS of this process since the last call; of gradients as they would be in
        one process."""
        empty = torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)
        taken = torch.stack([empty if found is None else found for found in self._statistics])
        taken[GRAD, :1] /= self.recipe.replicas
        taken[GRAD, 1:3] /= self.recipe.replicas**2
        self._statistics = [None] * len(OPERANDS)
        return taken

    # ---- steps

    def take_amax(self) -> list[Tensor]:
        """amax of each of OPERANDS on this process since the last call, float32 scalars; 0 of what was not used."""
        zero = self.amax.new_zeros(())
        found = [zero if amax is None else amax for amax in self._noted]
        for operand, bits in enumerate(self._noted_bits):
            if bits is not None:
                of_kernels = bits.view(torch.float32)[0]
                found[operand] = of_kernels if found[operand] is zero else torch.maximum(found[operand], of_kernels)
        self._noted, self._noted_bits = [None] * len(OPERANDS), [None] * len(OPERANDS)
        return found

    def forget_operands(self) -> None:
        """Forget the rounded weight, which is about to change, and what was rounded last."""
        self._weight = self._grad = self._sharers = None


def _is_same_memory(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors, of which the first is still held, are the same elements in the same order."""
    same_place = left.data_ptr() == right.data_ptr() and left.numel() == right.numel()
    return same_place and left.is_contiguous() and right.is_contiguous()


def add_statistics(left: Tensor, right: Tensor) -> Tensor:
    """STATISTICS of two sets of values together, [..., 6]."""
    return torch.cat((torch.maximum(left[..., :1], right[..., :1]), left[..., 1:] + right[..., 1:]), dim=-1)


def recall_fallbacks(modules: Iterable[nn.Module]) -> None:
    """Let the layers inside the modules fall back of which a checkpoint, just loaded, says that they have."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, FP8Matmul):
                part.recall_fallback()


@torch.no_grad()
def end_step(products: Sequence[FP8Matmul], group: Group) -> None:
    """The microbatches of a step are over: with delayed scaling, agree over the group, and find the next scales."""
    for product in products:
        product.forget_operands()
    if not products or products[0].recipe.name != "delayed":
        return
    recipe = products[0].recipe
    # All together: each product alone would be some twenty kernels, and a message that is nothing but latency.
    amax = torch.stack([amax for product in products for amax in product.take_amax()]).view(-1, len(OPERANDS))
    amax[:, GRAD] /= recipe.replicas
    all_reduce(amax, group, op="max")
    # A step that overflowed says nothing about the next one.
    amax = torch.where(amax.isfinite(), amax, torch.zeros_like(amax))
    history = torch.stack([product.amax_history for product in products])  # [products, 3, length]
    history = torch.cat((amax.unsqueeze(-1), history[..., :-1]), dim=-1)
    steps = torch.stack([product.steps for product in products])
    chosen = history.amax(-1) if recipe.takes_largest else amax
    is_due = (steps % recipe.interval == 0).unsqueeze(-1) & (chosen > 0)
    amax = torch.where(is_due, chosen, torch.stack([product.amax for product in products]))
    for name, values in (("amax_history", history), ("steps", steps + 1), ("amax", amax)):
        torch._foreach_copy_([getattr(product, name) for product in products], [*values.unbind()])
