# SPDX-License-Identifier: Apache-2.0
"""Flags of the learning-rate and weight-decay schedules: from the command line to what an optimizer group gets."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.errors import ConfigError
from megatron.training.config.relations import compute_schedule_lengths
from megatron.training.setup import build_scheduler
from tests.support.run_flags import SMALLEST_RUN, run_config

ITERATIONS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 64 --global-batch-size 8 --train-iters 100 --lr 1.0"
)
SAMPLES = ITERATIONS.replace("--train-iters 100", "--train-samples 800")


def curve(flags: str, base: str = ITERATIONS, key: str = "lr") -> list[float]:
    """lr or weight_decay of the optimizer's group after 0, 1, ..., 100 steps."""
    optimizer: Any = SimpleNamespace(param_groups=[{"lr_mult": 1.0, "wd_mult": 1.0}])
    scheduler = build_scheduler(run_config(flags, base), optimizer)
    values = [optimizer.param_groups[0][key]]
    for _ in range(100):
        scheduler.step(8)
        values.append(optimizer.param_groups[0][key])
    return values


@pytest.mark.flags("--lr", "--min-lr", "--lr-decay-style")
def test_styles() -> None:
    assert curve("--lr-decay-style constant") == [1.0] * 101
    linear = curve("--lr-decay-style linear --min-lr 0.5")
    assert linear[50] == pytest.approx(0.75)
    assert linear[100] == pytest.approx(0.5)
    cosine = curve("--lr-decay-style cosine --min-lr 0.2")
    assert cosine[25] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert curve("--lr 0.5 --lr-decay-style constant")[7] == 0.5


@pytest.mark.flags("--lr-warmup-iters", "--lr-warmup-init")
def test_warmup() -> None:
    found = curve("--lr-decay-style constant --lr-warmup-iters 10 --lr-warmup-init 0.5")
    assert found[:3] == pytest.approx([0.5, 0.55, 0.6])
    assert found[10] == 1.0


@pytest.mark.flags("--lr-warmup-samples", "--lr-decay-samples")
def test_lengths_in_samples() -> None:
    found = curve("--lr-warmup-samples 80 --lr-decay-samples 400", SAMPLES)
    assert found[5] == pytest.approx(0.5)
    assert found[10] == 1.0
    assert found[30] == pytest.approx(0.5)
    assert found[60] == 0.0


@pytest.mark.flags("--lr-warmup-fraction", "--lr-decay-iters")
def test_warmup_fraction_of_the_decay() -> None:
    found = curve("--lr-decay-iters 50 --lr-warmup-fraction 0.2")
    assert found[5] == pytest.approx(0.5)
    assert found[10] == 1.0
    assert found[30] == pytest.approx(0.5)
    assert found[51] == 0.0


@pytest.mark.flags("--lr-wsd-decay-iters", "--lr-wsd-decay-style")
def test_warmup_stable_decay() -> None:
    found = curve("--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style linear")
    assert found[80] == 1.0
    assert found[90] == pytest.approx(0.5)
    assert curve("--lr-decay-style WSD --lr-wsd-decay-iters 20")[90] == pytest.approx(2 * 0.5**0.5 - 1)


@pytest.mark.flags("--lr-wsd-decay-samples")
def test_warmup_stable_decay_in_samples() -> None:
    found = curve("--lr-decay-style WSD --lr-wsd-decay-samples 160 --lr-wsd-decay-style linear", SAMPLES)
    assert found[80] == 1.0
    assert found[90] == pytest.approx(0.5)


@pytest.mark.flags("--weight-decay", "--start-weight-decay", "--end-weight-decay", "--weight-decay-incr-style")
def test_weight_decay() -> None:
    assert curve("--weight-decay 0.3", key="weight_decay") == [0.3] * 101
    growing = "--start-weight-decay 0.1 --end-weight-decay 0.3 --weight-decay-incr-style"
    linear = curve(f"{growing} linear", key="weight_decay")
    assert (linear[0], linear[50], linear[100]) == pytest.approx((0.1, 0.2, 0.3))
    assert curve(f"{growing} cosine", key="weight_decay")[25] == pytest.approx(
        0.1 + 0.2 * 0.5 * (1 + math.cos(math.pi * 0.75))
    )


GROWING = ITERATIONS.replace("--global-batch-size 8", "--micro-batch-size 2 --step-batch-size-schedule 0:4,1K:8,4K:16")


@pytest.mark.flags("--step-batch-size-schedule", "--lr-warmup-iters", "--lr-decay-iters", "--lr-wsd-decay-iters")
@pytest.mark.parametrize(
    ("iterations", "samples"),
    [
        ("--lr-warmup-iters 5 --lr-decay-iters 50", "--lr-warmup-samples 10 --lr-decay-samples 100"),
        ("--lr-decay-style cosine --lr-decay-iters 80 --lr-warmup-fraction 0.1", "--lr-decay-samples 160 "
         "--lr-decay-style cosine --lr-warmup-fraction 0.1"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 20", "--lr-decay-style WSD --lr-wsd-decay-samples 40"),
    ],
)  # fmt: skip
def test_iterations_of_a_schedule_do_not_grow_with_the_batch(iterations: str, samples: str) -> None:
    """With --step-batch-size-schedule each is micro-batch size x data-parallel size samples, as upstream counts."""
    by_samples = GROWING.replace("--train-iters 100", "--train-samples 200")
    assert curve(iterations, GROWING) == curve(samples, by_samples)
    lengths = compute_schedule_lengths(run_config(iterations, GROWING, world_size=2))
    assert lengths.wd_incr_steps == 100 * 2 * 2, "and the decay is as long as the iterations of the run, likewise"


def test_the_first_rates_are_those_of_the_reference() -> None:
    """Read off a run of the reference: 4 samples consumed, a warm-up of 5 iterations: 0.4 of the rate."""
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    scheduler = build_scheduler(run_config("--lr 1e-3 --lr-warmup-iters 5 --lr-decay-iters 50", GROWING), optimizer)
    rates = []
    for samples in (4, 4, 2, 90):
        scheduler.step(samples)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([4e-4, 8e-4, 1e-3, 0.0])


def test_what_iterations_became_is_said_once() -> None:
    notes = run_config("--lr-warmup-iters 5 --lr-decay-iters 50", GROWING).notes
    said = [note for note in notes if "an iteration of a schedule counts as 2 samples" in note]
    assert len(said) == 1 and "warm-up 10, decay 100" in said[0] and "--lr-warmup-samples" in said[0]
    ramp = run_config("--rampup-batch-size 2 2 10 --lr-warmup-iters 5", ITERATIONS)
    assert any("counts as 8 samples" in note and "warm-up 40, decay 800" in note for note in ramp.notes)
    for flags, base in (
        ("", ITERATIONS),
        ("--lr-decay-style constant", GROWING),
        ("--lr-warmup-samples 5", GROWING.replace("--train-iters 100", "--train-samples 200")),
    ):
        assert not any("counts as" in note for note in run_config(flags, base).notes)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train-iters 0", "--train-iters 0 leaves the learning rate nothing to decay over"),
        ("--adam-beta1 1", "--adam-beta1 1.0 takes nothing of a gradient into the mean; give a number below 1"),
        ("--optimizer soap --adam-beta2 1", "--adam-beta2 1.0 takes nothing of a gradient"),
        ("--optimizer muon --adam-beta2 1", "--adam-beta2 1.0 takes nothing of a gradient"),
        ("--adam-eps 0", "--adam-eps 0 is out of range; give a number above 0"),
    ],
)
def test_what_would_train_nothing_or_divide_by_zero(flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_config(flags)


def test_fewer_samples_than_a_step() -> None:
    base = SMALLEST_RUN.replace("--train-iters 100", "--train-samples 7")
    with pytest.raises(ConfigError, match="--train-samples 7 are less than one step of --global-batch-size 8"):
        run_config("", base)
    assert run_config("--rampup-batch-size 2 2 4", base).training.train_samples == 7
    assert run_config("--optimizer lion --adam-beta1 1").optimizer.adam_beta1 == 1
