# SPDX-License-Identifier: Apache-2.0
"""Upstream's ways to specs of layers, and the classes that they name."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_sparse_attention_spec,
)
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.config_fields.positions import compute_yarn_magnitude
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.sparse_attention import build_hadamard
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class LocalSpecProvider:
    """The class that each part of a layer is made by."""

    products: ClassVar[tuple[type, type]] = (ColumnParallelLinear, RowParallelLinear)
    norm_and_product: ClassVar[type | None] = None
    norm: ClassVar[Any] = staticmethod(build_norm)
    attention: ClassVar[type] = DotProductAttention

    def column_parallel_linear(self) -> type:
        """Outputs divided."""
        return self.products[0]

    def row_parallel_linear(self) -> type:
        """Inputs divided."""
        return self.products[1]

    def fuse_layernorm_and_linear(self) -> bool:
        """Return True where a norm and the product after it are one module."""
        return self.norm_and_product is not None

    def column_parallel_layer_norm_linear(self) -> type | None:
        """Return that module: a norm, then outputs divided."""
        return self.norm_and_product

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """Builder of a norm; the config says which one, so that the arguments change nothing."""
        return self.norm

    def core_attention(self) -> type:
        """Scores, softmax and the sum over values."""
        return self.attention


class TESpecProvider(LocalSpecProvider):
    """The same by the names of Transformer Engine's layers."""

    products = (TEColumnParallelLinear, TERowParallelLinear)
    norm_and_product = TELayerNormColumnParallelLinear
    norm, attention = TENorm, TEDotProductAttention

    def linear(self) -> type:
        """Whole on every rank."""
        return TELinear


class Linear(TELinear):
    """A layer that is whole on every rank, with upstream's constructor for quantised models."""

    @take_arguments(
        "* gather_output=... stride=1 keep_master_weight_for_test=False skip_weight_param_allocation=False "
        "embedding_activation_buffer=None grad_output_buffer=None tp_comm_buffer_name=... disable_grad_reduce=False "
        "parallel_mode=None name=...",
        "its outputs are whole on every rank, by a weight of its own",
    )
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_group: Any = None,
    ) -> None:
        super().__init__(
            input_size, output_size, parallel_mode=None, config=config, init_method=init_method, bias=bias,
            skip_bias_add=skip_bias_add, is_expert=is_expert, tp_group=tp_group,
        )  # fmt: skip


def get_gpt_modelopt_spec(
    config: TransformerConfig,
    local_core_attention: bool = False,
    remap_te_layernorm: bool = False,
    real_quant_cfg: str = "None",
    qk_l2_norm: bool = False,
    use_arbitrary_attention_mask: bool = False,
) -> ModuleSpec:
    """The local spec, whose norms stand apart from products. local_core_attention: it always is.

    Raises ConfigError for real_quant_cfg and remap_te_layernorm, and where qk_l2_norm is not the config's.
    """
    if real_quant_cfg not in (None, "None") or remap_te_layernorm:
        raise ConfigError("get_gpt_modelopt_spec() has no real_quant_cfg and no remap_te_layernorm; leave them out")
    spec = get_gpt_layer_local_spec(multi_latent_attention=config.multi_latent_attention, qk_l2_norm=qk_l2_norm or None)
    if use_arbitrary_attention_mask:
        from megatron.core.enums import AttnMaskType

        spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.arbitrary
    return spec


def get_dsa_module_spec_for_backend(config: TransformerConfig, backend: Any = None) -> ModuleSpec:
    """The spec of latent attention to keys that an indexer chooses. backend: changes nothing."""
    return get_sparse_attention_spec()


def get_transformer_block_with_experimental_attention_variant_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """The spec of a stage's layers, each with the attention that the config says."""
    return get_gpt_decoder_block_spec(config, vp_stage=vp_stage, pp_rank=pp_rank)


def get_transformer_layer_with_experimental_attention_variant_spec(
    config: TransformerConfig, backend: Any = None
) -> list[ModuleSpec]:
    """The specs of all layers of the decoder. backend: changes nothing."""
    return get_gpt_decoder_layer_specs(config)


def is_gated_delta_net_variant(experimental_attention_variant: str | None) -> bool:
    """Return True for a value of --experimental-attention-variant that is a gated delta net."""
    return experimental_attention_variant in ("gdn", "gdn2", "gated_delta_net")


def is_linear_attention_variant(experimental_attention_variant: str | None) -> bool:
    """Return True for a value of --experimental-attention-variant whose attention is linear in the length."""
    return is_gated_delta_net_variant(experimental_attention_variant)


def rotate_activation(x: Tensor) -> Tensor:
    """x [..., d] times the orthogonal Hadamard matrix of its last dimension. Raises ConfigError where d is no power of
    two."""
    if (width := x.shape[-1]) & (width - 1):
        raise ConfigError(f"rotate_activation() got {width} channels, and there is no such matrix; use a power of two")
    return x @ build_hadamard(x)


def _yarn_get_concentration_factor_from_config(config: Any) -> float:
    """The factor on the cosines of YaRN's angles; 1 without YaRN."""
    if getattr(config, "position_embedding_type", None) != "yarn" and not hasattr(config, "yarn_mscale"):
        return 1.0
    factor, mscale, all_dim = (
        getattr(config, f"yarn_{name}", None) for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")
    )
    if factor is None or mscale is None or all_dim is None:
        return 1.0
    return compute_yarn_magnitude(factor, mscale) / compute_yarn_magnitude(factor, all_dim)
