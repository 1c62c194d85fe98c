# SPDX-License-Identifier: Apache-2.0
"""Numbers gone bad: the first one is named, a step is computed again, and its data are passed over where asked for."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError, MegatronError, NonFiniteError, RerunError
from megatron.training.checkpoint.rng_state import RandomState
from megatron.training.hooks.validation import ValidationHook
from megatron.training.loop import train
from megatron.training.rerun.ledger import LEDGER
from megatron.training.rerun.outliers import SAMPLES
from megatron.training.rerun.tracker_file import RejectionLog
from megatron.training.rerun.validation import GRADIENTS, LOSSES
from megatron.training.run import Place, Run
from tests.functional.pretrain_runs import TINY, metrics, run_ranks
from tests.support.tiny_training import prepare, replace_forward_step

WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


def _spoil(run: Run, iteration: int, *, microbatch: int = 1) -> None:
    """Let the second layer give NaN for one micro-batch whenever that iteration is computed."""
    calls = {"microbatch": -1}
    module = run.model[0].module

    def begin(*_: Any) -> None:
        calls["microbatch"] = (calls["microbatch"] + 1) % run.num_microbatches

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        if run.progress.iteration + 1 == iteration and calls["microbatch"] == microbatch:
            return (output[0] * float("nan"), *output[1:])
        return output

    module.register_forward_pre_hook(begin)
    module.decoder.layers[1].mlp.linear_fc1.register_forward_hook(spoil)


def _raise_loss(run: Run, iteration: int, *, once: bool) -> None:
    """Multiply what one micro-batch of that iteration gives by 40, the first time or whenever it is computed."""
    usual, left = run.recipe.forward_step, [1]

    def forward_step(batches: Any, model: Any) -> Any:
        output, loss_function = usual(batches, model)
        if run.progress.iteration + 1 == iteration and left[0]:
            left[0] -= once
            output = 40.0 * output
        return output, loss_function

    replace_forward_step(run, forward_step)


@pytest.mark.flags("--check-for-spiky-loss", "--check-for-large-grads")
@pytest.mark.parametrize(("flag", "once"), [("loss", True), ("loss", False), ("grads", True), ("grads", False)])
def test_R15_a_spike_is_computed_again_and_ends_nothing(
    flag: str, once: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, norm = _state(_train()), flag == "grads"
    flags = ["--check-for-large-grads" if norm else "--check-for-spiky-loss", "--rerun-mode", "validate_results"]
    run = prepare(*flags, "--result-rejected-tracker-filename", tmp_path / "log", "--log-interval", "1")
    # What 100 iterations have learned, with a loss and a norm of about 4 and 1.
    seen = {"largest": {LOSSES: 5.0, GRADIENTS: 1.3}, "seen": {LOSSES: SAMPLES, GRADIENTS: SAMPLES}}
    (hook,) = [h for h in run.hooks.hooks if isinstance(h, ValidationHook)]  # type: ignore[attr-defined]
    hook.load_state_dict(seen)
    _raise_loss(run, 3, once=once)
    train(run)
    run.hooks.on_close(run)
    assert hook.state_dict() == seen
    assert _same(run, state) == once
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "at least 10 times" in line]
    assert warning.startswith("warning: iteration 3: rank 0, ")
    assert (", also when it was computed again" in warning) != once
    what = "the whole step: the gradient norm is" if norm else "micro-batch 0 (samples 8 to 9): lm loss is"
    assert what in warning
    second = "first_rerun_not_reproducible" if once else "first_rerun_reproducible"
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split(" status=")[1].split()[0] for line in lines] == ["initial_run", second]


def test_the_usual_values_are_learned_and_kept(tmp_path: Path) -> None:
    flags = ["--check-for-spiky-loss", "--rerun-mode", "validate_results", "--save", tmp_path, "--load", tmp_path]
    _train(*flags, "--train-iters", "4", "--lr-decay-iters", "6")
    run = prepare(*flags)
    (hook,) = [h for h in run.hooks.hooks if isinstance(h, ValidationHook)]  # type: ignore[attr-defined]
    state = hook.state_dict()
    assert state["seen"] == {LOSSES: 4}
    assert 3.0 < state["largest"][LOSSES] < 6.0
    run.hooks.on_close(run)


def _train(*flags: str | Path, spoilt: int | None = None) -> Run:
    run = prepare(*flags)
    if spoilt is not None:
        _spoil(run, spoilt)
    try:
        train(run)
    finally:
        run.hooks.on_close(run)
    return run


def _state(run: Run) -> list[torch.Tensor]:
    return [*(p.detach().clone() for p in run.model[0].module.parameters()), *RandomState.take().torch.values()]


def _same(one: Run, state: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_state(one), state, strict=True))


@pytest.mark.parametrize("interval", ["1", "100"])
def test_R14_the_first_bad_value_is_named_also_when_it_is_found_later(interval: str) -> None:
    with pytest.raises(NonFiniteError) as caught:
        _train("--log-interval", interval, spoilt=3)
    # Iteration 3 has samples 8 to 11: two micro-batches of 2.
    expected = "first of all the output of decoder.layers.1.mlp.linear_fc1 on rank 0, micro-batch 1 (samples 10 to 11)"
    assert expected in str(caught.value)


@pytest.mark.flags("--nan-policy")
@pytest.mark.parametrize("reruns", [(), ("--rerun-mode", "validate_results")])
def test_skip_is_what_iterations_to_skip_of_that_iteration_is(
    tmp_path: Path, reruns: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = _train("--iterations-to-skip", "3")
    state, schedule = _state(expected), expected.scheduler.state_dict()
    run = _train("--nan-policy", "skip", "--save", tmp_path, "--save-interval", "2", *reruns, spoilt=3)
    assert _same(run, state)
    assert run.scheduler.state_dict() == schedule
    assert "iteration 3 is passed over" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / LEDGER).read_text().splitlines()]
    assert [(line["iterations"], line["samples"]) for line in lines] == [
        ([1, 2], [0, 7]), ([3, 3], [8, 11]), ([4, 6], [12, 23]),
    ]  # fmt: skip
    assert [line["skipped"] is None for line in lines] == [True, False, True]
    assert "decoder.layers.1.mlp.linear_fc1" in lines[1]["skipped"]
    assert "samples 10 to 11" in lines[1]["skipped"]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_together_is_the_run_that_skips_those_iterations(seed: int, tmp_path: Path) -> None:
    """A policy, computing again or not, a value that comes back or does not, an iteration to be skipped anyway, and a
    restart in between, drawn by chance; the ledger has each sample once."""
    draw = random.Random(seed)
    policy, reruns, lasting = draw.choice(["skip", "rollback"]), draw.random() < 0.5, draw.random() < 0.5
    bad, asked, end = draw.randint(3, 5), draw.choice([None, 2, 6]), draw.randint(2, 5)
    flags: list[str | Path] = ["--nan-policy", policy, "--save", tmp_path, "--load", tmp_path, "--save-interval", "2"]
    flags += ["--rerun-mode", "validate_results"] if reruns else []
    flags += ["--iterations-to-skip", str(asked)] if asked else []
    flags += [] if lasting else ["--simulate-fault", f"nan:0,{bad},{WEIGHT}"]
    skipped = sorted({i for i in (asked, bad if lasting or not reruns else None) if i is not None})
    expected = _state(_train(*(["--iterations-to-skip", *map(str, skipped)] if skipped else [])))
    _train(*flags, "--exit-interval", str(end), spoilt=bad if lasting else None)
    run = _train(*flags, spoilt=bad if lasting else None)
    assert _same(run, expected), (policy, reruns, lasting, bad, asked, end)
    lines = [json.loads(line) for line in (tmp_path / LEDGER).read_text().splitlines()]
    samples = [sample for line in lines for sample in range(line["samples"][0], line["samples"][1] + 1)]
    assert samples == list(range(24))
    assert [
        i for line in lines if line["skipped"] for i in range(line["iterations"][0], line["iterations"][1] + 1)
    ] == (skipped)


def test_rollback_goes_back_and_passes_over_the_samples(tmp_path: Path) -> None:
    state = _state(_train("--iterations-to-skip", "4"))
    places = ("--save", tmp_path, "--load", tmp_path, "--save-interval", "2")
    run = _train("--nan-policy", "rollback", *places, "--metrics-dir", tmp_path / "metrics", spoilt=4)
    assert _same(run, state)
    assert [row["iteration"] for row in metrics(tmp_path / "metrics")] == [1, 2, 3, 5, 6], "each once"
    lines = [json.loads(line) for line in (tmp_path / LEDGER).read_text().splitlines()]
    assert [line["iterations"] for line in lines] == [[1, 3], [4, 4], [5, 6]]
    with pytest.raises(NonFiniteError, match="holds no checkpoint to go back to"):
        empty = tmp_path / "empty"
        _train("--nan-policy", "rollback", "--save", empty, "--load", empty, spoilt=1)
    with pytest.raises(ConfigError, match="--nan-policy rollback goes back to a checkpoint of --save, found none"):
        prepare("--nan-policy", "rollback")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_result_that_is_clean_when_computed_again_skips_nothing(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = _state(_train("--log-interval", "1"))
    flags = ("--rerun-mode", "validate_results", "--nan-policy", policy, "--save", tmp_path)
    flags = (*flags, "--simulate-fault", f"nan:0,3,{WEIGHT}", "--result-rejected-tracker-filename", tmp_path / "log")
    if policy == "stop":
        with pytest.raises(NonFiniteError, match="Possible transient error: iteration 3: rank 0"):
            _train(*flags)
    else:
        assert _same(_train(*flags), state)
        assert "Possible transient error" in capsys.readouterr().err
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split(" status=")[1].split()[0] for line in lines] == [
        "initial_run",
        "first_rerun_not_reproducible",
    ]


@pytest.mark.flags("--rerun-mode", "--error-injection-rate", "--error-injection-type")
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("transient_error", "Possible transient error", None),
        ("persistent_error", "start again, on another device", "Possible persistent error"),
        ("correct_result", "start again, on another device", "correct result"),
    ],
)
def test_injected_errors_end_with_upstreams_codes(
    tmp_path: Path, kind: str, first: str, second: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--rerun-mode", "validate_results", "--error-injection-rate", "1", "--error-injection-type", kind]
    flags += ["--save", str(tmp_path), "--load", str(tmp_path)]
    with pytest.raises(NonFiniteError if second is None else RerunError, match=first) as caught:
        _train(*flags)
    assert caught.value.exit_code == (17 if second is None else 16)
    if second is None:
        return
    with pytest.raises(RerunError, match="same node"):
        _train(*flags)
    here = Place(socket.gethostname() + "-other")
    monkeypatch.setattr(ValidationHook, "build", classmethod(lambda cls, config, context: cls(config, here)))
    with pytest.raises(NonFiniteError, match=second):
        _train(*flags)


def test_a_reproduced_result_is_saved_before_its_update_and_judged_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _state(_train("--train-iters", "2", "--lr-decay-iters", "6"))
    flags = ("--rerun-mode", "validate_results", "--save", tmp_path, "--load", tmp_path, "--lr-decay-iters", "6")
    with pytest.raises(RerunError, match="iteration 3: rank 0, .* micro-batch 1 .samples 10 to 11.: lm loss is nan"):
        _train(*flags, spoilt=3)
    loaded = prepare(*flags)
    assert (loaded.progress.iteration, _same(loaded, before)) == (2, True)
    loaded.hooks.on_close(loaded)
    there = Place("elsewhere")
    monkeypatch.setattr(ValidationHook, "build", classmethod(lambda cls, config, context: cls(config, there)))
    with pytest.raises(NonFiniteError, match="correct result .but possible application error.: iteration 3"):
        _train(*flags, spoilt=3)
    with pytest.raises(MegatronError, match="lm loss is nan; first of all the output of decoder.layers.1"):
        _train(*flags, spoilt=3)
    # On this device the value is good again.
    run = _train(*flags)
    assert run.progress.iteration == 6


def test_report_stats_computes_every_step_twice_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    state = _state(_train())
    capsys.readouterr()
    assert _same(_train("--rerun-mode", "report_stats"), state)
    assert "lm loss: 12 samples, 12 identical; mean 0 p50 0" in capsys.readouterr().out


@pytest.mark.flags("--result-rejected-tracker-filename")
def test_iterations_rejected_twice_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rejected"
    form = "ts=2026-01-01 10:00:00 node=a device=0 jobID={} rank={} iteration={} status={} result=nan message='x y'\n"
    lasting = "RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE"
    rows = [("1", 0, 2, lasting), ("2", 0, 2, "rerun_disabled"), ("1", 0, 3, lasting), ("1", 1, 3, lasting)]
    rows += [("2", 0, 3, lasting), ("1", 0, 4, lasting), ("1", 0, 5, "initial_run"), ("2", 0, 5, "initial_run")]
    file.write_text("".join(form.format(*row) for row in rows) + "half a line jobID=")
    assert RejectionLog(str(file), "N/A").list_iterations_to_skip() == {2}
    state = _state(_train("--iterations-to-skip", "2"))
    assert _same(_train("--result-rejected-tracker-filename", file), state)
    with pytest.raises(ConfigError, match="--result-rejected-tracker-filename .* cannot be written"):
        _train("--result-rejected-tracker-filename", tmp_path / "none" / "file")


def test_ranks_agree_on_whose_value_was_bad(tmp_path: Path) -> None:
    flags = [*TINY, "--log-interval", "1", "--rerun-mode", "validate_results", "--nan-policy", "skip"]
    flags += ["--metrics-dir", str(tmp_path), "--global-batch-size", "8"]
    outcome = run_ranks([*flags, "--simulate-fault", f"nan:1,3,{WEIGHT}"], 2)
    assert outcome.returncode == 0, outcome.stderr
    assert "iteration 3: rank 1" in outcome.stderr
    assert [row["iteration"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert all(row["lm loss"] == row["lm loss"] for row in metrics(tmp_path))
