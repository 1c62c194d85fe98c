# SPDX-License-Identifier: Apache-2.0
"""The layers of multi-token prediction of DeepSeek V3 and GLM 4.5, from Hugging Face's files and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.errors import CheckpointError
from megatron.hf.auto_bridge import AutoBridge
from megatron.hf.conversion import export_model, import_model, open_model, open_source
from megatron.hf.tensor_files import write_tensors
from tests.support.family_models import make_model
from tests.unit.hf.test_bridge import assert_same_tensors, forget_origin, read_all

pytest.importorskip("transformers")


def save_with_prediction(name: str, directory: Path) -> dict[str, Tensor]:
    """A tiny model's directory with a further layer after the last one, which transformers leaves out; its tensors."""
    hf = make_model(name)
    hf.save_pretrained(directory)
    weights = read_all(directory)
    layers, generator = hf.config.num_hidden_layers, torch.Generator().manual_seed(5)
    last = {key: tensor for key, tensor in weights.items() if key.startswith(f"model.layers.{layers - 1}.")}
    width = hf.config.hidden_size
    further = {key.removeprefix(f"model.layers.{layers - 1}."): tensor for key, tensor in last.items()} | {
        "eh_proj.weight": torch.empty(width, 2 * width),
        **dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), torch.empty(width)),
    }
    further = {key: torch.randn(tensor.shape, generator=generator) for key, tensor in further.items()}
    further |= {
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "shared_head.head.weight": weights["lm_head.weight"],
    }
    weights |= {f"model.layers.{layers}.{key}": tensor for key, tensor in further.items()}
    write_anew(directory, weights)
    return weights


def write_anew(directory: Path, weights: dict[str, Tensor]) -> None:
    for file in directory.glob("model*"):
        file.unlink()
    write_tensors(directory, {name: (x.dtype, tuple(x.shape)) for name, x in weights.items()}, iter(weights.items()))


@pytest.mark.parametrize("name", ["DeepSeek V3", "GLM 4.5"])
def test_layers_that_predict_further_tokens_come_and_go(name: str, tmp_path: Path) -> None:
    expected = save_with_prediction(name, tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    assert source.config.model.mtp_num_layers == 1 and source.notes == []
    import_model(source, tmp_path / "ours")
    model = open_model(tmp_path / "ours")
    export_model(model, tmp_path / "back")
    assert_same_tensors(read_all(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    export_model(forget_origin(model), tmp_path / "anew")
    assert_same_tensors(read_all(tmp_path / "anew"), expected)

    # Where each lies, in words of its own.
    layer = AutoBridge.from_hf_pretrained(tmp_path / "hf").to_megatron().mtp.layers[0]
    prefix = f"model.layers.{model.config.model.num_layers}"
    for ours, theirs in (
        (layer.enorm, "enorm"), (layer.hnorm, "hnorm"), (layer.eh_proj, "eh_proj"),
        (layer.final_layernorm, "shared_head.norm"), (layer.mtp_model_layer.input_layernorm, "input_layernorm"),
        (layer.mtp_model_layer.self_attention.linear_proj, "self_attn.o_proj"),
        (layer.mtp_model_layer.mlp.router, "mlp.gate"),
    ):  # fmt: skip
        assert torch.equal(ours.weight, expected[f"{prefix}.{theirs}.weight"]), theirs


def test_files_with_other_further_layers_than_config_json_says(tmp_path: Path) -> None:
    weights = save_with_prediction("GLM 4.5", tmp_path / "hf")
    further = {name for name in weights if name.startswith("model.layers.4.")}
    # A run without them leaves them out.
    without = open_source(tmp_path / "hf", with_prediction=False)
    (note,) = without.notes
    assert without.config.model.mtp_num_layers is None
    assert note == f"{len(further)} tensors of layers behind the 4 of the model are left out: {min(further)}, ..."
    # Files that lack the copies are read, others that have two embeddings are not.
    head = "model.layers.4.shared_head.head.weight"
    write_anew(tmp_path / "hf", {name: tensor for name, tensor in weights.items() if name != head})
    import_model(open_source(tmp_path / "hf"), tmp_path / "ours")
    write_anew(tmp_path / "hf", weights | {head: weights[head] + 1})
    with pytest.raises(
        CheckpointError, match=f"{head} is not equal to lm_head.weight; .*num_nextn_predict_layers to 0"
    ):
        import_model(open_source(tmp_path / "hf"), tmp_path / "other")
    # As transformers writes it: the field without the layer.
    write_anew(tmp_path / "hf", {name: tensor for name, tensor in weights.items() if name not in further})
    source = open_source(tmp_path / "hf")
    assert source.config.model.mtp_num_layers is None
    assert source.notes == ["config.json says num_nextn_predict_layers 1, and the files hold 0 such layers"]
