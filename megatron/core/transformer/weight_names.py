# SPDX-License-Identifier: Apache-2.0
"""Names of weights as the layer spec of upstream that was asked for gives them, in a network that is always the same.

    spec      norm before a projection                      experts of a layer
    own       input_layernorm.weight                        mlp.experts.linear_fc1.weight [experts, out, in]
    local     input_layernorm.weight                        mlp.experts.local_experts.N.linear_fc1.weight
    engine    self_attention.linear_qkv.layer_norm_weight   mlp.experts.linear_fc1.weightN

and with engine the convolution of Mamba-2 is mixer.conv1d_weight, not mixer.conv1d.weight.

They are what named_parameters(), state_dict() and their like show, and converters match. Placements, and with them
initial numbers, checkpoints and the order in memory, always have our names (`find_own_name`).
"""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

from torch import nn

from megatron.core.stacked_parameters import divide_stack

WeightNames = Literal["own", "local", "engine"]

_FUSED = {
    "mixer.in_proj": "input_layernorm",
    "self_attention.in_proj": "input_layernorm",
    "self_attention": "input_layernorm",
    "mlp": "pre_mlp_layernorm",
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
}
"""Transformer Engine's module of norm and product -> the norm before it, as parts of a layer."""
_CONVOLUTION = "mixer.conv1d_"
_PART_OF_EXPERTS = re.compile(r"(?:local_experts\.\d+\.)?(linear_fc[12]\.(?:weight|bias))\d*")


def find_own_name(name: str) -> str:
    """Our name of a parameter of a layer, of which it is a part under any of the names above."""
    path, _, kind = name.rpartition(".layer_norm_")
    if path in _FUSED:
        return f"{_FUSED[path]}.{kind}"
    if name.startswith(_CONVOLUTION):
        return name.replace("conv1d_", "conv1d.")
    if name.startswith("mlp.experts."):
        return "mlp.experts." + _PART_OF_EXPERTS.sub(r"\1", name.removeprefix("mlp.experts."))
    return name


def name_weights(layer: nn.Module, names: WeightNames) -> None:
    """Give the weights of a layer that was built with our names the names of a spec."""
    if names == "own":
        return
    experts: Any = _find(layer, "mlp.experts")
    # A user's own experts have the names that the user gave them.
    if experts is not None and hasattr(experts, "show_experts"):
        experts.show_experts(names)
    for path, of_norm in _FUSED.items() if names == "engine" else ():
        product, norm = _find(layer, path), _find(layer, of_norm)
        # Attention or an MLP as a whole only where it is one matrix.
        is_product = product is not None and (path.count(".") or "weight" in product._parameters)
        if is_product and norm is not None and list(norm._parameters):
            _lend_parameters(norm, product, "layer_norm_")
    convolution = _find(layer, "mixer.conv1d")
    if names == "engine" and convolution is not None:
        _lend_parameters(convolution, _find(layer, "mixer"), "conv1d_")


def divide_layer(layer: nn.Module, holders: list[nn.Module], *, numbers: bool) -> None:
    """Register the parts of a layer of stacked experts [experts, ...] in one holder for each expert (`weight`), or with
    numbers in the layer itself (`weight0`)."""
    for name in ("weight", "bias"):
        stack = layer._parameters.pop(name, None)
        # An attribute of the layer all the same, under the name that it computes with.
        layer.__dict__[name] = stack
        for index, part in enumerate([] if stack is None else divide_stack(stack)):
            holders[index].register_parameter(f"{name}{index}" if numbers else name, part)


def find_norm_class(norm: nn.Module) -> type[nn.Module]:
    """The class of a norm, wherever its parameters are registered."""
    return type(norm).__bases__[0] if isinstance(norm, _Lending) else type(norm)


class _Lending:
    """A module, such as a norm, whose parameters are registered in another one, such as the projection after it."""

    holder: tuple[nn.Module]


def _lend_parameters(norm: nn.Module, product: Any, prefix: str) -> None:
    """Move a norm's parameters to the projection after it, as layer_norm_weight and layer_norm_bias, or another
    module's to another one under names with this prefix."""
    names = tuple(name for name, param in norm._parameters.items() if param is not None)
    for name in names:
        product.register_parameter(f"{prefix}{name}", norm._parameters.pop(name))
    # In a tuple, so that the projection does not become a part of the norm.
    norm.__dict__["holder"] = (product,)
    norm.__class__ = _lending_class(type(norm), names, prefix)  # type: ignore[arg-type]


@functools.cache
def _lending_class(norm_class: type[nn.Module], names: tuple[str, ...], prefix: str) -> type[nn.Module]:
    """The class of norm with these parameters, looked up where they are: replacing them replaces them there."""

    def look_up(name: str) -> property:
        return property(lambda norm: getattr(norm.holder[0], prefix + name))

    properties = {name: look_up(name) for name in names}
    return type(norm_class.__name__, (norm_class, _Lending), properties)  # type: ignore[no-any-return]


def _find(layer: nn.Module, path: str) -> nn.Module | None:
    found: Any = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
