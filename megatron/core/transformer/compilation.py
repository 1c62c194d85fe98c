# SPDX-License-Identifier: Apache-2.0
"""Compiling a model with torch.compile, layer by layer.

All layers of a kind share one graph, so compiling takes as long for 80 layers as for one. With `config.compile` the
layers are built from elementary operations, which the compiler fuses itself; embedding, output layer and loss stay as
they are: one large product, and operations that work in place already. So do experts: how many rows each one gets is
another number in every microbatch, for which the compiler would begin anew.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compile every transformer layer of `model` in place, around its experts where it has any; returns how many.
    Parameters and names stay as they are.

    backend: of torch.compile; "aot_eager" traces the same graphs without generating code, for tests.
    Build the model from a config with `compile` set, or the hand-written fusions will stand in the compiler's way.
    """
    # Layer by layer, not the whole model: hooks, pipeline stages and recomputation stay outside the graphs.
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    for layer in layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.forward = torch.compiler.disable(layer.mlp.forward)  # type: ignore[method-assign]
        # Shapes are fixed in training, and kernels for fixed shapes are faster; a new length is compiled anew.
        layer.compile(backend=backend, dynamic=False)
    return len(layers)
