# SPDX-License-Identifier: Apache-2.0
"""Configs made in Python check themselves, in the sentences of the command line."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config_base import CheckedConfig, check, get_settings, restore, unchecked
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.setting import Setting, find_field_problem
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run_groups import groups_of_fields
from megatron.training.flags.declarations import declared_flags, program_flags
from megatron.training.flags.flag import parse_value

CONFIGS: dict[type[CheckedConfig], dict[str, Any]] = {
    TransformerConfig: {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4},
    OptimizerConfig: {},
    DistributedDataParallelConfig: {},
}
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([0, 1, 2, 3, 4, 7]), st.floats(), st.text(max_size=5),
    st.lists(st.one_of(st.integers(0, 3), st.text(max_size=3)), max_size=3),
)  # fmt: skip


def values_of(setting: Setting) -> st.SearchStrategy[Any]:
    """Values of the field, likely and unlikely ones, and nonsense."""
    likely: list[Any] = [setting.default, *(setting.choices or ()), *((True, False) if setting.is_switch else ())]
    return st.one_of(st.sampled_from(likely), ANYTHING)


@st.composite
def drawn_values(draw: st.DrawFn) -> tuple[type[CheckedConfig], dict[str, Any]]:
    config_class = draw(st.sampled_from(list(CONFIGS)))
    declared = get_settings(config_class)
    names = draw(st.lists(st.sampled_from(list(declared)), max_size=6, unique=True))
    return config_class, CONFIGS[config_class] | {name: draw(values_of(declared[name])) for name in names}


def field_problems(config: CheckedConfig) -> list[str]:
    """What is wrong with each field alone."""
    found = (find_field_problem(field, getattr(config, name)) for name, field in get_settings(type(config)).items())
    return [problem for problem in found if problem is not None]


@settings(max_examples=300)
@given(drawn_values())
def test_a_config_holds_its_rules_or_is_refused(
    drawn: tuple[type[CheckedConfig], dict[str, Any]],
) -> None:
    config_class, values = drawn
    expected = check(unchecked(config_class, values))
    try:
        config = config_class(**values)
    except ConfigError as error:
        assert error.problems == expected != []
        assert all(isinstance(text, str) and text for text in error.problems)
        return
    assert expected == []
    assert field_problems(config) == [] == list(config.problems())
    assert dataclasses.replace(config) == config  # type: ignore[type-var]


FLAGS = {flag.dest: flag for flag in declared_flags() if groups_of_fields()[flag.dest] in ("model", "ddp", "optimizer")}


@settings(max_examples=300)
@given(st.data())
def test_values_are_judged_as_on_the_command_line(data: st.DataObject) -> None:
    """Numbers and words that the command line would read into the same value get the same sentence."""
    flag = data.draw(st.sampled_from([flag for flag in FLAGS.values() if not flag.is_switch and flag.parse is None]))
    value = data.draw(st.one_of(st.integers(), st.floats(allow_nan=False), st.text(min_size=1, max_size=8)))
    is_its_type = isinstance(value, (int, float) if flag.value_type is float else flag.value_type)
    if not is_its_type or (isinstance(value, float) and abs(value) == float("inf")):
        return
    try:
        parse_value(flag, str(value))
        expected = None
    except ValueError as error:
        expected = str(error)
    config_class = next(c for c in CONFIGS if flag.dest in get_settings(c))
    config = config_class(**CONFIGS[config_class])
    count = 1 if flag.nargs in ("+", "*") else flag.nargs
    setattr(config, flag.dest, [value] * count if isinstance(count, int) else value)
    found = [text for text in field_problems(config) if " is planned" not in text and " is not supported" not in text]
    assert found == ([] if expected is None else [expected])


@pytest.mark.parametrize(("values", "sentence"), [
    ({"hidden_dropout": 7.0}, "--hidden-dropout 7.0 is out of range; give a number from 0 to 1"),
    ({"hidden_dropout": "half"}, "--hidden-dropout half is not valid; give a number from 0 to 1"),
    ({"hidden_dropout": None}, "--hidden-dropout None is not valid; give a number from 0 to 1"),
    ({"num_layers": True}, "--num-layers True is not valid; give a whole number from 1 to 65536"),
    ({"num_layers": None}, "--num-layers is missing; give the number, for example --num-layers 12"),
    ({"bf16": 1}, "--bf16 is a switch; give true or false"),
    ({"virtual_pipeline_model_parallel_size": -1},
     "virtual_pipeline_model_parallel_size -1 is out of range; give a whole number of at least 0"),
    ({"normalization": "Norm"}, "--normalization Norm is not one of its values; give one of LayerNorm, RMSNorm"),
    ({"recompute_modules": ["mlp", "all"]},
     "--recompute-modules all is not one of its values; give one of core_attn, layernorm, mlp, "
     "mlp_act, mla_up_proj, moe_act, moe, shared_experts, gdn_norm_out"),
    ({"num_attention_heads": 3, "kv_channels": 8, "tensor_model_parallel_size": 2},
     "--num-attention-heads 3 cannot be split over --tensor-model-parallel-size 2; use 2 or 4 heads, or a "
     "tensor-parallel size of 1 or 3"),
    ({"pipeline_model_parallel_size": 3},
     "--num-layers 4 does not divide over --pipeline-model-parallel-size 3; use 3 or 6 layers, or 2 or 4 stages, or "
     "say the uneven stages with --decoder-first-pipeline-num-layers"),
    ({"num_moe_experts": 4, "expert_model_parallel_size": 3, "add_bias_linear": False},
     "--num-experts 4 cannot be divided over --expert-model-parallel-size 3; use 3 or 6 experts, or an "
     "expert-parallel size of 2 or 4"),
    ({"qk_layernorm": True, "qk_l2_norm": True},
     "--qk-layernorm and --qk-l2-norm contradict each other; keep one norm of queries and keys"),
])  # fmt: skip
def test_sentences(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(**CONFIGS[TransformerConfig] | values)
    assert caught.value.problems == [sentence]


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_an_empty_path_is_refused_whichever_flag_it_is_for(text: str) -> None:
    """`--save "$DIRECTORY"` without the variable would write into the current directory."""
    paths = [flag for flag in (*declared_flags(), *program_flags()) if flag.is_path]
    assert {"--save", "--load", "--data-path", "--tokenizer-model", "--metrics-dir", "--config"} <= {
        f.name for f in paths
    }
    for flag in paths:
        with pytest.raises(ValueError, match=f"^{flag.name} .* is empty"):
            parse_value(flag, text)
        in_python = find_field_problem(flag, [text] if flag.nargs else text)
        assert in_python is not None and "is empty" in in_python
        assert find_field_problem(flag, ["a b"] if flag.nargs else "a b") is None


def test_what_names_a_path_says_so_in_its_type() -> None:
    named_like_one = re.compile(r"(^|_)(path|dir|directory|file|save|load|checkpoint|map|config)$")
    for flag in (*declared_flags(), *program_flags()):
        is_text = flag.value_type is str and flag.choices is None and flag.parse is None
        assert flag.is_path or not (is_text and named_like_one.search(flag.dest)), flag.name


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(
            num_layers=3, hidden_size=64, num_attention_heads=30, tensor_model_parallel_size=4, hidden_dropout=7.0,
            moe_router_load_balancing_type="typo",  # type: ignore[arg-type]
        )  # fmt: skip
    flags = (
        "--hidden-dropout 7.0",
        "--moe-router-load-balancing-type typo",
        "--hidden-size 64",
        "--num-attention-heads",
    )
    assert [text.startswith(flag) for text, flag in zip(caught.value.problems, flags, strict=True)] == [True] * 4


def test_settings_of_an_earlier_run_are_not_judged_by_newer_rules() -> None:
    """Only what is no setting at all is refused: a value of the wrong type, or none."""
    saved = CONFIGS[TransformerConfig] | {"pipeline_model_parallel_size": 3, "hidden_dropout": 2.0, "of_later": 1}
    assert restore(TransformerConfig, saved).kv_channels == 4
    for wrong in ({"num_layers": "four"}, {"num_layers": None}):
        with pytest.raises(ConfigError, match="--num-layers"):
            restore(TransformerConfig, saved | wrong)


def test_a_model_on_one_process_keeps_all_but_the_layout() -> None:
    config = TransformerConfig(
        num_layers=8, hidden_size=16, num_attention_heads=4, tensor_model_parallel_size=2, sequence_parallel=True,
        tp_comm_overlap=True, pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2,
        hidden_dropout=0.3, qk_layernorm=True,
    )  # fmt: skip
    assert config.virtual_pipeline_model_parallel_size == 2
    alone = config.on_one_process(bf16=True)
    whole = TransformerConfig(
        num_layers=8, hidden_size=16, num_attention_heads=4, hidden_dropout=0.3, qk_layernorm=True, bf16=True
    )
    assert alone == whole


def test_every_field_has_a_kind() -> None:
    for config_class in CONFIGS:
        assert [name for name, setting in get_settings(config_class).items() if setting.kind is None] == []
