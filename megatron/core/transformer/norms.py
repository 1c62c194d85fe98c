"""LayerNorm and RMSNorm as modules, in the form the config asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.fusions.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from megatron.core.process_groups_config import Group
from megatron.core.tensor_parallel.layers import tensor_parallel_split
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.parameters import declare_parameter, ones, parameter_dtype, zeros
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


def uses_fused_norm(config: TransformerConfig) -> bool:
    """Whether norms run as one operation; a compiler makes its own from the elementary ones."""
    return config.persist_layer_norm and not config.compile


class _Norm(MegatronModule):
    """A weight of ones; stored as zeros, and one added in use, with layernorm_zero_centered_gamma.

    partial_grad_axes: axes whose ranks each normalise a part of the input; those of sequence parallelism when None.
    """

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
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.is_fused = uses_fused_norm(config)
        # With sequence parallelism each rank normalises its own tokens only.
        by_sequence = ("tp",) if config.sequence_parallel else ()
        self.partial = by_sequence if partial_grad_axes is None else tuple(partial_grad_axes)
        self.weight = declare_parameter(
            (hidden_size,),
            init=zeros if self.zero_centered else ones,
            dtype=parameter_dtype(config),
            partial_grad_axes=self.partial,
        )

    def scale(self) -> Tensor:
        """The factor applied to the normalised input, [h]."""
        return self.weight + 1 if self.zero_centered else self.weight

    def in_format_of(self, x: Tensor, *parameters: Tensor) -> list[Tensor]:
        """The parameters in x's number format: a residual stream in float32 has another than they."""
        return [parameter.to(x.dtype) for parameter in parameters]

    def extra_repr(self) -> str:
        """Size and form, for print(model)."""
        return f"{self.hidden_size}, eps={self.eps}, zero_centered={self.zero_centered}, fused={self.is_fused}"


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h] in the number format of the weight."""
        (scale,) = self.in_format_of(x, self.scale())
        return (rms_norm if self.is_fused else rms_norm_reference)(x, scale, self.eps).to(self.weight.dtype)


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float | None = None,
        partial_grad_axes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(config, hidden_size, eps, partial_grad_axes)
        self.bias = declare_parameter(
            (hidden_size,), init=zeros, dtype=parameter_dtype(config), partial_grad_axes=self.partial
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h] in the number format of the weight."""
        scale, bias = self.in_format_of(x, self.scale(), self.bias)
        return (layer_norm if self.is_fused else layer_norm_reference)(x, scale, bias, self.eps).to(self.weight.dtype)


class HeadL2Norm(MegatronModule):
    """x / sqrt(mean(x^2) + eps) over the channels of each head, without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        wide = x.float()
        root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        return (wide * root).to(x.dtype)


class AllHeadsRMSNorm(MegatronModule):
    """RMSNorm over all heads of a token at once (OLMo 2), where each tensor-parallel rank has some of them."""

    def __init__(self, config: TransformerConfig, num_heads: int, head_width: int, tp_group: Group) -> None:
        """num_heads: of the whole model, a multiple of the ranks."""
        super().__init__(config)
        self.width, self.eps, self.tp_group = num_heads * head_width, config.layernorm_epsilon, tp_group
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = declare_parameter(
            (self.width,),
            init=zeros if self.zero_centered else ones,
            dtype=parameter_dtype(config),
            splits=tensor_parallel_split(0, tp_group),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, n, d] -> [s, b, n, d], n heads of this rank."""
        flat = x.flatten(-2).float()  # [s, b, n * d]
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
) -> LayerNorm | RMSNorm:
    """The norm that config.normalization names. Raises ConfigError for a name we do not know."""
    norms: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if config.normalization not in norms:
        raise ConfigError(f"--normalization {config.normalization} is not known; use LayerNorm or RMSNorm")
    return norms[config.normalization](config, hidden_size, eps, partial_grad_axes)
