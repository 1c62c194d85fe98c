#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Mixers with a state (letters M, G, K): chunks against the recurrence, the torch path of transformers, and formulas;
and sparse attention (letter D) against latent attention to all tokens.

    OMP_NUM_THREADS=1 python benchmarks/mixers.py
    OMP_NUM_THREADS=1 python benchmarks/mixers.py --kinds M --tokens 512 --rounds 5

One CPU thread, float32, CPU time in rounds that run each variant once, in turn; freed memory stays in the process, as
in training. Ratios are taken within rounds, and their median is printed; for sparse attention with its 95 % interval.

    recurrence    the same arithmetic token by token, against chunks, forward and backward
    length        four times the tokens, over four times the time
    transformers  its layer's torch path, against ours, forward and backward
    memory        what autograd keeps of a layer behind its norm, against the rows of its plan (`kept`)
    generation    a token after 4,096 others against one after 64
    D             a layer that chooses 512 tokens over a dense one, of --tokens and of 4 times as many
    products      the time that the products of forward and backward take alone, as those of 64 x 64 and as projections,
                  over that of the layer; their FLOP are counted, without the triangular systems
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.conditions import print_conditions
from benchmarks.guards import find_interval
from benchmarks.memory import KeptForBackward
from megatron.core.host_memory import keep_freed_host_memory
from megatron.core.models.gpt.gpt_layer_specs import get_latent_attention_spec, get_sparse_attention_spec
from megatron.core.optional_deps import available
from megatron.core.plan.branch_kind import Tokens
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import Branch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.chunks import Inputs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.kimi_delta_attention import KimiDeltaAttention
from megatron.core.ssm.linear_attention import attend, attend_step
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.state_mixer import StateMixer, StateMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.parameters import initialise_parameters
from megatron.core.tensor_parallel.products import multiply_by_onednn, takes_onednn
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN = 512


class Kind(NamedTuple):
    """A kind of mixers, and the sizes that are measured."""

    mixer: type[StateMixer]
    name: str
    sizes: dict[str, int]


_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 8}
KINDS = {
    "M": Kind(
        MambaMixer, "mamba",
        {"mamba_num_heads": 16, "mamba_head_dim": 64, "mamba_state_dim": 64, "mamba_num_groups": 2},
    ),
    "G": Kind(GatedDeltaNet, "gated_delta_net", _DELTA | {"linear_num_key_heads": 4}),
    "K": Kind(KimiDeltaAttention, "kimi_delta", _DELTA | {"linear_num_key_heads": 8}),
}  # fmt: skip


def build_config(kind: Kind) -> TransformerConfig:
    """A model of such layers."""
    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=8, normalization="RMSNorm", **kind.sizes
    )


def build_ours(kind: Kind) -> StateMixer:
    """Our layer."""
    parts = StateMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    mixer = kind.mixer(build_config(kind), parts, layer_number=1, pg_collection=ProcessGroupCollection.single())
    initialise_parameters(mixer, seed=1)
    return mixer


def build_theirs(letter: str) -> nn.Module | None:
    """The layer of transformers that computes the same; None where the package is missing."""
    if not available("transformers"):
        return None
    import transformers
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    transformers.logging.set_verbosity_error()
    sizes = KINDS[letter].sizes
    layer: nn.Module
    if letter == "M":
        config = transformers.Mamba2Config(
            hidden_size=HIDDEN, num_heads=sizes["mamba_num_heads"], head_dim=sizes["mamba_head_dim"],
            state_size=sizes["mamba_state_dim"], n_groups=sizes["mamba_num_groups"], conv_kernel=4, use_bias=False,
        )  # fmt: skip
        layer = Mamba2Mixer(config, 0)
    elif letter == "G":
        layer = Qwen3_5GatedDeltaNet(transformers.Qwen3NextConfig(hidden_size=HIDDEN, **sizes), 0)
    else:
        config = transformers.KimiLinearConfig(
            hidden_size=HIDDEN, linear_head_dim=64, linear_num_heads=sizes["linear_num_value_heads"],
            linear_conv_kernel_dim=4,
        )  # fmt: skip
        layer = KimiLinearDeltaAttention(config, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.02)
    return layer


def draw_inputs(kind: Kind, tokens: int) -> Inputs:
    """What linear attention of this kind reads, of one sequence."""
    sizes = kind.sizes
    if kind.name == "mamba":
        groups, heads = sizes["mamba_num_groups"], sizes["mamba_num_heads"]
        channels, width = sizes["mamba_state_dim"], sizes["mamba_head_dim"]
    else:
        groups, heads = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
        channels, width = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
    query, key = torch.randn(2, 1, tokens, groups, channels) * channels**-0.5
    by_channel = (channels,) if kind.name == "kimi_delta" else ()
    strength = torch.rand(1, tokens, heads)
    erase = None if kind.name == "mamba" else strength
    decay = -torch.rand(1, tokens, heads, *by_channel)
    return Inputs(query, key, torch.randn(1, tokens, heads, width), decay, strength, erase)


def run_recurrence(inputs: Inputs) -> Tensor:
    """`attend`, token by token."""
    value = inputs.value
    state = value.new_zeros(value.shape[0], value.shape[2], inputs.key.shape[3], value.shape[3])
    outputs = []
    for token in range(value.shape[1]):
        of_token = inputs.map(lambda x, token=token: x[:, token])  # type: ignore[misc]
        output, state = attend_step(of_token, state)
        outputs.append(output)
    return torch.stack(outputs, dim=1)


class CountProducts(TorchDispatchMode):
    """Counts the FLOP of products of batches of matrices inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None and "bmm" in str(func):
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def train(function: Callable[[Any], Tensor], *leaves: Tensor) -> Callable[[], None]:
    """Forward and backward of the function of the first leaf."""

    def run() -> None:
        function(leaves[0]).sum().backward()

    return run


def compare(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each variant in each round; the first round does not count."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, run in variants.items():
            began = time.process_time()
            run()
            found[name].append(time.process_time() - began)
    return {name: seconds[1:] for name, seconds in found.items()}


def find_ratio(found: dict[str, list[float]], one: str, other: str) -> float:
    """Median over the rounds of the time of one over that of the other."""
    return find_ratios(found, one, other)[0]


def find_ratios(found: dict[str, list[float]], one: str, other: str) -> tuple[float, float, float]:
    """The same median, and the bounds between which it lies in 95 of 100 cases."""
    return find_interval([a / b for a, b in zip(found[one], found[other], strict=True)])


def call_layer(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer's output without what it returns beside it."""

    def call(x: Tensor) -> Tensor:
        output = layer(x)
        return output[0] if isinstance(output, tuple) else output

    return call


def measure_speed(letter: str, tokens: int, rounds: int) -> dict[str, float]:
    """The ratios of the table above."""
    kind = KINDS[letter]
    ours, theirs = build_ours(kind), build_theirs(letter)
    found: dict[str, float] = {}

    def as_leaves(length: int) -> Inputs:
        return draw_inputs(kind, length).map(lambda x: x.requires_grad_())

    short, long = as_leaves(tokens), as_leaves(4 * tokens)
    variants = {
        "chunks": train(lambda x: attend(x)[0], short),  # type: ignore[arg-type]
        "long": train(lambda x: attend(x)[0], long),  # type: ignore[arg-type]
    }
    times = compare(variants, rounds)
    found["time of 4 times the tokens / 4"] = find_ratio(times, "long", "chunks") / 4
    times = compare(
        {"chunks": variants["chunks"], "recurrence": train(run_recurrence, short)},  # type: ignore[arg-type]
        max(1, rounds // 3),
    )
    found["recurrence / chunks"] = find_ratio(times, "recurrence", "chunks")
    hidden = torch.randn(tokens, 1, HIDDEN, requires_grad=True)
    variants = {"ours": train(call_layer(ours), hidden)}
    if theirs is not None:
        variants["theirs"] = train(call_layer(theirs), torch.randn(1, tokens, HIDDEN, requires_grad=True))
    with CountProducts() as counter:
        variants["ours"]()
    small = torch.randn(64, 64, 64)
    multiply = (
        multiply_by_onednn if takes_onednn(torch.empty(tokens, HIDDEN), torch.empty(HIDDEN, HIDDEN)) else torch.mm
    )
    wide, inner = torch.randn(tokens, HIDDEN), torch.randn(HIDDEN, HIDDEN)
    variants["products of chunks"] = lambda: [torch.bmm(small, small) for _ in range(8)]
    variants["projections"] = lambda: multiply(wide, inner)
    times = compare(variants, rounds)
    if theirs is not None:
        found["transformers / ours"] = find_ratio(times, "theirs", "ours")
    projected = 6 * tokens * (ours.in_proj.weight.numel() + ours.out_proj.weight.numel())
    floor = counter.flops / (8 * 2 * 64**4) * statistics.median(times["products of chunks"])
    floor += projected / (2 * wide.numel() * HIDDEN) * statistics.median(times["projections"])
    found["GFLOP of chunks"], found["GFLOP of projections"] = counter.flops / 1e9, projected / 1e9
    found["bare products / layer"] = floor / statistics.median(times["ours"])
    return found


def measure_memory(letter: str, tokens: int) -> tuple[int, float]:
    """Bytes that a layer keeps of one sequence behind its norm, and what its plan says."""
    kind = KINDS[letter]
    mixer = build_ours(kind)
    hidden = torch.randn(tokens, 1, HIDDEN, requires_grad=True) * 1.0
    count = KeptForBackward()
    with count.counting():
        output = mixer(hidden)[0]
    held = count.now
    del output
    rows = find_kind(kind.name).kept(build_config(kind), Branch(kind.name), Tokens(tokens, tokens))
    return held, sum(row.bytes for row in rows if row.name != "the branch's input")


def measure_generation(letter: str, rounds: int) -> float:
    """CPU time of a token after 4,096 others over that of one after 64."""
    kind = KINDS[letter]
    times = []
    with torch.no_grad():
        states = [attend(draw_inputs(kind, length))[1] for length in (64, 4096)]
        token = draw_inputs(kind, 1).map(lambda x: x[:, 0])

        def step(state: Tensor) -> Callable[[], object]:
            return lambda: [attend_step(token, state) for _ in range(50)]

        times = compare({"short": step(states[0]), "long": step(states[1])}, 2 * rounds)
    return find_ratio(times, "long", "short")


def measure_sparse(tokens: int, rounds: int) -> tuple[float, float, float]:
    """CPU time of forward and backward of a layer of sparse attention over that of latent attention: the median over
    the rounds, and its bounds."""
    sizes: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 1024, "num_attention_heads": 16, "normalization": "RMSNorm",
        "multi_latent_attention": True, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_head_dim": 64,
        "qk_pos_emb_head_dim": 32, "v_head_dim": 64, "qk_layernorm": True, "add_bias_linear": False,
        "position_embedding_type": "rope", "attention_dropout": 0.0,
    }  # fmt: skip
    chooses = {
        "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 8, "dsa_indexer_head_dim": 64,
        "dsa_indexer_topk": 512,
    }  # fmt: skip
    variants = {}
    for name, spec, more in (
        ("dense", get_latent_attention_spec(), {}), ("sparse", get_sparse_attention_spec(), chooses)
    ):  # fmt: skip
        config = TransformerConfig(**sizes, **more)
        layer = build_module(spec, config=config, layer_number=1, pg_collection=ProcessGroupCollection.single())
        initialise_parameters(layer, seed=1)
        variants[name] = train(call_layer(layer), torch.randn(tokens, 1, 1024, requires_grad=True))
    return find_ratios(compare(variants, rounds), "sparse", "dense")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "D"], default=[*KINDS, "D"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_host_memory()
    print_conditions()
    for letter in args.kinds:
        if letter == "D":
            for tokens in (args.tokens, 4 * args.tokens):
                ratio, lower, upper = measure_sparse(tokens, args.rounds)
                print(f"D, {tokens} tokens, sparse / dense {ratio:.2f} ({lower:.2f} to {upper:.2f})", flush=True)
            continue
        print(f"{letter}, {args.tokens} tokens, hidden size {HIDDEN}, {KINDS[letter].sizes}", flush=True)
        for name, ratio in measure_speed(letter, args.tokens, args.rounds).items():
            print(f"    {name:<32}{ratio:8.2f}", flush=True)
        held, formula = measure_memory(letter, args.tokens)
        print(f"    {'bytes kept / formula':<32}{held / formula:8.3f} ({held / 2**20:.1f} MB)")
        print(f"    {'token after 4,096 / after 64':<32}{measure_generation(letter, args.rounds):8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
