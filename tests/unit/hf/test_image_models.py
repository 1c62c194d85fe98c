# SPDX-License-Identifier: Apache-2.0
"""Models that read images and text, from Hugging Face's files and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import CheckpointError
from megatron.hf import ImageTextBridge
from tests.support.huggingface_models import randomised
from tests.unit.hf.test_bridge import assert_same_tensors, read_all

transformers = pytest.importorskip("transformers")

IMAGE = 63
TEXT = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 65, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip


def make(tower: str, layer: int, strategy: str) -> Any:
    config = transformers.LlavaConfig(
        text_config=TEXT, vision_config={"model_type": tower, **VISION}, image_token_index=IMAGE,
        vision_feature_layer=layer, vision_feature_select_strategy=strategy,
    )  # fmt: skip
    return randomised(transformers.LlavaForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("tower", "layer", "strategy", "features"),
    [("clip_vision_model", -2, "default", 4), ("clip_vision_model", 3, "full", 5),
     ("siglip_vision_model", -1, "full", 4)],
)  # fmt: skip
def test_logits_and_weights_are_theirs(tmp_path: Path, tower: str, layer: int, strategy: str, features: int) -> None:
    theirs = make(tower, layer, strategy)
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "preprocessor_config.json").write_text("{}")
    bridge = ImageTextBridge.from_hf_pretrained(tmp_path / "hf")
    ours = bridge.to_megatron()
    images, tokens = torch.randn(2, 3, 28, 28), [1, 2, IMAGE, 3, 4, IMAGE, 7]
    # Theirs have a token for each feature.
    repeated = [token for token in tokens for _ in range(features if token == IMAGE else 1)]
    expected = theirs(input_ids=torch.tensor([repeated]), pixel_values=images).logits
    logits, _ = ours(images, torch.tensor([tokens]), None)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(ours(images.flip(0), torch.tensor([tokens]), None)[0], logits, atol=1e-3)

    bridge.save_hf(tmp_path / "back")
    assert_same_tensors(read_all(tmp_path / "back"), read_all(tmp_path / "hf"))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (tmp_path / "hf" / "config.json").read_text()
    )
    assert (tmp_path / "back" / "preprocessor_config.json").read_text() == "{}"


def test_files_of_another_form_are_refused(tmp_path: Path) -> None:
    make("clip_vision_model", -2, "default").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())

    def refuse(match: str, **changes: Any) -> None:
        file.write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=match):
            ImageTextBridge.from_hf_pretrained(tmp_path)

    refuse(r"model_type is 'llava_next'; it must be llava", model_type="llava_next")
    refuse(r"vision_config.model_type is 'dinov2'; it must be clip", vision_config={"model_type": "dinov2"})
    refuse(r"vision_feature_layer is -4; it must be the number", vision_feature_layer=-4)
    refuse(r"vision_feature_layer is \[-1, -2\]; it must be", vision_feature_layer=[-1, -2])
    refuse(r"class_embedding is \(24,\) in model.safetensors, and config.json makes it \(48,\)",
           vision_config=config["vision_config"] | {"hidden_size": 48})  # fmt: skip
