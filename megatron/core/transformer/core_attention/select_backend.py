"""Which implementation --attention-backend means on this device, and what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.errors import ConfigError
from megatron.core.transformer.core_attention.base import AttentionBackend, AttentionOptions
from megatron.core.transformer.core_attention.cpu import CPUAttention
from megatron.core.transformer.core_attention.local import LocalAttention
from megatron.core.transformer.core_attention.query_blocks import QueryBlocksAttention
from megatron.core.transformer.core_attention.sdpa import SDPAttention
from megatron.core.transformer.layer_patterns import has_windows
from megatron.core.transformer.transformer_config import TransformerConfig


def attention_problems(config: TransformerConfig, device: torch.device) -> list[str]:
    """Why the configured backend cannot honour the configured options on this device; empty when it can."""
    backend, on_cpu = config.attention_backend, device.type == "cpu"
    problems = []
    if backend == "flash" and on_cpu and config.attention_dropout > 0:
        problems.append(
            "--attention-backend flash has no dropout on the CPU, and --attention-dropout is "
            f"{config.attention_dropout}; use --attention-dropout 0, or --attention-backend auto"
        )
    if backend == "fused" and on_cpu:
        problems.append("--attention-backend fused needs a GPU with cuDNN, and this runs on the CPU; use auto or flash")
    kernels = {"flash": "the flash kernel", "fused": "the cuDNN kernel", "unfused": "torch's math kernel"}
    for flag, what in _beyond_the_kernels(config, backend):
        problems.append(
            f"--attention-backend {backend}: {kernels[backend]} has no {what} ({flag}); use --attention-backend auto, "
            "or local"
        )
    return problems


def _beyond_the_kernels(config: TransformerConfig, backend: str) -> Iterator[tuple[str, str]]:
    """(flag, what it asks for) of everything that torch's kernel of this name cannot do."""
    if backend not in ("flash", "fused", "unfused"):
        return
    if has_windows(config) and backend != "unfused":  # a window is a mask, which these do not take
        yield "--window-size", "sliding window"
    if config.softmax_type != "vanilla":
        yield f"--softmax-type {config.softmax_type}", "attention sinks"
    if config.attn_logit_softcapping is not None:
        yield f"--attn-logit-softcapping {config.attn_logit_softcapping:g}", "bound on scores"


def build_attention_backend(config: TransformerConfig, layer_number: int, device: torch.device) -> AttentionBackend:
    """The core of attention of one layer, counted from 1. Raises ConfigError when it cannot do what the config asks."""
    problems = attention_problems(config, device)
    if problems:
        raise ConfigError(problems)
    options = AttentionOptions.of(config, layer_number)
    has_more = config.softmax_type != "vanilla" or options.softcap is not None
    if config.attention_backend == "local" or (has_more and config.compile):
        return LocalAttention(options)
    if has_more and config.attention_backend == "auto":
        return QueryBlocksAttention(options)
    if config.attention_backend == "auto" and device.type == "cpu" and not config.compile:
        return CPUAttention(options)
    return SDPAttention(options, config.attention_backend)
