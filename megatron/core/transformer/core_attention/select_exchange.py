"""Which exchange --cp-comm-type means in a layer, and what it cannot do.

| type        | travels                          | attention on each rank                    |
|-------------|----------------------------------|-------------------------------------------|
| p2p         | keys and values, round a ring    | own queries, one block of keys at a time  |
| all_gather  | keys and values, all at once     | own queries, all keys                     |
| a2a         | heads for tokens, and back       | whole sequences, some heads               |
| a2a+p2p     | a2a among neighbours, p2p beyond | as p2p, some heads                        |
"""

from __future__ import annotations

import torch

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.transformer.core_attention.base import AttentionOptions, SequenceAttention
from megatron.core.transformer.core_attention.block_attention import BlockKernel, CPUFlashKernel, PlainKernel
from megatron.core.transformer.core_attention.documents import ByDocument
from megatron.core.transformer.core_attention.gathered_keys import GatheredKeysAttention
from megatron.core.transformer.core_attention.head_exchange import HeadExchangeAttention, check_heads
from megatron.core.transformer.core_attention.max_logits import MaxLogits
from megatron.core.transformer.core_attention.ring import RingAttention
from megatron.core.transformer.core_attention.select_backend import build_attention_backend
from megatron.core.transformer.layer_patterns import window_of_layer
from megatron.core.transformer.transformer_config import TransformerConfig

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def comm_type_of(config: TransformerConfig, layer_number: int) -> str:
    """How layer `layer_number`, counted from 1, exchanges: one type for all layers, or one for each."""
    types = config.cp_comm_type
    if isinstance(types, str):
        types = [types]
    if len(types) not in (1, config.num_layers):
        raise ConfigError(
            f"--cp-comm-type names {len(types)} types for --num-layers {config.num_layers}; give one, or one per layer"
        )
    chosen = types[0] if len(types) == 1 else types[layer_number - 1]
    if chosen not in COMM_TYPES:
        raise ConfigError(f"--cp-comm-type {chosen} is unknown; use {', '.join(COMM_TYPES[:-1])} or {COMM_TYPES[-1]}")
    return chosen


def build_sequence_attention(
    config: TransformerConfig, layer_number: int, groups: ProcessGroupCollection, device: torch.device
) -> SequenceAttention:
    """The core of attention of one layer, over sequences that the ranks of `groups.cp` share.

    Raises ConfigError when it cannot do what the config asks.
    """
    backend = build_attention_backend(config, layer_number, device)
    if groups.cp.size() == 1:
        if config.measures_attention_logits:
            backend = MaxLogits(backend, AttentionOptions.of(config, layer_number))
        return ByDocument(backend)
    kind = comm_type_of(config, layer_number)
    if kind == "all_gather":
        has_window = window_of_layer(config, layer_number) is not None
        return GatheredKeysAttention(backend, groups.cp, has_window=has_window)
    if kind == "p2p":
        return _ring(config, layer_number, groups.cp, device)
    if kind == "a2a":
        return _exchange(config, ByDocument(backend), groups.cp, groups, "--cp-comm-type a2a")
    if len(groups.hcp) != 2:
        raise ConfigError(
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes, the ranks of an exchange and the "
            f"ranks of a ring, whose product is --context-parallel-size {groups.cp.size()}"
        )
    neighbours, beyond = groups.hcp
    inner = ByDocument(backend) if beyond.size() == 1 else _ring(config, layer_number, beyond, device)
    if neighbours.size() == 1:
        return inner
    return _exchange(config, inner, neighbours, groups, "--cp-comm-type a2a+p2p")


def _ring(config: TransformerConfig, layer_number: int, group: Group, device: torch.device) -> RingAttention:
    options = AttentionOptions.of(config, layer_number)
    kernel = _block_kernel(config, options, device)
    return RingAttention(kernel, group, draws_dropout=options.dropout > 0, window=options.window)


def _exchange(
    config: TransformerConfig, inner: SequenceAttention, group: Group, groups: ProcessGroupCollection, flag: str
) -> HeadExchangeAttention:
    check_heads(config.num_attention_heads // groups.tp.size(), group.size(), flag)
    return HeadExchangeAttention(inner, group)


def _block_kernel(config: TransformerConfig, options: AttentionOptions, device: torch.device) -> BlockKernel:
    """What --attention-backend means for one block of a ring: scores and softmax always in float32."""
    if config.attention_backend == "fused":
        raise ConfigError(
            "--attention-backend fused cannot merge the blocks of --cp-comm-type p2p; use --attention-backend auto, "
            "or --cp-comm-type all_gather or a2a"
        )
    by_kernel = config.attention_backend in ("auto", "flash") and options.dropout == 0 and options.softcap is None
    if by_kernel and device.type == "cpu":
        return CPUFlashKernel(options.scale)
    return PlainKernel(options.scale, options.dropout, options.softcap)
