# SPDX-License-Identifier: Apache-2.0
"""The products of linear layers in FP8 and NVFP4, against a reference: the same rounding, in float64.

Rounding has no derivative. Training takes the derivative of the product without rounding, at the rounded operands
("straight through"):

    Y = R(X) R(W)^T + b        dX = R(dY) R(W)        dW = R(dY)^T R(X)

The reference rounds by the formats' definitions, number by number, and shares no code with what it judges; docs/fp8.md
has its tables and sources. Where output gradients are rounded at random, it knows mean and variance of the results, and
asks that their error in the direction of the mean be one that chance makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.fp8_products import GRAD, INPUT, WEIGHT, FP8Matmul
from megatron.core.tensor_parallel.parameters import find_global_name
from megatron.core.transformer.config_fields.precision import PrecisionFields

_CHANCE = 6.0
"""Standard deviations that a random error may have."""
_SUMS = 1e-5
"""Of the largest element: the rounding of sums in float32."""


class _Grid(NamedTuple):
    """The numbers of a format."""

    mantissa: int
    least_exponent: int
    """Of a normal number; smaller ones have the steps of these."""
    largest: float

    def find_steps(self, x: Tensor) -> Tensor:
        """Distance of the neighbours around each x."""
        exponent = torch.frexp(x).exponent - 1
        return torch.ldexp(torch.ones_like(x), exponent.clamp(min=self.least_exponent) - self.mantissa)

    def round(self, x: Tensor) -> Tensor:
        """The nearest number, to even between two; what is too large becomes the largest."""
        steps = self.find_steps(x.clamp(-self.largest, self.largest))
        return ((x / steps).round() * steps).clamp(-self.largest, self.largest)


_E4M3, _E5M2, _E2M1 = _Grid(3, -6, 448.0), _Grid(2, -14, 57344.0), _Grid(1, 0, 6.0)


class _Rounded(NamedTuple):
    """A matrix [rows, k] that a product sums over k."""

    mean: Tensor
    """float64."""
    variance: Tensor | None = None
    """Of what is rounded at random."""


class ProductReference:
    """The expected values of the three products of one layer; see the module. weights [out, in], or
    [experts, out, in] with the rows of each expert."""

    def __init__(self, settings: PrecisionFields) -> None:
        assert settings.few_bits_recipe is not None
        self.settings, self.recipe = settings, settings.few_bits_recipe
        self._earlier: dict[int, Tensor] = {}
        self._noted: dict[int, Tensor] = {}

    def end_step(self) -> None:
        """The microbatches of the first step are over: delayed scales follow from its largest values."""
        self._earlier, self._noted = self._noted, {}

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Sequence[int]) -> _Rounded:
        """Y [tokens, out]."""
        left, right = self._round(INPUT, x), self._round_weight(weight)
        y = torch.cat([a @ w.mT for a, w in zip(left.mean.split(rows), right, strict=True)])
        return _Rounded(y if bias is None else y + bias.double())

    def find_input_grad(self, grad: Tensor, weight: Tensor, rows: Sequence[int]) -> _Rounded:
        """dX [tokens, in]."""
        left, right = self._round(GRAD, grad), self._round_weight(weight, turned=True)
        return _join([_multiply(part, w) for part, w in zip(_split(left, rows), right, strict=True)])

    def find_weight_grad(self, grad: Tensor, x: Tensor, rows: Sequence[int], *, is_stack: bool) -> _Rounded:
        """dW [out, in], or of each expert."""
        if not self.settings.fp8_wgrad:
            parts = zip(grad.double().split(rows), x.double().split(rows), strict=True)
            pairs = [(_Rounded(g.mT), a) for g, a in parts]
        elif self._has_one_scale:
            of_grad, of_input = self._round(GRAD, grad).mean, self._round(INPUT, x).mean
            pairs = [(_Rounded(g.mT), a) for g, a in zip(of_grad.split(rows), of_input.split(rows), strict=True)]
        else:
            turned = (
                (_turn(g, self.recipe), _turn(a, self.recipe))
                for g, a in zip(grad.split(rows), x.split(rows), strict=True)
            )
            pairs = [(self._round(GRAD, g), self._round(INPUT, a).mean.mT) for g, a in turned]
        found = [_multiply(left, right) for left, right in pairs]
        if not is_stack:
            return found[0]
        return _join([_Rounded(one.mean[None], None if one.variance is None else one.variance[None]) for one in found])

    @property
    def _has_one_scale(self) -> bool:
        return self.recipe in ("delayed", "tensorwise")

    def _round_weight(self, weight: Tensor, *, turned: bool = False) -> Tensor:
        """The matrices that dY or X is multiplied by, float64; turned: what blocks along the sum are for dX."""
        stack = weight if weight.dim() == 3 else weight[None]
        along_out = turned and self.recipe in ("mxfp8", "rowwise")
        amax = self._find_amax(WEIGHT, stack)
        matrices = [self._round(WEIGHT, w.mT if along_out else w, amax).mean for w in stack.detach()]
        return torch.stack([w.mT if along_out else w for w in matrices])

    def _find_amax(self, operand: int, x: Tensor) -> Tensor:
        """Find the largest magnitude, from which the scale of a whole matrix follows."""
        own = x.detach().abs().max().float() if x.numel() else torch.zeros(())
        if self.recipe != "delayed":
            return own
        self._noted[operand] = torch.maximum(own, self._noted.get(operand, own))
        earlier = self._earlier.get(operand)
        return own if earlier is None or not earlier > 0 else earlier

    def _round(self, operand: int, matrix: Tensor, amax: Tensor | None = None) -> _Rounded:
        """A matrix [rows, k], to be summed over k."""
        x, grid = matrix.detach().float(), _E5M2 if operand == GRAD and self.settings.fp8 == "hybrid" else _E4M3
        if self._has_one_scale:
            amax = self._find_amax(operand, x) if amax is None else amax
            margin = self.settings.fp8_margin if self.recipe == "delayed" else 0
            scale = _or_one(torch.tensor(grid.largest) / amax / 2.0**margin, amax)
            return _Rounded(grid.round((x * scale).double()) * (1.0 / scale).double())
        if self.recipe == "nvfp4":
            return self._round_to_4_bits(x, x.abs().max() if amax is None else amax, operand)
        width = {"blockwise": 128, "mxfp8": 32, "rowwise": max(1, x.shape[1])}[self.recipe]
        of_block = _find_block_amax(x, width if operand == WEIGHT and self.recipe == "blockwise" else 1, width)
        # Divided in float32, as its definition has it; a power of two that saturates nothing needs no rounding.
        quotient = grid.largest / (of_block.double() if self.recipe == "mxfp8" else of_block)
        power = torch.frexp(quotient.double()).exponent - 1
        scale = _or_one(torch.ldexp(torch.ones_like(x), power), of_block).double()
        return _Rounded(grid.round(x.double() * scale) / scale)

    def _round_to_4_bits(self, x: Tensor, amax: Tensor, operand: int) -> _Rounded:
        factor = 1.0 / _or_one(torch.tensor(_E2M1.largest * _E4M3.largest) / amax, amax)
        of_block = _find_block_amax(x, 16 if operand == WEIGHT else 1, 16)
        stored = _E4M3.round((of_block / _E2M1.largest / factor).double())
        unit = stored.float() * factor
        scaled = torch.where(unit > 0, x * (1.0 / unit), 0.0).double().clamp(-_E2M1.largest, _E2M1.largest)
        unit = stored * factor.double()
        if operand != GRAD:
            return _Rounded(_E2M1.round(scaled) * unit)
        steps = _E2M1.find_steps(scaled)
        share = scaled / steps - (scaled / steps).floor()
        return _Rounded(scaled * unit, share * (1 - share) * (steps * unit).square())


def _or_one(scale: Tensor, amax: Tensor) -> Tensor:
    """The scale, or 1 where there is nothing to scale."""
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def _find_block_amax(x: Tensor, rows: int, columns: int) -> Tensor:
    """For each element of [n, k] the largest absolute value of its block."""
    found = torch.empty_like(x)
    for first in range(0, x.shape[0], rows) if rows > 1 else [0]:
        band = slice(first, first + rows) if rows > 1 else slice(None)
        for column in range(0, x.shape[1], columns):
            block = x[band, column : column + columns].abs()
            found[band, column : column + columns] = block.max() if rows > 1 else block.amax(1, keepdim=True)
    return found


def _turn(x: Tensor, recipe: str) -> Tensor:
    """[tokens, n] -> [n, tokens], to be summed over tokens; NVFP4 first transforms 16 of these at a time."""
    if recipe != "nvfp4":
        return x.mT
    signs = torch.tensor([1, 1, -1, 1, -1, -1, 1, 1, 1, -1, 1, -1, -1, -1, 1, -1], dtype=torch.float64)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    padded = torch.nn.functional.pad(x.detach().double(), (0, 0, 0, -len(x) % 16))
    turned = matrix / 4 @ (padded.unflatten(0, (-1, 16)) * signs[:, None])
    return turned.flatten(0, 1).mT


def _split(matrix: _Rounded, rows: Sequence[int]) -> list[_Rounded]:
    variances = [None] * len(rows) if matrix.variance is None else matrix.variance.split(rows)
    return [_Rounded(*pair) for pair in zip(matrix.mean.split(rows), variances, strict=True)]


def _join(parts: Sequence[_Rounded]) -> _Rounded:
    variances = [part.variance for part in parts if part.variance is not None]
    return _Rounded(torch.cat([part.mean for part in parts]), torch.cat(variances) if variances else None)


def _multiply(left: _Rounded, right: Tensor) -> _Rounded:
    """[n, k] x [k, m]; the variance is of the product's component along its mean, spread over its rows."""
    mean = left.mean @ right
    if left.variance is None:
        return _Rounded(mean)
    # <E R, M> = <E, M R^T> for errors E of the left operand, which are independent of each other.
    along = (left.variance * (mean @ right.mT).square()).sum()
    return _Rounded(mean, torch.full_like(mean, float(along) / max(mean.numel(), 1)))


def find_disagreement(found: Tensor, wanted: _Rounded, precision: float) -> float:
    """Distance of a product from what it should be: 0 where rounding, or chance, explains it; else relative to the
    largest element. precision: of the result's dtype."""
    mean, error = wanted.mean, found.double() - wanted.mean
    largest = float(mean.abs().max()) if mean.numel() else 0.0
    if wanted.variance is not None:
        along, deviation = float((error * mean).sum().abs()), float(wanted.variance.sum().sqrt())
        limit = _CHANCE * deviation + _SUMS * float(mean.square().sum())
        return 0.0 if along <= limit else along / max(float(mean.square().sum()), 1e-300)
    limits = precision * mean.abs() + _SUMS * largest
    return 0.0 if bool((error.abs() <= limits).all()) else float(error.abs().max()) / max(largest, 1e-300)


# ---- during a run


class ProductCheck:
    """Compares each low-precision product of a run with the reference as it is computed."""

    def __init__(self, chunks: Sequence[nn.Module], settings: PrecisionFields) -> None:
        self.checked = 0
        self.errors: dict[str, float] = {}
        """`output of LAYER` and so on -> the largest disagreement, in the order in which they were found."""
        self._references = []
        for name, product in _list_products(chunks):
            reference = ProductReference(settings)
            self._references.append(reference)
            self._watch(name, product, reference)

    def end_step(self) -> None:
        """A step is over."""
        for reference in self._references:
            reference.end_step()

    def _watch(self, name: str, product: FP8Matmul, reference: ProductReference) -> None:
        # Backward meets them in the opposite order, also where a layer is used twice or computed again.
        inputs: list[Tensor] = []
        forward, keeping = product.forward, product.forward_keeping
        input_grad, weight_grad = product.input_grad, product.weight_grad

        def see(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor | None, y: Tensor) -> None:
            rows = x.detach().reshape(-1, x.shape[-1])
            inputs.append(rows.clone())
            wanted = reference.multiply(rows, weight, bias, _list_rows(ends, rows))
            self._note(f"output of {name}", y.detach().reshape(-1, y.shape[-1]), wanted)

        def run_forward(x: Tensor, weight: Tensor, bias: Any = None, ends: Any = None) -> Tensor:
            y = forward(x, weight, bias, ends)
            see(x, weight, bias, ends, y)
            return y

        def run_keeping(x: Tensor, weight: Tensor, bias: Any = None, ends: Any = None) -> Any:
            if not product.has_smaller_form:  # which is `forward`
                return keeping(x, weight, bias, ends)
            y, kept = keeping(x, weight, bias, ends)
            see(x, weight, bias, ends, y)
            return y, kept

        def run_input_grad(grad: Tensor, weight: Tensor, ends: Any = None) -> Tensor:
            found = input_grad(grad, weight, ends)
            wanted = reference.find_input_grad(grad, weight, _list_rows(ends, grad))
            self._note(f"gradient of the input of {name}", found, wanted)
            return found

        def run_weight_grad(grad: Tensor, x: Any, weight: Tensor, main_grad: Any, ends: Any = None) -> Any:
            before = None if main_grad is None else main_grad.clone()
            returned = weight_grad(grad, x, weight, main_grad, ends)
            found: Any = returned if main_grad is None else main_grad - before
            rows = _list_rows(ends, grad)
            wanted = reference.find_weight_grad(grad, inputs.pop(), rows, is_stack=weight.dim() == 3)
            # An exact product in 16 bits is rounded before it is added.
            precision = found.dtype if reference.settings.fp8_wgrad else grad.dtype
            self._note(f"gradient of {name}.weight", found, wanted, precision)
            return returned

        product.forward, product.forward_keeping = run_forward, run_keeping  # type: ignore[method-assign]
        product.input_grad, product.weight_grad = run_input_grad, run_weight_grad  # type: ignore[method-assign]

    def _note(self, what: str, found: Tensor, wanted: _Rounded, precision: torch.dtype | None = None) -> None:
        self.checked += 1
        size = find_disagreement(found, wanted, torch.finfo(precision or found.dtype).eps)
        if size:
            self.errors[what] = max(size, self.errors.get(what, 0.0))


def _list_rows(ends: Tensor | None, matrix: Tensor) -> list[int]:
    """Rows of each expert; all in one part without experts."""
    stops = [0, *([len(matrix)] if ends is None else ends.tolist())]
    return [stop - start for start, stop in zip(stops, stops[1:], strict=False)]


def _list_products(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, FP8Matmul]]:
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, FP8Matmul) and not module.falls_back:
                yield find_global_name(chunk, name.removesuffix(".product")), module
