# SPDX-License-Identifier: Apache-2.0
"""Warnings of losses and gradients far beyond the usual: R15 of the catalogue of faults."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.traffic import Traffic
from megatron.training.hooks.guards import OutlierHook
from megatron.training.metrics import MetricsRow
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.rerun.outliers import FACTOR, SAMPLES
from megatron.training.run import HookContext
from tests.support.run_flags import run_config


def warnings_of(flags: str, values: list[tuple[float, float]], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a run with these (loss, gradient norm) prints on standard error."""
    config = run_config(flags)
    context = HookContext(build_gpt_recipe(config), Traffic())
    hook = OutlierHook.build(config, context)
    if hook is None:
        return []
    run: Any = SimpleNamespace(is_first_rank=True)
    for number, (loss, norm) in enumerate(values, start=1):
        numbers = {"grad_norm": norm, "consumed_samples": 8 * number, "global_batch_size": 8}
        hook.on_metrics(run, [MetricsRow(number, {"lm loss": loss, **numbers}, losses={"lm loss": loss})])
        if number == 50:
            hook, before = OutlierHook.build(config, context), hook
            assert hook is not None
            hook.load_state_dict(json.loads(json.dumps(before.state_dict())))
    return capsys.readouterr().err.splitlines()


@pytest.mark.flags("--check-for-spiky-loss", "--check-for-large-grads")
def test_R15_a_spike_is_named_and_the_warm_up_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    usual = [(1.0, 2.0)] * (SAMPLES - 1)
    spikes = [(FACTOR * 3.0 - 1, 1.0), (FACTOR * 3.0, 1.0), (1.0, FACTOR * 5.0), (float("nan"), float("inf"))]
    values = [(3.0, 5.0), *usual, *spikes]
    loss = (
        "warning: iteration 102: lm loss is 30, at least 10 times the 3 that the first 100 iterations reached; look "
        "at samples 808 to 815"
    )
    norm = "warning: iteration 103: the gradient norm is 50, at least 10 times the 5 that"
    assert warnings_of("", values, capsys) == []
    assert warnings_of("--check-for-spiky-loss", values, capsys) == [loss]
    (found,) = warnings_of("--check-for-large-grads", values, capsys)
    assert found.startswith(norm)
    assert len(warnings_of("--check-for-large-grads --check-for-spiky-loss", values, capsys)) == 2
    assert warnings_of("--check-for-spiky-loss", [(1.0, 1.0), (1000.0, 1.0)], capsys) == [], "too early to tell"
