# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm: modules in the form the config asks for, and the operations that they run.

    RMSNorm    y = x * r * w,               r = 1 / sqrt(mean(x^2) + eps)         Zhang & Sennrich, 2019
    LayerNorm  y = (x - m) * r * w + b,     r = 1 / sqrt(mean((x - m)^2) + eps)   Ba et al., 2016

The fused RMSNorm keeps its input and one number per token. Its backward, with g = dy * w:

    dx = r * (g - x * r^2 * mean(g * x)),  dw = sum over tokens of dy * x * r

is LayerNorm's backward at m = 0 plus the term r * mean(g) which LayerNorm subtracts, so torch's one-pass kernel does
the work on the CPU, where torch has no RMSNorm kernel.

Where kernels run (megatron/core/kernels/norm.py) one of ours adds x to the residual stream, normalises the sum, and in
backward adds what comes along the stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import current_device, is_cpu
from megatron.core.errors import ConfigError
from megatron.core.kernels import launching
from megatron.core.operation_table import WIDEST_NORM, Choice
from megatron.core.process_groups_config import Group
from megatron.core.tensor_parallel.layers import tensor_parallel_split
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.parameters import declare_parameter, ones, parameter_dtype, zeros
from megatron.core.tensor_parallel.products import at_least_float32, is_wide
from megatron.core.transformer.compiled_regions import Compile, choose_form
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


def choose_norm(config: TransformerConfig, width: int, device: torch.device) -> Choice:
    """Return the ways of a norm over so many channels, the one that is taken first."""
    has_all = config.norm_parameters == "all" or (config.norm_parameters, config.normalization) == ("weight", "RMSNorm")
    asked = frozenset(() if has_all else ("fewer parameters",))
    return choose_form(config, "norm", is_fused=config.persist_layer_norm, device=device, widths=(width,), asked=asked)


class Norm(MegatronModule, ABC):
    """A weight of ones; stored as zeros, and one added in use, with layernorm_zero_centered_gamma.

    normalise: the norm with everything around it, in the weight's dtype.
    joins_stream: whether a kernel may take the sums of the residual stream, too, so that no other operation sees their
    gradients.

    partial_grad_axes: axes whose ranks each normalise a part of the input; the sequence-parallel ones when None.
    """

    normalise: Callable[..., Tensor]
    joins_stream = True
    has_offset = False
    """True if something is added to the scaled input, a parameter `bias`."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float | None = None,
        partial_grad_axes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(config)
        self.hidden_size = hidden_size
        self.eps = config.layernorm_epsilon if eps is None else eps
        # Stored around zero, the weight is pulled by weight decay towards a norm that changes nothing.
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.is_fused = choose_norm(config, hidden_size, current_device()).way.is_fused
        # With sequence parallelism each rank normalises only its tokens.
        by_sequence = ("tp",) if config.sequence_parallel else ()
        self.partial = by_sequence if partial_grad_axes is None else tuple(partial_grad_axes)
        self.weight = declare_parameter(
            (hidden_size,),
            kind="norm",
            init=zeros if self.zero_centered else ones,
            dtype=parameter_dtype(config),
            partial_grad_axes=self.partial,
        )
        if self.has_offset:
            self.bias = declare_parameter(
                (hidden_size,),
                kind="norm",
                init=zeros,
                dtype=parameter_dtype(config),
                partial_grad_axes=self.partial,
            )
        self.normalise = self._choose_form()

    @abstractmethod
    def _choose_form(self) -> Callable[..., Tensor]:
        """The norm by torch's operations."""

    def forward(
        self, x: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None, returns_sum: bool = False
    ) -> Any:
        """Normalise x [..., h] -> [..., h] in the weight's dtype.

        returns_sum: normalise x + bias + residual, [h] and [..., h], either left out, and return that sum as well, for
        what goes on from it to another place. Only where `can_join` says so. Overwrites x where there is a residual.
        """
        if self._runs_kernel(x, bias, residual):
            offset = self._parameters.get("bias")
            joined = _KernelNorm.apply(x, bias, residual, self.weight, offset, self.eps, self.zero_centered)
            return joined if returns_sum else joined[0]
        assert not returns_sum, "asked for a sum that no kernel makes"
        return self._normalise(x)

    def can_join(self, x: Tensor, *others: Tensor | None) -> bool:
        """Return whether the norm takes over the sums before and around it, of x and the others; a kernel does."""
        return self.joins_stream and self._runs_kernel(x, *others)

    def _runs_kernel(self, *tensors: Tensor | None) -> bool:
        is_fit = self.is_fused and self.hidden_size <= WIDEST_NORM
        return is_fit and launching.uses_kernels(*tensors, self.weight)

    def _normalise(self, x: Tensor) -> Tensor:
        """By torch's operations: [..., h] -> [..., h]."""
        return self.normalise(x, self.weight, self.eps, self.zero_centered)

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        if not self.is_fused:
            self.normalise = compiled(self.normalise)

    def extra_repr(self) -> str:
        """Size and form, for print(model)."""
        return f"{self.hidden_size}, eps={self.eps}, zero_centered={self.zero_centered}, fused={self.is_fused}"


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def _choose_form(self) -> Callable[..., Tensor]:
        return _fused_rms_norm if self.is_fused else _plain_rms_norm


class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension."""

    has_offset = True

    def _choose_form(self) -> Callable[..., Tensor]:
        return _fused_layer_norm if self.is_fused else _plain_layer_norm

    def _normalise(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.weight, self.bias, self.eps, self.zero_centered)


class LayerNormWithoutBias(Norm):
    """(x - mean) / sqrt(variance + eps) * weight, over the last dimension."""

    joins_stream = False

    def _choose_form(self) -> Callable[..., Tensor]:
        return _fused_layer_norm if self.is_fused else _plain_layer_norm

    def _runs_kernel(self, *tensors: Tensor | None) -> bool:
        return False  # without a bias, ours is RMSNorm

    def _normalise(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.weight, None, self.eps, self.zero_centered)


class NormWithoutParameters(MegatronModule):
    """Either norm without weight and bias, over the last dimension."""

    def __init__(self, config: TransformerConfig, eps: float | None = None) -> None:
        super().__init__(config)
        self.eps, self.dtype = config.layernorm_epsilon if eps is None else eps, parameter_dtype(config)
        self.normalise = normalise_length if config.normalization == "RMSNorm" else _normalise_centred

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        self.normalise = compiled(self.normalise)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x: [..., h] -> [..., h] in the model's dtype."""
        return self.normalise(x, self.eps).to(self.dtype)


class HeadL2Norm(MegatronModule):
    """x / sqrt(mean(x^2) + eps) over the channels of each head, without a weight."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.normalise = normalise_length

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        self.normalise = compiled(self.normalise)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each head's channels: [..., d] -> [..., d] in x's dtype, computed in float32."""
        return self.normalise(x, self.config.layernorm_epsilon)


class AllHeadsRMSNorm(MegatronModule):
    """RMSNorm over all heads of a token at once (OLMo 2), where each tensor-parallel rank has some of them."""

    def __init__(self, config: TransformerConfig, num_heads: int, head_width: int, tp_group: Group) -> None:
        """num_heads: of the whole model, a multiple of the ranks."""
        super().__init__(config)
        self.width, self.eps, self.tp_group = num_heads * head_width, config.layernorm_epsilon, tp_group
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = declare_parameter(
            (self.width,),
            kind="qk_norm",
            init=zeros if self.zero_centered else ones,
            dtype=parameter_dtype(config),
            splits=tensor_parallel_split(0, tp_group),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise all heads of a token together: [s, b, n, d] -> [s, b, n, d], with the n heads of this rank."""
        # A rank has a part of each token's channels, so the mean of their squares is a sum over the ranks.
        flat = at_least_float32(x.flatten(-2))  # [s, b, n * d]
        total = reduce_from_tensor_model_parallel_region(flat.square().sum(-1, keepdim=True), self.tp_group)
        # What each rank does with the total differs, so its gradient is summed as well.
        mean = copy_to_tensor_model_parallel_region(total, self.tp_group) / self.width
        normalised = (flat * torch.rsqrt(mean + self.eps)).to(x.dtype)
        return (normalised * (self.weight + 1 if self.zero_centered else self.weight)).view_as(x)


def build_norm(
    config: TransformerConfig,
    hidden_size: int,
    eps: float | None = None,
    partial_grad_axes: Sequence[str] | None = None,
) -> Any:
    """The norm that config.normalization names, with the parameters of config.norm_parameters. Raises ConfigError for a
    name we do not know."""
    norms: dict[str, type[Norm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if config.norm_parameters == "weight":
        norms["LayerNorm"] = LayerNormWithoutBias
    if config.normalization not in norms:
        raise ConfigError(f"--normalization {config.normalization} is not known; use LayerNorm or RMSNorm")
    if config.norm_parameters == "none":
        return NormWithoutParameters(config, eps)
    return norms[config.normalization](config, hidden_size, eps, partial_grad_axes)


# ---- regions: a norm with the scale as it is stored, and the dtypes of a residual stream in float32


def _fused_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return rms_norm(x, _scale(weight, zero_centered).to(x.dtype), eps).to(weight.dtype)


def _plain_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return rms_norm_reference(x, _scale(weight, zero_centered).to(x.dtype), eps).to(weight.dtype)


def _fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    scale = _scale(weight, zero_centered).to(x.dtype)
    return layer_norm(x, scale, None if bias is None else bias.to(x.dtype), eps).to(weight.dtype)


def _plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    scale = _scale(weight, zero_centered).to(x.dtype)
    return layer_norm_reference(x, scale, None if bias is None else bias.to(x.dtype), eps).to(weight.dtype)


def _normalise_centred(x: Tensor, eps: float) -> Tensor:
    return layer_norm(x, None, None, eps)


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    """The factor on the normalised input, [h]."""
    return weight + 1 if zero_centered else weight


def normalise_length(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension: [..., d] -> [..., d] in x's dtype, computed in float32."""
    # Torch's kernel keeps x as it is for backward; elementary operations would keep it in float32.
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


# ---- operations


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        rows = x.reshape(-1, width)  # [..., h] -> [tokens, h]
        # The norm sums squares in one pass without storing them; sqrt and square cancel in what follows.
        rstd = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        rstd.square_().div_(width).add_(eps).rsqrt_()
        # Not the output: it is rows * rstd * weight, and its readers save it.
        ctx.save_for_backward(rows, weight, rstd)
        # _unsafe_view: a fresh tensor, not a view, so that the caller may go on in place.
        return torch.ops.aten._unsafe_view(torch.mul(rows, rstd).mul_(weight), x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight, rstd = ctx.saved_tensors
        width = rows.shape[-1]
        grad_rows = grad.reshape(-1, width)  # [..., h] -> [tokens, h]
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        # Mean zero, and no gradient of a bias: the third of `mask`.
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad_rows, rows, [width], torch.zeros_like(rstd), rstd, weight, None, mask
        )
        if grad_x is not None:
            mean_g = (grad_rows @ weight).unsqueeze(-1).div_(width)  # [tokens, 1]
            grad_x = grad_x.add_(mean_g.mul_(rstd)).view(grad.shape)
        return grad_x, grad_weight, None


class _KernelNorm(torch.autograd.Function):
    """The norm of x + bias + residual, and that sum; of x and x where there is neither."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, offset: Tensor | None,
        eps: float, zero_centered: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from megatron.core.kernels import norm as kernels

        ctx.set_materialize_grads(False)
        ctx.kind, ctx.zero_centered = x.dtype, zero_centered
        # Written over although autograd knows it: the fresh output of a product, which does not keep it for backward.
        x = x.detach()
        y, sums, (means, factors) = kernels.normalise(
            x, weight, offset, eps, zero_centered, bias=bias, residual=residual
        )
        ctx.save_for_backward(sums, weight, means, factors)
        # Hooks for saved tensors hand back another one. Where there is an offset, both gradients go by autograd.
        main_grad = getattr(weight, "main_grad", None) if offset is None else None
        ctx.main_grad = main_grad if main_grad is not None and main_grad.dtype == torch.float32 else None
        return y, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> Any:
        from megatron.core.kernels import norm as kernels

        sums, weight, means, factors = ctx.saved_tensors
        needs_weights = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        if grad is None:  # nobody used the norm's output
            grad = torch.zeros_like(sums, dtype=weight.dtype)
        grad_residual, grad_x, of_weights = kernels.find_gradients(
            grad, grad_sums, sums, weight, kernels.Statistics(means, factors), ctx.zero_centered,
            rounds_to=ctx.kind, with_weights=needs_weights, into=ctx.main_grad,
        )  # fmt: skip
        grad_bias = grad_x.reshape(-1, grad_x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        if of_weights is None or ctx.main_grad is not None:
            grad_weight = grad_offset = None
        else:
            grad_weight, grad_offset = of_weights[0], of_weights[-1]
        return (
            grad_x, grad_bias, grad_residual if ctx.needs_input_grad[2] else None, grad_weight,
            grad_offset if ctx.needs_input_grad[4] else None, None, None,
        )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension; x [..., h], weight [h]. Computes in float32, returns x's format."""
    # Elsewhere torch has a kernel, which also computes statistics in float32.
    if not is_cpu(x) or not is_wide(x):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    if torch.is_inference_mode_enabled():  # nothing is kept; of torch's operations one is longer than these
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # An operation takes a tensor of one number in a fifth of the time that it takes for a Python number.
        factor = torch.addcmul(x.new_full((), eps), length, length, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(x, factor).mul_(weight)
    result: Tensor = _FusedRMSNorm.apply(x, weight, eps)
    return result


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm from elementary operations: x [..., h], weight [h] -> [..., h] in x's format."""
    # Squares of 16-bit numbers overflow and lose digits: statistics are in float32, the scale in x's format.
    wide = at_least_float32(x)
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normalised.to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension by torch's fused operator; x [..., h], weight and bias [h] or left out."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm from elementary operations: x [..., h], weight and bias [h] -> [..., h] in x's format."""
    wide = at_least_float32(x)
    centred = wide - wide.mean(-1, keepdim=True)
    normalised = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    scaled = normalised.to(x.dtype) * weight
    return scaled if bias is None else scaled + bias
