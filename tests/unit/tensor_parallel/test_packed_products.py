# SPDX-License-Identifier: Apache-2.0
"""Ordered copies of weights: the same numbers, of the weights as they are now, and nothing of them in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.host_memory import HostMemory
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.tensor_parallel import packed_products
from megatron.core.tensor_parallel.packed_products import OrderedCopies, pack_weights
from tests.support.gpt_models import build_model
from tests.unit.inference.crossings import LONGEST, assert_as_alone, draw_requests

FLAGS = """--position-embedding-type rope --swiglu --hidden-size 256 --num-attention-heads 4 --init-method-std 0.05
    --max-position-embeddings 64 --seq-length 64"""

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --disable-bias-linear"


def list_copies(model: nn.Module) -> list[OrderedCopies]:
    """Of all layers that multiply by some."""
    products = (getattr(module, "product", None) for module in model.modules())
    return [copies for copies in (getattr(product, "copies", None) for product in products) if copies is not None]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize(
    ("flags", "products"), [("--disable-bias-linear", 2 * 4 + 1), ("", 2 * 4 + 1), (EXPERTS, 2 * 4 + 1)]
)
def test_numbers_are_those_of_the_weights_as_they_are(
    flags: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_products, "onednn_is_faster", lambda: True)
    model = build_model(f"{FLAGS} {flags}")
    pack_weights(model)
    copies = list_copies(model)
    assert len(copies) == products
    engine = Engine(model, EngineSettings(LONGEST, reuses_prefixes=False))

    def check() -> None:
        asked = draw_requests(1, 7, logprobs=1, prompt_logprobs=1)
        for request in [*engine.run(asked[:6]), *engine.run(asked[6:])]:
            assert_as_alone(model, request)  # whose forward is not in inference mode, and by the plain product

    check()
    assert sum({single for _, single in each.held} == {True, False} for each in copies) >= 8, "single rows and several"
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.005)
    check()
    ids = torch.arange(6).unsqueeze(0)
    model.train()(ids, ids, labels=ids).mean().backward()
    check()


def test_copies_are_at_most_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "onednn_is_faster", lambda: True)
    model = build_model(FLAGS)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    for factor, turns in ((3, None), (5, False), (9, True)):
        monkeypatch.setattr(packed_products, "read_host_memory", lambda f=factor: HostMemory(f * weights, "a test has"))
        model = build_model(FLAGS)
        pack_weights(model)
        assert {each.turns for each in list_copies(model)} == (set() if turns is None else {turns})
