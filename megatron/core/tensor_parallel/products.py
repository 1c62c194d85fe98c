# SPDX-License-Identifier: Apache-2.0
"""A layer's multiplication by its weight: three products behind one protocol, and the autograd function around them.

    forward            Y  = X W^T + b       [tokens, in] x [in, out]
    input gradient     dX = dY W            [tokens, out] x [out, in]
    weight gradient    G += dY^T X          [out, tokens] x [tokens, in]

G is `weight.main_grad`, the view of the flat gradient buffer that data parallelism hands to every parameter. Adding
into it inside the product spares one temporary the size of the weight, and one pass over it, per micro-batch.

| layer                      | product (`layer.product`)                                                            |
|----------------------------|--------------------------------------------------------------------------------------|
| column, row, output layer  | Matmul                                                                               |
| embedding                  | TableLookup: X is one-hot, so the products are a look-up and a scattered addition    |
| experts                    | ExpertByExpert or GroupedMatmul (transformer/moe/grouped_products.py)                |

A product in another dtype, such as FP8, is one more class: layers only ever call the protocol.
"""

from __future__ import annotations

import functools
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import current_device, has_wide_sums, is_cpu
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.operation_table import Case, choose
from megatron.core.tensor_parallel.kept_activations import has_way
from megatron.core.tensor_parallel.parameters import parameter_dtype

Kept = Tensor | tuple[Tensor, ...]
"""Data that weight_grad reads of an input: the input itself, or the tensors of a smaller form of it."""


class Product(ABC):
    """The three products of one layer with its weight [out, in], or with a stack of weights [matrices, out, in].

    Each layer makes a separate object, so a product may keep state about its operands (scaling factors, histories of
    their largest values); one whose state belongs in checkpoints may also be a torch module, which the layer then
    registers. With communication in chunks every method is called once per chunk of tokens, and recomputation calls
    `forward` again during backward (auxiliary_loss.is_recomputing() tells).

    ends: [matrices] int32 on the device: where the rows of each matrix of a stack end; None for a single matrix.
    """

    name: str
    """The implementation, as the log shows it."""
    accumulates: bool = True
    """True if weight gradients are added into `weight.main_grad`, where the weight has one, instead of returned."""
    by_autograd: bool = False
    """True if forward is made of operators that torch differentiates, and is to be left to it: weight gradients are
    then never added into main_grad."""
    is_deferrable: bool = True
    """True if a zero-bubble schedule may compute the weight gradient later than the input gradient."""
    out_dtype: torch.dtype | None = None
    """Dtype of the result; the operands' when None."""
    is_plain: bool = False
    """True if Y and dX are torch's products of the operands as they are, so that a collective may have them inside."""
    has_smaller_form: bool = False
    """True if forward_keeping returns a form of the input in fewer bytes, instead of the input."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """Y = X W^T + b; x [..., in], bias [out] -> [..., out] in `out_dtype`."""

    def forward_keeping(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None
    ) -> tuple[Tensor, Kept]:
        """`forward`, and what is to wait for `weight_grad`: x, or a form of it in fewer bytes.

        The tensors of that form have stretches of tokens, in their order, as first dimension, or no dimension at all.
        """
        return self.forward(x, weight, bias, ends), x

    @abstractmethod
    def input_grad(self, grad: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        """dX = dY W; grad [tokens, out] in the weight's dtype -> [tokens, in]."""

    @abstractmethod
    def weight_grad(
        self, grad: Tensor, x: Any, weight: Tensor, main_grad: Tensor | None, ends: Tensor | None = None
    ) -> Tensor | None:
        """dW = dY^T X, added to main_grad, returning None; or returned where main_grad is None.

        grad: [tokens, out]. x: as forward got it, or what forward_keeping returned. main_grad: shaped as the weight,
        often in a wider dtype.
        """

    # Communication in chunks multiplies the same stretch of every rank's tokens at a time: rows with gaps between the
    # ranks' parts, in what is read or in what is written. A product that can leave the gaps open spares a copy.

    def forward_parts(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Y = X W^T; x [parts, tokens, in] -> [parts, tokens, out], written into `out` where that is given. Either may
        be a view with gaps between its parts."""
        y = self.forward(x, weight)
        return y if out is None else out.copy_(y)

    def input_grad_parts(self, grad: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """dX = dY W; grad [parts, tokens, out] -> [parts, tokens, in], as forward_parts."""
        grad_x = self.input_grad(grad.flatten(0, 1), weight).view(*grad.shape[:2], -1)
        return grad_x if out is None else out.copy_(grad_x)


class Matmul(Product):
    """torch's matrix products, summed in the precision that torch sums them in; in float32 on some CPUs oneDNN's.

    out_dtype: float32 keeps those sums unrounded where the operands have 16 bits (logits); gradients stay in 16 bits.
    """

    def __init__(
        self, *, accumulates: bool = True, by_autograd: bool = False, out_dtype: torch.dtype | None = None
    ) -> None:
        assert not (by_autograd and (accumulates or out_dtype)), "torch's own gradients are plain ones"
        self.accumulates, self.by_autograd, self.out_dtype = accumulates, by_autograd, out_dtype
        self.is_plain = out_dtype is None
        self.name = choose("linear", Case("accumulated" if accumulates else "autograd", current_device())).way.name

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """Multiply x [..., in] by the weight, and add the bias: -> [..., out]."""
        # A few tokens and a small weight are torch's in any case.
        if not self.by_autograd and (weight.numel() >= _LEAST_WEIGHT or x.numel() >= _LEAST_LENGTH * x.shape[-1]):
            by_columns = weight.t()
            if takes_onednn(x, by_columns) or (torch.is_inference_mode_enabled() and suits_few_rows(x, by_columns)):
                return multiply_by_onednn(x, by_columns, bias)
        # The usual case: bias and product are one kernel.
        if self.out_dtype is None:
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])  # [s, b, in] -> [tokens, in]
        if is_cpu(x):  # whose kernels have no product of 16-bit operands with a wider result
            y = rows.to(self.out_dtype) @ weight.to(self.out_dtype).t()
        else:
            y = torch.mm(rows, weight.t(), out_dtype=self.out_dtype)
        return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], -1)

    def input_grad(self, grad: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        """Output gradients [tokens, out] -> input gradients [tokens, in]."""
        return multiply_by_onednn(grad, weight) if takes_onednn(grad, weight) else grad @ weight

    def forward_parts(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """As Product.forward_parts, in one kernel."""
        if self.out_dtype is not None or (len(x) == 1 and out is None):
            return super().forward_parts(x, weight, out)
        result: Tensor = torch.bmm(x, weight.t().expand(len(x), -1, -1), out=out)
        return result

    def input_grad_parts(self, grad: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """As Product.input_grad_parts, in one kernel."""
        if len(grad) == 1 and out is None:
            return super().input_grad_parts(grad, weight)
        result: Tensor = torch.bmm(grad, weight.expand(len(grad), -1, -1), out=out)
        return result

    def weight_grad(
        self, grad: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, ends: Tensor | None = None
    ) -> Tensor | None:
        """grad [tokens, out], x [..., in] -> [out, in], or None when added to main_grad."""
        rows = x.reshape(-1, x.shape[-1])  # [s, b, in] -> [tokens, in]
        by_onednn = takes_onednn(grad.t(), rows)
        if main_grad is None:
            return multiply_by_onednn(grad.t(), rows) if by_onednn else grad.t() @ rows
        # None tells autograd that there is no gradient to store: it is in the buffer already.
        if by_onednn:
            main_grad.add_(multiply_by_onednn(grad.t(), rows))
        else:
            add_weight_grad(main_grad, grad, rows)
        return None


class TableLookup(Product):
    """Rows of a table [rows, h] at token numbers [...]: the product with one-hot vectors.

    torch's gradient of an embedding is a zero-filled temporary the size of the table (gigabytes for large vocabularies)
    of which a micro-batch touches a few rows; here those rows alone are added to the gradient buffer.
    """

    is_deferrable = False  # nothing is won: it is no matrix product, and no other gradient waits for it

    def __init__(self, *, accumulates: bool = True) -> None:
        self.accumulates, self.by_autograd = accumulates, not accumulates
        self.name = "table look-up, gradient " + ("added into main_grad" if accumulates else "by autograd")

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """Look up the rows of token numbers [...] -> [..., h]."""
        return F.embedding(x, weight)

    def input_grad(self, grad: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        """Raises AssertionError: token numbers have no gradient."""
        raise AssertionError(f"token numbers have no gradient; found one of shape {tuple(grad.shape)}")

    def weight_grad(
        self, grad: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, ends: Tensor | None = None
    ) -> Tensor | None:
        """grad [tokens, h], token numbers [...] -> [rows, h], or None when added to main_grad."""
        if main_grad is None:
            grad = grad.view(*x.shape, -1)
            return torch.ops.aten.embedding_dense_backward(grad, x, weight.shape[0], -1, False)
        # A token that occurs twice adds twice; rows of other tokens are not touched.
        main_grad.index_add_(0, x.reshape(-1), grad.to(main_grad.dtype))
        return None


def choose_product(config: ModelParallelConfig, out_dtype: torch.dtype | None = None) -> Product:
    """A new product for one linear layer. out_dtype: of its result; the parameters' dtype when None."""
    accumulates = accumulates_weight_grads(config)
    if out_dtype is None or out_dtype == parameter_dtype(config):
        # Autograd computes both gradients of an operator at once.
        is_divided = accumulates or getattr(config, "delays_weight_gradients", False)
        return Matmul(accumulates=accumulates, by_autograd=not is_divided)
    return Matmul(accumulates=accumulates, out_dtype=out_dtype)


def choose_lookup(config: ModelParallelConfig) -> Product:
    """Return a new product for one embedding table."""
    return TableLookup(accumulates=accumulates_weight_grads(config))


def accumulates_weight_grads(config: ModelParallelConfig) -> bool:
    """Return whether weight gradients are added into the gradient buffer inside the product."""
    return config.gradient_accumulation_fusion


def add_weight_grad(main_grad: Tensor, grad: Tensor, rows: Tensor) -> None:
    """main_grad [out, in] += dY^T X, summed in main_grad's dtype; grad [tokens, out], rows [tokens, in]."""
    if main_grad.dtype == grad.dtype:
        main_grad.addmm_(grad.t(), rows)
    elif main_grad.dtype == torch.float32 and has_wide_sums(main_grad.device, grad.dtype):
        # Low-precision operands, float32 sum, in one kernel.
        torch.addmm(main_grad, grad.t(), rows, out_dtype=main_grad.dtype, out=main_grad)
    else:
        # The product is rounded to the operands' format before it is added.
        main_grad.add_(grad.t() @ rows)


# ---- in autograd


class CommunicationPlan:
    """Communication of a parallel layer around its product, and its times: here nothing, its group has one member.

    Plans of larger groups: communication_plans.py.
    """

    @property
    def name(self) -> str:
        """Description of the communication, for the log; nothing when empty."""
        return ""

    def multiply(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [s, b, in] by the weight: -> [s, b, out], differentiable."""
        return multiply(product, x, weight, bias)


def multiply(
    product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """Run the product's forward, [..., in] -> [..., out], differentiable: its backward runs the other two."""
    # In inference mode there is no backward to keep anything for.
    if product.by_autograd or torch.is_inference_mode_enabled():
        return product.forward(x, weight, bias, ends)
    result: Tensor = _Multiply.apply(x, weight, bias, product, ends)
    return result


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, ends: Tensor | None
    ) -> Tensor:
        # Only the input is saved. The weight lives anyway, and readers of the output save it.
        output, kept = forward_keeping(product, x, weight, bias, ends)
        save_kept(ctx, kept, ends)
        # The weight itself, with its main_grad and queue: hooks for saved tensors would hand back another tensor.
        ctx.weight, ctx.product, ctx.shape = weight, product, x.shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, ends), weight, product = load_kept(ctx), ctx.weight, ctx.product
        grad = grad.reshape(-1, grad.shape[-1])  # [s, b, out] -> [tokens, out]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = sum_bias_grad(grad, weight)
        grad = grad.to(weight.dtype)  # of a float32 result of 16-bit operands: rounded as the operands are
        # The input gradient first: the layers before this one wait for it, the optimizer waits for the other.
        if ctx.needs_input_grad[0]:
            grad_x = product.input_grad(grad, weight, ends).view(ctx.shape)  # [tokens, in] -> [s, b, in]
        if ctx.needs_input_grad[1]:
            grad_weight = finish_weight_grad(product, weight, grad, x, ends)
        return grad_x, grad_weight, grad_bias, None, None


def forward_keeping(
    product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None
) -> tuple[Tensor, Kept]:
    """The product's output, and what of x is to wait for the weight gradient; see Product.forward_keeping."""
    # What is computed again, or kept elsewhere, needs no smaller form.
    if not product.has_smaller_form or has_way(x):
        return product.forward(x, weight, bias, ends), x
    return product.forward_keeping(x, weight, bias, ends)


def save_kept(ctx: Any, kept: Kept, ends: Tensor | None = None) -> None:
    """Save for backward where hooks for saved tensors see it."""
    ctx.has_smaller_form = not isinstance(kept, Tensor)
    ctx.save_for_backward(*([kept] if isinstance(kept, Tensor) else kept), ends)


def load_kept(ctx: Any) -> tuple[Any, Tensor | None]:
    """Load what save_kept saved."""
    *kept, ends = ctx.saved_tensors
    return (tuple(kept) if ctx.has_smaller_form else kept[0]), ends


def sum_bias_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the bias, [tokens, out] -> [out], in the weight's dtype."""
    return grad.sum(0).to(weight.dtype)


# ---- weight gradients, now or later


class WeightGradDeferral(Protocol):
    """Object that a zero-bubble schedule attaches to a weight, as `weight.weight_grad_queue`, to have its gradient
    later."""

    @property
    def is_open(self) -> bool:
        """True if `defer` would take work now."""

    def defer(self, compute: Callable[[], object]) -> bool:
        """Take the work and return True; return False where the caller is to do it at once."""


def defers_weight_grad(product: Product, weight: Tensor) -> bool:
    """Return whether a weight gradient that is asked for now would be computed later."""
    queue: WeightGradDeferral | None = getattr(weight, "weight_grad_queue", None)
    return queue is not None and queue.is_open and product.is_deferrable


def finish_weight_grad(
    product: Product, weight: Tensor, grad: Tensor, x: Kept | Callable[[], Kept], ends: Tensor | None = None
) -> Tensor | None:
    """Return what backward returns for the weight: its gradient, or None when that is in main_grad, or will be.

    grad: dY [tokens, out]. x: what was kept of X, or what makes it when its turn comes (a gather).
    """
    # The queue holds dY and X (or what gathers it) until the schedule asks for the product.
    if defers_weight_grad(product, weight):
        weight.weight_grad_queue.defer(functools.partial(_add_late_weight_grad, product, weight, grad, x, ends))  # type: ignore[attr-defined]
        return None
    x = x() if callable(x) and not isinstance(x, Tensor) else x
    # Outside training, and under FSDP, weights have no buffer: autograd takes the gradient to weight.grad.
    main_grad = getattr(weight, "main_grad", None) if product.accumulates else None
    return product.weight_grad(grad, x, weight, main_grad, ends)


def _add_late_weight_grad(
    product: Product, weight: Tensor, grad: Tensor, x: Kept | Callable[[], Kept], ends: Tensor | None
) -> None:
    """The deferred half of a backward pass: what autograd would have done with the result is done here."""
    with torch.no_grad():
        grad_weight = finish_weight_grad(product, weight, grad, x, ends)
        if grad_weight is not None and (main_grad := getattr(weight, "main_grad", None)) is not None:
            main_grad.add_(grad_weight)
        elif grad_weight is not None:
            weight.grad = grad_weight if weight.grad is None else weight.grad.add_(grad_weight)


# ---- results wider than operands


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply_in_float32(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        # As a sum of two bfloat16 numbers a float32 number keeps 16 of its 24 digits, more than any result here has.
        high = grad.to(x.dtype)
        both = torch.cat((high, (grad - high).to(x.dtype)), dim=1)  # [tokens, 2 out]
        grad_x = both @ torch.cat((weight, weight)) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _multiply_in_float32(both.t(), x).unflatten(0, (2, -1)).sum(0).to(weight.dtype)
        return grad_x, grad_weight


def _multiply_in_float32(a: Tensor, b: Tensor) -> Tensor:
    # The CPU's kernels have no product of 16-bit operands with a wider result.
    return a.float() @ b.float() if is_cpu(a) else torch.mm(a, b, out_dtype=torch.float32)


def has_wide_product(x: Tensor, weight: Tensor) -> bool:
    """Return whether `multiply_wide` is the way to multiply these in float32: bfloat16 tensors on a GPU, with a torch
    that has products of a wider result."""
    is_bfloat16 = x.dtype == weight.dtype == torch.bfloat16
    return is_bfloat16 and not is_cpu(x) and "dtype" in torch.ops.aten.mm.overloads()


def multiply_wide(x: Tensor, weight: Tensor) -> Tensor:
    """X W^T in float32 of bfloat16 x [tokens, in] and weight [out, in], of which no copies in float32 are made; neither
    are they for the gradients, which have the accuracy of float32 products all the same."""
    result: Tensor = _WideProduct.apply(x, weight)
    return result


# ---- the dtype of sums, statistics and probabilities
#
# Nobody trains in float64. Gradients are checked in it (megatron/training/verify/gradients.py), which tests the code
# that trains only if nothing on the way narrows its input.


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it has float64."""
    return x if x.dtype == torch.float64 else x.float()


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of `at_least_float32(x)`."""
    return torch.promote_types(x.dtype, torch.float32)


def is_wide(x: Tensor) -> bool:
    """Return whether x has that format already."""
    return x.dtype == wide_dtype(x)


# ---- float32 on a CPU
#
# torch multiplies float32 matrices on x86 by Intel's MKL, which uses less than half of what other makers' processors
# with AVX-512 can do: one core of an AMD EPYC does 90 billion operations a second with it, and 200 with oneDNN, which
# torch uses for other dtypes. On an Intel Xeon MKL is ahead in every product of a layer. A call of oneDNN takes 13
# microseconds instead of 3, and the first one of a shape a millisecond more. So small products stay with torch, and so
# do those whose shapes are new in every step (tokens of an expert).
#
# Where nothing is trained, few tokens times a large weight are oneDNN's, too: 8192 x 512 in 0.83 to 0.33 of the time.
# Which kernel multiplies depends only on the processor and the shapes, so that a run repeats itself bit by bit.

_LEAST_LENGTH = 64
_LEAST_MULTIPLICATIONS = 1 << 21
_LEAST_WEIGHT = 1 << 20
"""From these on oneDNN is ahead in all three products of a layer; a weight gradient copies dY, which has to pay."""


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether this process's processor is one for which oneDNN's float32 products are the faster ones."""
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    has_wide_vectors = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return has_both and has_wide_vectors and _find_maker() not in ("", "GenuineIntel")


def _find_maker() -> str:
    """The processor's maker as x86 processors name it, such as AuthenticAMD; nothing where that is not told."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        # Windows: "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD".
        return platform.processor().rpartition(", ")[2]
    values = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(values, "")


def takes_onednn(a: Tensor, b: Tensor) -> bool:
    """Return whether `multiply_by_onednn` is the faster way to multiply a [..., k] by b [k, n]."""
    k, n = b.shape
    rows = a.numel() // k if k else 0
    is_large = min(rows, k, n) >= _LEAST_LENGTH and rows * k * n >= _LEAST_MULTIPLICATIONS
    return is_large and onednn_is_faster() and takes_float32(a, b)


def takes_float32(a: Tensor, b: Tensor) -> bool:
    """Return True where both are float32 on the CPU."""
    return a.dtype == torch.float32 == b.dtype and is_cpu(a)


def suits_few_rows(a: Tensor, b: Tensor) -> bool:
    """Return whether it is also faster for a few tokens: of a [..., k] by a large b [k, n], which is read once."""
    k, n = b.shape
    return k * n >= _LEAST_WEIGHT and min(k, n) >= _LEAST_LENGTH and onednn_is_faster() and takes_float32(a, b)


def multiply_by_onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [..., k] times b [k, n], plus bias [n], by oneDNN -> [..., n]. Not differentiable."""
    rows = a.reshape(-1, a.shape[-1])
    # What torch.compile makes of a linear layer; there is no public name for it.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, b.t(), bias, "none", [], "")
    # Not a view: what an autograd function returns may be changed in place.
    return product if a.dim() == 2 else torch.ops.aten._unsafe_view(product, [*a.shape[:-1], b.shape[1]])
