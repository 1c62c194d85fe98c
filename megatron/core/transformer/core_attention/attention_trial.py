# SPDX-License-Identifier: Apache-2.0
"""Choice among the ways of attention that a GPU and its packages have, by a trial when a run starts.

Which one is the fastest depends on the GPU, on the release of packages and on the heads, so that attention of the run's
shape is computed forward and backward by each row of `attention` in the table that nothing stands against: packed
documents, or a sequence where only the widths of keys and values differ. One that gives other numbers than the way that
needs no trial, or fails, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.collectives import broadcast_object
from megatron.core.device import is_cpu, mark, measure_seconds_between, synchronize
from megatron.core.device_kernels import activate_flash_attention
from megatron.core.operation_table import Case, OperationWay, choose
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.tensor_parallel.parameters import parameter_dtype
from megatron.core.transformer.core_attention.interface import (
    AttentionBackend,
    AttentionInputs,
    AttentionOptions,
    Visible,
)
from megatron.core.transformer.core_attention.select import build_gpu_attention
from megatron.core.transformer.transformer_config import TransformerConfig

_MOST_TOKENS, _ROUNDS = 8192, 3
_TOLERANCE = 2.0**-5
"""Of the greatest value: several roundings to bfloat16."""
_VERSIONS = {"flash attention 3": 3, "flash attention 4": 4}


def choose_attention_way(
    config: TransformerConfig,
    seq_length: int,
    device: torch.device,
    groups: ProcessGroupCollection,
    *,
    has_documents: bool = False,
) -> str | None:
    """Note in the config the fastest way of attention here, the same on all ranks, activate it, and return a sentence
    on it; None where there is nothing to choose. Every rank calls this.

    Not with --deterministic-mode, whose runs must not depend on a clock, nor where flags choose. has_documents: of a
    run that packs them.
    """
    by_flag = config.flash_attention_version is not None or config.attention_backend not in ("auto", "flash")
    number = _find_layer(config)
    if by_flag or config.deterministic_mode or is_cpu(device) or number is None:
        return None
    case = describe_case(config, device, number, has_documents=has_documents)
    ways = choose("attention", case).ways
    if not any(way.on_trial for way in ways):
        return None
    # The first rank decides: a clock says something else on each.
    found, failed = broadcast_object(
        measure_ways(config, seq_length, case, number, ways) if groups.world.rank() == 0 else None, groups.world
    )
    chosen = choose("attention", case, seconds=found).way
    config.attention_way = chosen.name if chosen.on_trial else None
    activate_flash_attention(_VERSIONS.get(chosen.name, 2))
    said = ", ".join(f"{1e3 * seconds:.2f} ms by {name}" for name, seconds in found.items())
    said += "".join(f"; not {name}: {reason}" for name, reason in failed.items())
    return f"attention of {case.kind} is computed by {chosen.name}, the fastest here ({said})"


def describe_case(config: TransformerConfig, device: torch.device, number: int, *, has_documents: bool = False) -> Case:
    """The work of attention in layer `number`, counted from 1: documents, windows and chunks where the run has any,
    else values of another width than keys."""
    options = AttentionOptions.from_config(config, number)
    exchange = read_plan(config).layer(number).options.context_exchange or ""
    shares = config.context_parallel_size > 1
    has_bands = has_documents or options.window is not None or options.chunk is not None
    has_bands |= shares and exchange == "all_gather"
    widths = (config.query_width, config.value_width)
    asked = {
        "dropout": config.attention_dropout > 0, "ring": shares and "p2p" in exchange, "no bands": not has_bands,
        "deterministic": config.deterministic_mode, "sinks": options.has_sinks,
    }  # fmt: skip
    kind = "two widths" if not has_bands and not shares and len(set(widths)) > 1 else "bands"
    kind = "bounds" if options.softcap is not None else kind
    words = frozenset(word for word, is_so in asked.items() if is_so)
    return Case(kind, device, parameter_dtype(config), widths, words)


def _find_layer(config: TransformerConfig) -> int | None:
    """The first layer with a window or chunks; the first one with attention where none has."""
    layers = [layer for layer in read_plan(config).decoder if {"attention", "latent_attention"} & set(layer.kinds)]
    banded = [layer for layer in layers if layer.options.window is not None or layer.options.chunk is not None]
    return next((layer.number for layer in (*banded, *layers)), None)


def measure_ways(
    config: TransformerConfig, seq_length: int, case: Case, number: int, ways: Sequence[OperationWay]
) -> tuple[dict[str, float], dict[str, str]]:
    """Name -> seconds of one call forward and backward, of the ways that run here and agree with the first one that
    needs no trial; name of another way -> why it is left out. Leaves flash attention 2 in place."""
    options = AttentionOptions.from_config(config, number)
    inputs = _draw_inputs(config, options, seq_length, case.device, has_documents=case.kind == "bands")
    usual = next(way for way in ways if not way.on_trial)
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    expected: list[Tensor] = []
    try:
        for way in (usual, *(way for way in ways if way.on_trial)):
            try:
                activate_flash_attention(_VERSIONS.get(way.name, 2))
                attention = build_gpu_attention(config, options, case.device, way.name if way.on_trial else None)
                found = _run(attention, inputs)
                if way is usual:
                    expected = found
                elif not all(map(_agree, found, expected)):
                    failed[way.name] = f"it gives other numbers than {usual.name}"
                    continue
                seconds[way.name] = min(_time(attention, inputs) for _ in range(_ROUNDS))
            # Not for this GPU, or not for such heads; compilers raise errors of many kinds.
            except Exception as error:
                if way is usual:
                    raise
                failed[way.name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        activate_flash_attention(2)
    return seconds, failed


def _draw_inputs(
    config: TransformerConfig, options: AttentionOptions, seq_length: int, device: torch.device, *, has_documents: bool
) -> AttentionInputs:
    """One sample of the run's shape on one rank, of two documents where asked for."""
    tokens = max(2, min(seq_length, _MOST_TOKENS) // 2 * 2)
    per_group = config.num_attention_heads // (config.num_query_groups or config.num_attention_heads)
    heads = max(per_group, config.num_attention_heads // config.tensor_model_parallel_size)
    generator = torch.Generator("cpu").manual_seed(1)
    width, kv_heads = config.query_width, heads // per_group
    shapes = ((heads, width), (kv_heads, width), (kv_heads, config.value_width))
    q, k, v = (
        torch.randn(tokens, 1, n, channels, generator=generator, device="cpu").to(device, parameter_dtype(config))
        for n, channels in shapes
    )
    documents = TokenLayout.of_documents((0, tokens // 2, tokens)) if has_documents else None
    visible = Visible(window=options.window, chunk=options.chunk, documents=documents)
    sinks = torch.zeros(heads, device=device) if options.has_sinks else None
    return AttentionInputs(q, k, v, visible, sinks, training=True)


def _run(attention: AttentionBackend, inputs: AttentionInputs) -> list[Tensor]:
    """The output, and the gradients of all operands."""
    leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    out = attention(
        AttentionInputs(leaves[0], leaves[1], leaves[2], inputs.visible, inputs.sinks, training=inputs.training)
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def _time(attention: AttentionBackend, inputs: AttentionInputs) -> float:
    before = mark()
    _run(attention, inputs)
    after = mark()
    synchronize()
    return measure_seconds_between(before, after)


def _agree(found: Tensor, expected: Tensor) -> bool:
    error = (found.float() - expected.float()).abs().max()
    return bool((error <= _TOLERANCE * expected.float().abs().max()).item())
