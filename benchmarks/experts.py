#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""A layer of experts against loops over experts and against a dense MLP; bytes of experts and of latent attention.

    OMP_NUM_THREADS=1 python benchmarks/experts.py
    OMP_NUM_THREADS=1 python benchmarks/experts.py --tokens 2048 --hidden 256 --inner 176 --rounds 10

Speed: forward and backward of a layer with 64 experts, 6 for each token, float32, CPU time in rounds that run each
variant once, in turn; ratios are taken within rounds.

    loop        a router and a list of MLPs: for each expert, look up its tokens, multiply, add the weighted outputs
    hf loop     Hugging Face's experts (OLMoE, implementation "eager"): stacked weights, the same loop
    ours        MoELayer, one product for each expert; grouped: with --moe-grouped-gemm
    products    the nine products of ours alone, on rows that are sorted already
    dense       our MLP of the same number of multiplications per token

Bytes, measured against formulas: what latent attention keeps for backward and in its cache (docs/attention.md), and
parameters, gradients and optimizer state of experts on each of four processes.
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.conditions import print_conditions
from benchmarks.memory import KeptForBackward
from benchmarks.train_step import measure
from megatron.core.host_memory import keep_freed_host_memory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequences.state import SequenceState
from megatron.core.tensor_parallel.parameters import initialise_parameters
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.flags.read import read_run_config
from megatron.training.launch.local_job import run_locally
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import parse_layout

EXPERTS, TOPK = 64, 6


class Sizes(NamedTuple):
    """Of a layer and its microbatch."""

    tokens: int = 256
    hidden: int = 128
    inner: int = 64


class LoopOfExperts(nn.Module):
    """[T, h] -> [T, h], as one writes it: a router, and a loop over gated MLPs."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.hidden, EXPERTS, bias=False)
        self.up = nn.ModuleList(nn.Linear(sizes.hidden, 2 * sizes.inner, bias=False) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(sizes.inner, sizes.hidden, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Add up the outputs of each token's experts."""
        logits, chosen = self.router(x).topk(TOPK, dim=-1)
        weights, output = logits.softmax(-1), torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, slot = torch.where(chosen == expert)
            gate, value = up(x[token]).chunk(2, dim=-1)
            output.index_add_(0, token, down(F.silu(gate) * value) * weights[token, slot, None])
        return output


def build_layer(sizes: Sizes, **options: Any) -> nn.Module:
    """Our layer of experts, or with num_moe_experts=None a dense MLP; gradients go to buffers, as in training."""
    config = TransformerConfig(
        num_layers=1, hidden_size=sizes.hidden, num_attention_heads=4, gated_linear_unit=True, add_bias_linear=False,
        activation_func="silu", moe_router_topk=TOPK, moe_router_load_balancing_type="none",
        **{"num_moe_experts": EXPERTS, "ffn_hidden_size": sizes.inner} | options,
    )  # fmt: skip
    groups, parts = ProcessGroupCollection.single(), get_gpt_layer_local_spec().submodules
    assert parts is not None
    if config.num_moe_experts is None:
        layer = build_module(parts.mlp, config=config, pg_collection=groups)
    else:
        layer = build_module(parts.moe, config=config, layer_number=1, pg_collection=groups)
    initialise_parameters(layer, seed=1)
    for param in layer.parameters():
        param.main_grad = torch.zeros_like(param)
    module: nn.Module = layer
    return module


def build_loop_like(layer: Any, sizes: Sizes) -> LoopOfExperts:
    """The loop with the weights of our layer."""
    loop = LoopOfExperts(sizes)
    with torch.no_grad():
        loop.router.weight.copy_(layer.router.weight)
        for expert in range(EXPERTS):
            loop.up[expert].weight.copy_(layer.experts.linear_fc1.weight[expert])
            loop.down[expert].weight.copy_(layer.experts.linear_fc2.weight[expert])
    return loop


def build_hugging_face_layer(sizes: Sizes) -> nn.Module | None:
    """Hugging Face's layer; None where transformers is missing."""
    try:
        from transformers import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
    except ImportError:
        return None
    config = OlmoeConfig(hidden_size=sizes.hidden, intermediate_size=sizes.inner, num_experts=EXPERTS,
                         num_experts_per_tok=TOPK)  # fmt: skip
    config._experts_implementation = "eager"
    block: nn.Module = OlmoeSparseMoeBlock(config)
    with torch.no_grad():
        for param in block.parameters():
            nn.init.normal_(param, std=0.02)
    return block


def build_products(layer: Any, rows: Tensor, ends: Tensor) -> Callable[[], None]:
    """The products of our layer alone: two forward, two input gradients, two weight gradients of all experts."""
    first, second = layer.experts.linear_fc1, layer.experts.linear_fc2

    def run() -> None:
        with torch.no_grad():
            inner = first.product.forward(rows, first.weight, None, ends)
            half = inner[:, : second.weight.shape[2]].contiguous()
            outer = second.product.forward(half, second.weight, None, ends)
            for linear, x, grad in ((second, half, outer), (first, rows, inner)):
                linear.product.input_grad(grad, linear.weight, ends)
                linear.product.weight_grad(grad, x, linear.weight, linear.weight.main_grad, ends)

    return run


def build_variants(sizes: Sizes) -> dict[str, Callable[[], Tensor | None]]:
    """Name -> forward and backward once; returns the output."""
    x = torch.randn(sizes.tokens, 1, sizes.hidden, generator=torch.Generator().manual_seed(0))
    ours = build_layer(sizes)
    layers: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]] = {
        "loop": (build_loop_like(ours, sizes), lambda layer, x: layer(x.flatten(0, 1))),
        "ours": (ours, lambda layer, x: layer(x)[0].flatten(0, 1)),
        "ours grouped": (build_layer(sizes, moe_grouped_gemm=True), lambda layer, x: layer(x)[0].flatten(0, 1)),
        "dense": (build_layer(sizes, num_moe_experts=None, ffn_hidden_size=TOPK * sizes.inner),
                  lambda layer, x: layer(x)[0].flatten(0, 1)),
    }  # fmt: skip
    theirs = build_hugging_face_layer(sizes)
    if theirs is not None:
        layers["hf loop"] = (theirs, lambda layer, x: layer(x.transpose(0, 1))[0])

    def step(name: str) -> Tensor:
        layer, run = layers[name]
        leaf = x.clone().requires_grad_()
        output = run(layer, leaf)
        output.sum().backward()
        for param in layer.parameters():
            param.grad = None
        return output.detach()

    with torch.no_grad():
        dispatched = ours.dispatcher.dispatch(x.flatten(0, 1), ours.router(x))  # type: ignore[operator, union-attr]
    variants: dict[str, Callable[[], Tensor | None]] = {name: lambda name=name: step(name) for name in layers}  # type: ignore[misc]
    return variants | {"products": build_products(ours, dispatched.rows, dispatched.ends)}


def report_speed(sizes: Sizes, rounds: int) -> None:
    """A line for each variant."""
    print(f"\n{EXPERTS} experts, {TOPK} for each token, {sizes}: CPU time of forward and backward, {rounds} rounds")
    variants = build_variants(sizes)
    expected, found = variants["loop"](), variants["ours"]()
    assert expected is not None and found is not None
    print(f"largest difference of outputs, loop and ours: {(expected - found).abs().max():.1e}")
    times = measure(variants, rounds)  # type: ignore[arg-type]
    best = min(("ours", "ours grouped"), key=lambda name: statistics.median(times[name]))
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times[best], strict=True))
        print(f"{name:<14}{1e3 * min(own):>9.2f} ms at best{ratio:>8.2f} x {best} (median)")


# ---- bytes


def measure_latent_attention(layers: int = 2, tokens: int = 32, batch: int = 2) -> dict[str, tuple[int, int]]:
    """What -> (bytes measured, bytes by formula), float32."""
    heads, rq, rk, d, p, dv, hidden = 4, 24, 16, 12, 4, 10, 64
    config = MLATransformerConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, q_lora_rank=rq, kv_lora_rank=rk,
        qk_head_dim=d, qk_pos_emb_head_dim=p, v_head_dim=dv, rope_type="rope", normalization="RMSNorm",
        add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, recompute_granularity="selective",
        recompute_modules=["core_attn"],
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True).submodules
    assert spec is not None
    found: dict[str, tuple[int, int]] = {}
    cache = SequenceState(batch, tokens)
    for modules in (["core_attn"], ["core_attn", "mla_up_proj"]):
        config.recompute_modules = modules
        attention: Any = build_module(
            spec.self_attention, config=config, layer_number=1, pg_collection=ProcessGroupCollection.single()
        )
        initialise_parameters(attention, seed=1)
        attention.recomputed = frozenset(modules)  # as a layer says it of its parts
        count = KeptForBackward()
        with count.counting():
            x = torch.randn(tokens, batch, hidden, requires_grad=True)
            output, _ = attention(x)
        made = heads * (2 * (d + p) + dv)
        kept = hidden + rq + rk + p + heads * dv + (made if "mla_up_proj" not in modules else 0)
        assert output.requires_grad
        found[f"kept for backward, recomputing {' '.join(modules)}"] = (count.now, 4 * tokens * batch * kept)
    with torch.no_grad():
        cache.begin([tokens] * batch)
        attention(x, None, None, cache)
    held = sum(memory.nbytes for layer in cache._layers.values() for memory in layer)
    found["cache"] = (held, 4 * tokens * batch * (rk + p))
    found["cache of as many heads with keys and values"] = (held, 4 * tokens * batch * heads * (d + p + dv))
    return found


LAYOUTS = ["1", "dp4,ep2,dist-opt", "dp4,ep4,dist-opt", "dp4,ep2,fsdp2"]


def measure_expert_bytes(rank: int, text: str) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state of the experts that a process holds after a step."""
    layout = parse_layout(text)
    flags = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
        --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 2 --swiglu --disable-bias-linear --mock-data
        --tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0 --num-workers 0 --num-experts 8
        --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall"""
    config = read_run_config([*flags.split(), *layout.flags], {"WORLD_SIZE": str(layout.world_size)})
    with open_local_run(config, build_gpt_recipe(config), rank) as run:
        train_step(run, run.data.open("train", 0))
        experts = {
            name: param
            for chunk in run.model
            for name, param in chunk.module.named_parameters()
            if get_placement(param, name).is_expert
        }
        weights = [param.to_local() if isinstance(param, DTensor) else param for param in experts.values()]
        grads = [buffer.grad_data for chunk in run.model for buffer in chunk.flat_buffers if buffer.is_expert]
        state = [
            t for name, kinds in run.optimizer.named_state().items() if ".experts." in name for t in kinds.values()
        ]
        return tuple(sum(t.nbytes for t in tensors) for tensors in (weights, grads, state))  # type: ignore[return-value]


def report_bytes() -> None:
    """Latent attention, then experts."""
    print("\nlatent attention, bytes measured and by formula")
    for what, (found, formula) in measure_latent_attention().items():
        print(f"{what:<58}{found:>9}{formula:>9}{found / formula:>8.3f}")
    print("\nexperts, bytes of rank 0: weights, gradients, optimizer state; share of one process's")
    alone = run_locally(measure_expert_bytes, 1, ("1",))[0]
    for text in LAYOUTS:
        found = run_locally(measure_expert_bytes, parse_layout(text).world_size, (text,))[0]
        shares = "".join(f"{own:>10}{own / whole:>7.3f}" for own, whole in zip(found, alone, strict=True))
        print(f"{text:<20}{shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in Sizes()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--rounds", type=int, default=20, help="paired rounds (default: 20)")
    parser.add_argument("--only", choices=["speed", "bytes"], help="one of the two parts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_host_memory()  # as the trainer does on a CPU; all variants profit alike
    print_conditions()
    if arguments.only != "bytes":
        report_speed(Sizes(arguments.tokens, arguments.hidden, arguments.inner), arguments.rounds)
    if arguments.only != "speed":
        report_bytes()


if __name__ == "__main__":
    main()
