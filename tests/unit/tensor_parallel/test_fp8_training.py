# SPDX-License-Identifier: Apache-2.0
"""Runs in FP8: they learn as bfloat16 does, go on from their checkpoints bit for bit, and say what rounding costs."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.tensor_parallel.fp8_products import OPERANDS, FP8Matmul
from megatron.training.checkpoint.trained_model import load_trained_model
from megatron.training.hooks.fp8_measures import FP8Hook
from megatron.training.run import Run
from tests.support.tiny_training import SEQUENCE, VOCABULARY, differing, finish, note_losses, prepare, train_tiny

ROOT = Path(__file__).parents[3]
STEPS = 200
WIDE = """
    --num-layers 1 --hidden-size 128 --num-attention-heads 2 --lr 2e-3 --hidden-dropout 0 --attention-dropout 0 --bf16
    --micro-batch-size 4
""".split()


class CountingTokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Of each token the next one follows in seven of ten cases; else any may come."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=generator)
        follows = torch.rand(SEQUENCE, generator=generator) < 0.7
        for place in range(SEQUENCE):
            if follows[place]:
                tokens[place + 1] = (3 * tokens[place] + 1) % VOCABULARY
        mask, positions = torch.ones(SEQUENCE), torch.arange(SEQUENCE)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": positions}


@functools.cache
def train_on_counting(flags: str) -> list[float]:
    """Losses of all steps."""
    run = prepare(
        *WIDE, "--train-iters", str(STEPS), "--log-interval", str(STEPS), *flags.split(),
        build_datasets=lambda counts: [CountingTokens(n) if n else None for n in counts],
    )  # fmt: skip
    losses = note_losses(run)
    finish(run)
    return losses


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_two_hundred_steps_are_within_two_per_cent_of_bfloat16(recipe: str) -> None:
    history = "--fp8-amax-history-len 16 --fp8-amax-compute-algo max" if recipe == "delayed" else ""
    expected = train_on_counting("")
    asked = "--fp4-format e2m1" if recipe == "nvfp4" else f"--fp8-format hybrid --fp8-recipe {recipe} {history}"
    found = train_on_counting(asked)
    assert sum(expected[-20:]) < 0.75 * sum(expected[:20]), "the reference learns"
    assert found != expected
    for first in range(0, STEPS, 20):
        part = slice(first, first + 20)
        assert sum(found[part]) == pytest.approx(sum(expected[part]), rel=0.02)


# ---- checkpoints


def list_states(run: Run) -> dict[str, Tensor]:
    return {
        f"{name}.{kind}": data.clone()
        for name, module in run.model[0].module.named_modules()
        if isinstance(module, FP8Matmul)
        for kind, data in module.named_buffers(recurse=False)
    }


FP8 = "--fp8-format hybrid --fp8-amax-history-len 5 --fp8-amax-compute-algo max --fp8-interval 2".split()


@pytest.mark.parametrize(
    "more", ["", "--async-save", "--bf16 --use-distributed-optimizer --init-model-with-meta-device"]
)
def test_a_run_goes_on_where_it_was_saved(more: str, tmp_path: Path) -> None:
    flags = [*FP8, *more.split()]
    whole = train_tiny(*flags)
    train_tiny(*flags, "--save", tmp_path, "--save-interval", 3, "--exit-interval", 3)
    resumed = train_tiny(*flags, "--save", tmp_path, "--load", tmp_path)
    assert differing(whole, resumed) == []
    expected, found = list_states(whole), list_states(resumed)
    assert len(found) == 8 * 3 and all(torch.equal(data, found[name]) for name, data in expected.items())
    assert all(data.all() for name, data in found.items() if name.endswith("amax_history"))


def test_from_bfloat16_to_fp8_and_back(tmp_path: Path) -> None:
    train_tiny("--bf16", "--save", tmp_path / "bf16", "--exit-interval", 2)
    run = train_tiny("--bf16", *FP8, "--load", tmp_path / "bf16", "--save", tmp_path / "fp8", "--exit-interval", 4)
    assert {data.item() for name, data in list_states(run).items() if name.endswith("steps")} == {2}
    # Another length of history is another state, which begins anew.
    other = ["--fp8-format", "hybrid", "--fp8-amax-history-len", "3"]
    longer = prepare("--bf16", *other, "--load", tmp_path / "fp8")
    assert not any(data.any() for name, data in list_states(longer).items() if name.endswith("amax_history"))
    finish(longer)
    back = train_tiny("--bf16", "--load", tmp_path / "fp8")
    assert back.progress.iteration == 6


# ---- statistics


@pytest.mark.flags("--log-fp8-stats")
def test_what_rounding_costs_is_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--log-interval", 3]
    run = train_tiny(*flags, "--log-fp8-stats", "--metrics-dir", tmp_path)
    assert "fp8 sqnr: " in capfd.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "fp8_sqnr" in row] == [3, 6]
    row = rows[5]
    layer = "decoder.layers.1.mlp.linear_fc2"
    for operand in OPERANDS:
        # 3 bits of mantissa: errors of at most 1/16, uniform within steps: about 31 dB; e5m2 has one bit less.
        assert 20 < row[f"fp8_sqnr {layer} {operand}"] < 40
        assert row[f"fp8_overflow {layer} {operand}"] == 0.0
        assert 0.0 <= row[f"fp8_underflow {layer} {operand}"] < 0.1
    assert row[f"fp8_sqnr {layer} grad"] < row[f"fp8_sqnr {layer} weight"] - 3
    assert row["fp8_sqnr"] == min(value for name, value in row.items() if name.startswith("fp8_sqnr "))
    weight = dict(run.model[0].module.named_parameters())[f"{layer}.weight"]
    assert row[f"fp8_amax {layer} weight"] == pytest.approx(weight.abs().max().item(), rel=0.2)
    assert not any(name.startswith("fp8") for name in run.metrics.shown if name != "fp8_sqnr")


def test_overflow_and_underflow_are_counted() -> None:
    run = prepare("--fp8-format", "e4m3", "--log-fp8-stats")
    product = next(m for m in run.model[0].modules() if isinstance(m, FP8Matmul))
    product.amax.fill_(448.0)
    x = torch.tensor([[1000.0, 448.0, 1e-4, 0.0]])
    product.forward(x, torch.ones(16, 4))
    amax, signal, noise, overflow, underflow, elements = product.take_statistics(x.device)[0].tolist()
    assert (amax, overflow, underflow, elements) == (1000.0, 1, 1, 4)
    assert noise == pytest.approx(552.0**2) and signal == pytest.approx(1000.0**2 + 448.0**2)
    product.eval()
    product.forward(x, torch.ones(16, 4))
    assert not product.take_statistics(x.device).any(), "evaluation is not counted"
    finish(run)


def test_the_lowest_ratio_is_that_of_operands_with_an_error() -> None:
    recorded: dict[str, Tensor] = {}
    run = mock.Mock()
    run.metrics.record = lambda name, value, *options, **more: recorded.update({name: value})
    hook = FP8Hook()
    hook.names = ["layer"]
    # Of zeros alone there is neither signal nor noise.
    hook._record(run, {"fp8_sqnr": torch.tensor([[torch.nan, torch.inf, 30.0]])})
    assert recorded["fp8_sqnr"] == 30.0 and recorded["fp8_sqnr layer input"].isnan()


# ---- falling back


@pytest.mark.flags("--fp8-fallback-sqnr")
def test_a_layer_that_misbehaves_goes_over_to_bfloat16(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--log-interval", 1]
    plain = train_tiny(*flags)
    patient = train_tiny(*flags, "--fp8-fallback-sqnr", 1)
    assert differing(plain, patient) == [] and "multiplies in 16 bits" not in capfd.readouterr().out
    # Above what e5m2 leaves of any gradient, and below what e4m3 leaves of inputs and weights.
    strict = [
        *flags,
        "--fp8-fallback-sqnr",
        28,
        "--save",
        tmp_path,
        "--save-interval",
        3,
        "--metrics-dir",
        tmp_path / "m",
    ]
    whole = train_tiny(*strict, "--log-fp8-stats")
    said = capfd.readouterr().out
    assert said.count("multiplies in 16 bits from iteration 2 on: rounding its grad left") == 8
    assert re.search(
        r"warning: decoder.layers.1.mlp.linear_fc2 .* left 2\d\.\d dB, less than --fp8-fallback-sqnr 28", said
    )
    rows = [json.loads(line) for line in (tmp_path / "m" / "metrics.jsonl").read_text().splitlines()]
    assert [sum(name.startswith("fp8_sqnr ") for name in row) for row in rows] == [24, 0, 0, 0, 0, 0]
    assert all(p.falls_back for p in whole.model[0].modules() if isinstance(p, FP8Matmul))
    assert differing(plain, whole) != []
    again = train_tiny(*strict[:-4], "--load", tmp_path, "--ckpt-step", 3)
    assert differing(whole, again) == [] and "multiplies in 16 bits" not in capfd.readouterr().out
    # Who generates text from a checkpoint, or evaluates it without an optimizer, multiplies as the run did.
    generating = load_trained_model(tmp_path).model
    evaluating = prepare(*strict[:-4], "--load", tmp_path, "--no-load-optim", "--skip-train")
    for model in (generating, evaluating.model[0].module):
        assert [p.falls_back for p in model.modules() if isinstance(p, FP8Matmul)] == [True] * 8
    finish(evaluating)


def test_without_an_optimizers_state_a_layer_that_fell_back_is_saved_too(tmp_path: Path) -> None:
    flags = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--fp8-fallback-sqnr", 1, "--log-interval", 9]
    run = prepare(*flags, "--save", tmp_path, "--exit-interval", 1, "--no-save-optim")
    fallen = run.model[0].module.decoder.layers[1].mlp.linear_fc1.product
    fallen.fall_back()
    finish(run)
    products = [p for p in load_trained_model(tmp_path).model.modules() if isinstance(p, FP8Matmul)]
    assert sum(product.falls_back for product in products) == 1


# ---- the drawing


def draw(*arguments: object) -> tuple[int, str]:
    """Exit code and output of tools/draw_fp8.py."""
    command = [sys.executable, str(ROOT / "tools" / "draw_fp8.py"), *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    return finished.returncode, finished.stdout + finished.stderr


def test_noise_is_drawn_by_layer_and_by_kind(tmp_path: Path) -> None:
    names = [f"decoder.layers.{layer}.mlp.linear_{kind}" for layer in (0, 1) for kind in ("fc1", "fc2")]
    rows = []
    for n in range(1, 9):
        values = {f"fp8_sqnr {name} {operand}": 20.0 + n + k for k, name in enumerate(names) for operand in OPERANDS}
        # The last layer falls back on the way.
        rows.append({"iteration": n} | {name: v for name, v in values.items() if n < 5 or names[3] not in name})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = draw(tmp_path, "--operand", "grad")
    first, *lines = output.splitlines()
    assert code == 0 and first == "fp8_sqnr: ' ' 21 to '@' 30; iterations 1 to 8"
    assert lines[0] == "decoder.layers.0.mlp.linear_fc1 grad | .:-=+*#| 28"
    assert lines[3] == "decoder.layers.1.mlp.linear_fc2 grad |-=+*????| nan"
    code, output = draw(tmp_path, "--by", "kind", "--layers", "*.linear_fc?", "--operand", "input")
    assert [line.partition("|")[0].strip() for line in output.splitlines()[1:]] == [
        "linear_fc1 input",
        "linear_fc2 input",
    ]
    assert output.endswith("| 29\n"), "of the layers that are left"
    for arguments, sentence in (
        ((tmp_path, "--layers", "fc3"), "has no layer fc3; there are decoder.layers.0.mlp.linear_fc1"),
        ((tmp_path, "--metric", "fp8_amax"), "has no fp8_amax of layers; the run needs --log-fp8-stats"),
    ):
        code, output = draw(*arguments)
        assert code == 2 and sentence in output
    pytest.importorskip("matplotlib")
    assert draw(tmp_path, "--output", tmp_path / "noise.png")[0] == 0
    assert (tmp_path / "noise.png").read_bytes()[:4] == b"\x89PNG"
