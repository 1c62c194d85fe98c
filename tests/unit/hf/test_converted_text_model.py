# SPDX-License-Identifier: Apache-2.0
"""Models that see images, too: their text model, from Hugging Face's files and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.hf.conversion import export_model, import_model, open_model, open_source
from megatron.hf.logits import compare_logits
from megatron.training.flags.read import read_run_config
from tests.support.family_models import MODELS
from tests.support.huggingface_models import SIZES, randomised
from tests.unit.hf.test_bridge import assert_same_tensors, read_all

transformers = pytest.importorskip("transformers")


def test_the_text_model_of_llama4(tmp_path: Path) -> None:
    """As published: text and vision in one directory."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
              "vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24, "image_size": 28,
              "patch_size": 14}  # fmt: skip
    text = SIZES | {name: value for name, value in MODELS["Llama 4"][1].items() if name != "attn_implementation"}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    randomised(transformers.Llama4ForConditionalGeneration(config)).save_pretrained(tmp_path / "hf")
    stored = read_all(tmp_path / "hf")
    expected = {
        name.removeprefix("language_model."): tensor
        for name, tensor in stored.items()
        if name.startswith("language_model.")
    }
    source = open_source(tmp_path / "hf")
    (note,) = source.notes
    assert note.startswith(f"{len(stored) - len(expected)} tensors are left out, which are not of the text model: ")
    import_model(source, tmp_path / "ours")
    assert "differ by at most" in compare_logits(tmp_path / "hf", tmp_path / "ours")
    export_model(open_model(tmp_path / "ours"), tmp_path / "back")
    assert_same_tensors(read_all(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "llama4_text"
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert_same_tensors(found, expected)

    run = "--seq-length 16 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data"
    flags = ["--load", f"hf:{tmp_path / 'hf'}", "--use-checkpoint-args", *run.split()]
    assert read_run_config(flags, {}).model.attention_chunk_size == 6
