# SPDX-License-Identifier: Apache-2.0
"""--tuning: each name is a run that can be, says what it means, and what is given wins."""

from __future__ import annotations

import pytest

from megatron.core.errors import ConfigError
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.flags.tuning import TUNING

COMMON = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 100 --tokenizer-type NullTokenizer --vocab-size 50 --data-path x.jsonl"
)


def read(flags: str) -> RunConfig:
    return read_run_config(f"{COMMON} {flags}".split(), {})


@pytest.mark.flags("--tuning")
@pytest.mark.parametrize("name", TUNING)
def test_a_name_stands_for_its_flags(name: str) -> None:
    config, written = read(f"--tuning {name}"), read(TUNING[name])
    for group in ("model", "optimizer", "scheduler", "ddp", "preference", "checkpoint"):
        assert getattr(config, group) == getattr(written, group)
    assert f"--tuning {name} means {TUNING[name]}" in config.notes and config.sources["--clip-grad"] == "preset"
    assert config.scheduler.lr_warmup_fraction == 0.04 and config.optimizer.min_lr == pytest.approx(
        (config.optimizer.lr or 0) / 10
    )


def test_what_is_given_wins() -> None:
    config = read("--tuning lora --lr 1e-3 --fp16 --lora-rank 4 --lr-warmup-iters 7")
    assert (config.model.fp16, config.model.bf16, config.model.lora_rank, config.model.lora_scale) == (
        True,
        False,
        4,
        1,
    )
    assert (config.optimizer.lr, config.optimizer.min_lr) == (1e-3, 0) and config.scheduler.lr_warmup_iters == 7
    meant = next(note for note in config.notes if note.startswith("--tuning lora means"))
    assert "--weight-decay 0" in meant and not any(word in meant for word in ("--lr ", "--bf16", "rank", "warmup"))
    with pytest.raises(ConfigError, match="--tuning"):
        read("--tuning some")
