"""Which implementation --attention-backend means on this device, and what it cannot do."""

from __future__ import annotations

import torch

from megatron.core.errors import ConfigError
from megatron.core.transformer.attention_backends.base import AttentionBackend, AttentionOptions
from megatron.core.transformer.attention_backends.cpu import CPUAttention
from megatron.core.transformer.attention_backends.local import LocalAttention
from megatron.core.transformer.attention_backends.sdpa import SDPAttention
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
    return problems


def build_attention_backend(config: TransformerConfig, layer_number: int, device: torch.device) -> AttentionBackend:
    """The core of attention of one layer, counted from 1. Raises ConfigError when it cannot do what the config asks."""
    problems = attention_problems(config, device)
    if problems:
        raise ConfigError(problems)
    options = AttentionOptions.of(config, layer_number)
    if config.attention_backend == "local":
        return LocalAttention(options)
    if config.attention_backend == "auto" and device.type == "cpu" and not config.compile:
        return CPUAttention(options)
    return SDPAttention(options, config.attention_backend)
