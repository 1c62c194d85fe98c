# SPDX-License-Identifier: Apache-2.0
"""torch.compile of the layers: the same function, with gradients handed over the ordinary way."""

from __future__ import annotations

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.compilation import compile_layers
from megatron.core.transformer.moe.router import TopKRouter
from tests.unit.gpt_models import SEQUENCE_LENGTH, assert_same_function, build_model, first_mlp, token_batch


@pytest.mark.flags("--compile")
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear",
        "--position-embedding-type rope --window-size 4,0",
        "--softmax-type learnable --attn-logit-softcapping 2 --window-size 4,0 --attention-output-gate",
    ],
)
def test_compiled_layers_compute_the_same(flags: str) -> None:
    eager, compiled = build_model(flags), build_model(f"{flags} --compile")
    assert first_mlp(eager).activate is not first_mlp(compiled).activate  # the compiler fuses elementary operations
    assert compile_layers(compiled, backend="aot_eager") == 2
    assert_same_function(eager, compiled)
    assert compiled.state_dict().keys() == eager.state_dict().keys()


def test_layers_with_experts_are_compiled_around_them() -> None:
    """Rows of experts differ from batch to batch: neither graphs nor compilations become more."""
    flags = """--num-experts 4 --moe-layer-freq 2 --moe-ffn-hidden-size 24 --disable-bias-linear --moe-z-loss-coeff 0.1
        --moe-shared-expert-intermediate-size 24 --moe-aux-loss-coeff 0.1"""
    eager, compiled = build_model(flags), build_model(f"{flags} --compile")
    assert compile_layers(compiled, backend="aot_eager") == 2
    graphs = []
    for seed in range(3):
        ids, places, labels = token_batch(seed=seed)
        found, expected = (model(ids, places, labels=labels) for model in (compiled, eager))
        torch.testing.assert_close(found, expected)
        for model in (compiled, eager):
            model.zero_grad()
        found.mean().backward()
        expected.mean().backward()
        for (name, ours), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == graphs[2]
    routers = [[part for part in model.modules() if isinstance(part, TopKRouter)] for model in (compiled, eager)]
    for ours, theirs in zip(*routers, strict=True):
        torch.testing.assert_close(ours.take_losses(), theirs.take_losses())


def test_documents_of_every_batch_run_in_the_same_graphs() -> None:
    """Bounds differ from batch to batch; what was compiled for one serves the others."""
    flags = "--position-embedding-type rope --window-size 4,0"
    eager, compiled = build_model(flags), build_model(f"{flags} --compile")
    compile_layers(compiled, backend="aot_eager")
    ids, places, labels = token_batch(batch=1)
    graphs = []
    for bounds in ([0, 5, 6, SEQUENCE_LENGTH], [0, 9, SEQUENCE_LENGTH], [0, 1, 2, 3, SEQUENCE_LENGTH]):
        packed = PackedSeqParams(cu_seqlens_q=torch.tensor(bounds))
        found, expected = (model(ids, places, labels=labels, packed_seq_params=packed) for model in (compiled, eager))
        torch.testing.assert_close(found, expected)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == graphs[2]


def test_a_layer_is_one_graph() -> None:
    """Nothing in it, the inputs of core attention neither, makes the compiler break off."""
    model = build_model("--position-embedding-type rope --window-size 4,0 --compile")
    ids, places, labels = token_batch()
    for layer in model.decoder.layers:
        layer.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    model(ids, places, labels=labels).sum().backward()
