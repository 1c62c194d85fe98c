# SPDX-License-Identifier: Apache-2.0
"""Layers by Transformer Engine among ranks: the run of plain layers on one process, in every layout.

Its modules are stand-ins that communicate as the package's do (tests/support/transformer_engine_stand_in.py).
"""

from __future__ import annotations

import pytest

from megatron.training.loop import train
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training
from tests.support.tiny_training import note_losses
from tests.support.transformer_engine_stand_in import install

STEPS = "--train-iters 4 --num-layers 2"
# A key-value head for two ranks; biases, and an activation of our own; biases in LayerNormMLP; experts.
MODELS = {
    "llama": f"{STYLES['llama']} --num-query-groups 1 {STEPS}",
    "gpt2": f"{STYLES['gpt2']} {STEPS}",
    "openai": f"--openai-gelu {STEPS}",
    "moe": f"{EXPERTS['moe']} {STEPS}",
}


def train_on(flags: str, layout: str) -> tuple[list[float], set[str]]:
    """Losses of all steps, and the kinds of modules of the package that ran."""
    with pytest.MonkeyPatch.context() as patch:
        engine = install(patch)
        config, recipe = training(flags, layout)
        with open_local_run(config, recipe, own_rank(config)) as run:
            losses = note_losses(run)
            train(run)
        return losses, engine.kinds()


@pytest.mark.parametrize(
    ("model", "layout", "kind"),
    [
        ("llama", "tp2,sp", "LayerNormMLP"),
        ("gpt2", "tp2,sp", "LayerNormLinear"),
        ("llama", "dp2,fsdp2", "LayerNormMLP"),
        ("openai", "tp2", "LayerNormMLP"),
        ("moe", "tp2,sp,dp2,ep2,dist-opt", "GroupedLinear"),
    ],
)
def test_the_run_is_that_of_plain_layers(model: str, layout: str, kind: str) -> None:
    expected, nothing = train_on(MODELS[model], "1")
    assert len(expected) == 4 and not nothing
    flags = f"{MODELS[model]} --transformer-impl transformer_engine"
    found = run_distributed(train_on, parse_layout(layout).world_size, flags, layout)
    for losses, kinds in found:
        assert losses == pytest.approx(expected, rel=2e-5)
        assert kind in kinds
