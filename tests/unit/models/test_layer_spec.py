# SPDX-License-Identifier: Apache-2.0
"""--spec: layers of a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from examples.custom_layer import INITIAL_SCALE, ScaledMLP
from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.placement import get_placement
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.flags.read import examine
from tests.support.gpt_models import build_model, first_mlp
from tests.support.pretend_groups import pretend
from tests.support.run_flags import SMALLEST_RUN
from tests.support.tiny_training import train_tiny

SPEC = "--spec examples.custom_layer layer_spec"


@pytest.mark.flags("--spec")
def test_layers_of_ones_own() -> None:
    model, usual = build_model(SPEC), build_model("--spec local")
    assert type(first_mlp(usual)) is MLP
    mlp = first_mlp(model)
    assert isinstance(mlp, ScaledMLP)
    assert get_placement(mlp.scale).name == "decoder.layers.0.mlp.scale"
    x = torch.randn(4, 2, 32)
    output, bias = first_mlp(usual)(x)
    torch.testing.assert_close(mlp(x)[0], INITIAL_SCALE * (output + bias))


def test_layers_of_ones_own_train() -> None:
    run = train_tiny("--spec", "examples.custom_layer", "layer_spec")
    scales = [value for name, value in run.model[0].module.named_parameters() if name.endswith("mlp.scale")]
    assert len(scales) == 2
    for scale in scales:
        assert (scale != INITIAL_SCALE).all()


def test_a_spec_may_be_an_object_or_ask_for_the_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_layers.py").write_text(
        "from examples.custom_layer import layer_spec\n"
        "ready = layer_spec()\n"
        "def of_config(config):\n"
        "    assert config.num_layers == 2\n"
        "    return ready\n"
        "def nothing():\n"
        "    return 5\n"
        "def failing():\n"
        "    return {}['b']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("ready", "of_config"):
        assert isinstance(first_mlp(build_model(f"--spec my_layers {name}")), ScaledMLP)
    with pytest.raises(ConfigError, match="--spec my_layers nothing gives a int; it must give a ModuleSpec"):
        build_model("--spec my_layers nothing")
    with pytest.raises(ConfigError, match="--spec my_layers failing fails with KeyError: 'b'; --traceback shows"):
        build_model("--spec my_layers failing")
    (tmp_path / "importing.py").write_text("import no_such_module")
    with pytest.raises(ConfigError, match="--spec importing spec fails with ModuleNotFoundError: No module named"):
        build_model("--spec importing spec")
    # A builtin makes no layer; and it must not be called: the first would end the process.
    for words, sentence in (
        ("os _exit", "gives a builtin_function"),
        ("os system", "gives a builtin_function"),
        ("sys nothing", "sys has no nothing"),
    ):
        with pytest.raises(ConfigError, match=f"--spec {words}.*{sentence}"):
            build_model(f"--spec {words}")
    with pytest.raises(ConfigError, match="my_layers.py has no other"):
        build_model("--spec my_layers other")
    with pytest.raises(ConfigError, match="no module no_such_package.*PYTHONPATH"):
        build_model("--spec no_such_package.layers spec")


@pytest.mark.parametrize("words", ["my_layers", "a b c", "../../x y", "a..b c"])
def test_a_spec_is_two_words(words: str) -> None:
    problems = examine([*SMALLEST_RUN.split(), "--spec", *words.split()], {}).problems
    assert [f"--spec {words} is not a module" in problem.text for problem in problems] == [True]


def test_plain_torch_modules_in_a_layer_have_names_in_the_whole_model() -> None:
    """The second stage's first layer is another layer than the first stage's."""

    class WithPlainWeight(MLP):
        def __init__(self, config: object, **parts: object) -> None:
            super().__init__(config, **parts)  # type: ignore[arg-type]
            self.plain = nn.Linear(2, 2)

    spec = get_gpt_layer_local_spec()
    spec.submodules.mlp = ModuleSpec(WithPlainWeight, submodules=spec.submodules.mlp.submodules)
    groups = pretend(1, pp=2)
    config = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=2)
    model = GPTModel(config, spec, 16, 16, pre_process=False, pg_collection=groups)
    names = {get_placement(parameter).name for parameter in model.parameters()}
    assert {name for name in names if "plain.weight" in name} == {
        f"decoder.layers.{layer}.mlp.plain.weight" for layer in (2, 3)
    }
