# SPDX-License-Identifier: Apache-2.0
"""Sentences for the log on the implementation that each operation of the model got."""

from __future__ import annotations

import torch

from megatron.core.activations import find_activation
from megatron.core.device import current_device, is_cpu, is_cuda
from megatron.core.kernels import launching
from megatron.core.operation_table import Case, choose
from megatron.core.plan.read import read_plan
from megatron.core.tensor_parallel.parameters import parameter_dtype
from megatron.core.tensor_parallel.products import accumulates_weight_grads, choose_product, onednn_is_faster
from megatron.core.transformer.attention import choose_rotary
from megatron.core.transformer.core_attention.interface import AttentionOptions
from megatron.core.transformer.core_attention.select import build_attention_backend
from megatron.core.transformer.execution.fp8_layers import read_fp8_recipe
from megatron.core.transformer.mlp import choose_activate
from megatron.core.transformer.moe.grouped_products import BatchedMatmul, GroupedMatmul, choose_expert_product
from megatron.core.transformer.moe.permutation import choose_permutation
from megatron.core.transformer.norms import choose_norm
from megatron.core.transformer.residual_branch import choose_residual_sum
from megatron.core.transformer.transformer_config import TransformerConfig


def describe_operations(
    config: TransformerConfig, device: torch.device | None = None, engine: str | None = None
) -> dict[str, str]:
    """Operation -> implementation on `device` (this process's when None). engine: name of what multiplies in place of
    our products, Transformer Engine with its release; None without.

    Raises ConfigError when the configured attention backend cannot do what the config asks on this device.
    """
    # The names come from the objects that layers would build, so that the log cannot say something else than what runs.
    device = current_device() if device is None else device
    attending = [layer for layer in read_plan(config).decoder if {"attention", "latent_attention"} & set(layer.kinds)]
    layers = [AttentionOptions.from_config(config, layer.number) for layer in attending]
    # Layers may differ (sliding windows), but equal names are said once.
    layer_backends = [build_attention_backend(config, options, device).name for options in layers]
    if config.has_kind("sparse_attention"):
        layer_backends.append("keys that an indexer chooses, by blocks of queries")
    if config.is_compressed:
        layer_backends.append("a window and compressed entries, by blocks of queries")
    experts = {} if config.num_moe_experts is None else describe_expert_operations(config, device, engine)
    loss = "fused" if config.cross_entropy_loss_fusion else "elementary"
    gate = "gated " if config.gated_linear_unit else ""
    rotation = choose_rotary(config, device)
    # What a norm has made is rotated by itself.
    is_apart = config.apply_rope_fusion and not (rotation.is_fused or config.compile)
    by_itself = is_apart and launching.kernels_work(device)
    assert config.hidden_size is not None
    rotary = {"rotary positions": "one kernel each way for queries, and one for keys" if by_itself else rotation.name}
    return {
        "linear": _describe_linear(config, device) if engine is None else engine,
        "attention": "; ".join(dict.fromkeys(layer_backends)),
        "norm": f"{config.normalization}, {choose_norm(config, config.hidden_size, device).way.name}",
        "activation": f"{gate}{find_activation(config.activation_func).name}, " + choose_activate(config, device).name,
        **(rotary if config.rotates_heads else {}),
        **experts,
        "bias, dropout, residual": choose_residual_sum(config, device).name,
        "cross entropy": f"vocabulary-parallel, {choose('cross entropy', Case(loss, device)).way.name}",
        **describe_kernels(device),
        "layers": _describe_launching(config),
    }


def _describe_launching(config: TransformerConfig) -> str:
    described = "regions between products compiled by torch.compile" if config.compile else "eager"
    if config.cuda_graph_impl == "none":
        return described
    parts = " and ".join(config.cuda_graph_modules) or "whole layers"
    return f"{described}; {parts} launched as CUDA graphs from step {max(1, config.cuda_graph_warmup_steps) + 1} on"


def describe_kernels(device: torch.device) -> dict[str, str]:
    """Return whether the kernels of megatron/core/kernels run on a GPU, and why not; nothing for a CPU."""
    if not is_cuda(device):
        return {}
    obstacle = launching.find_obstacle(device)
    return {"kernels": "Triton" if obstacle is None else f"PyTorch's own alone: {obstacle}"}


def _describe_linear(config: TransformerConfig, device: torch.device) -> str:
    plain = choose_product(config).name
    in_float32 = parameter_dtype(config) == torch.float32
    # Autograd differentiates only torch's products.
    if is_cpu(device) and in_float32 and accumulates_weight_grads(config) and onednn_is_faster():
        plain += "; large products by oneDNN, which is faster on this processor"
    if config.few_bits_recipe is None:
        return plain
    layers = [layer for layer in read_plan(config).decoder if layer.low_precision]
    outside = [] if config.fp8 is not None and config.fp8_output_proj else ["output layer"]
    if len(layers) < config.num_layers:
        outside.append(f"{config.num_layers - len(layers)} of {config.num_layers} layers")
    if config.fp8_bf16_layers:
        outside.append(" ".join(config.fp8_bf16_layers))
    described = read_fp8_recipe(config, device).describe()
    return described + (f"; {' and '.join(outside)}: {plain}" if outside else "")


def describe_expert_operations(
    config: TransformerConfig, device: torch.device, engine: str | None = None
) -> dict[str, str]:
    """Return operation -> implementation for what only layers with experts have."""
    width, inner, dtype = config.expert_channels, config.moe_ffn_hidden_size, parameter_dtype(config)
    assert inner is not None
    # The shapes that one process multiplies: whether a kernel takes them depends on the split.
    inner //= config.expert_tensor_parallel_size or 1
    products = [
        choose_expert_product(config, widths, dtype, device).name
        for widths in ((width, inner * (2 if config.gated_linear_unit else 1)), (inner, width))
    ]
    if engine is not None:
        products = [f"{engine}, GroupedLinear"]
    elif config.few_bits_recipe is not None:
        products = [f"{read_fp8_recipe(config, device).describe()}, one product for each expert"]
    elif config.moe_grouped_gemm:
        taken = (GroupedMatmul.name, BatchedMatmul.name)
        products = [name if name in taken else f"{name} (grouped_mm refuses its widths)" for name in products]
        adds_to_float32 = accumulates_weight_grads(config) and dtype != torch.float32
        if GroupedMatmul.name in products and adds_to_float32 and launching.kernels_work(device):
            products.append("weight gradients added in float32 by a kernel")
    return {
        "products of experts": "; ".join(dict.fromkeys(products)),
        "tokens to experts and back": f"{config.moe_token_dispatcher_type}, sorted and summed by "
        + choose_permutation(config, device).name,
    }
