# SPDX-License-Identifier: Apache-2.0
"""The namespace for scripts written against upstream."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser
from dataclasses import dataclass

import pytest

from megatron.core.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args, parse_args
from tests.support.run_flags import SMALLEST_RUN

ARGV = [*SMALLEST_RUN.split(), "--swiglu", "--ffn-hidden-size", "32", "--bf16"]


def add_rate(parser: ArgumentParser) -> None:
    parser.add_argument("--my-rate", type=float, default=0.5)


def test_settings_have_upstreams_names() -> None:
    args = parse_args(add_rate, argv=[*ARGV, "--my-rate", "2"], environ={"WORLD_SIZE": "2"})
    assert (args.num_layers, args.micro_batch_size, args.global_batch_size, args.lr) == (1, 1, 8, 0.01)
    assert args.accumulate_allreduce_grads_in_fp32 is True
    assert (args.world_size, args.data_parallel_size, args.my_rate) == (2, 2, 2.0)
    assert args.run_config.training.global_batch_size == 8


def test_a_transformer_config_follows_changes() -> None:
    args = parse_args(argv=ARGV, environ={})
    args.hidden_dropout = 0.5
    config = core_transformer_config_from_args(args)
    assert config.hidden_dropout == 0.5 and config.gated_linear_unit and config.activation_func == "silu"
    args.hidden_dropout = args.run_config.model.hidden_dropout
    # Programs are told of Transformer Engine, whose names of weights they convert.
    told = dataclasses.replace(args.run_config.model, transformer_impl="transformer_engine")
    assert core_transformer_config_from_args(args) == told


def test_a_config_class_of_ones_own() -> None:
    @dataclass(kw_only=True)
    class WithRate(TransformerConfig):
        my_rate: float = 1.0

    config = core_transformer_config_from_args(parse_args(add_rate, argv=ARGV, environ={}), WithRate)
    assert isinstance(config, WithRate) and config.my_rate == 0.5


def test_no_flag_is_ignored_unless_asked_for() -> None:
    foreign = [*ARGV, "--engine-flag", "7", "--my-rate", "2"]
    with pytest.raises(ConfigError, match="unknown flag --engine-flag"):
        parse_args(add_rate, argv=foreign, environ={})
    args = parse_args(add_rate, ignore_unknown_args=True, argv=foreign, environ={})
    assert args.my_rate == 2 and not hasattr(args, "engine_flag")
    assert args.run_config.model == parse_args(argv=ARGV, environ={}).run_config.model
    # Flags that are known are judged as ever.
    with pytest.raises(ConfigError, match="--num-layers 0 is out of range"):
        parse_args(add_rate, ignore_unknown_args=True, argv=[*foreign, "--num-layers", "0"], environ={})
