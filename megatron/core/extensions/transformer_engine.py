# SPDX-License-Identifier: Apache-2.0
"""Upstream's layers of Transformer Engine: our layers with upstream's constructors, installed or not.

Programs name them in specs, derive from them, replace their methods and ask isinstance. Which of our layers compute by
Transformer Engine is chosen elsewhere (--transformer-impl), and changes neither classes nor parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.enums import AttnMaskType
from megatron.core.errors import ConfigError
from megatron.core.models.common.embeddings.rope_utils import fused_apply_rotary_pos_emb
from megatron.core.placement import Split
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LayerOutput,
    ReplicatedLinear,
    RowParallelLinear,
)
from megatron.core.tensor_parallel.parameters import Initialiser, declare_parameter, fill_alone, parameter_dtype, zeros
from megatron.core.tensor_parallel.products import multiply
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.tensor_parallel.upstream_arguments import find_layer_group
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.upstream.fusions import WrappedTorchNorm
from megatron.core.upstream.fusions import split_along_dim as SplitAlongDim  # noqa: N812

# Put here by a table of upstream's names; declared for type checkers.
te_general_gemm: Any

HAVE_TE = False
"""No class here is from Transformer Engine."""
TENorm = WrappedTorchNorm
__all__ = [
    "HAVE_TE", "SplitAlongDim", "TEColumnParallelGroupedLinear", "TEColumnParallelLinear", "TEDotProductAttention",
    "TEGroupedLinear", "TELayerNormColumnParallelLinear", "TELinear", "TENorm", "TERowParallelGroupedLinear",
    "TERowParallelLinear", "fused_apply_rotary_pos_emb", "te_checkpoint",
]  # fmt: skip


class _LayerKinds(type):
    """Classes of upstream's that a model's own layers are of, too: programs choose adapters and names by isinstance."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        norm_and_product = isinstance(instance, ColumnParallelLinear) and "layer_norm_weight" in instance._parameters
        if cls is TELayerNormColumnParallelLinear or norm_and_product:
            return cls is TELayerNormColumnParallelLinear and norm_and_product
        alike: dict[Any, Any] = {
            TELinear: (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear),
            TEColumnParallelLinear: ColumnParallelLinear,
            TERowParallelLinear: RowParallelLinear,
            TEDotProductAttention: DotProductAttention,
        }
        return isinstance(instance, alike.get(cls, ()))


class TELinear(nn.Module, metaclass=_LayerKinds):
    """A product that is whole on every rank, weight [output_size, input_size]; parameters know the `parallel_mode`."""

    @take_arguments(
        "* skip_weight_param_allocation=False tp_comm_buffer_name=... symmetric_ar_type=... name=... "
        "gtp_remat_group=None gtp_replica_group=None",
        "it has a weight of its own, whole on every rank",
    )
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: Literal["column", "row", "duplicated"] | None,
        config: TransformerConfig,
        init_method: Initialiser,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_group: Group | None = None,
    ) -> None:
        """skip_bias_add: hand the bias back. Raises ConfigError for parallel_mode column and row."""
        if parallel_mode in ("column", "row"):
            kind = "TEColumnParallelLinear" if parallel_mode == "column" else "TERowParallelLinear"
            raise ConfigError(f"TELinear is whole on every rank; found parallel_mode={parallel_mode!r}: take {kind}")
        super().__init__()
        self.input_size, self.output_size, self.parallel_mode = input_size, output_size, parallel_mode
        self.skip_bias_add, self.te_return_bias = skip_bias_add, skip_bias_add and bias
        group = find_layer_group(self, tp_group, is_expert)
        inner = ReplicatedLinear(
            input_size, output_size, config=config, init_method=init_method, tp_group=group, bias=bias
        )
        self.weight, self.bias, self.product = inner.weight, inner.bias, inner.product
        for param in self.parameters():
            param.parallel_mode = parallel_mode  # type: ignore[attr-defined]
        fill_alone(self)

    def forward(self, x: Tensor) -> LayerOutput:
        """[..., input_size] -> [..., output_size], and the bias where it is left to the caller."""
        output = multiply(self.product, x, self.weight, None if self.skip_bias_add else self.bias)
        return output, self.bias if self.skip_bias_add else None


class TEColumnParallelLinear(ColumnParallelLinear, metaclass=_LayerKinds):
    """Our ColumnParallelLinear."""


class TELayerNormColumnParallelLinear(ColumnParallelLinear, metaclass=_LayerKinds):
    """A norm and a column-parallel product in one module, with the norm's parameters as `layer_norm_weight` and
    `layer_norm_bias`."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        """options: of TEColumnParallelLinear."""
        super().__init__(input_size, output_size, config=config, **options)
        norm = build_norm(config, input_size)
        self.layer_norm_weight = norm.weight
        if norm.has_offset:
            self.layer_norm_bias = norm.bias
        fill_alone(norm)
        # Not registered as a child, or its parameters would be in checkpoints twice.
        self._norm = (norm,)

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> LayerOutput:
        """[s, b, input_size] -> normalised, then as ColumnParallelLinear."""
        (norm,) = self._norm
        # What is ours now, which is not what it was built with where a model has been moved or copied.
        norm.weight = self.layer_norm_weight
        if norm.has_offset:
            norm.bias = self.layer_norm_bias
        return super().forward(norm(input_), weight)


class TERowParallelLinear(RowParallelLinear, metaclass=_LayerKinds):
    """Our RowParallelLinear."""


class TEGroupedLinear(nn.Module):
    """Products of `num_gemms` experts, with the parameters weight0 [output_size, input_size], bias0, weight1, ..."""

    @take_arguments("* tp_comm_buffer_name=... name=...")
    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: Literal["column", "row"] | None,
        config: TransformerConfig,
        init_method: Initialiser,
        bias: bool = False,
        skip_bias_add: bool = False,
        is_expert: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """parallel_mode: "column" divides the outputs of each expert, "row" the inputs."""
        super().__init__()
        self.num_gemms, self.input_size, self.output_size = num_gemms, input_size, output_size
        self.skip_bias_add, self.use_bias = skip_bias_add, bias
        group = find_layer_group(self, None, is_expert, pg_collection)
        axis = "etp" if is_expert else "tp"
        dtype = parameter_dtype(config)

        def split(dim: int) -> tuple[Split, ...]:
            return (Split(dim, axis, group.size(), group.rank()),) if group.size() > 1 else ()

        of_weight = {"column": split(0), "row": split(1), None: ()}[parallel_mode]
        of_bias = split(0) if parallel_mode == "column" else ()
        for number in range(num_gemms):
            weight = declare_parameter((output_size, input_size), init=init_method, dtype=dtype, splits=of_weight)
            self.register_parameter(f"weight{number}", weight)
            if bias:
                self.register_parameter(
                    f"bias{number}", declare_parameter((output_size,), init=zeros, dtype=dtype, splits=of_bias)
                )
        fill_alone(self)

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor) -> tuple[Tensor, list[Tensor] | None]:
        """Rows [n, input_size] sorted by expert and how many each has -> [n, output_size], and the biases where they
        are left to the caller. A row-parallel one gives this rank's part of the sum."""
        counts = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        biases = [getattr(self, f"bias{number}") if self.use_bias else None for number in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.skip_bias_add else biases
        outputs = [
            F.linear(rows, getattr(self, f"weight{number}"), added[number])
            for number, rows in enumerate(x.split(counts))
        ]
        left: Any = biases if self.skip_bias_add and self.use_bias else None
        return torch.cat(outputs), left


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    """The first half of experts: outputs are divided."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **options: Any) -> None:
        """options: of TEGroupedLinear."""
        super().__init__(num_gemms, input_size, output_size, parallel_mode="column", **options)


class TERowParallelGroupedLinear(TEGroupedLinear):
    """The second half of experts: inputs are divided."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **options: Any) -> None:
        """options: of TEGroupedLinear."""
        super().__init__(num_gemms, input_size, output_size, parallel_mode="row", **options)


class TEDotProductAttention(DotProductAttention, metaclass=_LayerKinds):
    """Our core attention."""

    @take_arguments("* v_channels=... num_splits=...")  # inputs have the first, and the second is a kernel's
    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        *positional: Any,
        k_channels: int | None = None,
        **options: Any,
    ) -> None:
        """positional, options: of DotProductAttention. k_channels: width of a key, of which the scale of scores follows
        where neither softmax_scale nor the config says it."""
        own = config.qk_head_dim + config.qk_pos_emb_head_dim if config.multi_latent_attention else config.kv_channels
        if k_channels not in (None, own) and len(positional) < 3 and options.get("softmax_scale") is None:
            options["softmax_scale"] = k_channels**-0.5
        super().__init__(config, layer_number, attn_mask_type, *positional, **options)


def te_checkpoint(
    forward_func: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_state_tracker: Any,
    tp_group: Group | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """forward_func(*args, **kwargs), which backward computes again. get_rng_state_tracker: it is the process's one."""
    run = functools.partial(forward_func, **kwargs) if kwargs else forward_func
    return checkpoint(run, distribute_saved_activations, *args, tp_group=tp_group)


def _get_extra_te_kwargs(config: TransformerConfig) -> dict[str, Any]:
    """Dtype and device of parameters, as Transformer Engine's constructors take them."""
    device: Any = "meta" if getattr(config, "init_model_with_meta_device", False) else torch.get_default_device()
    return {"params_dtype": parameter_dtype(config), "device": device}
