# SPDX-License-Identifier: Apache-2.0
"""Layers by Transformer Engine: the same function as plain layers, under the same names, in every form they have.

Its modules are stand-ins with its signatures and plain arithmetic (transformer_engine_stand_in.py); where the package
itself is installed, its signatures are compared with theirs.
"""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from megatron.core.device import current_device
from megatron.core.errors import ConfigError
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optional_deps import available
from megatron.core.placement import get_placement
from megatron.core.transformer.execution.execution import Execution
from megatron.core.transformer.execution.transformer_engine import EngineExecution
from megatron.core.transformer.execution.transformer_engine_package import choose_implementation, load_package
from megatron.training.recipes.gpt import describe_gpt_operations
from megatron.training.run import Run
from tests.support.gpt_models import (
    assert_same_function,
    build_model,
    first_attention,
    first_layer,
    read_config,
    token_batch,
)
from tests.support.pretend_groups import pretend
from tests.support.tiny_training import differing, finish, prepare, train_tiny
from tests.support.transformer_engine_stand_in import SIGNATURES, Engine, install

ASKED = "--transformer-impl transformer_engine"
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PARTS = "--recompute-granularity selective --recompute-modules"
LATENT = "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 --v-head-dim 6"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
FUSED = {"LayerNormLinear", "Linear", "DotProductAttention"}
FP8_SIZES = "--fp8-format hybrid --bf16"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The stand-in, in the package's place."""
    return install(monkeypatch)


# ---- the same function


@pytest.mark.flags("--transformer-impl")
@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        # Exact GELU is none of the package's activations.
        ("", FUSED),
        ("--openai-gelu --apply-layernorm-1p --num-attention-heads 6 --hidden-size 72", FUSED | {"LayerNormMLP"}),
        (f"{LLAMA} --group-query-attention --num-query-groups 2", FUSED | {"LayerNormMLP"}),
        (f"{LLAMA} --qk-layernorm --window-size (3,0) --add-qkv-bias", FUSED | {"LayerNormMLP"}),
        ("--quick-geglu --norm-placement both", FUSED | {"LayerNormMLP"}),
        ("--squared-relu --norm-placement output", {"Linear", "DotProductAttention"}),
        ("--swiglu --apply-residual-connection-post-layernorm", {"Linear", "DotProductAttention"}),
        (f"{LLAMA} {PARTS} mlp core_attn", FUSED),
        (f"{LLAMA} {AGAIN}", FUSED | {"LayerNormMLP"}),
        (f"{LLAMA} {PARTS} mlp_act", FUSED),
        (f"{LLAMA} {PARTS} layernorm", FUSED - {"LayerNormLinear"}),
        (f"{LLAMA} --softmax-type learnable", {"LayerNormLinear", "Linear", "LayerNormMLP"}),
        (f"{LLAMA} {EXPERTS} --moe-shared-expert-intermediate-size 24", FUSED | {"GroupedLinear"}),
        (f"{EXPERTS} --moe-layer-freq 2", FUSED | {"GroupedLinear"}),
        # Not all of its parts are exchanged: their inputs are computed again, or experts have as many rows each.
        (f"{LLAMA} {EXPERTS} {PARTS} moe_act", FUSED | {"GroupedLinear"}),
        (f"{EXPERTS} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", FUSED),
        (f"{LLAMA} {LATENT}", {"Linear", "DotProductAttention", "LayerNormMLP"}),
        (f"{LLAMA} {LATENT} {PARTS} mla_up_proj", {"Linear", "LayerNormMLP"}),
        (f"{LLAMA} --mtp-num-layers 1", FUSED | {"LayerNormMLP"}),
    ],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_plain_layers(engine: Engine, flags: str, kinds: set[str]) -> None:
    plain, model = build_model(flags), build_model(f"{flags} {ASKED}")
    assert isinstance(first_layer(model).execution, EngineExecution) and not isinstance(
        first_layer(plain).execution, EngineExecution
    )
    assert_same_function(plain, model)
    assert engine.kinds() == kinds
    # Nothing of the package is in what checkpoints, optimizers and initialisation see.
    assert list(model.state_dict()) == list(plain.state_dict())
    for (name, ours), (_, theirs) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert get_placement(theirs, name) == get_placement(ours, name)
        assert torch.equal(theirs, ours)


def test_a_mask_and_a_cache_are_for_the_plain_backend(engine: Engine) -> None:
    plain, model = build_model(LLAMA).eval(), build_model(f"{LLAMA} {ASKED}").eval()
    ids, positions, _ = token_batch()
    seen_twice = torch.ones(16, 16, dtype=torch.bool).triu(3)[None, None]
    torch.testing.assert_close(model(ids, positions, seen_twice), plain(ids, positions, seen_twice))
    assert "DotProductAttention" not in engine.kinds()
    assert first_attention(model).core_attention.backend.name == "Transformer Engine"


def test_weight_gradients_go_into_the_buffer_and_checkpoints_go_both_ways(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{LLAMA} --ffn-hidden-size 48 --lr-decay-iters 6 --attention-dropout 0 --hidden-dropout 0".split()

    def train(*more: str) -> dict[str, torch.Tensor]:
        return train_tiny(*flags, *more).model[0].module.state_dict()

    expected = train("--train-iters", "6")
    for first, second in ((ASKED, ""), ("", ASKED)):
        directory = str(tmp_path / f"from{len(first)}")
        train(*first.split(), "--train-iters", "3", "--save", directory)
        found = train(*second.split(), "--train-iters", "6", "--load", directory)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    # Modules of the last form that were built are those with a buffer: weights' gradients are added inside of them.
    fuses = [has["fuse_wgrad_accumulation"] for kind, has in engine.built if kind == "LayerNormMLP"]
    assert fuses and all(fuses)
    assert "Transformer Engine 2.20.2" in capsys.readouterr().out


# ---- FP8 and FP4


@pytest.mark.parametrize(
    ("flags", "recipe"),
    [
        ("--fp8-format hybrid --fp8-margin 2 --fp8-amax-history-len 8 --fp8-amax-compute-algo max", "DelayedScaling"),
        ("--fp8-format e4m3 --fp8-recipe tensorwise", "Float8CurrentScaling"),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "Float8BlockScaling"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "MXFP8BlockScaling"),
        ("--fp4-format e2m1", "NVFP4BlockScaling"),
    ],
)
def test_recipes_are_the_packages(engine: Engine, flags: str, recipe: str) -> None:
    model = build_model(f"{LLAMA} --bf16 --hidden-size 128 --ffn-hidden-size 256 {flags} {ASKED}")
    ids, positions, labels = token_batch()
    model(ids, positions, labels=labels).mean().backward()
    # One around the whole pass, and in it one for each layer.
    assert [(each["depth"], each["enabled"]) for each in engine.passes] == [(0, True), (1, True), (1, True)]
    assert {used[0] for _, used in engine.ran} == {recipe}
    if recipe == "DelayedScaling":
        has = engine.passes[0]["recipe"][1]
        assert (has["margin"], has["amax_history_len"], has["amax_compute_algo"]) == (2, 8, "max")
        assert has["fp8_format"].name == "HYBRID"


def test_largest_values_are_those_of_the_whole_stage(engine: Engine) -> None:
    layer, groups = first_layer(build_model(f"{LLAMA} {FP8_SIZES} {ASKED}")), pretend(1, tp=2, dp=2)
    layer.execution.multiply_in_few_bits(layer, groups)
    with layer.execution.open_pass():
        assert engine.passes[-1]["amax_reduction_group"] is groups.tp_dp_cp and groups.tp_dp_cp.size() == 4


def test_delayed_scales_go_on_where_they_were_saved(engine: Engine, tmp_path: Path) -> None:
    flags = (
        f"{LLAMA} {EXPERTS} --moe-layer-freq 2 --ffn-hidden-size 48 --bf16 --lr-decay-iters 6 --fp8-format hybrid "
        f"--fp8-amax-history-len 4 --fp8-amax-compute-algo max {ASKED}"
    ).split()

    def train(*more: str | Path) -> tuple[Run, dict[str, torch.Tensor]]:
        run = train_tiny(*flags, *more)
        # The package's state is one for the process: what follows would go on with the modules of this run.
        engine.metas.clear()
        buffers = run.model[0].module.named_buffers()
        return run, {name: data.clone() for name, data in buffers if "engine_scales" in name}

    whole, expected = train()
    train("--save", tmp_path, "--exit-interval", "3")
    resumed, found = train("--load", tmp_path)
    assert differing(whole, resumed) == []
    assert {"LayerNormLinear", "Linear", "LayerNormMLP", "GroupedLinear"} <= engine.kinds()
    # Two projections of each layer, two products of experts, one dense MLP; two tensors for each direction.
    assert len(expected) == 7 * 4 and all(torch.equal(data, found[name]) for name, data in expected.items())
    assert all((data != 1).any() for name, data in expected.items() if "_scale_" in name)
    # A history of another length begins anew.
    flags[flags.index("--fp8-amax-history-len") + 1] = "3"
    other = prepare(*flags, "--load", tmp_path)
    known = {name: data.any() for name, data in other.model[0].module.named_buffers() if "amax_history" in name}
    assert known and not any(known.values())
    finish(other)


def test_layers_in_bf16_and_experts_in_blocks(engine: Engine) -> None:
    flags = (
        f"{LLAMA} {EXPERTS} --bf16 --num-layers 3 --fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16"
    )
    model = build_model(f"{flags} {ASKED}")
    ids, positions, labels = token_batch()
    model(ids, positions, labels=labels).mean().backward()
    assert [each["enabled"] for each in engine.passes] == [True, False, True, False]
    by_layer = [used is not None for kind, used in engine.ran if kind == "LayerNormLinear"]
    assert by_layer == [False, True, False]
    assert {"Fp8Padding", "Fp8Unpadding"} <= engine.kinds()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--fp8-emulation", "--fp8-emulation"),
        ("--fp8-bf16-layers *.linear_fc2", "--fp8-bf16-layers"),
        ("--fp8-fallback-sqnr 10", "--fp8-fallback-sqnr"),
        ("--no-fp8-wgrad", "--no-fp8-wgrad"),
        ("--mtp-num-layers 1", "--mtp-num-layers"),
        ("--fp8-interval 2", "--fp8-interval above 1"),
        (AGAIN, "recomputation of linear layers"),
        (f"{PARTS} layernorm", "layernorm, mlp_act or moe_act"),
    ],
)
def test_what_it_does_not_know_is_refused(engine: Engine, flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match="or give --transformer-impl local") as refused:
        build_model(f"{LLAMA} {FP8_SIZES} {flags} {ASKED}")
    assert named in str(refused.value)


# ---- is it there?


def test_on_a_cpu_layers_are_plain_whatever_is_asked() -> None:
    for asked in ("local", "transformer_engine", "auto"):
        assert not choose_implementation(asked, torch.device("cpu")).is_engine
        assert type(first_layer(build_model(f"--transformer-impl {asked}")).execution) is Execution


def test_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ConfigError, match="or give --transformer-impl local, which needs no package"):
        choose_implementation("transformer_engine", gpu)
    chosen = choose_implementation("auto", gpu)
    assert not chosen.is_engine and chosen.name.startswith("plain torch: --transformer-impl transformer_engine needs")
    install(monkeypatch, version="1.13.0+abc")
    with pytest.raises(ConfigError, match=r"needs Transformer Engine 2.9 or newer, and 1.13.0\+abc is installed; run"):
        choose_implementation("transformer_engine", gpu)
    install(monkeypatch)
    assert choose_implementation("auto", gpu).name == "Transformer Engine 2.20.2"
    assert not choose_implementation("local", gpu).is_engine


@pytest.mark.flags("--transformer-impl")
def test_the_log_says_what_layers_compute_with(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{LLAMA} {EXPERTS}"

    def described(asked: str) -> dict[str, str]:
        model, config = build_model(f"{flags} {asked}"), read_config(f"{flags} {asked}")
        return dict(describe_gpt_operations(config, 64, [model], pretend(), current_device()))

    found = described("--transformer-impl auto")
    assert found["transformer layers"] == found["linear"] == "Transformer Engine 2.20.2"
    assert found["norm"] == "Transformer Engine, with the products behind it"
    assert found["attention"] == "Transformer Engine"
    assert found["products of experts"] == "Transformer Engine 2.20.2, GroupedLinear"
    assert "transformer layers" not in described("--transformer-impl local")
    monkeypatch.undo()
    assert described("--transformer-impl auto")["transformer layers"].startswith("plain torch: ")


def test_the_spec_by_upstreams_name(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    assert spec.params["execution_type"] is EngineExecution
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="local spec .plain torch: Transformer Engine runs on GPUs only"):
        assert "execution_type" not in gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec().params


# ---- the package itself


def compare_signatures(pytorch: types.ModuleType, recipes: types.ModuleType) -> list[str]:
    """What SIGNATURES has and the package has not, and positional arguments in another order."""
    problems = []
    for kind, (construct, forward) in SIGNATURES.items():
        found = getattr(recipes if kind.endswith("Scaling") else pytorch, kind)
        calls = [(found, construct)] + ([(found.forward, ("self", *forward))] if forward else [])
        for function, names in calls:
            has = list(inspect.signature(function).parameters)
            problems += [f"{kind} has no {name}" for name in names if name not in has]
            # As many as are ever given by position.
            problems += [f"{kind}: {has[:2]}"] if forward and has[:2] != list(names[:2]) else []
    return problems


@pytest.mark.skipif(not available("transformer_engine_torch"), reason="Transformer Engine is not installed")
def test_signatures_are_those_of_the_installed_package() -> None:
    load_package()
    found = [sys.modules[f"transformer_engine.{name}"] for name in ("pytorch", "common.recipe")]
    assert compare_signatures(*found) == []
