# SPDX-License-Identifier: Apache-2.0
"""Single operations, forward and backward, against torch's own way of writing them, and against both ceilings.

    python -m benchmarks attention linear optimizer loss --picture roofline.png

    attention    the backend that a model would use here, against softmax(Q K^T) V written out
    linear       products of the shapes of 1B and 8B models, weight gradient added into a flat float32 buffer, against
                 the three bare products into memory that is there; grouped products of experts; FP8 products on a GPU
                 that has them
    optimizer    the trainer's update with its norm and clipping, against torch's AdamW(fused=True) with clip_grad_norm_
    loss         cross entropy of a large vocabulary, both ways, against F.cross_entropy of float32 logits
    emulation    a small model in bfloat16 whose products are emulated in each recipe of FP8 and in NVFP4, against none

Bytes are the least that has to be moved: every operand read once and every result written once, forward and backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measurements import Report, choose_dtype, measure, measure_ceilings
from megatron.core import device as device_module
from megatron.core.device_kernels import find_product_obstacle
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import MegatronError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.megatron_optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection, SingleRankGroup
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.tensor_parallel.cross_entropy import (
    fused_vocab_parallel_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.products import Product, choose_product, multiply
from megatron.core.transformer.core_attention.interface import AttentionInputs, AttentionOptions, Visible
from megatron.core.transformer.core_attention.select import build_attention_backend
from megatron.core.transformer.execution.fp8_layers import FP8Products, multiply_in_fp8
from megatron.core.transformer.moe.grouped_products import choose_expert_product
from megatron.core.transformer.transformer_config import TransformerConfig

Case = tuple[str, Callable[[], Callable[[], object]], dict[str, Any]]
"""Name, what builds one round, the facts of its Measurement."""


class Sizes:
    """How large the operands are: on a GPU those of real models, on a CPU and to try it smaller ones."""

    def __init__(self, *, is_tiny: bool) -> None:
        self.is_tiny = is_tiny
        self.device = device_module.current_device()
        self.dtype = choose_dtype()
        large = not device_module.is_cpu(self.device) and not is_tiny
        self.sequence, self.batch = (4096, 2) if large else (32, 2) if is_tiny else (512, 2)
        self.tokens = 8192 if large else 64 if is_tiny else 512
        self.vocab = 128256 if large else 512 if is_tiny else 32000
        self.linears = (
            {"8B qkv": (4096, 6144), "8B proj": (4096, 4096), "8B fc1": (4096, 28672), "8B fc2": (14336, 4096),
             "1B fc1": (2048, 16384), "1B head": (2048, 128256)}
            if large
            else {"square": (64, 64)} if is_tiny else {"fc1": (768, 4096), "fc2": (2048, 768)}
        )  # fmt: skip
        self.experts = (8, 2048, 11264) if large else (4, 32, 64) if is_tiny else (8, 256, 512)
        self.hidden, self.layers = (2048, 4) if large else (32, 1) if is_tiny else (512, 2)
        self.heads = ((32, 8, 128), (32, 8, 64)) if large else ((4, 2, 16),) if is_tiny else ((8, 2, 64),)

    @property
    def bytes_each(self) -> int:
        """Of an element of the activations."""
        return self.dtype.itemsize

    def draw(self, *shape: int, grad: bool = False) -> Tensor:
        """Random values on the device."""
        return torch.randn(shape, device=self.device).to(self.dtype).requires_grad_(grad)


def build_config(sizes: Sizes, **fields: Any) -> TransformerConfig:
    """The settings of a small model in this device's number format."""
    return TransformerConfig(
        num_layers=sizes.layers, hidden_size=sizes.hidden, num_attention_heads=4, normalization="RMSNorm",
        gated_linear_unit=True, activation_func="silu", add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, bf16=sizes.dtype == torch.bfloat16, params_dtype=sizes.dtype, **fields,
    )  # fmt: skip


def _forward_and_backward(call: Callable[..., Tensor], *operands: Tensor) -> Callable[[], None]:
    """One round: the result's gradient is given, so that no further kernel is timed."""
    with torch.no_grad():
        grad = torch.ones_like(call(*operands))

    def step() -> None:
        call(*operands).backward(grad)
        for operand in operands:
            operand.grad = None

    return step


# ---- attention


def list_attention(sizes: Sizes) -> Iterator[Case]:
    """Causal, within a window, within documents; heads of each width."""
    s, b = sizes.sequence, sizes.batch
    for n, g, d in sizes.heads:
        q, k, v = (sizes.draw(s, b, heads, d, grad=True) for heads in (n, g, g))
        elements = s * b * d * (n + g)
        # Forward: Q K V O; backward: those and dO again, and three gradients.
        facts = {"moved_bytes": float(sizes.bytes_each * (2 + 4) * elements), "flops": 6.0 * b * n * s * s * d}
        label = f"{n}/{g} heads of {d}"
        config = build_config(sizes, kv_channels=d)
        backend = build_attention_backend(config, AttentionOptions.from_config(config, 1), sizes.device)
        plain = f"written out, {label}"
        yield plain, partial(_forward_and_backward, _attend_plainly, q, k, v), facts
        visible = {"causal": Visible(), "window of a quarter": Visible(window=max(1, s // 4))}
        for name, what in visible.items():
            yield f"{name}, {label}", partial(bind_attention, backend, what, q, k, v), facts | {"baseline": plain}
        # Documents of uneven lengths in one sequence, as packing makes them.
        packed = [x.detach()[:, :1].contiguous().requires_grad_() for x in (q, k, v)]
        bounds = sorted({0, s // 7, s // 3, s // 2, s - s // 5, s})
        pairs = sum((stop - start) ** 2 for start, stop in zip(bounds, bounds[1:], strict=False))
        of_documents = {"flops": 6.0 * n * pairs * d, "moved_bytes": facts["moved_bytes"] / b}
        documents = Visible(documents=TokenLayout.of_documents(tuple(bounds)))
        bound = partial(bind_attention, backend, documents, *packed)
        yield f"{len(bounds) - 1} documents, {label}", bound, of_documents


def bind_attention(
    backend: Callable[[AttentionInputs], Tensor], visible: Visible, *operands: Tensor
) -> Callable[[], None]:
    """One round of a backend over queries, keys and values, forward and backward."""
    return _forward_and_backward(lambda q, k, v: backend(AttentionInputs(q, k, v, visible, training=True)), *operands)


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every score in memory; [s, b, n, d] -> [s, b, n * d]."""
    per_group = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(per_group, 2), v.repeat_interleave(per_group, 2)))
    scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    context = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype) @ v
    return context.permute(2, 0, 1, 3).flatten(2)


# ---- linear layers


def list_linear(sizes: Sizes) -> Iterator[Case]:
    """Each shape bare and as a layer, in FP8 where the device has it, and the products of experts."""
    for name, (inputs, outputs) in sizes.linears.items():
        facts = _count_linear(sizes, sizes.tokens, inputs, outputs)
        x, weight = sizes.draw(sizes.tokens, inputs, grad=True), nn.Parameter(sizes.draw(outputs, inputs))
        # A slice of a flat buffer, as the trainer's gradients are.
        flat = torch.zeros(weight.numel() + 64, device=sizes.device)
        weight.main_grad = flat[64:].view_as(weight)  # type: ignore[attr-defined]
        yield f"bare, {name}", partial(_build_bare, x.detach(), weight.detach()), facts
        for title, product in _list_products(sizes):
            layer = _Layer(product, weight)
            yield f"{title}, {name}", partial(_forward_and_backward, layer, x), facts | {"baseline": f"bare, {name}"}
    experts, inputs, outputs = sizes.experts
    facts = _count_linear(sizes, sizes.tokens, inputs, outputs)
    x, stack = sizes.draw(sizes.tokens, inputs, grad=True), nn.Parameter(sizes.draw(experts, outputs, inputs))
    stack.main_grad = torch.zeros_like(stack, dtype=torch.float32)  # type: ignore[attr-defined]
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=sizes.device) * (sizes.tokens // experts)
    for grouped in (False, True):
        config = build_config(sizes, num_moe_experts=experts, moe_grouped_gemm=grouped)
        product = choose_expert_product(config, (inputs, outputs), sizes.dtype, sizes.device)
        title = f"{experts} experts, {'wanted grouped' if grouped else 'one by one'}"
        baseline = {"baseline": f"{experts} experts, one by one"} if grouped else {}
        details = {"details": {"is": product.name}}
        yield title, partial(_forward_and_backward, _Layer(product, stack, ends), x), facts | baseline | details


class _Layer:
    """A product with its weight: [tokens, in] -> [tokens, out]."""

    def __init__(self, product: Product, weight: Tensor, ends: Tensor | None = None) -> None:
        self.product, self.weight, self.ends = product, weight, ends

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(self.product, x, self.weight, None, self.ends)


def _list_products(sizes: Sizes) -> Iterator[tuple[str, Product]]:
    yield "layer", choose_product(build_config(sizes))
    # Emulated elsewhere, which says nothing about speed.
    if find_product_obstacle(sizes.device, (8, 9)) is None or sizes.is_tiny:
        groups = ProcessGroupCollection.single()
        layer = nn.Module()
        layer.product = choose_product(build_config(sizes))  # type: ignore[assignment]
        multiply_in_fp8(layer, build_config(sizes, fp8="hybrid", fp8_recipe="tensorwise"), groups, "layer")
        yield "layer in FP8", layer.product  # type: ignore[misc]


def _count_linear(sizes: Sizes, tokens: int, inputs: int, outputs: int) -> dict[str, float]:
    activations = tokens * (inputs + outputs)
    weight = inputs * outputs
    # Forward, input gradient and weight gradient each read two operands and write one result; the sum of gradients is
    # read and written in float32.
    moved = sizes.bytes_each * (3 * activations + 2 * weight) + 8 * weight
    return {"flops": 6.0 * tokens * weight, "moved_bytes": float(moved)}


def _build_bare(x: Tensor, weight: Tensor) -> Callable[[], None]:
    y, grad_x, grad_weight = x @ weight.t(), torch.empty_like(x), torch.empty_like(weight)

    def products() -> None:
        torch.mm(x, weight.t(), out=y)
        torch.mm(y, weight, out=grad_x)
        torch.mm(y.t(), x, out=grad_weight)

    return products


# ---- optimizer


def list_optimizer(sizes: Sizes) -> Iterator[Case]:
    """An update of all parameters, with the norm of the gradients and clipping."""
    groups = ProcessGroupCollection.single()
    config = build_config(sizes)
    with sizes.device:
        gpt = GPTModel(
            config, get_gpt_layer_local_spec(), sizes.vocab, sizes.sequence, position_embedding_type="rope",
            pg_collection=groups,
        )  # fmt: skip
    assert all(parameter.device.type == sizes.device.type for parameter in gpt.parameters())
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, settings, gpt, pg_collection=groups)
    bf16 = sizes.dtype == torch.bfloat16
    chosen = OptimizerConfig(lr=1e-4, weight_decay=0.1, bf16=bf16)
    optimizer = get_megatron_optimizer(chosen, [model], pg_collection=groups)
    count = sum(parameter.numel() for parameter in gpt.parameters())
    weights = [nn.Parameter(torch.randn(count // 8, device=sizes.device)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    rival = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.1, fused=True)

    def plainly() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        rival.step()

    # Weight, gradient and two moments read, all but the gradient written; the norm reads the gradient once more.
    facts = {"moved_bytes": 32.0 * count, "details": {"parameters": count}}
    yield "torch AdamW, fused, float32", lambda: plainly, facts
    kept = {"moved_bytes": (34.0 if bf16 else 32.0) * count, "details": {"parameters": count}}
    yield "ours", lambda: optimizer.step, kept | {"baseline": "torch AdamW, fused, float32"}


# ---- loss


def list_loss(sizes: Sizes) -> Iterator[Case]:
    """From logits to the gradient of the logits."""
    tokens, vocab = sizes.tokens, sizes.vocab
    logits, target = sizes.draw(tokens, 1, vocab, grad=True), torch.randint(0, vocab, (tokens, 1), device=sizes.device)
    group = SingleRankGroup()
    # Read forward, read again and written over in backward.
    facts = {"moved_bytes": 3.0 * sizes.bytes_each * tokens * vocab}
    base = "F.cross_entropy of float32"
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        base: lambda x: F.cross_entropy(x.float().flatten(0, 1), target.flatten(), reduction="none"),
        "ours, of float32": lambda x: vocab_parallel_cross_entropy(x.float(), target, tp_group=group),
        "ours, as they are": lambda x: fused_vocab_parallel_cross_entropy(x, target, tp_group=group),
    }
    for name, way in ways.items():
        yield name, partial(_forward_and_backward, way, logits), facts | ({} if name == base else {"baseline": base})


# ---- emulation


def list_emulation(sizes: Sizes) -> Iterator[Case]:
    """Forward and backward of a model that a laptop trains, by recipe."""
    groups = ProcessGroupCollection.single()
    layers, hidden, ffn, sequence, vocab = (1, 128, 128, 32, 128) if sizes.is_tiny else (4, 256, 640, 256, 8192)
    ids = torch.randint(vocab, (4, sequence), device=sizes.device)
    positions = torch.arange(sequence, device=sizes.device).expand(4, -1)
    recipes: dict[str, dict[str, Any]] = {"bfloat16": {}}
    for name in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        recipes[f"FP8 {name}"] = {"fp8": "hybrid", "fp8_recipe": name, "fp8_emulation": True}
    recipes["NVFP4"] = {"fp4": "e2m1", "fp8_emulation": True}
    for title, fields in recipes.items():
        config = TransformerConfig(
            num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, num_attention_heads=4, bf16=True,
            params_dtype=torch.bfloat16, normalization="RMSNorm", gated_linear_unit=True, activation_func="silu",
            add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, **fields,
        )  # fmt: skip
        with sizes.device:
            model = GPTModel(
                config,
                get_gpt_layer_local_spec(),
                vocab,
                sequence,
                position_embedding_type="rope",
                pg_collection=groups,
            )
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        facts = {"baseline": "bfloat16"} if fields else {}
        yield title, partial(_bind_step, model, groups, ids, positions), facts


def _bind_step(model: GPTModel, groups: ProcessGroupCollection, ids: Tensor, positions: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(ids, positions, labels=ids).mean().backward()
        model.zero_grad()
        for part in model.modules():
            if isinstance(part, FP8Products):
                part.finish_step(groups)

    return step


# ---- the benchmark

OPERATIONS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "attention": list_attention,
    "linear": list_linear,
    "optimizer": list_optimizer,
    "loss": list_loss,
    "emulation": list_emulation,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of all operations."""
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count (default: 20)")


def run(name: str, arguments: argparse.Namespace) -> Report:
    """Measure an operation; a case that cannot run here becomes a note."""
    sizes = Sizes(is_tiny=arguments.tiny)
    report = Report(f"{name}: forward and backward", [], measure_ceilings(sizes.dtype, is_tiny=arguments.tiny))
    if name == "optimizer":
        report.title = "optimizer: an update"
    cases = OPERATIONS[name](sizes)
    while True:
        title = "the next case"
        try:
            title, build, facts = next(cases)
            report.measurements.append(measure(title, build(), arguments.rounds, **facts))
        except StopIteration:
            return report
        except (RuntimeError, MegatronError) as error:
            text = str(error).strip().splitlines()
            report.notes.append(f"{title} is left out: {type(error).__name__}: {text[0] if text else ''}")
