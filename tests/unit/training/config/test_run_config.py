# SPDX-License-Identifier: Apache-2.0
"""RunConfig: each setting is declared once and says what it is, Python gets the sentences of the command line, and
settings that earlier releases saved still load."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.core.config_base import get_settings
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.setting import Setting
from megatron.training.checkpoint.differences import (
    ESCAPE,
    Change,
    describe_shape_differences,
    find_changes,
    list_changes,
    refuse_another_function,
)
from megatron.training.config.container import RunConfig
from megatron.training.config.run_groups import group_classes, groups_of_fields
from megatron.training.config.scheduler import SchedulerConfig
from megatron.training.config.training import TrainingConfig
from megatron.training.flags.read import examine
from tests.support.run_flags import run_config

SAVED = Path(__file__).parent / "data" / "saved_settings.json"
# Names that several classes have, and why. At most one of them has a flag; the others are set by code only.
IN_SEVERAL = {
    "bf16": "of the layers; of the parameters that an optimizer is given, which knows no model",
    "fp16": "likewise",
    **dict.fromkeys(
        (
            "barrier_with_L1_time", "fp8_param_gather", "fp8_recipe", "log_max_attention_logit",
            "log_num_zeros_in_grad", "overlap_param_gather", "overlap_param_gather_with_optimizer_step",
            "params_dtype", "reuse_grad_buf_for_mxfp8_param_ag", "timers", "transformer_impl",
            "use_distributed_optimizer",
        ),
        "upstream's configs have it in each of these classes, and programs in Python give it to them",
    ),
}  # fmt: skip


def test_no_field_is_declared_twice() -> None:
    groups, flagged = defaultdict(list), defaultdict(list)
    for group, config_class in group_classes().items():
        for name, setting in get_settings(config_class).items():
            groups[name].append(group)
            if not setting.hidden:
                flagged[name].append(group)
    assert {name for name, declared in groups.items() if len(declared) > 1} == set(IN_SEVERAL)
    assert {name: declared for name, declared in flagged.items() if declared != [groups_of_fields()[name]]} == {}


def test_settings_of_earlier_releases_load() -> None:
    """Recorded before seed, positions, windows and experts had one place each."""
    config = RunConfig.from_dict(json.loads(SAVED.read_text()))
    model = config.model
    assert (model.seed, model.compile, model.window_size, model.window_attn_skip_freq) == (77, False, (7, 0), 4)
    assert (model.position_embedding_type, model.no_rope_freq) == ("rope", 2)
    assert (model.num_moe_experts, model.moe_layer_freq) == (4, [0, 0, 1, 1])
    assert model.moe_router_load_balancing_type == ["aux_loss", "seq_aux_loss"]
    assert model.moe_aux_loss_coeff == [0.1, 0.2]
    assert model.activation_func == "silu" and model.gated_linear_unit and config.optimizer.bf16
    assert RunConfig.from_dict(config.to_dict()) == config


def test_every_field_says_what_kind_of_fact_it_is() -> None:
    fields = [(cls.__name__, setting) for cls in group_classes().values() for setting in get_settings(cls).values()]
    assert [f"{owner}.{setting.dest}" for owner, setting in fields if setting.kind is None] == []


def another(setting: Setting, value: Any) -> Any:
    """A value of the same type that is not this one."""
    if setting.is_switch:
        return not value
    if setting.choices:
        return next(choice for choice in setting.choices if choice != value)
    if setting.annotation == list[str] | None:
        return ["another"]
    if setting.annotation == list[int] | None:
        return [7]
    if setting.annotation == tuple[int, int] | None:
        return [5, 0]
    number = {int: 7, float: 7.5}.get(setting.value_type)
    if isinstance(setting.nargs, int):
        return [number] * setting.nargs
    return number if number is not None else 3 if setting.parse else "another"


ALL = [(group, setting) for group, cls in group_classes().items() for setting in get_settings(cls).values()]
SHAPES = [(group, setting) for group, setting in ALL if setting.kind == "shape" and setting.name.startswith("--")]
FUNCTIONS = [
    (group, setting)
    for group, setting in ALL
    # LongRoPE needs lists that fit a head: tests/unit/hf/test_stretched_positions.py.
    if setting.kind == "function" and not setting.dest.startswith("longrope")
]


# Between them every setting of the model has an effect.
_EFFECTIVE = (
    "--num-attention-heads 4 --ffn-hidden-size 64 --window-size 7,0 --window-attn-skip-freq 2 --swiglu --num-experts 4 "
    "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-expert-capacity-factor 2 --qk-layernorm "
    "--position-embedding-type"
)
BASES = ("", f"{_EFFECTIVE} rope --use-rope-scaling",
         f"{_EFFECTIVE} yarn --yarn-original-max-position-embeddings 32", "--use-mup --parallel-residual",
         "--multi-latent-attention --position-embedding-type rope",
         "--position-embedding-type rope --num-layers 2 --no-rope-freq 2 --attn-temperature-scale 0.1 --qk-l2-norm",
         "--num-experts 4 --swiglu --ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64",
         "--mtp-num-layers 2 --position-embedding-type rope",
         "--num-layers 2 --linear-attention-freq 2 --experimental-attention-variant gdn",
         "--mamba-beside-attention --mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 8",
         "--num-layers 2 --linear-attention-freq 2 --experimental-attention-variant gdn --apply-layernorm-1p "
         "--normalization RMSNorm",
         "--num-layers 3 --hybrid-layer-pattern MKL --mamba-num-groups 2 --mamba-num-heads 4 "
         "--mamba-head-dim 8 --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 8 "
         "--linear-value-head-dim 8",
         "--num-layers 2 --multi-latent-attention --position-embedding-type rope --disable-bias-linear "
         "--qk-head-dim 8 --v-head-dim 8 --qk-pos-emb-head-dim 8 --experimental-attention-variant dsa "
         "--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8 "
         "--dsa-indexer-topk-freq 2", "--enable-hyper-connections", "--enable-mhc-connections", "--lora-rank 4",
         "--num-layers 2 --num-attention-heads 4 --multi-latent-attention --experimental-attention-variant dsv4_hybrid "
         "--csa-compress-ratios [4,5] --dsa-indexer-topk 8 --attention-dropout 0 --ffn-hidden-size 64 "
         "--q-lora-rank 16 --qk-pos-emb-head-dim 4 --v-head-dim 10 --o-groups 2 "
         "--o-lora-rank 6 --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --position-embedding-type rope "
         "--disable-bias-linear --normalization RMSNorm --swiglu --num-experts 4 --moe-ffn-hidden-size 24 "
         "--moe-router-score-function sqrtsoftplus --moe-n-hash-layers 1 --actual-vocab-size 128")  # fmt: skip


@functools.cache
def base_config(flags: str) -> RunConfig:
    return run_config(flags)


def change_one(group: str, setting: Setting) -> list[Change]:
    """What is found when this setting is another one than the saved."""
    for config in map(base_config, BASES):
        saved = json.loads(json.dumps(config.to_dict()))
        saved[group][setting.dest] = another(setting, saved[group][setting.dest])
        changes = find_changes(saved, config)
        if any(change.setting is setting for change in changes):
            return changes
    return []


@pytest.mark.parametrize(("group", "setting"), SHAPES, ids=lambda part: getattr(part, "dest", ""))
def test_a_changed_shape_is_named(group: str, setting: Setting) -> None:
    """What explains why a checkpoint's tensors do not fit, for every setting that may."""
    assert f"; settings: {setting.name} was " in describe_shape_differences(change_one(group, setting))


@pytest.mark.parametrize(("group", "setting"), FUNCTIONS, ids=lambda part: getattr(part, "dest", ""))
def test_a_changed_function_is_refused(group: str, setting: Setting) -> None:
    """Every setting that lets the saved weights compute something else, by what its field says of itself."""
    changes = change_one(group, setting)
    with pytest.raises(CheckpointError, match=f"iter_5 is of another model: .*{setting.name} was .* now; .*{ESCAPE}"):
        refuse_another_function(changes, "iter_5", is_overridden=False)
    refuse_another_function(changes, "iter_5", is_overridden=True)
    assert any(line.startswith(f"{setting.name} was ") for line in list_changes(changes)) == changes[0].is_flag


def test_other_spellings_and_idle_settings_are_no_change_of_function() -> None:
    rope = run_config("--position-embedding-type rope")
    for flags in ("--use-rotary-position-embeddings", "--position-embedding-type rope --no-position-embedding"):
        refuse_another_function(find_changes(run_config(flags).to_dict(), rope), "", is_overridden=False)
    learned = run_config()
    idle = run_config("--rotary-base 5000 --moe-router-topk 1 --mup-output-mult 3")
    assert find_changes(idle.to_dict(), learned) == []
    trained_otherwise = run_config("--lr 0.5 --hidden-dropout 0.3 --bf16 --seed 5 --optimizer lion --clip-grad 0.2")
    refuse_another_function(find_changes(trained_otherwise.to_dict(), learned), "", is_overridden=False)


def test_what_follows_from_a_written_setting_is_not_said() -> None:
    changes = find_changes(run_config("--num-attention-heads 2").to_dict(), run_config("--num-attention-heads 4"))
    assert {change.setting.dest for change in changes} == {"num_attention_heads", "num_query_groups", "kv_channels"}
    with pytest.raises(CheckpointError) as refused:
        refuse_another_function(changes, "iter_5", is_overridden=False)
    assert "--num-attention-heads was 2 in the checkpoint, is 4 now; give the checkpoint's value," in str(refused.value)
    assert "kv" not in str(refused.value)
    # The activation is a field without a flag, for which switches stand.
    with pytest.raises(CheckpointError, match="model: --squared-relu was off in the checkpoint, is on now; give"):
        refuse_another_function(find_changes(run_config().to_dict(), run_config("--squared-relu")), "iter_5",
                                is_overridden=False)  # fmt: skip
    mine = run_config()
    mine.model.activation_func = "quick_gelu"
    with pytest.raises(CheckpointError, match="activation_func was gelu in the checkpoint, is quick_gelu now"):
        refuse_another_function(find_changes(run_config().to_dict(), mine), "iter_5", is_overridden=False)


def test_settings_that_an_earlier_release_did_not_know() -> None:
    """They are compared with their default; a field without a flag, which may have been a callable, is not."""
    saved = run_config().to_dict()
    del saved["model"]["softmax_scale"], saved["model"]["activation_func"]
    assert find_changes(saved, run_config()) == []
    with pytest.raises(CheckpointError, match="--softmax-scale was not given in the checkpoint, is 0.5 now"):
        refuse_another_function(find_changes(saved, run_config("--softmax-scale 0.5")), "", is_overridden=False)
    refuse_another_function(find_changes(saved, run_config("--squared-relu")), "", is_overridden=False)
    recorded = json.loads(SAVED.read_text())
    assert find_changes(recorded, RunConfig.from_dict(recorded)) == []


def test_all_other_changes_are_listed_a_line_each() -> None:
    saved = run_config("--tensor-model-parallel-size 2 --num-workers 0 --log-interval 7", world_size=2).to_dict()
    assert list_changes(find_changes(saved, run_config("--lr 0.02"))) == [
        "--tensor-model-parallel-size was 2 in the checkpoint, is 1 now",
        "--expert-tensor-parallel-size was 2 in the checkpoint, is 1 now",
        "--lr was 0.01 in the checkpoint, is 0.02 now",
        "--num-workers was 0 in the checkpoint, is 2 now",
    ], "what only shows something else is no news"


def test_saved_settings_load_although_a_rule_refuses_them_now() -> None:
    """Their run's release accepted them; only values of another type are no settings of any release."""
    saved = run_config().to_dict()
    saved["training"] |= {"train_samples": 5}
    saved["scheduler"] |= {"lr_warmup_fraction": 1.5}
    config = RunConfig.from_dict(saved)
    assert config.training.train_samples == 5 and config.scheduler.lr_warmup_fraction == 1.5
    with pytest.raises(ConfigError, match="both say how long to train"):
        TrainingConfig(train_iters=10, train_samples=5)
    with pytest.raises(ConfigError, match="out of range"):
        SchedulerConfig(lr_warmup_fraction=1.5)
    saved["training"]["train_iters"] = "many"
    with pytest.raises(ConfigError, match="--train-iters many is not valid"):
        RunConfig.from_dict(saved)


# The same sentence from the command line and from Python -------------------------------------------------------------

BASE: dict[str, Any] = {
    "micro_batch_size": 1, "global_batch_size": 8, "train_iters": 100, "lr": 0.01, "mock_data": True, "seq_length": 64,
    "max_position_embeddings": 64, "tokenizer_type": "NullTokenizer", "vocab_size": 64, "num_layers": 4,
    "hidden_size": 64, "num_attention_heads": 4,
}  # fmt: skip
LEFT_OUT = {
    "use_checkpoint_args": "it reads a checkpoint",
    "use_torch_fsdp2": "a command line makes other settings of it",
    "use_megatron_fsdp": "likewise",
    "elastic_layouts": "likewise: the sizes of a layout",
    "site_topology": "it reads a file of hosts",
    "optimizer": "likewise: dist_muon",
    "recompute_activations": "likewise, as all switches of GPTModelFlags",
    "window_size": "written as one text",
    "dry_run_world_size": "a command line is judged for so many processes, in place of its launcher's",
}
DRAWN = {
    name: setting
    for group, config_class in group_classes().items()
    for name, setting in get_settings(config_class).items()
    if setting.name.startswith("--") and name not in LEFT_OUT and group != "gpt"
}

# What other settings depend on most.
RELATED = sorted(
    name
    for name, setting in DRAWN.items()
    if setting.kind == "layout" or groups_of_fields()[name] in ("training", "scheduler", "validation")
)


def values_of(setting: Setting) -> st.SearchStrategy[Any]:
    """Sense and nonsense for one setting, as Python values."""
    if setting.is_switch:
        # What is on by default can only be switched off on the command line by another name, which says the same.
        return st.just(not setting.default)
    if setting.choices:
        one: st.SearchStrategy[Any] = st.sampled_from([*setting.choices, -3 if setting.value_type is int else "typo"])
    elif setting.value_type is int or setting.parse is not None:
        one = st.sampled_from([0, 1, 2, 7, 8, 100, 101, -1, 2**63])
    elif setting.value_type is float:
        one = st.sampled_from([0.0, 0.005, 0.5, 1.0, 7.0, -0.5, float("nan"), float("inf")])
    else:
        one = st.sampled_from(["x", "0:16", "a://b"])
    if setting.nargs is None:
        return one
    size = setting.nargs if isinstance(setting.nargs, int) else 2
    return st.lists(one, min_size=size, max_size=size)


@st.composite
def drawn_settings(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(
        st.lists(st.sampled_from(sorted(DRAWN)) | st.sampled_from(RELATED), min_size=1, max_size=6, unique=True)
    )
    return {name: draw(values_of(DRAWN[name])) for name in names}


def words(name: str, value: Any) -> list[str]:
    setting = get_settings(group_classes()[groups_of_fields()[name]])[name]
    if setting.is_switch:
        return [setting.spell(value)]
    return [setting.name, *map(str, value)] if isinstance(value, list) else [f"{setting.name}={value}"]


def made(config_class: type, values: dict[str, Any]) -> tuple[Any, list[str]]:
    """A config, or None and what is wrong with the values."""
    try:
        return config_class(**values), []
    except ConfigError as error:
        return None, error.problems


@settings(max_examples=300)
@given(drawn_settings(), st.sampled_from([1, 3, 16]))
@example({"context_parallel_size": 7, "sequence_parallel": True}, 1)
@example({"distribute_saved_activations": True, "sequence_parallel": True}, 1)
@example({"moe_aux_loss_coeff": [-0.5, float("nan")]}, 1)
@example({"enable_cuda_graph": True, "fp8": "e4m3"}, 1)
def test_python_says_what_the_command_line_says(drawn: dict[str, Any], world_size: int) -> None:
    """Nonsense in one setting, between the settings of a group, and between groups."""
    values = BASE | drawn
    argv = [word for name, value in values.items() for word in words(name, value)]
    examination = examine(argv, {"WORLD_SIZE": str(world_size)})
    said = {problem.text for problem in examination.problems}
    if any(note.startswith("CUDA graphs have no effect with") for note in examination.config.notes):
        # A command line leaves them out; a config in Python is refused, since it has no notes.
        values = {name: value for name, value in values.items() if "cuda_graph" not in name}
        said = {text for text in said if "cuda-graph" not in text}
    groups: dict[str, Any] = {}
    refused: list[str] = []
    for group in group_classes():
        own = {name: value for name, value in values.items() if groups_of_fields()[name] == group}
        groups[group], problems = made(group_classes()[group], own)
        refused += problems
    assert set(refused) <= said
    if not refused:
        assert set(made(RunConfig, groups | {"world_size": world_size})[1]) == said
