# SPDX-License-Identifier: Apache-2.0
"""config.json: each field of a family is followed, changes nothing, or is refused; `python -m tests.trial` has all."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import CheckpointError, ConfigError
from megatron.hf.auto_bridge import AutoBridge
from megatron.hf.conversion import open_source
from megatron.hf.convert import convert, parse_arguments
from megatron.training.recipes.families import FAMILIES, find_family
from megatron.training.recipes.family import Family
from megatron.training.recipes.family_flags import IDLE, build_flags, complete_fields
from megatron.training.recipes.hf_config import PREDICTION, list_model_flags
from tests.support.huggingface_models import SIZES
from tests.trial.config_fields import ABSENT, BASES, FieldCase, draw_fields, judge_fields, read_config, write_fields
from tests.unit.training.recipes.test_model_families import make

transformers = pytest.importorskip("transformers")
BY_TYPE = pytest.mark.parametrize("family", FAMILIES, ids=[family.model_type for family in FAMILIES])
FULL, LOCAL = "full_attention", "sliding_attention"


@BY_TYPE
def test_defaults_are_those_of_the_installed_class(family: Family) -> None:
    """Every field of the class is in the table, with the class's default, or changes nothing."""
    config_class = type(transformers.AutoConfig.for_model(family.model_type))
    fields = {
        family.other_names.get(field.name, field.name): field.default
        for field in dataclasses.fields(config_class)
        if field.name not in IDLE | family.idle
    }
    if PREDICTION in fields:
        # Its class has no such layers, whatever the field says.
        fields[PREDICTION] = 0
    assert family.defaults == fields
    theta = getattr(config_class, "default_theta", None)
    if isinstance(theta, float):
        kinds = family.rope.values() if FULL in family.rope else [family.rope]
        assert [kind["rope_theta"] for kind in kinds] == [theta] * len(kinds)
    # Its names for one field are ours, too.
    known = {*family.defaults, *family.idle, *IDLE}
    for other, name in config_class.attribute_map.items():
        assert family.other_names.get(other) == name or other in known or family.other_names.get(name) == other


@BY_TYPE
def test_what_a_file_leaves_out_means_what_the_class_takes_for_it(family: Family) -> None:
    written = write_fields(family.model_type)
    names = [name for name in family.defaults if name not in SIZES and name not in BASES[family.model_type]]
    for absent in ([], *([name] for name in names), names):
        fields = {name: value for name, value in written.items() if name not in absent}
        ours, theirs = complete_fields(family, fields), read_config(family.model_type, fields)
        for name in set(ours) & (set(family.defaults) - {"n_group", "topk_group", PREDICTION}):
            # Heads and their width follow from other flags where they are not given.
            if ours[name] is None and name in ("head_dim", "num_key_value_heads", "layer_types"):
                continue
            assert agree(ours[name], getattr(theirs, name)), (name, absent)


def agree(found: Any, expected: Any) -> bool:
    """Whether two values say the same; of rotary positions, what both have."""
    if isinstance(found, dict):
        return all(agree(value, expected[name]) for name, value in found.items() if name in expected)
    found, expected = (list(value) if isinstance(value, tuple) else value for value in (found, expected))
    return bool(found == expected) or (not found and not expected)


@pytest.mark.parametrize(
    ("model_type", "changes", "verdict"),
    [
        # A group of experts that the table once took for none; experts per token that are not twice the groups.
        ("deepseek_v3", {"topk_group": 1}, "ran"),
        ("deepseek_v3", {"topk_group": 2, "num_experts_per_tok": 6}, "ran"),
        ("glm4_moe", {"topk_group": 1, "num_experts_per_tok": 3}, "ran"),
        ("deepseek_v2", {"topk_group": 1}, "ran"),
        ("deepseek_v2", {"topk_method": "greedy"}, "ran"),
        # What files of earlier releases leave out.
        ("llama", {"rms_norm_eps": ABSENT}, "ran"),
        ("qwen3", {"head_dim": ABSENT}, "ran"),
        ("mistral", {"sliding_window": None}, "ran"),
        ("nemotron", {"rope_parameters": ABSENT}, "ran"),
        ("smollm3", {"no_rope_layers": ABSENT, "no_rope_layer_interval": 2, "rope_parameters": ABSENT}, "ran"),
        ("gemma3_text", {"layer_types": ABSENT, "sliding_window_pattern": 2}, "ran"),
        ("gemma2", {"layer_types": ABSENT, "attn_logit_softcapping": ABSENT}, "ran"),
        ("qwen2_moe", {"layer_types": ABSENT, "use_sliding_window": True, "sliding_window": 4}, "ran"),
        ("gpt_oss", {"rope_parameters": ABSENT, "layer_types": ABSENT}, "ran"),
        ("mixtral", {"num_local_experts": ABSENT, "num_experts": 6}, "ran"),
        # A single expert of sigmoid scores weighs 1 there; latent vectors have an epsilon of their own.
        ("minimax_m2", {"num_experts_per_tok": 1}, "refused"),
        ("deepseek_v4", {"num_experts_per_tok": 1}, "refused"),
        ("deepseek_v3", {"rms_norm_eps": 0.01}, "ran"),
        # Values wider than keys, where keys are chosen.
        ("glm_moe_dsa", {"qk_nope_head_dim": 1}, "ran"),
        # Layers by word, with bases of their own, or without a window.
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 2}, "ran"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "wide"] * 2}, "refused"),
        ("granite_swa", {"layer_rope_theta": [0, 10000.0, 0, 10000.0]}, "ran"),
        ("granite_swa", {"layer_rope_theta": [0, 10000.0, 500.0, 10000.0]}, "refused"),
        ("exaone4", {"sliding_window": None, "layer_types": [FULL] * 4}, "ran"),
        ("olmo3", {"rope_parameters": ABSENT, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                             "original_max_position_embeddings": 16}}, "ran"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 3.0, "factor": 1.0}}, "refused"),
        # Earlier forms of layers, widths that follow from others, shares of a softmax that are not divided.
        ("falcon", {"new_decoder_architecture": False, "num_ln_in_parallel_attn": ABSENT}, "ran"),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 8}, "ran"),
        ("mistral4", {"norm_topk_prob": False}, "ran"),
        ("cohere2_moe", {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 4.0}}, "refused"),
        # What no flag can follow.
        ("llama", {"mlp_bias": True}, "refused"),
        ("falcon", {"alibi": True}, "refused"),
        ("cohere", {"use_qk_norm": True}, "refused"),
        ("gemma2", {"use_bidirectional_attention": True}, "refused"),
        ("gpt_oss", {"swiglu_limit": 3.0}, "refused"),
        ("olmoe", {"clip_qkv": 0.5}, "refused"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0,
                                       "low_freq_factor": 1.0, "rope_theta": 100.0}}, "refused"),
        ("deepseek_v2", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "mscale": 0.7,
                                             "mscale_all_dim": 0.9, "rope_theta": 100.0}}, "refused"),
        ("llama4_text", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0}}, "refused"),
        ("deepseek_v3", {"head_dim": 2}, "refused"),
        ("qwen3", {"layer_types": [LOCAL] * 4}, "refused"),
        ("gemma2", {"layer_types": [FULL, "linear_attention", FULL, FULL]}, "refused"),
    ],
)  # fmt: skip
def test_a_field_changed_alone(model_type: str, changes: dict[str, Any], verdict: str) -> None:
    found = judge_fields(FieldCase(model_type, tuple(changes.items())))
    assert found.kind == verdict, found.text


@pytest.mark.parametrize("seed", range(8))
def test_fields_changed_together(seed: int) -> None:
    found = judge_fields(draw_fields(seed))
    assert found.kind != "fault", f"{found.text}\n    {found.command}"


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, "10000", [1], 10**400, 1e-300], ids=repr)
def test_a_number_that_no_model_has_is_refused_before_any_rule_reads_it(value: Any, tmp_path: Path) -> None:
    where, base = tmp_path / "config.json", write_fields("llama")
    for change in (
        {"rope_theta": value, "rope_parameters": None}, {"rope_parameters": {"rope_theta": value}},
        {"rope_scaling": {"type": "linear", "factor": value}}, {"rms_norm_eps": value}, {"hidden_size": value},
        {"num_hidden_layers": value}, {"max_position_embeddings": value}, {"num_key_value_heads": value},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"Llama: [a-z_.]+ is .* in its config.json; it must be a .*number"):
            list_model_flags({**base, **change}, where)
    with pytest.raises(CheckpointError, match="vocab_size is .*; it must be the number of the embedding's rows"):
        list_model_flags(base | {"vocab_size": value}, where)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("smollm3", {"no_rope_layer_interval": 0}), ("smollm3", {"layer_types": [[1]]}),
        ("gemma3_text", {"sliding_window_pattern": "6"}), ("gemma3_text", {"rope_parameters": {"full_attention": 3}}),
        ("llama4_text", {"interleave_moe_layer_step": None}), ("gpt_oss", {"original_max_position_embeddings": "4096"}),
        ("gemma2", {"query_pre_attn_scalar": 0}), ("deepseek_v3", {"topk_group": 0}),
        ("qwen2", {"num_hidden_layers": 2.5}), ("llama", {"rope_scaling": {"type": "longrope", "factor": 4.0},
                                                          "original_max_position_embeddings": 1}),
    ],
)  # fmt: skip
def test_fields_from_which_others_follow_are_judged_too(model_type: str, changes: dict[str, Any]) -> None:
    """A sentence that names the field, not one of Python's."""
    family = find_family(model_type)
    sentence = f"{family.name}: [a-z_.]*{[*changes][-1]}[a-z_.]* is .* in its config.json; "
    with pytest.raises(ConfigError, match=sentence):
        build_flags(family, {**write_fields(model_type), **changes})


def test_two_names_of_one_field_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_local_experts is 4 in its config.json; and num_experts, another name"):
        complete_fields(find_family("mixtral"), {"num_local_experts": 4, "num_experts": 8})


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    make("Llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    rope = fields["rope_parameters"] | {"turns": 3}
    path.write_text(json.dumps(fields | {"window_of_thought": 1, "rope_parameters": rope}))
    assert open_source(tmp_path).notes == [
        "fields of config.json that no Llama model has are passed over: window_of_thought, rope_parameters.turns"
    ]


def test_without_transformers_the_same_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the command says what it has verified and what it has not, in either direction."""
    make("Llama").save_pretrained(tmp_path / "hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for kinds, source, result in (("hf megatron", "hf", "ours"), ("megatron hf", "ours", "back")):
        first, second = kinds.split()
        argv = ["--source", first, "--input-path", str(tmp_path / source)]
        convert(parse_arguments([*argv, "--target", second, "--output-path", str(tmp_path / result)]))
        assert capsys.readouterr().out.splitlines() == [
            "verified: every weight bit for bit; "
            "not verified: logits, as the Python package transformers is not installed",
            f"wrote {tmp_path / result}",
        ]
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mlp_bias": True}))
    for read in (open_source, AutoBridge.from_hf_pretrained):
        with pytest.raises(ConfigError, match="mlp_bias is True in its config.json; only False is known"):
            read(tmp_path / "hf")
