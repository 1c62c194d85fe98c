# SPDX-License-Identifier: Apache-2.0
"""Programs that ask for what is missing: Transformer Engine's and CUDA's ways on a CPU, and arguments without anything
behind them, get one sentence with the way out where they ask; drawn from the tables and signatures themselves."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import parallel_state as mpu
from megatron.core.config_base import get_settings
from megatron.core.enums import AttnBackend
from megatron.core.errors import ConfigError, MegatronError
from megatron.core.extensions import transformer_engine as te
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.model_parallel_config import _REFUSED as OF_ALL_MODELS
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.config_fields.program_fields import _REFUSED as OF_TRANSFORMERS
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import parse_args

SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
REMEDY = r"(leave .*out|[;:] (use|take|give|add|train|available)|needs? )"
OTHER = {bool: True, int: 3, str: "other"}
FLAGS = Path(__file__).parents[2] / "golden/data/flags/upstream_flags.tsv"


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    yield
    mpu.destroy_model_parallel()


@pytest.mark.parametrize("name", [*OF_ALL_MODELS, *OF_TRANSFORMERS])
def test_fields_of_missing_features_take_their_default_alone(name: str) -> None:
    default = (OF_ALL_MODELS | OF_TRANSFORMERS)[name][0]
    assert getattr(TransformerConfig(**SIZES, **{name: default}), name) == default
    with pytest.raises(ConfigError, match=rf"{name}=.* is not supported: .+; leave it out"):
        TransformerConfig(**SIZES, **{name: OTHER.get(type(default), [1, 2])})
    if name in OF_ALL_MODELS:
        with pytest.raises(ConfigError, match=name):
            ModelParallelConfig(timers=None, **{name: True})


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"attention_backend": AttnBackend.unfused}, {"attention_backend": "unfused"}),
        ({"moe_aux_loss_coeff": 0.5}, {"moe_aux_loss_coeff": [0.5]}),
        ({"moe_router_load_balancing_type": "none"}, {"moe_router_load_balancing_type": ["none"]}),
        ({"cp_comm_type": "all_gather"}, {"cp_comm_type": ["all_gather"]}),
        ({"num_layers_in_last_pipeline_stage": None}, {"decoder_last_pipeline_num_layers": None}),
    ],
)
def test_fields_take_upstreams_values_when_a_config_is_made_and_later(
    given: dict[str, Any], held: dict[str, Any]
) -> None:
    made, later = TransformerConfig(**SIZES, **given), TransformerConfig(**SIZES)
    for name, value in given.items():
        setattr(later, name, value)
    for config in (made, later):
        assert {name: getattr(config, name) for name in held} == held
    later.num_layers_in_first_pipeline_stage = 1
    assert later.decoder_first_pipeline_num_layers == 1
    assert TransformerConfig(**SIZES, cp_comm_type=None).cp_comm_type == ["p2p"]
    optimizer = OptimizerConfig(min_lr=None, main_grads_dtype=torch.float32, exp_avg_dtype=torch.float32)
    assert (optimizer.min_lr, optimizer.main_grads_dtype, optimizer.exp_avg_dtype) == (0.0, "fp32", "fp32")


def test_arguments_that_a_config_does_not_have_are_named() -> None:
    for error in (ConfigError, TypeError):
        with pytest.raises(
            error, match="OptimizerConfig has no field eps; leave it out, or .+ has no field clip_grd; use"
        ):
            OptimizerConfig(eps=1e-8, clip_grd=1.0)  # type: ignore[call-arg]

    class OwnConfig(TransformerConfig):
        def __init__(self, source: str, **named: Any) -> None:
            super().__init__(**SIZES | named)

    assert OwnConfig(source="program", add_qkv_bias=True).add_qkv_bias


def test_a_plan_of_two_schedules_is_refused() -> None:
    with pytest.raises(MegatronError, match="build_schedule_plan .+: .+ --overlap-moe-expert-parallel-comm"):
        GPTModel.build_schedule_plan(None, None, None, labels=None)


SIGNATURE = inspect.signature(mpu.initialize_model_parallel).parameters
EFFECTIVE = {
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "hierarchical_context_parallel_sizes", "hybrid_context_parallel",
    "expert_model_parallel_size", "num_distributed_optimizer_instances", "expert_tensor_parallel_size",
    "distributed_timeout_minutes", "order", "create_gloo_process_groups", "high_priority_stream_groups",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(SIGNATURE) - EFFECTIVE))
def test_arguments_of_groups_are_refused_by_name(name: str) -> None:
    default = SIGNATURE[name].default
    with pytest.raises(ConfigError, match=rf"initialize_model_parallel\(\) has no {name} .+; leave it out"):
        mpu.initialize_model_parallel(**{name: OTHER.get(type(default), "other")})
    mpu.initialize_model_parallel(**{name: default})


def list_kernel_choices() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, setting in get_settings(TransformerConfig).items():
        # A compiler takes seconds and has tests of its own; on the meta device there is nothing to compute with.
        if name in ("compile", "init_model_with_meta_device") or setting.kind not in ("kernel", "numerics"):
            continue
        if isinstance(setting.default, bool):
            found.append((name, not setting.default))
        found += [(name, [choice] if setting.nargs else choice) for choice in setting.choices or ()]
    return found


def test_every_kernel_and_number_format_computes_on_a_cpu_or_is_refused_in_a_sentence() -> None:
    mpu.initialize_model_parallel()
    tokens, outcomes = torch.arange(8)[None], {"computes": 0, "is refused": 0}
    for name, value in list_kernel_choices():
        try:
            config = TransformerConfig(**SIZES, **{name: value})
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
            GPTModel(config, spec, 32, 8)(tokens, tokens, None, labels=tokens).mean().backward()
            outcomes["computes"] += 1
        except MegatronError as error:
            outcomes["is refused"] += 1
            message = " ".join(str(error).split())
            assert re.search(REMEDY, message), message
    assert min(outcomes.values()) > 5, outcomes


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (te.TELinear, {"parallel_mode": "column"}),
        (te.TELinear, {"parallel_mode": "row"}),
        (te.TELinear, {"parallel_mode": None, "skip_weight_param_allocation": True}),
        (te.TEColumnParallelLinear, {"stride": 2, "gather_output": False}),
        (te.TERowParallelLinear, {"stride": 2, "input_is_parallel": True}),
    ],
)
def test_layers_of_transformer_engine(layer: Any, options: dict[str, Any]) -> None:
    mpu.initialize_model_parallel()
    config = TransformerConfig(**SIZES)
    with pytest.raises(ConfigError, match=REMEDY):
        layer(16, 16, config=config, init_method=torch.nn.init.zeros_, bias=False, skip_bias_add=False, **options)


def test_an_fp8_context_is_refused_where_the_config_asks_for_it() -> None:
    config = TransformerConfig(**SIZES | {"hidden_size": 32}, bf16=True)
    with get_fp8_context(config):
        pass
    with pytest.raises(MegatronError, match="fp8"):
        get_fp8_context(dataclasses.replace(config, fp8="hybrid"))


def test_all_of_upstreams_settings_are_attributes() -> None:
    words = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
    args = parse_args(argv=[*words.split(), "--micro-batch-size", "1"])
    with FLAGS.open() as file:
        rows = [row["dest"] for row in csv.DictReader(file, delimiter="\t")]
    of_programs = ["enable_gloo_process_groups", "moe_use_legacy_grouped_gemm", "num_floating_point_operations_so_far"]
    assert len(rows) > 800 and [name for name in [*rows, *of_programs] if not hasattr(args, name)] == []
