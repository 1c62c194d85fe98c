# SPDX-License-Identifier: Apache-2.0
"""All pairs of --recompute-modules in all number formats give the bits of no recomputation. `list_cases` has them all;
the suite takes a fixed sample, in which every pair and every format occurs."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tests.support.gpt_models import build_model, token_batch

FORMATS = {
    "float32": "",
    "bfloat16": "--bf16",
    **{name: f"--bf16 --fp8-format hybrid --fp8-recipe {name}" for name in ("delayed", "tensorwise", "mxfp8")},
    "blockwise": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
    "nvfp4": "--bf16 --fp4-format e2m1",
}
_DENSE = ("core_attn", "layernorm", "mlp", "mlp_act")
MODULES = {
    "dense": _DENSE,
    "experts": (*_DENSE, "moe", "moe_act", "shared_experts"),
    "latent": (*_DENSE, "mla_up_proj"),
}
_WIDTHS = "--hidden-size 128 --num-attention-heads 2 --ffn-hidden-size 128 --hidden-dropout 0.1 --attention-dropout 0.1"
MODELS = {
    "dense": "",
    "experts": """--swiglu --num-experts 2 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128
        --moe-layer-freq ([0,1]) --disable-bias-linear""",
    "latent": """--multi-latent-attention --position-embedding-type rope --q-lora-rank 128 --kv-lora-rank 128
        --qk-head-dim 64 --qk-pos-emb-head-dim 128 --v-head-dim 64 --disable-bias-linear --normalization RMSNorm""",
}


class Case(NamedTuple):
    """A model, a number format, and two parts that backward computes again."""

    model: str
    number_format: str
    modules: tuple[str, str]


def list_cases() -> list[Case]:
    """Every pair of parts of every model, in every format."""
    return [
        Case(model, number_format, pair)
        for number_format in FORMATS
        for model, modules in MODULES.items()
        for pair in itertools.combinations(modules, 2)
    ]


def train(model: str, number_format: str, modules: str = "") -> dict[str, Tensor]:
    """Losses and gradients of two steps of forward and backward, by name."""
    built = build_model(f"{_WIDTHS} {MODELS[model]} {FORMATS[number_format]} {modules}")
    model_parallel_cuda_manual_seed(5)
    for param in built.parameters():
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)  # type: ignore[attr-defined]
    ids, positions, labels = token_batch()
    found = {}
    for turn in range(2):
        losses = built(ids.roll(turn, 1), positions, labels=labels)
        losses.mean().backward()
        found[f"losses {turn}"] = losses.detach()
    for name, param in built.named_parameters():
        found[name] = param.main_grad if param.grad is None else param.main_grad + param.grad  # type: ignore[attr-defined]
    return found


@functools.lru_cache(maxsize=len(FORMATS) * len(MODELS))
def _train_plain(model: str, number_format: str) -> dict[str, Tensor]:
    return train(model, number_format)


def list_differing(case: Case) -> list[str]:
    """Names of the losses and gradients that recomputation changes."""
    modules = f"--recompute-granularity selective --recompute-modules {' '.join(case.modules)}"
    found = train(case.model, case.number_format, modules)
    expected = _train_plain(case.model, case.number_format)
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def choose_sample() -> list[Case]:
    """Each pair of each model in one format, which takes turns; norms with what lies behind them in all."""
    cases = list_cases()
    behind = ({"layernorm", "mlp"}, {"layernorm", "moe"}, {"layernorm", "shared_experts"})
    pairs = sorted({(case.model, case.modules) for case in cases})
    turns = dict(zip(pairs, itertools.cycle(FORMATS), strict=False))
    of_norms = [case for case in cases if set(case.modules) in behind and case.model == "experts"]
    return [case for case in cases if case in of_norms or turns[case.model, case.modules] == case.number_format]


@pytest.mark.parametrize("number_format", FORMATS)
def test_pairs_of_recomputed_parts_change_no_bit(number_format: str) -> None:
    sample = [case for case in choose_sample() if case.number_format == number_format]
    differing = {case: names for case in sample if (names := list_differing(case))}
    assert sample and differing == {}
