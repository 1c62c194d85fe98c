# SPDX-License-Identifier: Apache-2.0
"""Texts of models that multiply in 8 or 4 bits."""

from __future__ import annotations

import pytest

from megatron.core.inference.engine import Engine, EngineSettings
from tests.support.gpt_models import build_model
from tests.unit.inference.crossings import LONGEST, draw_requests

SHAPE = """--position-embedding-type rope --swiglu --disable-bias-linear --hidden-size 256 --ffn-hidden-size 256
    --num-attention-heads 2 --init-method-std 0.1 --max-position-embeddings 64 --seq-length 64 --bf16"""


@pytest.mark.parametrize(
    "recipe",
    [f"--fp8-format e4m3 --fp8-recipe {name}" for name in ("delayed", "tensorwise", "blockwise", "mxfp8")]
    + ["--fp4-format e2m1 --fp4-recipe nvfp4"],
)
def test_texts_are_those_of_each_request_alone(recipe: str) -> None:
    """A scale of all tokens of a pass makes texts depend on one another, but not where each has passes of its own."""
    model = build_model(f"{SHAPE} {recipe} --fp8-emulation")
    settings = EngineSettings(LONGEST, batch_invariant=True)
    together = Engine(model, settings).run(draw_requests(3, 5, logprobs=0))
    for index, request in enumerate(together):
        (alone,) = Engine(model, settings).run(draw_requests(3, 5, logprobs=0)[index : index + 1])
        assert alone.new_tokens == request.new_tokens
        assert alone.token_logprobs == request.token_logprobs
    assert model.training
