# SPDX-License-Identifier: Apache-2.0
"""--logits-save-dir and --logits-load-dir: a teacher's tokens are the same from each layout, a student's step is a
short formula and the same in each layout, a run that goes on is the one that did not stop, and bad input is named."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.datasets.teacher_logits import MANIFEST, TeacherLogits, compute_key
from megatron.core.errors import ConfigError, DataError
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.loop import evaluate
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.step import train_step
from megatron.training.verify.comparison import compare
from megatron.training.verify.parity import RankTrace, Trace, join, open_local_run, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import COMMON, STYLES, own_rank
from tests.support import tiny_training

VOCABULARY = 125
TEACHER = "--hidden-size 48 --num-layers 2"
LAYOUTS = ["tp2,sp", "pp2", "cp2", "dp2,dist-opt"]
ALPHA = 0.7


def settings(*flags: object, layout: str = "1") -> RunConfig:
    parsed = parse_layout(layout)
    common = COMMON.replace("--train-iters 10", "")
    common = common.replace("divisible-by 128", f"divisible-by {128 // parsed.sizes['tp']}")
    words = f"{common} {STYLES['llama']} --train-iters 2 --lr-warmup-iters 0 {' '.join(map(str, flags))}".split()
    return read_run_config([*words, *parsed.flags], {"WORLD_SIZE": str(parsed.world_size)})


def teach(directory: Path, flags: str, layout: str = "1") -> None:
    """Write a teacher's tokens, on this process's rank of the layout."""
    config = settings(f"{TEACHER} --logits-save-dir {directory}", flags, layout=layout)
    with open_local_run(config, build_gpt_recipe(config), own_rank(config)) as run:
        assert run.progress.iteration == 0


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("teacher") / "logits"
    teach(directory, f"--logits-save-top-k {VOCABULARY} --logits-save-dtype fp32")
    return directory


def read_all(directory: Path) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    found = TeacherLogits(directory)
    return {int(key): found.find(int(key)) for key in found._keys}  # type: ignore[misc]


@pytest.mark.flags("--logits-save-dir", "--logits-save-top-k")
@pytest.mark.parametrize("layout", ["tp2,sp,pp2", "cp2", "dp2"])
def test_a_teacher_writes_the_same_in_each_layout(layout: str, logits: Path, tmp_path: Path) -> None:
    flags = "--logits-save-top-k 5 --logits-save-dtype fp32"
    run_distributed(teach, parse_layout(layout).world_size, tmp_path / "found", flags, layout)
    found, whole = read_all(tmp_path / "found"), read_all(logits)
    assert found.keys() == whole.keys() and len(found) > 12
    for key, (tokens, values) in found.items():
        torch.testing.assert_close(values, whole[key][1][:, :5], rtol=1e-4, atol=1e-5)
        assert (tokens == whole[key][0][:, :5]).float().mean() > 0.95  # neighbours may be equally likely


def student(logits: Path, layout: str = "1", *flags: object) -> RunConfig:
    return settings(f"--logits-load-dir {logits} --logits-load-kd-loss-alpha {ALPHA}", *flags, layout=layout)


@pytest.mark.flags("--logits-load-dir", "--logits-load-kd-loss-alpha")
def test_a_students_step_is_the_formula(logits: Path) -> None:
    """Loss and gradient norm, from both models' float64 softmax."""
    teachers = settings(TEACHER)
    with open_local_run(teachers, build_gpt_recipe(teachers), 0) as run, torch.no_grad():
        samples = [run.data.parts("train")[0][index] for index in range(12)]
        tokens, labels = (torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels"))
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        of_teacher = run.model[0].module(tokens, places, None)[..., :VOCABULARY].double().log_softmax(-1)
    config = student(logits)
    with open_local_run(config, build_gpt_recipe(config), 0) as run:
        of_student = run.model[0].module(tokens, places, None).double().log_softmax(-1)
        divergence = (of_teacher.exp() * (of_teacher - of_student[..., :VOCABULARY])).sum(-1).mean()
        lm_loss = -of_student.gather(-1, labels.unsqueeze(-1)).mean()
        run.model[0].zero_grad_buffer()
        (ALPHA * divergence + (1 - ALPHA) * lm_loss).backward()
        grads: list[Any] = [parameter.main_grad for parameter in run.model[0].module.parameters()]  # type: ignore
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
        result = train_step(run, run.data.open("train", 0))
        for name, expected in (("kd loss", divergence), ("lm loss", lm_loss)):
            torch.testing.assert_close(result.losses[name].double(), expected.detach(), rtol=1e-5, atol=1e-6)
        assert float(result.grad_norm or 0) == pytest.approx(float(norm), rel=1e-4)


def share(logits: Path, layout: str) -> RankTrace:
    config = student(logits, layout)
    return trace_rank(config, build_gpt_recipe(config), rank=own_rank(config), iterations=2)


@functools.cache
def run_alone(logits: Path) -> Trace:
    return join([share(logits, "1")])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_student_is_the_same_run_in_each_layout(layout: str, logits: Path) -> None:
    trace = join(run_distributed(share, parse_layout(layout).world_size, logits, layout))
    assert compare(run_alone(logits), trace) == []


def step_and_evaluate(logits: Path, layout: str) -> dict[str, float]:
    config = student(logits, layout, "--eval-iters 1 --eval-interval 1")
    with open_local_run(config, build_gpt_recipe(config), own_rank(config)) as run:
        train_step(run, run.data.open("train", 0))
        return evaluate(run, run.data.open("validation", 0), 1)


def test_evaluation_has_no_teacher(logits: Path) -> None:
    """Also where stages tell each other the losses, of which a step has more."""
    alone = step_and_evaluate(logits, "1")
    assert list(alone) == ["lm loss"]
    for found in run_distributed(step_and_evaluate, 2, logits, "pp2"):
        assert found == pytest.approx(alone, rel=1e-5)


def test_a_student_that_goes_on_is_bit_for_bit_the_same(logits: Path, tmp_path: Path) -> None:
    def train(*flags: object) -> list[float]:
        config = student(logits, "1", "--lr-decay-iters 2", *flags)
        with open_local_run(config, build_gpt_recipe(config), 0) as run:
            noted: list[float] = []
            run.metrics.record_losses = lambda found: noted.append(found["kd loss"].item())  # type: ignore
            tiny_training.finish(run)
        return noted

    whole = train()
    assert train("--train-iters 1 --save", tmp_path / "run") + train("--load", tmp_path / "run") == whole
    assert len(whole) == 2


@pytest.mark.flags(
    "--logits-load-ignore-errors", "--logits-save-top-p", "--logits-save-top-p-min-k", "--logits-save-dtype"
)
def test_bad_input_is_named(logits: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the tokens that are kept.*--logits-save-top-k"):
        settings(f"--logits-save-dir {tmp_path}")
    with pytest.raises(ConfigError, match="has files already"):
        teach(logits, "--logits-save-top-k 4")
    with pytest.raises(ConfigError, match="no complete logits"):
        build(student(tmp_path))
    few = tmp_path / "few"
    teach(few, "--logits-save-top-k 9 --logits-save-top-p 0.001 --logits-save-top-p-min-k 2 --logits-save-dtype bf16"
          " --train-iters 1")  # fmt: skip
    kept = [(values > -torch.inf).sum(-1) for _, values in read_all(few).values()]
    assert min(int(k.min()) for k in kept) == 2 and max(int(k.max()) for k in kept) < 9
    dataset = build(student(few))
    with pytest.raises(DataError, match="sample 12 .*has no logits in --logits-load-dir"):
        [dataset[index] for index in range(13)]
    lenient = build(student(few, "1", "--logits-load-ignore-errors"))
    assert (lenient[12]["teacher_log_probs"] == -torch.inf).all() and (lenient[3]["teacher_log_probs"] <= 0).all()
    manifest = json.loads((few / MANIFEST).read_text())
    for name, said in (
        ("vocab_size", "a vocabulary .* of 9, and the student has 125"),
        ("sequence_length", "--seq-length 9"),
    ):
        (few / MANIFEST).write_text(json.dumps(manifest | {name: 9}))
        with pytest.raises(ConfigError, match=said):
            build(student(few))
    (few / MANIFEST).write_text(json.dumps(manifest))
    file = few / f"{manifest['files'][0]}.keys.npy"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DataError, match="keys.npy: cannot be read"):
        build(student(few))
    assert compute_key({"tokens": torch.arange(3)}) != compute_key({"tokens": torch.arange(4)})
    for flags in ("--mtp-num-layers 1", "--loss-chunk-size 4", "--dataloader-type external"):
        with pytest.raises(ConfigError, match="--logits-load-dir"):
            student(logits, "1", flags)


def build(config: RunConfig) -> Any:
    """The training data of a run."""
    return build_gpt_recipe(config).build_datasets((24, None, None))[0]
