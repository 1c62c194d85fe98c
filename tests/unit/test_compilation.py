"""torch.compile of the layers: the same function, with gradients handed over the ordinary way."""

from __future__ import annotations

import pytest

from megatron.core.transformer.compilation import compile_layers
from tests.unit.gpt_models import assert_same_function, build_model, first_mlp


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
