# SPDX-License-Identifier: Apache-2.0
"""Decoders of letters: how a pattern is read, that its model is a GPT's, kinds of a program's own, and what is
refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from examples.custom_mixer import DECAYED_SUM
from megatron.core.errors import ConfigError
from megatron.core.plan.kinds import register_kind
from megatron.core.plan.letters import Letters, find_letters_problem, split_letters
from megatron.core.plan.read import read_plan
from megatron.core.plan.stages import build_pipeline_layout, build_virtual_stages
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planner.memory import count_parameters
from tests.support.gpt_models import build_model, losses_and_grads, read_config

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("M-M*", (("M-M*",), ())),
        ("M-M-|M-M*-/MM/MM", (("M-M-", "M-M*-"), ("MM", "MM"))),
        ("|M*", (("", "M*"), ())),
        ("M*||M*", (("M*", "", "M*"), ())),
        ("M*M*//", (("M*M*",), ())),
    ],
)
def test_a_pattern_is_taken_apart(pattern: str, expected: tuple[tuple[str, ...], ...]) -> None:
    assert split_letters(pattern) == Letters(*expected)
    assert find_letters_problem(pattern, "M-*") is None


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("M*X", "has the letter 'X', for which there is no kind of layer; the letters are M *"),
        ("M *", "has the letter ' '"),
        ("m*", "has the letter 'm'"),
        ("MV", "has the letter 'V', compressed sparse attention of DeepSeek-V4.1, which does not exist here yet"),
        ("M*|D", "has the letter 'D'"),
        ("M*/M|M", "has a cut (|) in a part of multi-token prediction"),
        ("M*/MM/M*", "has parts of multi-token prediction (behind /) that differ"),
        ("M*/MM/", "has parts of multi-token prediction (behind /) that differ"),
    ],
)
def test_a_pattern_that_is_none(pattern: str, problem: str) -> None:
    assert (find_letters_problem(pattern, "M*") or "").startswith(problem)


@pytest.mark.flags("--hybrid-layer-pattern")
def test_a_gpt_in_letters_is_the_same_function() -> None:
    """A layer of a GPT is two letters: attention, and its MLP."""
    flags = "--num-experts 4 --moe-router-topk 2"
    letters = build_model(f"--num-layers 4 --hybrid-layer-pattern *-*E {flags}")
    gpt = build_model(f"--num-layers 2 --moe-layer-freq [0,1] {flags}")

    def rename(name: str) -> str:
        name = name.replace("decoder.final_layernorm", "decoder.final_norm")
        start, found, rest = name.partition("decoder.layers.")
        number, _, part = rest.partition(".")
        is_mlp = part.startswith(("mlp.", "pre_mlp"))
        return f"{start}{found}{2 * int(number) + is_mlp}.{part}" if found else name

    letters.load_state_dict({rename(name): value for name, value in gpt.state_dict().items()})
    losses, grads = losses_and_grads(gpt)
    losses_of_letters, grads_of_letters = losses_and_grads(letters)
    assert torch.equal(losses, losses_of_letters)
    assert {rename(name) for name in grads} == set(grads_of_letters)
    assert all(torch.equal(grad, grads_of_letters[rename(name)]) for name, grad in grads.items())
    counts = [count_parameters(model.config, padded_vocab_size=64, untied=False) for model in (gpt, letters)]
    assert counts[0].decoder == counts[1].decoder


def test_cuts_are_stages() -> None:
    config = TransformerConfig(hybrid_layer_pattern="*-*|-||*-", pipeline_model_parallel_size=2, **SIZES)
    shape = build_virtual_stages(config)
    assert (config.num_layers, shape.stages, shape.chunks) == (6, 2, 2)
    assert [list(content.layers) for content in build_pipeline_layout(config, shape)] == [[0, 1, 2], [3], [], [4, 5]]


def test_layers_of_prediction_are_described() -> None:
    config = TransformerConfig(num_layers=2, **SIZES)
    config.hybrid_layer_pattern = "*-/*-/*-"
    plan = read_plan(config)
    assert [(layer.number, layer.name) for layer in plan.prediction] == [
        (3, "mtp.layers.0.mtp_model_layer.layers.0"), (4, "mtp.layers.0.mtp_model_layer.layers.1"),
        (5, "mtp.layers.1.mtp_model_layer.layers.0"), (6, "mtp.layers.1.mtp_model_layer.layers.1"),
    ]  # fmt: skip


# ---- kinds of a program's own


@pytest.mark.parametrize(
    ("name", "letter", "problem"),
    [
        ("decayed_sum", "B", "the kind decayed_sum with the letter B meets decayed_sum"),
        ("other", "*", "the kind other with the letter \\* meets attention"),
        ("other", "|", "cannot stand for other"),
        ("other", "AB", "cannot stand for other"),
    ],
)
def test_what_no_kind_can_be(name: str, letter: str, problem: str) -> None:
    register_kind(DECAYED_SUM)  # a module that is imported twice
    with pytest.raises(ConfigError, match=problem):
        register_kind(dataclasses.replace(DECAYED_SUM, name=name, letter=letter))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--num-layers 2 --hybrid-layer-pattern *X", "--hybrid-layer-pattern *X has the letter 'X', for which"),
        ("--hybrid-layer-pattern |/*-", "--hybrid-layer-pattern |/*- has no layer"),
        ("--hybrid-layer-pattern D-", "sparse attention has no sizes of its own; give --dsa-indexer-n-heads"),
        (
            "--hybrid-layer-pattern *- --hybrid-override-pattern *-",
            "is an earlier name of --hybrid-layer-pattern",
        ),
        (
            "--mtp-num-layers 1 --mtp-hybrid-override-pattern *",
            "--mtp-hybrid-override-pattern * describes layers behind a decoder of letters",
        ),
        (
            "--num-layers 4 --hybrid-layer-pattern *-*- --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank 2 contradicts --hybrid-layer-pattern, which says all about stages",
        ),
        (
            "--num-layers 4 --hybrid-layer-pattern *-*- --pipeline-model-parallel-size 2 "
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
            "leaves 2 layers, which do not divide over the 0 other stages",
        ),
        ("--num-layers 2 --hybrid-layer-pattern *E", "contradicts --num-experts: the letter E and that flag go"),
        ("--num-layers 2 --hybrid-layer-pattern *- --num-experts 4", "contradicts --num-experts: the letter E"),
        ("--hybrid-layer-pattern *- --multi-latent-attention", "has attention with latent vectors and without"),
        (
            "--hybrid-layer-pattern M- --multi-latent-attention",
            "contradicts --multi-latent-attention: the letter + and",
        ),
        ("--num-layers 2 --hybrid-layer-pattern *- --parallel-residual", "--parallel-residual is for layers of two"),
        (
            "--num-layers 4 --hybrid-layer-pattern *-*- --pipeline-model-parallel-layout Ett|ttL",
            "--hybrid-layer-pattern *-*- contradicts --pipeline-model-parallel-layout, which says all",
        ),
        (
            "--num-layers 4 --hybrid-layer-pattern *-|*- --decoder-first-pipeline-num-layers 1",
            "--decoder-first-pipeline-num-layers 1 contradicts --hybrid-layer-pattern, which says all",
        ),
        (
            "--num-layers 4 --hybrid-layer-pattern *|-|*- --pipeline-model-parallel-size 2",
            "has 3 stages, which is not a multiple of --pipeline-model-parallel-size 2; use 2 or 4 stages",
        ),
    ],
)
def test_letters_that_contradict_other_settings(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(flags)
    assert any(problem in found for found in caught.value.problems), caught.value.problems
