# SPDX-License-Identifier: Apache-2.0
"""float16: the loss scale follows the gradients, overflows are skipped, and nothing but the scale knows of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.errors import ConfigError, NonFiniteError
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.training.hooks.writers import build_row_points
from megatron.training.metrics import MetricsRow
from tests.support.run_flags import run_config
from tests.support.tiny_training import differing, train_tiny
from tests.unit.optimizer.test_megatron_optimizer import loss_of, tiny_network, train, wrapped
from tests.unit.training.test_training_flags import rows

CPU = torch.device("cpu")


def scales(scaler: DynamicGradScaler, steps: str) -> list[float]:
    """The scale after each step; `x` overflows."""
    found = []
    for step in steps:
        scaler.update(overflowed=step == "x")
        found.append(scaler.value)
    return found


def test_the_scale_falls_with_overflows_and_grows_after_a_window_without() -> None:
    scaler = DynamicGradScaler(64.0, 4.0, window=3, hysteresis=2, device=CPU)
    assert scales(scaler, "x.x") == [64, 64, 32], "the second overflow lowers it, whatever lies between"
    assert scales(scaler, "x") == [16], "from then on each one does"
    assert scales(scaler, "..x") == [16, 16, 8], "an overflow ends the window"
    assert scales(scaler, "...x") == [8, 8, 16, 16], "growth renews the patience"
    assert float(scaler.scale) == scaler.value


def test_overflow_at_the_smallest_scale_is_reported() -> None:
    scaler = DynamicGradScaler(6.0, 4.0, window=3, hysteresis=1, device=CPU)
    assert scaler.update(overflowed=True) and scaler.value == 4.0
    assert not scaler.update(overflowed=True)
    assert scaler.update(overflowed=False)


def optimizer_of(flags: str) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    config = run_config(f"--fp16 {flags}")
    model = DistributedDataParallel(config.model, config.ddp, tiny_network(torch.float16))
    return model, get_megatron_optimizer(config.optimizer, [model])


def step(model: DistributedDataParallel, optimizer: MegatronOptimizer, kind: str) -> None:
    """One step; `x` with an overflow."""
    model.zero_grad_buffer()
    optimizer.scale_loss(loss_of(model, 0)).backward()
    if kind == "x":
        model.flat_buffers[0].grad_data[3] = math.inf
    optimizer.step()


@pytest.mark.flags("--loss-scale", "--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis")
@pytest.mark.parametrize(
    ("flags", "steps", "expected"),
    [
        ("--loss-scale 128", "..", 128),
        ("--initial-loss-scale 1024", "", 1024),
        ("", "", 2.0**32),
        ("--initial-loss-scale 64", "xxx", 16),
        ("--initial-loss-scale 64 --hysteresis 1", "xxx", 8),
        ("--initial-loss-scale 64 --hysteresis 1 --min-loss-scale 24", "xx", 24),
        ("--initial-loss-scale 64 --loss-scale-window 2", "....", 256),
    ],
)
def test_flags_of_the_scale(flags: str, steps: str, expected: float) -> None:
    model, optimizer = optimizer_of(flags)
    for kind in steps:
        step(model, optimizer, kind)
    assert optimizer.loss_scale == expected


@pytest.mark.parametrize("grads_in_fp32", [True, False])
def test_a_scaled_step_is_the_unscaled_one(grads_in_fp32: bool) -> None:
    """Powers of two shift exponents only: same norm, clipping and update, bit for bit, while nothing over- or
    underflows."""
    updated = []
    for scale in (1, 256):
        accumulate = "--accumulate-allreduce-grads-in-fp32" if grads_in_fp32 else ""
        model, optimizer = optimizer_of(f"--loss-scale {scale} --clip-grad 0.5 {accumulate}")
        assert model.flat_buffers[0].grad_data.dtype == (torch.float32 if grads_in_fp32 else torch.float16)
        model.zero_grad_buffer()
        model.flat_buffers[0].grad_data.copy_(torch.linspace(-1, 1, model.flat_buffers[0].layout.numel))
        model.scale_gradients(scale)
        norm = optimizer.step().grad_norm
        updated.append((norm, {name: kinds["main_param"] for name, kinds in optimizer.named_state().items()}))
    assert updated[0][0] == updated[1][0] > 0.5
    for name, value in updated[0][1].items():
        torch.testing.assert_close(updated[1][1][name], value, rtol=1e-6, atol=1e-8)


def test_main_parameters_are_float32_and_the_model_rounds_them() -> None:
    model, optimizer = optimizer_of("--loss-scale 8")
    train(model, optimizer, 3)
    for name, param in model.module.named_parameters():
        main = optimizer.named_state()[name]["main_param"]
        assert main.dtype == torch.float32 and param.dtype == torch.float16
        assert torch.equal(param, main.half())


def test_an_overflow_changes_nothing_but_the_scale() -> None:
    model, optimizer = optimizer_of("--initial-loss-scale 64 --hysteresis 1")
    step(model, optimizer, ".")
    before = [model.flat_buffers[0].param_data.clone()]
    before += [kind.clone() for kinds in optimizer.named_state().values() for kind in kinds.values()]
    step(model, optimizer, "x")
    after = [model.flat_buffers[0].param_data]
    after += [kind for kinds in optimizer.named_state().values() for kind in kinds.values()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert (optimizer.step_count, optimizer.loss_scale) == (1, 32)


@pytest.mark.flags("--min-loss-scale", "--loss-scale", "--no-check-for-nan-in-loss-and-grad")
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--initial-loss-scale 2 --min-loss-scale 2 --hysteresis 1", "smallest loss scale, 2 after 0.*--bf16"),
        ("--loss-scale 16", "with --loss-scale 16 after 0.*leave out --loss-scale"),
    ],
)
def test_R17_an_overflow_that_no_smaller_scale_can_mend_stops_the_run(flags: str, named: str) -> None:
    with pytest.raises(NonFiniteError, match=named):
        step(*optimizer_of(flags), "x")
    model, optimizer = optimizer_of(f"{flags} --no-check-for-nan-in-loss-and-grad")
    step(model, optimizer, "x")
    assert optimizer.step_count == 0


def test_state_of_another_number_format_is_taken_without_a_scale() -> None:
    _, optimizer = wrapped(tiny_network())
    fresh, _ = optimizer_of("--initial-loss-scale 64")[1], optimizer.load_numbers({"step_count": 3})
    fresh.load_numbers(optimizer.numbers())
    assert (fresh.step_count, fresh.loss_scale) == (3, 64)
    optimizer.load_numbers(fresh.numbers())
    assert optimizer.loss_scale == 1.0


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="--min-loss-scale 8.0 is above --initial-loss-scale 4.0"):
        run_config("--fp16 --initial-loss-scale 4 --min-loss-scale 8")
    assert any("--loss-scale 8.0 has no effect without --fp16" in note for note in run_config("--loss-scale 8").notes)
    assert OptimizerConfig().fp16 is False


@pytest.mark.flags("--fp16")
@pytest.mark.usefixtures("no_yardstick")
def test_a_run_skips_overflows_reports_them_and_resumes_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A million overflows in this model: skipped steps, whose samples are used up and whose learning rate is not."""
    flags = ["--fp16", "--initial-loss-scale", "2e6", "--hysteresis", "1", "--log-interval", "6"]
    straight = train_tiny(*flags, "--metrics-dir", tmp_path / "metrics", "--train-iters", "8")
    found = rows(tmp_path / "metrics")
    skipped = sum(row["skipped"] for row in found)
    assert 2 <= skipped < 6 and straight.progress.skipped_iterations == skipped
    assert [row["loss_scale"] for row in found[:3]] == [2e6, 1e6, 5e5]
    assert all((row["grad_norm"] is None) == row["skipped"] for row in found)
    assert found[0]["lr"] == found[1]["lr"] == 1e-2 > found[-1]["lr"]
    assert straight.scheduler.num_steps == 4 * (8 - skipped) and straight.optimizer.step_count == 8 - skipped
    output = capsys.readouterr().out
    assert "| loss scale: " in output and f"number of skipped iterations: {skipped:3d}" in output

    save = ["--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--save-interval", "2"]
    train_tiny(*flags, *save, "--train-iters", "8", "--exit-interval", "2")
    resumed = train_tiny(*flags, *save, "--train-iters", "8")
    assert resumed.progress.iteration == 8
    assert differing(resumed, straight) == []
    assert resumed.optimizer.numbers() == straight.optimizer.numbers()


@pytest.mark.flags("--log-loss-scale-to-tensorboard")
def test_the_scale_in_tensorboard() -> None:
    for flag, expected in (("", True), ("--no-log-loss-scale-to-tensorboard", False)):
        assert (
            "loss-scale" in build_row_points(MetricsRow(1, {"loss_scale": 64.0}), run_config(flag).logger, 1)
        ) is expected
