# SPDX-License-Identifier: Apache-2.0
"""Choice of the backend that --attention-backend means on this device and of the exchange that --cp-comm-type means in
a layer, with what they cannot do.

| --cp-comm-type | travels                          | attention on each rank                    |
|----------------|----------------------------------|-------------------------------------------|
| p2p            | keys and values, round a ring    | its queries, one block of keys at a time  |
| all_gather     | keys and values, all at once     | its queries, all keys                     |
| a2a            | heads for tokens, and back       | whole sequences, some heads               |
| a2a+p2p        | a2a among neighbours, p2p beyond | as p2p, some heads                        |
"""

from __future__ import annotations

import torch

from megatron.core import operation_table
from megatron.core.device import find_kernel_obstacle, find_widest_flash_heads, is_cpu, is_cuda
from megatron.core.errors import ConfigError
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.parameters import parameter_dtype
from megatron.core.transformer.config_fields.attention import comm_type_problem
from megatron.core.transformer.core_attention.block_kernels import BlockKernel, CPUFlashKernel, PlainKernel
from megatron.core.transformer.core_attention.cuda import CUDAAttention, keeps_widths
from megatron.core.transformer.core_attention.exchanges import (
    GatheredKeysAttention,
    HeadExchangeAttention,
)
from megatron.core.transformer.core_attention.flash import FlashKernel
from megatron.core.transformer.core_attention.interface import AttentionBackend, AttentionOptions, CoreAttention
from megatron.core.transformer.core_attention.local import LocalAttention
from megatron.core.transformer.core_attention.max_logits import MaxLogits
from megatron.core.transformer.core_attention.query_blocks import CPUAttention, QueryBlocksAttention
from megatron.core.transformer.core_attention.ring import RingAttention
from megatron.core.transformer.core_attention.sdpa import SDPAttention
from megatron.core.transformer.transformer_config import TransformerConfig


def attention_problems(config: TransformerConfig, device: torch.device) -> list[str]:
    """Return why the configured backend cannot honour the configured options on this device; empty when it can."""
    backend, on_cpu = config.attention_backend, is_cpu(device)
    problems = []
    if backend == "flash" and on_cpu and config.attention_dropout > 0:
        problems.append(
            "--attention-backend flash has no dropout on the CPU, and --attention-dropout is "
            f"{config.attention_dropout}; use --attention-dropout 0, or --attention-backend auto"
        )
    if backend == "flash" and on_cpu and (config.has_windows or config.softmax_type != "vanilla"):
        problems.append(
            "--attention-backend flash has neither windows (--window-size) nor sinks (--softmax-type) on the CPU; use "
            "--attention-backend auto, or local"
        )
    flash_problem = None if backend != "flash" or on_cpu else find_flash_problem(config, device)
    if flash_problem is not None:
        problems.append(
            f"--attention-backend flash cannot compute these layers: {flash_problem}; use --attention-backend auto"
        )
    if backend == "fused" and on_cpu:
        problems.append("--attention-backend fused needs a GPU with cuDNN, and this runs on the CPU; use auto or flash")
    return [*problems, *config.kernel_problems()]


def build_attention_backend(
    config: TransformerConfig, options: AttentionOptions, device: torch.device
) -> AttentionBackend:
    """Attention of one layer on one rank. Raises ConfigError when it cannot do what the config asks."""
    problems = attention_problems(config, device)
    if problems:
        raise ConfigError(problems)
    # What torch's operator lacks.
    has_more = config.softmax_type != "vanilla" or options.softcap is not None
    if config.attention_backend == "local":
        return LocalAttention(options)
    if config.attention_backend in ("auto", "flash") and is_cuda(device):
        return build_gpu_attention(config, options, device, config.attention_way)
    if has_more and config.attention_backend == "auto":
        return QueryBlocksAttention(options)
    if config.attention_backend == "auto" and is_cpu(device):
        return CPUAttention(options)
    return SDPAttention(options, config.attention_backend, device)


def build_gpu_attention(
    config: TransformerConfig, options: AttentionOptions, device: torch.device, way: str | None
) -> AttentionBackend:
    """Attention of one layer on a GPU; way: see CUDAAttention."""
    flash, flex = find_flash_problem(config, device), find_kernel_obstacle(device)
    return CUDAAttention(options, config.attention_backend, device, flash, flex, way)


def find_flash_problem(config: TransformerConfig, device: torch.device) -> str | None:
    """Return why torch's flash kernel for GPUs cannot compute these layers on this device; None where it can."""
    widths = (config.query_width, config.value_width)
    return operation_table.find_flash_problem(parameter_dtype(config), *widths, widest=find_widest_flash_heads(device))


def build_core_attention(
    config: TransformerConfig,
    options: AttentionOptions,
    groups: ProcessGroupCollection,
    device: torch.device,
    comm_type: str | None = None,
) -> CoreAttention:
    """Attention of one layer over sequences that the ranks of `groups.cp` share.

    comm_type: how they exchange; what the config says when None. Raises ConfigError when it cannot do what the config
    asks.
    """
    backend = build_attention_backend(config, options, device)
    # Scores are measured only here: the command line refuses it together with context parallelism.
    if groups.cp.size() == 1:
        return MaxLogits(backend, options) if config.measures_attention_logits else backend
    kind = comm_type or read_plan(config).layer(options.layer_number).options.context_exchange
    problem = comm_type_problem(kind)
    if problem is not None:  # the spec of a layer asked for it
        raise ConfigError(problem)
    if kind == "all_gather":
        return GatheredKeysAttention(backend, groups.cp)
    if kind == "p2p":
        return _build_ring(config, options, groups.cp, device)
    # Before anything is sent: heads that cannot be shared would end in an exchange of unequal parts.
    if kind == "a2a":
        _check_exchange(config, kind, groups.tp, groups.cp)
        return HeadExchangeAttention(backend, groups.cp)
    # Exactly two levels: one exchange, and one ring around it.
    if len(groups.hcp) != 2:
        raise ConfigError(
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes, the ranks of an exchange and the "
            f"ranks of a ring, whose product is --context-parallel-size {groups.cp.size()}"
        )
    # The exchange runs among neighbours, usually one machine, and the ring across machines.
    neighbours, beyond = groups.hcp
    inner: CoreAttention = backend if beyond.size() == 1 else _build_ring(config, options, beyond, device)
    if neighbours.size() == 1:
        return inner
    _check_exchange(config, kind, groups.tp, neighbours)
    return HeadExchangeAttention(inner, neighbours)


def _check_exchange(config: TransformerConfig, kind: str, tp: Group, ranks: Group) -> None:
    problems = list(config.exchange_problems(kind, tp.size(), ranks.size()))
    if problems:
        raise ConfigError(problems)


def _build_ring(
    config: TransformerConfig, options: AttentionOptions, group: Group, device: torch.device
) -> RingAttention:
    return RingAttention(_build_block_kernel(config, options, device), group, draws_dropout=options.dropout > 0)


def _build_block_kernel(config: TransformerConfig, options: AttentionOptions, device: torch.device) -> BlockKernel:
    """Return what --attention-backend means for one block of a ring: scores and softmax always in float32."""
    problem = config.ring_problem()
    if problem is not None:
        raise ConfigError(problem)
    # To merge blocks takes the logarithm of each one's sum, which torch's CPU kernel returns and its operator does not.
    by_kernel = config.attention_backend in ("auto", "flash") and options.dropout == 0 and options.softcap is None
    if by_kernel and is_cpu(device):
        return CPUFlashKernel(options.scale)
    if by_kernel and find_flash_problem(config, device) is None:
        return FlashKernel(options.scale, keeps_widths=keeps_widths(config.attention_way))
    return PlainKernel(options.scale, options.dropout, options.softcap)
