# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in loops over tokens and experts, as its definition says, and tiny layers to compare with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import LOSS_NAMES, read_loss_coefficients
from tests.support.gpt_models import build_model

E, K, S, B, H = 8, 2, 6, 2, 32
MOE = "--disable-bias-linear --swiglu --num-experts 8 --moe-ffn-hidden-size 16"


def layer_of(flags: str, index: int = 0, base: str = MOE) -> MoELayer:
    """The mixture of a layer of the tiny model, with a router whose choices are clear."""
    layer = build_model(f"{base} {flags}").decoder.layers[index].mlp
    assert isinstance(layer, MoELayer)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            size = 1.0 if "router.weight" in name else 0.3
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return layer


def tokens() -> Tensor:
    """[s, b, h]."""
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(5))


# ---- the definition, in loops, in double precision


def chosen_experts(layer: MoELayer, logits: Tensor) -> list[tuple[list[int], list[Tensor]]]:
    """Experts and weights of each token."""
    config, bias = layer.config, layer.router.expert_bias
    k, function = config.moe_router_topk, config.moe_router_score_function
    found = []
    for row in logits:
        scores = {
            "softmax": row.softmax(0) if config.moe_router_pre_softmax else row,
            "sigmoid": row.sigmoid(),
            "sqrtsoftplus": F.softplus(row).sqrt(),
        }[function]
        ranking = scores if bias is None else scores + bias
        candidates = list(range(E))
        if config.moe_router_group_topk:
            groups = [
                candidates[i::1][: E // config.moe_router_num_groups]
                for i in range(0, E, E // config.moe_router_num_groups)
            ]
            per_group = 1 if config.moe_router_group_score == "best" else k // config.moe_router_group_topk
            strength = [sum(sorted((ranking[e].item() for e in group), reverse=True)[:per_group]) for group in groups]
            admitted = sorted(range(len(groups)), key=lambda g: -strength[g])[: config.moe_router_group_topk]
            candidates = [e for g in admitted for e in groups[g]]
        experts = sorted(candidates, key=lambda e: -ranking[e].item())[:k]
        weights = torch.stack([scores[e] for e in experts])
        if function == "softmax" and not config.moe_router_pre_softmax:
            weights = weights.softmax(0)
        elif function != "softmax" and k > 1:
            weights = weights / weights.sum()
        found.append((experts, list(weights * (config.moe_router_topk_scaling_factor or 1.0))))
    return found


def mlp(x: Tensor, layer: MoELayer, e: int) -> Tensor:
    """Expert e on one token [h]."""
    fc1, fc2, config = layer.experts.linear_fc1, layer.experts.linear_fc2, layer.config
    hidden = fc1.weight[e].double() @ x + (0 if fc1.bias is None else fc1.bias[e].double())
    if config.gated_linear_unit:
        gate, up = take_apart(hidden, config.moe_mlp_glu_interleave_size)
        hidden = F.silu(gate) * up
    else:
        hidden = F.relu(hidden) ** 2 if config.activation_func == "squared_relu" else F.gelu(hidden)
    return fc2.weight[e].double() @ hidden + (0 if fc2.bias is None else fc2.bias[e].double())


def apply_linear(linear: Any, rows: Tensor) -> Tensor:
    """y = x W^T + b."""
    return rows @ linear.weight.double().t() + (0 if linear.bias is None else linear.bias.double())


def take_apart(hidden: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
    """Gate and up, in turns of `size` channels along the last dimension."""
    half = hidden.shape[-1] // 2
    gates = [c for c in range(2 * half) if c // (size or half) % 2 == 0]
    return hidden[..., gates], hidden[..., [c for c in range(2 * half) if c not in gates]]


def kept_choices(layer: MoELayer, choices: list[tuple[list[int], list[Tensor]]]) -> set[tuple[int, int]]:
    """(token, expert) that fit into the capacity."""
    config = layer.config
    everything = [(t, e, w.item()) for t, (experts, ws) in enumerate(choices) for e, w in zip(experts, ws, strict=True)]
    ranks = config.expert_model_parallel_size
    bounds = [(E, config.moe_expert_capacity_factor), (ranks, config.moe_expert_rank_capacity_factor)]
    for parts, factor in bounds:
        if factor is None:
            continue
        capacity = math.ceil(len(choices) * config.moe_router_topk / parts * factor)
        left = []
        for part in range(parts):
            wanting = [entry for entry in everything if entry[1] * parts // E == part]
            if config.moe_token_drop_policy == "probs":
                wanting.sort(key=lambda entry: -entry[2])
            left += wanting[:capacity]
        everything = [entry for entry in everything if entry in left]
    return {(t, e) for t, e, _ in everything}


def auxiliary_losses(layer: MoELayer, logits: Tensor) -> Iterator[Tensor]:
    config, k = layer.config, layer.config.moe_router_topk
    scores = {
        "softmax": logits.softmax(1),
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": F.softplus(logits).sqrt(),
    }[config.moe_router_score_function]
    shares = scores / scores.sum(1, keepdim=True)
    batches = {"aux_loss": [range(S * B)], "seq_aux_loss": [range(b, S * B, B) for b in range(B)]}
    batches["global_aux_loss"] = batches["aux_loss"]  # of the first microbatch of a step
    for kind, weight in zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=False):
        for members in batches.get(kind, []):
            chosen = [set(shares[t].topk(k).indices.tolist()) for t in members]
            for e in range(E):
                fraction = sum(e in found for found in chosen) / (k * len(members))
                mean_share = torch.stack([shares[t, e] for t in members]).mean()
                yield weight * E * fraction * mean_share / len(batches[kind])
    if config.moe_z_loss_coeff:
        for row in logits:
            yield config.moe_z_loss_coeff * row.exp().sum().log() ** 2 / len(logits)


def by_definition(layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output [s, b, h] and the sum of the auxiliary losses."""
    flat, router, config = x.flatten(0, 1).double(), layer.router, layer.config
    narrow = flat if config.moe_latent_size is None else apply_linear(layer.fc1_latent_proj, flat)
    logits = flat @ router.weight.double().t() + (0 if router.bias is None else router.bias.double())
    choices = chosen_experts(layer, logits)
    kept = kept_choices(layer, choices)
    rows = []
    for t, (experts, weights) in enumerate(choices):
        row = torch.zeros(narrow.shape[1], dtype=torch.float64)
        for e, weight in zip(experts, weights, strict=True):
            if (t, e) not in kept:
                continue
            if config.moe_apply_probs_on_input:
                row = row + mlp(weight * narrow[t], layer, e)
            else:
                row = row + weight * mlp(narrow[t], layer, e)
        rows.append(row)
    output = torch.stack(rows)
    if config.moe_latent_size is not None:
        output = apply_linear(layer.fc2_latent_proj, output)
    output = output.view_as(x)
    shared = layer.shared_experts
    if shared is not None:
        wide = x.double()
        gate, up = take_apart(
            wide @ shared.linear_fc1.weight.double().t(), config.moe_shared_expert_glu_interleave_size
        )
        own = (F.silu(gate) * up) @ shared.linear_fc2.weight.double().t()
        gates = None if shared.gate_weight is None else (wide @ shared.gate_weight.double().t()).sigmoid()
        output = output + (own if gates is None else gates * own)
    return output.float(), sum(auxiliary_losses(layer, logits), torch.zeros(())).float()


def gradients(layer: MoELayer, loss: Tensor, x: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    x.grad = None
    loss.backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return grads | {"input": x.grad.clone()}


def assert_is_the_definition(layer: MoELayer) -> None:
    """Output, gradients and logged losses of the layer are those of the loops."""
    x = tokens().requires_grad_()
    pull = torch.randn(S, B, H, generator=torch.Generator().manual_seed(6))
    output, bias = layer(x)
    assert bias is None
    found = gradients(layer, (output * pull).sum(), x)
    expected, auxiliary = by_definition(layer, x)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    wanted = gradients(layer, (expected * pull).sum() + auxiliary, x)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        size = max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * size, msg=lambda m, n=name: f"{n}: {m}")
    weights = {LOSS_NAMES[kind]: weight for kind, weight in read_loss_coefficients(layer.config).items()}
    logged = sum((weights[name] * loss for name, loss in layer.router.take_losses().items()), torch.zeros(()))
    torch.testing.assert_close(logged, auxiliary.detach(), rtol=1e-5, atol=1e-6)
