"""Floating-point operations of a global batch equal the reference's, exactly."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planner.throughput import count_training_flops_per_token

CASES = json.loads((Path(__file__).parent / "data" / "flops_memory.json").read_text())
NAMES = ("gpt3_small", "gpt3_175b_tp8pp16", "llama3_8b", "tiny_b", "mixtral_8x7b")


def _options(command_line: str) -> dict[str, str]:
    words = shlex.split(command_line)
    following = [*words[1:], "--"]
    return {word: after for word, after in zip(words, following, strict=True) if word.startswith("--")}


@pytest.mark.parametrize("name", NAMES)
def test_flops_of_a_global_batch(name: str) -> None:
    options, expected = _options(CASES[name]["cli"]), CASES[name]["result"]
    model = TransformerConfig(
        num_layers=int(options["--num-layers"]),
        hidden_size=int(options["--hidden-size"]),
        num_attention_heads=int(options["--num-attention-heads"]),
        num_query_groups=expected["num_query_groups"],
        ffn_hidden_size=expected["ffn_hidden_size"],
        gated_linear_unit="--swiglu" in options,
        num_moe_experts=int(options["--num-experts"]) if "--num-experts" in options else None,
        moe_router_topk=int(options.get("--moe-router-topk", 2)),
    )
    seq_length = int(options["--seq-length"])
    per_token = count_training_flops_per_token(
        model,
        seq_length=seq_length,
        padded_vocab_size=expected["padded_vocab_size"],
    )
    assert per_token * seq_length * int(options["--global-batch-size"]) == expected["num_flops_global_batch"]
