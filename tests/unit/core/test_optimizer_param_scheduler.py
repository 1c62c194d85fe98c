# SPDX-License-Identifier: Apache-2.0
"""What the recorded curves do not show: other WSD shapes, loading states, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, compute_scheduler_steps
from tests.support.run_flags import SMALLEST_RUN, run_config


class Groups:
    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{}, {"max_lr": 4.0, "min_lr": 2.0, "wd_mult": 0.0}]


def scheduler(**changes: Any) -> OptimizerParamScheduler:
    settings: dict[str, Any] = {
        "init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "lr_warmup_steps": 10, "lr_decay_steps": 110,
        "lr_decay_style": "linear", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 100, "wd_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": False, "wsd_decay_steps": 40, "lr_wsd_decay_style": "linear",
    }  # fmt: skip
    return OptimizerParamScheduler(Groups(), **(settings | changes))


def from_flags(flags: str, base: str = SMALLEST_RUN) -> OptimizerParamScheduler:
    from megatron.training.setup import build_scheduler

    return build_scheduler(run_config(flags, base), Groups())  # type: ignore[arg-type]


def lr_after(steps: int, **changes: Any) -> float:
    made = scheduler(**changes)
    made.step(steps)
    lr: float = made.optimizer.param_groups[0]["lr"]
    return lr


@pytest.mark.parametrize(
    ("style", "halfway", "three_quarters"),
    [
        ("linear", 0.5, 0.25),
        ("cosine", 0.5, 0.14644660940672627),
        ("exponential", 0.41421356237309515, 0.18920711500272103),
        ("minus_sqrt", 0.2928932188134524, 0.1339745962155614),
    ],
)
def test_wsd_shapes(style: str, halfway: float, three_quarters: float) -> None:
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_style": style}
    found = [lr_after(steps, **wsd) for steps in (10, 70, 90, 100, 110, 111)]
    assert found == pytest.approx([1.0, 1.0, halfway, three_quarters, 0.0, 0.0], abs=1e-15)


def test_a_group_may_have_a_range_of_its_own() -> None:
    made = scheduler()
    made.step(60)  # half of the decay
    assert [group["lr"] for group in made.optimizer.param_groups] == pytest.approx([0.5, 3.0])
    assert [group["weight_decay"] for group in made.optimizer.param_groups] == [0.1, 0.0]


def test_weight_decay_grows_along_a_cosine() -> None:
    made = scheduler(start_wd=0.0, end_wd=0.2, wd_incr_style="cosine")
    found = []
    for _ in range(5):
        found.append(made.get_wd())
        made.step(25)
    assert found == pytest.approx([0.0, 0.1 - 0.1 / 2**0.5, 0.1, 0.1 + 0.1 / 2**0.5, 0.2], abs=1e-15)


def test_lengths_in_iterations_and_in_samples_are_the_same_run() -> None:
    by_iterations = compute_scheduler_steps(
        global_batch_size=8, train_iters=100, lr_decay_iters=90, lr_warmup_iters=5, lr_wsd_decay_iters=10
    )
    by_samples = compute_scheduler_steps(
        global_batch_size=8, train_samples=800, lr_decay_samples=720, lr_warmup_samples=40, lr_wsd_decay_samples=80
    )
    assert by_iterations == by_samples == (40, 720, 800, 80)


@pytest.mark.flags("--lr-wsd-decay-samples", "--lr-wsd-decay-style", "--train-samples")
def test_wsd_flags_in_samples() -> None:
    base = SMALLEST_RUN.replace("--train-iters 100", "--train-samples 800")
    flags = "--lr 1.0 --lr-decay-style WSD --lr-wsd-decay-samples 80 --lr-wsd-decay-style "
    found = []
    for style in ("linear", "minus_sqrt"):
        made = from_flags(flags + style, base)
        made.step(720 + 40)
        found.append(made.optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([0.5, 1 - 0.5**0.5])


def test_warmup_fraction_is_a_share_of_the_decay() -> None:
    steps = compute_scheduler_steps(global_batch_size=8, train_iters=100, lr_decay_iters=50, lr_warmup_fraction=0.1)
    assert steps.lr_warmup_steps == 40.0


def test_resume_continues_the_curve() -> None:
    straight, first, second = scheduler(), scheduler(), scheduler()
    straight.step(70)
    first.step(40)
    second.load_state_dict(first.state_dict())
    second.step(30)
    assert second.optimizer.param_groups == straight.optimizer.param_groups
    assert second.state_dict() == straight.state_dict()


def test_a_run_without_decay_may_be_made_longer() -> None:
    saved = from_flags("--lr-decay-style constant --train-iters 10 --min-lr 0.001")
    saved.step(80)
    longer = from_flags("--lr-decay-style constant --train-iters 20")
    longer.load_state_dict(saved.state_dict())
    assert longer.num_steps == 80
    # What has an effect is compared as before: the warm-up, and the length of a decay on either side.
    with pytest.raises(CheckpointError, match="--lr-warmup-iters"):
        from_flags("--lr-decay-style constant --lr-warmup-iters 2").load_state_dict(saved.state_dict())
    decaying = from_flags("--lr-decay-style linear --train-iters 10")
    for here, there in ((decaying, longer), (longer, decaying), (from_flags("--train-iters 20"), decaying)):
        with pytest.raises(CheckpointError, match="--lr-decay-iters"):
            here.load_state_dict(there.state_dict())
    theirs = from_flags("--lr-decay-style constant --train-iters 20 --use-checkpoint-opt_param-scheduler")
    theirs.load_state_dict(decaying.state_dict())
    assert theirs.lr_decay_steps == decaying.lr_decay_steps


@pytest.mark.flags("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler")
def test_who_wins_when_the_checkpoint_differs() -> None:
    saved = from_flags("--lr 2.0")
    saved.step(400)  # half of the linear decay over 800 samples
    with pytest.raises(CheckpointError, match=r"--lr was 2.0 and is 1.0.*--override-opt_param-scheduler"):
        from_flags("--lr 1.0").load_state_dict(saved.state_dict())
    lrs = []
    for flag in ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"):
        loaded = from_flags(f"--lr 1.0 {flag}")
        loaded.load_state_dict(saved.state_dict())
        lrs.append(loaded.optimizer.param_groups[0]["lr"])
    assert lrs == pytest.approx([0.5, 1.0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"min_lr": 2.0}, "--min-lr 2.0"),
        ({"init_lr": 2.0}, "--lr-warmup-init 2.0"),
        ({"lr_decay_steps": 0}, "decays over 0 samples"),
        ({"lr_warmup_steps": 110}, "warm-up of 110 samples"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": None}, "--lr-wsd-decay-iters"),
        ({"lr_decay_style": "cubic"}, "--lr-decay-style cubic"),
        ({"start_wd": 0.2}, "--start-weight-decay 0.2"),
        ({"end_wd": 0.2}, "incr-style constant contradicts"),
        ({"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True}, "contradict each other"),
    ],
)
def test_curves_that_cannot_be_drawn_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        scheduler(**changes)


def test_a_run_with_constant_weight_decay_may_be_made_longer() -> None:
    saved, longer = scheduler(), scheduler(wd_incr_steps=200)
    assert saved.wd_incr_steps != longer.wd_incr_steps
    saved.step(40)
    longer.load_state_dict(saved.state_dict())
    assert longer.num_steps == 40
    growing = {"start_wd": 0.0, "end_wd": 0.2, "wd_incr_style": "cosine"}
    with pytest.raises(CheckpointError, match="--train-iters"):
        scheduler(wd_incr_steps=200, **growing).load_state_dict(scheduler(**growing).state_dict())
