#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""A transformer layer with residual streams against one without, forward and backward, as a ratio of processor time.

    OMP_NUM_THREADS=1 python benchmarks/hyper_connections.py
    OMP_NUM_THREADS=1 python benchmarks/hyper_connections.py --tokens 1024 --streams 2

One CPU thread, float32, CPU time in rounds that run each variant once, in turn; freed memory stays in the process, as
in training. Ratios are taken within rounds, and their median is printed with its 95 % interval.
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conditions import print_conditions
from benchmarks.mixers import compare, find_ratios
from megatron.core.host_memory import keep_freed_host_memory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.parameters import initialise_parameters
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

_FORMS = {
    "--enable-hyper-connections": ("enable_hyper_connections", "num_residual_streams"),
    "--enable-mhc-connections": ("enable_mhc_connections", "mhc_num_residual_streams"),
}


def measure(hidden: int, tokens: int, streams: int, rounds: int) -> dict[str, tuple[float, float, float]]:
    """CPU time of a layer with streams over that of one without, by form: its median, and bounds."""
    sizes: dict[str, Any] = {
        "num_layers": 1, "hidden_size": hidden, "num_attention_heads": hidden // 64, "normalization": "RMSNorm",
        "add_bias_linear": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    }  # fmt: skip
    variants = {}
    for name, fields in {"plain": None, **_FORMS}.items():
        config = TransformerConfig(**sizes, **({} if fields is None else {fields[0]: True, fields[1]: streams}))
        layer = build_module(
            get_gpt_layer_local_spec(), config=config, layer_number=1, pg_collection=ProcessGroupCollection.single()
        )
        initialise_parameters(layer, seed=1)
        variants[name] = train(layer, torch.randn(tokens, 1, config.stream_width, requires_grad=True))
    times = compare(variants, rounds)
    return {name: find_ratios(times, name, "plain") for name in _FORMS}


def train(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward, of a gradient that is no view of one number."""
    grad = torch.randn_like(x)
    return lambda: layer(x).backward(grad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_host_memory()
    print_conditions()
    print(f"{args.streams} streams, hidden size {args.hidden_size}, {args.tokens} tokens, time over a plain layer's")
    for name, (ratio, lower, upper) in measure(args.hidden_size, args.tokens, args.streams, args.rounds).items():
        print(f"    {name:<32}{ratio:8.2f} ({lower:.2f} to {upper:.2f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
