# SPDX-License-Identifier: Apache-2.0
"""Choice of the layers of a model that multiply in FP8, and the end of their steps.

A transformer layer exchanges, when it is built, the products of its linear layers and experts (`multiply_in_fp8`).
Layers outside of transformer layers keep their dtype: embedding, router, norms, core attention, and the output layer
unless --fp8-output-proj asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.device import current_device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.fp8_products import FP8Matmul, FP8Recipe, choose_way, end_step
from megatron.core.tensor_parallel.products import Matmul
from megatron.core.transformer.config_fields.precision import PrecisionFields
from megatron.core.transformer.moe.grouped_products import ExpertByExpert, FP8Experts
from megatron.core.transformer.transformer_config import TransformerConfig


class FP8Products(nn.Module):
    """The FP8 products of a layer, which end their step together."""

    def __init__(self, products: Mapping[str, FP8Matmul]) -> None:
        super().__init__()
        # In a list, so that they are registered where they belong, in their linear layers.
        self._products = list(products.items())

    @property
    def products(self) -> Mapping[str, FP8Matmul]:
        """Name of the linear layer, as in `self_attention.linear_qkv` -> its product."""
        return dict(self._products)

    def finish_step(self, groups: ProcessGroupCollection) -> None:
        """Find the scales of the next step; every process of the pipeline stage takes part."""
        self.finish_steps([self], groups)

    @staticmethod
    def finish_steps(layers: Sequence[FP8Products], groups: ProcessGroupCollection) -> None:
        """The same for all layers of this process, with one message."""
        end_step([product for layer in layers for product in layer.products.values()], groups.tp_dp_cp)


def read_fp8_recipe(config: PrecisionFields, device: torch.device | None = None, replicas: int = 1) -> FP8Recipe:
    """The recipe that the settings ask for, on `device` (this process's when None); replicas: see FP8Recipe.

    Raises ConfigError where the device has no FP8 products, and --fp8-emulation was not given.
    """
    device = current_device() if device is None else device
    name = config.few_bits_recipe
    assert name is not None, "a run without FP8 and FP4 has no recipe"
    return FP8Recipe(
        name=name,
        hybrid=config.fp8 == "hybrid",
        margin=config.fp8_margin,
        interval=config.fp8_interval,
        history_length=config.fp8_amax_history_len,
        takes_largest=config.fp8_amax_compute_algo == "max",
        rounds_weight_grad=config.fp8_wgrad,
        way=choose_way(name, emulates=config.fp8_emulation, device=device),
        measures=config.log_fp8_stats or config.fp8_fallback_sqnr is not None,
        may_fall_back=config.fp8_fallback_sqnr is not None,
        replicas=replicas,
    )


def multiply_in_fp8(
    module: nn.Module,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    module_name: str,
    keeps_rounded_input: Callable[[str], bool] = lambda name: True,
) -> FP8Products:
    """Exchange the product of every linear layer and of the experts inside the module, or of itself, but for those that
    are to stay in 16 bits. module_name: of the module in the whole model. keeps_rounded_input: whether a linear layer,
    by its name in the module, keeps its input in 8 bits."""
    # With a loss per token gradients are sums, which nobody divides before the end of the step.
    recipe = read_fp8_recipe(config, replicas=1 if config.calculate_per_token_loss else groups.dp_cp.size())
    # Replicas have other tokens; with hybrid context parallelism each microbatch has other ranks.
    of_tokens = groups.tp if config.hybrid_context_parallel else groups.tp_cp
    exchanged: dict[str, FP8Matmul] = {}
    for name, part in list(module.named_modules()):
        # Asked of the dictionary: embeddings and norms have no product, or another kind.
        plain: Any = part.__dict__.get("product")
        # An indexer's products are scores and what they are made of, and narrow.
        if ".indexer." in name or config.stays_in_bf16(f"{module_name}.{name}".rstrip(".")):
            continue
        if isinstance(plain, Matmul | ExpertByExpert):
            kind = FP8Experts if isinstance(plain, ExpertByExpert) else FP8Matmul
            part.product = kind(
                recipe,
                exact=plain,
                accumulates=plain.accumulates,
                out_dtype=plain.out_dtype,
                keeps_rounded_input=keeps_rounded_input(name),
                sharers=(of_tokens, groups.tp_dp_cp if kind is FP8Experts else groups.tp),
            )
            # Under sequence parallelism ranks keep their own tokens of an input: its rows.
            part.product.turns_input &= not config.sequence_parallel
            exchanged[name] = part.product
    return FP8Products(exchanged)
