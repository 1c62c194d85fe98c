#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""A whole training step against the bare matrix products it consists of, and against Hugging Face's Llama.

    OMP_NUM_THREADS=1 python benchmarks/train_step.py                  # eager, 15.1M parameters, batch 4 x 256, float32
    OMP_NUM_THREADS=2 python benchmarks/train_step.py --compile        # also both models under torch.compile

Every round runs each variant once, in turn, and the ratios are taken within rounds: a machine that slows down slows all
of them down. One thread: time is CPU time of the process; several: wall time.

    floor     forward, input-gradient and weight-gradient product of every linear layer into preallocated memory, and
              attention as full squares (six batched products per layer), all by torch.mm and torch.bmm
    floor, oneDNN
              the linear layers' by oneDNN, on CPUs on which ours takes it (tensor_parallel/products.py)
    ours      zero gradients, forward, loss, backward, gradient synchronisation, norm, clipping, AdamW
    hf        LlamaForCausalLM (sdpa attention) of the same sizes, clip_grad_norm_, fused AdamW
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.optional_deps import available, require
from megatron.core.tensor_parallel.products import multiply_by_onednn, onednn_is_faster

Step = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """The model and the batch."""

    vocab: int = 8192
    hidden: int = 384
    layers: int = 5
    heads: int = 6
    ffn: int = 1024
    batch: int = 4
    sequence: int = 256

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch * self.sequence


# ---- the variants


# The least that any implementation has to compute, without memory traffic of its own.
def build_floor_step(sizes: Sizes, by_onednn: bool = False) -> Step:
    """Build a step of the matrix products alone: torch's, or oneDNN's of the linear layers."""
    h, f, t = sizes.hidden, sizes.ffn, sizes.tokens
    build = build_onednn_products if by_onednn else build_linear_products
    layer = [build(t, *shape) for shape in ((h, 3 * h), (h, h), (h, 2 * f), (f, h))]
    layer.append(build_attention_products(sizes.batch * sizes.heads, sizes.sequence, h // sizes.heads))
    head = build(t, h, sizes.vocab)

    def step() -> None:
        for _ in range(sizes.layers):
            for products in layer:
                products()
        head()

    return step


def build_linear_products(tokens: int, inputs: int, outputs: int) -> Step:
    """Build the three products of a linear layer: Y = X W^T, dX = dY W, dW = dY^T X."""
    x, weight, grad = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
    y, grad_x, grad_weight = torch.empty_like(grad), torch.empty_like(x), torch.empty_like(weight)

    def products() -> None:
        torch.mm(x, weight.t(), out=y)
        torch.mm(grad, weight, out=grad_x)
        torch.mm(grad.t(), x, out=grad_weight)

    return products


def build_onednn_products(tokens: int, inputs: int, outputs: int) -> Step:
    """Build the same three by oneDNN, which allocates their results."""
    x, weight, grad = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)

    def products() -> None:
        multiply_by_onednn(x, weight.t())
        multiply_by_onednn(grad, weight)
        multiply_by_onednn(grad.t(), x)

    return products


def build_attention_products(heads: int, sequence: int, width: int) -> Step:
    """S = Q K^T, O = P V; dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q, all as full squares."""
    q = torch.randn(heads, sequence, width)
    scores = torch.randn(heads, sequence, sequence)
    square, tall = torch.empty_like(scores), torch.empty_like(q)

    def products() -> None:
        # Forward has two products, backward four, all of the same size.
        for _ in range(2):
            torch.bmm(q, q.transpose(1, 2), out=square)
            torch.bmm(scores, q, out=tall)
            torch.bmm(scores.transpose(1, 2), q, out=tall)

    return products


def build_our_step(sizes: Sizes, tokens: Tensor, compiled: bool) -> Step:
    """Our GPTModel, data-parallel wrapper and optimizer."""
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer.megatron_optimizer import get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.execution.compilation import compile_regions
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        ffn_hidden_size=sizes.ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func="silu",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        compile=compiled,
    )
    groups = ProcessGroupCollection.single()
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        sizes.vocab,
        sizes.sequence,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    if compiled:
        compile_regions(gpt)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-4, weight_decay=0.1), [model], pg_collection=groups)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(sizes.sequence).expand_as(inputs)

    def step() -> None:
        model.zero_grad_buffer()
        loss = model(inputs, positions, labels=labels).mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()

    return step


def build_hugging_face_step(sizes: Sizes, tokens: Tensor, compiled: bool) -> Step | None:
    """Hugging Face's Llama with torch's fused AdamW; None where transformers is not installed."""
    if not available("transformers"):
        print("transformers is not installed: no comparison with Hugging Face")
        return None
    transformers = require("transformers", needed_by="the comparison with Hugging Face")
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.sequence,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    forward = torch.compile(model) if compiled else model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)
    inputs = tokens[:, :-1].contiguous()

    def step() -> None:
        # The faster of torch's two ways: the comparison is with Hugging Face at its best.
        optimizer.zero_grad(set_to_none=True)
        forward(input_ids=inputs, labels=inputs).loss.backward()  # shifts the labels itself
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


# ---- measuring


def seconds(step: Step) -> float:
    """One run: CPU time of the process with one thread, wall time with several."""
    # CPU time does not count other processes of the machine; with several threads it would add them up.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    step()
    return clock() - start


def measure(variants: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of every variant in every round, after one warm-up each (for compiled ones: compiling)."""
    for step in variants.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for round_number in range(rounds):
        # Another one begins each round, so that nobody always follows the same neighbour.
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(seconds(variants[name]))
    return times


def report(times: dict[str, list[float]], tokens: int) -> None:
    """A line for each variant: median ratio to the floor, ratio of the minima, speed against hf, tokens per second."""
    print(f"{'variant':<14}{'x floor (median)':>18}{'x floor (min)':>15}{'hf time / ours':>16}{'tok/s best':>12}")
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times["floor"], strict=True)]
        rival = times.get("hf compiled" if "compiled" in name else "hf")
        faster = ""
        if rival is not None and name.startswith("ours"):
            faster = f"{statistics.median(b / a for a, b in zip(own, rival, strict=True)):.3f}"
        print(
            f"{name:<14}{statistics.median(ratios):>18.3f}{min(own) / min(times['floor']):>15.3f}"
            f"{faster:>16}{tokens / min(own):>12.0f}"
        )


def describe_machine(sizes: Sizes) -> None:
    """Print what a reader needs to judge the numbers."""
    from megatron.core.device import device_name

    model = f"{platform.machine()}, {device_name()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    clock = "CPU time" if torch.get_num_threads() == 1 else "wall time"
    print(f"machine: {model}\npython {platform.python_version()}, torch {torch.__version__}")
    print(f"threads: {torch.get_num_threads()} ({clock})\ncommand: {' '.join([sys.executable, *sys.argv])}\n{sizes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="paired rounds (default: 10)")
    parser.add_argument("--compile", action="store_true", help="also measure both models under torch.compile")
    parser.add_argument("--no-hf", action="store_true", help="leave Hugging Face out")
    parser.add_argument(
        "--return-freed-memory", action="store_true", help="let the C library give freed memory back, as by default"
    )
    arguments = parser.parse_args()
    if not arguments.return_freed_memory:
        from megatron.core.host_memory import keep_freed_host_memory

        print(f"freed host memory is kept for every variant: {keep_freed_host_memory()}")
    torch.manual_seed(0)
    sizes = Sizes()
    describe_machine(sizes)
    tokens = torch.randint(0, sizes.vocab, (sizes.batch, sizes.sequence + 1))
    variants: dict[str, Step | None] = {"floor": build_floor_step(sizes), "ours": build_our_step(sizes, tokens, False)}
    if onednn_is_faster():
        variants["floor, oneDNN"] = build_floor_step(sizes, by_onednn=True)
    if arguments.compile:
        variants["ours compiled"] = build_our_step(sizes, tokens, True)
    if not arguments.no_hf:
        variants["hf"] = build_hugging_face_step(sizes, tokens, False)
        if arguments.compile:
            variants["hf compiled"] = build_hugging_face_step(sizes, tokens, True)
    report(measure({name: step for name, step in variants.items() if step}, arguments.rounds), sizes.tokens)


if __name__ == "__main__":
    main()
