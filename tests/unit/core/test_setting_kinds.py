# SPDX-License-Identifier: Apache-2.0
"""What a setting is said to be (its kind) is what it does: whether a model with the same weights computes the same.

A run refuses to go on with weights whose function has changed, by the kind of the settings that differ. So a field
whose kind says less than it does would let a run train another model in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.core.config_base import get_settings
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.setting import Setting
from megatron.core.tensor_parallel.parameters import declare_vocabulary, materialise_parameters
from megatron.training.config.container import Fields, RunConfig
from megatron.training.config.run_groups import group_classes
from megatron.training.recipes.gpt import build_gpt_recipe
from tests.support.run_flags import run_config

_SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32 --vocab-size 50 "
    "--max-position-embeddings 32 --init-method-std 0.3 --micro-batch-size 1 --global-batch-size 8 --train-iters 9 "
    "--lr 0.1 --mock-data --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1"
)
_ROTARY = "--swiglu --disable-bias-linear --normalization RMSNorm --window-size 7,0 --position-embedding-type"
BASES = (
    "",
    f"{_ROTARY} rope --window-attn-skip-freq 2 --num-experts 8 --qk-layernorm",
    # Between all of them every setting has an effect.
    f"{_ROTARY} rope --use-rope-scaling --rotary-base 500000",
    f"{_ROTARY} rope --no-rope-freq 2 --attn-temperature-scale 0.1 --attn-temperature-floor 8 --qk-l2-norm",
    f"{_ROTARY} yarn --yarn-original-max-position-embeddings 512 --rotary-scaling-factor 4 --qk-layernorm",
    "--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-expert-capacity-factor 0.5",
    "--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --swiglu --moe-shared-expert-intermediate-size 64",
    "--multi-latent-attention --position-embedding-type rope --rotary-scaling-factor 4 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16",
    "--multi-latent-attention --position-embedding-type rope --disable-bias-linear --qk-head-dim 16 --v-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --experimental-attention-variant dsa --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 16 "
    "--dsa-indexer-topk 4",
    "--multi-latent-attention --position-embedding-type rope --disable-bias-linear --normalization RMSNorm "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --q-lora-rank 16 --experimental-attention-variant dsv4_hybrid "
    "--csa-compress-ratios [4,8] --csa-window-size 8 --o-groups 2 --o-lora-rank 16 --dsa-indexer-n-heads 2 "
    "--dsa-indexer-head-dim 16 --dsa-indexer-topk 4 --attention-dropout 0",
    "--use-mup --mup-base-hidden-size 32",
    "--parallel-residual",
    "--lora-rank 4",
    "--enable-hyper-connections --mhc-init-gating-factor 2 --mhc-sinkhorn-iterations 1",
    "--hybrid-layer-pattern L*",
    "--use-mup",
    "--multi-latent-attention --qk-layernorm --position-embedding-type rope --normalization RMSNorm --kv-lora-rank 16 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16",
    "--mamba-beside-attention --normalization RMSNorm --mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 8",
    "--hybrid-layer-pattern GM --normalization RMSNorm --mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 8 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--apply-layernorm-1p",
    "--hybrid-layer-pattern GM --normalization RMSNorm --mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 8 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8",
)
_LONGROPE = "its factors are lists, one for each pair of channels: tests/unit/hf/test_stretched_positions.py"
NOT_TRIED = {
    "longrope_short_factors": _LONGROPE,
    "longrope_long_factors": _LONGROPE,
    "longrope_original_max_position_embeddings": _LONGROPE,
    "longrope_magnitude": _LONGROPE,
    "spec": "names code of the user's own",
    "fp16": "like bf16, and slow without a GPU",
    "fp4": "like fp8, with errors eight times as large; tests/unit/core/test_fp4.py bounds them",
    "fp8": "like bf16, with errors sixteen times as large; tests/unit/core/test_fp8.py bounds them",
}
SETTINGS = [
    setting
    for group in ("model", "gpt")
    for setting in get_settings(group_classes()[group]).values()
    if setting.name.startswith("--")
    and setting.status == "works"
    and setting.kind not in ("layout", "report")
    and setting.dest not in NOT_TRIED
]
TOKENS = torch.randint(0, 50, (2, 32), generator=torch.Generator().manual_seed(3))


@functools.cache
def build(flags: str) -> Any:
    """A model in evaluation mode on one process. Raises ConfigError for flags that describe none."""
    config = settings_of(flags)
    recipe = build_gpt_recipe(config)
    recipe.check_layout(config.model)
    model = recipe.build_model(pre_process=True, post_process=True, pg_collection=ProcessGroupCollection.single())
    declare_vocabulary(model, recipe.vocab_size)
    materialise_parameters(model, seed=5, device=torch.device("cpu"))
    for name, parameter in model.named_parameters():
        if name.endswith(".adapter.linear_out.weight"):  # which start at zero
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(5))
    return model.eval()


@torch.no_grad()
def compute_logits(model: Any) -> torch.Tensor:
    """[s, b, v] in float32."""
    positions = torch.arange(32).expand(2, 32)
    logits: torch.Tensor = model(TOKENS, positions, None).float()
    return logits


def spellings(setting: Setting) -> Iterator[str]:
    """Other values of a setting, as one would write them; some fit no model."""
    if setting.is_switch:
        yield setting.spell(not setting.default)
    elif setting.offered_choices:
        yield from (f"{setting.name} {choice}" for choice in setting.offered_choices if choice != setting.default)
    else:
        yield from (f"{setting.name}={value}" for value in ("2", "1", "3", "4", "0.5", "16", "5,0", "0.3"))
        if isinstance(setting.nargs, int):
            yield f"{setting.name} {' '.join(['2'] * setting.nargs)}"


@functools.cache
def settings_of(flags: str) -> RunConfig:
    """The settings of a tiny run."""
    return run_config(flags, _SIZES)


def has_effect(setting: Setting, base: str) -> bool:
    """Whether a run with these flags has something for the setting to do."""
    run = Fields(settings_of(base), {setting.dest})
    return all(needs.met(run) for needs in setting.needs)


def outcomes(setting: Setting) -> Iterator[str]:
    """What changes of the setting do to models: other tensors, another result, the same. Few where it is no function,
    which has to show in all of them."""
    is_function = setting.kind == "function"
    bases = [base for base in BASES if has_effect(setting, base)] if is_function else BASES[:2]
    if setting.dest == "bf16":
        bases = BASES[:1]  # its rounding would choose other experts
    for base in bases:
        built = 0
        for written in spellings(setting):
            try:
                yield compare(build(base), build(f"{base} {written}"))
            except ConfigError:
                continue
            built += 1
            if built == 2 and not is_function:
                break


def compare(before: Any, after: Any) -> str:
    ours, theirs = dict(before.named_parameters()), dict(after.named_parameters())
    if {name: p.shape for name, p in ours.items()} != {name: p.shape for name, p in theirs.items()}:
        return "other tensors"
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    expected, found = compute_logits(before), compute_logits(after)
    is_short = any(p.dtype != torch.float32 for p in theirs.values())
    difference = float((expected - found).abs().max() / expected.std())
    return "same" if difference < (0.3 if is_short else 1e-4) else "other result"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.dest)
def test_a_setting_does_what_its_kind_says(setting: Setting) -> None:
    found = outcomes(setting)
    if setting.kind == "function":
        assert "other result" in found, "with the same weights nothing changes"
    elif setting.kind == "shape":
        assert set(found) <= {"other tensors", "same"}
    elif setting.kind != "shorthand":
        assert set(found) <= {"same"}, "the same weights compute something else: the field is of kind function"
