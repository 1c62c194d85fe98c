# SPDX-License-Identifier: Apache-2.0
"""Ordered copies of weights: the same numbers, of the weights as they are now, and nothing of them in training."""

from __future__ import annotations

import pytest
import torch

from megatron.core.host_memory import HostMemory
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.tensor_parallel import packed_products
from megatron.core.tensor_parallel.packed_products import PackedMatmul, pack_weights
from tests.support.gpt_models import build_model
from tests.unit.inference.crossings import LONGEST, assert_as_alone, draw_requests

FLAGS = """--position-embedding-type rope --swiglu --hidden-size 256 --num-attention-heads 4 --init-method-std 0.1
    --max-position-embeddings 64 --seq-length 64"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("biases", ["--disable-bias-linear", ""])
def test_numbers_are_those_of_the_weights_as_they_are(biases: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "onednn_is_faster", lambda: True)
    model = build_model(f"{FLAGS} {biases}")
    pack_weights(model)
    products = [module.product for module in model.modules() if isinstance(getattr(module, "product", 0), PackedMatmul)]
    assert len(products) == 2 * 4 + 1
    engine = Engine(model, EngineSettings(LONGEST, reuses_prefixes=False))

    def check() -> None:
        for request in engine.run(draw_requests(1, 6, logprobs=1, prompt_logprobs=1)):
            assert_as_alone(model, request)  # whose forward is not in inference mode, and by the plain product

    check()
    assert sum(product._packed is not None for product in products) >= 8
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    check()
    ids = torch.arange(6).unsqueeze(0)
    model.train()(ids, ids, labels=ids).mean().backward()
    check()


def test_weights_of_more_than_a_quarter_of_the_memory_are_not_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "onednn_is_faster", lambda: True)
    model = build_model(FLAGS)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    for factor, is_packed in ((3, False), (5, True)):
        monkeypatch.setattr(packed_products, "read_host_memory", lambda f=factor: HostMemory(f * weights, "a test has"))
        pack_weights(model)
        assert any(isinstance(getattr(m, "product", 0), PackedMatmul) for m in model.modules()) == is_packed
