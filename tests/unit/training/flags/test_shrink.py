# SPDX-License-Identifier: Apache-2.0
"""tools/shrink.py: a cluster's command line with tiny sizes."""

from __future__ import annotations

import pytest

from megatron.core.errors import ConfigError
from megatron.training.flags import shrink as module
from megatron.training.flags.declarations import declared_flags
from megatron.training.flags.read import read_run_config
from megatron.training.flags.shrink import shrink

RUN = "--micro-batch-size 4 --global-batch-size 1024 --train-iters 9999 --lr 1e-4 --seq-length 4096 --bf16 "
DATA = "--data-path /data/text --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tokenizer --split 99,1,0 "


def read_small(flags: str, world_size: int) -> tuple[str, int]:
    words, processes = shrink((RUN + DATA + flags).split(), {"WORLD_SIZE": str(world_size)})
    config = read_run_config(words, {"WORLD_SIZE": str(processes)})
    assert config.model.num_layers <= 4 and config.model.hidden_size == 64
    assert config.data.mock_data and config.training.train_iters == 5
    return " ".join(words), processes


def test_what_is_left_out_are_settings() -> None:
    assert {flag.dest for flag in declared_flags()} >= module._LEFT_OUT


def test_layout_and_kind_of_layers_stay() -> None:
    words, processes = read_small(
        "--preset llama3-70b --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 5 --sequence-parallel --use-distributed-optimizer "
        "--save /checkpoints --save-interval 100 --save-hf /hf --non-persistent-save-interval 10 --profile "
        "--metrics-dir /metrics --lr-warmup-iters 2000 --rampup-batch-size 32 32 1000", 256
    )  # fmt: skip
    assert processes == 4
    for kept in (
        "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2",
        "--num-virtual-stages-per-pipeline-rank 2", "--sequence-parallel", "--use-distributed-optimizer", "--swiglu",
        "--normalization RMSNorm", "--num-query-groups 2", "--lr 0.0001", "--lr-warmup-iters 1", "--bf16",
    ):  # fmt: skip
        assert f" {kept} " in f" {words} ", kept
    for left_out in ("--save", "save-interval", "/", "--rampup", "--preset", "--profile"):
        assert left_out not in words


@pytest.mark.parametrize(
    ("flags", "world_size", "processes"),
    [
        ("--preset mixtral-8x7b --expert-model-parallel-size 8", 8, 2),
        ("--preset qwen3-235b-a22b --tensor-model-parallel-size 4 --expert-model-parallel-size 8 "
         "--expert-tensor-parallel-size 1 --context-parallel-size 2", 64, 4),
        ("--preset glm4.5 --pipeline-model-parallel-size 4 --expert-model-parallel-size 16", 64, 4),
        ("--preset gemma2-9b --tensor-model-parallel-size 8", 8, 2),
        ("--preset smollm3-3b --pipeline-model-parallel-size 4 --pipeline-schedule zb-v", 8, 4),
        ("--preset gpt3-13b --use-torch-fsdp2", 64, 2),
        ("--preset llama3-8b --context-parallel-size 4 --cp-comm-type a2a+p2p "
         "--hierarchical-context-parallel-sizes 2 2", 32, 4),
        ("--preset qwen2.5-7b --use-mup --mup-base-hidden-size 256", 1, 1),
    ],
)  # fmt: skip
def test_the_small_run_has_no_problems(flags: str, world_size: int, processes: int) -> None:
    assert read_small(flags, world_size)[1] == processes


def test_what_is_refused_at_full_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="--freeze-all-layers is planned"):
        read_small("--preset llama3-8b --freeze-all-layers", 8)
    with pytest.raises(ConfigError, match="--no-such-flag"):
        read_small("--preset llama3-8b --no-such-flag", 8)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])
def test_widths_are_whole_blocks_of_a_recipe_for_8_bits(recipe: str) -> None:
    flags = f"--fp8-format e4m3 --fp8-recipe {recipe} --tensor-model-parallel-size 2 --sequence-parallel"
    for preset in (
        "llama3-8b",
        "deepseek-v3 --qk-pos-emb-head-dim 128",
        "qwen3-30b-a3b --expert-tensor-parallel-size 1",
    ):
        words, processes = shrink(f"{RUN}{DATA}--preset {preset} {flags}".split(), {"WORLD_SIZE": "16"})
        # Its own rules have looked at every width; small is what is no larger than it must be.
        config = read_run_config(words, {"WORLD_SIZE": str(processes)})
        assert config.model.fp8_recipe == recipe and (config.model.hidden_size or 0) <= 256


def test_fp16_trains_from_the_first_step() -> None:
    words, _ = shrink((RUN + DATA + "--preset gpt3-13b").replace("--bf16", "--fp16").split(), {"WORLD_SIZE": "8"})
    assert read_run_config(words, {"WORLD_SIZE": "1"}).optimizer.initial_loss_scale == 4096
