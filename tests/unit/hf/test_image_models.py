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

    assert_written_again(bridge, tmp_path)
    assert (tmp_path / "back" / "preprocessor_config.json").read_text() == "{}"


def assert_written_again(bridge: ImageTextBridge, directory: Path) -> None:
    bridge.save_hf(directory / "back")
    assert_same_tensors(read_all(directory / "back"), read_all(directory / "hf"))
    configs = [json.loads((directory / name / "config.json").read_text()) for name in ("back", "hf")]
    assert configs[0] == configs[1]


def test_qwen2_vl_with_images_of_several_sizes(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {name: value for name, value in TEXT.items() if name != "model_type"}
    config = transformers.Qwen2VLConfig(
        text_config=text | {"rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 0}, image_token_id=IMAGE,
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
    )  # fmt: skip
    theirs: Any = randomised(transformers.Qwen2VLForConditionalGeneration(config))
    theirs.save_pretrained(tmp_path / "hf")
    bridge = ImageTextBridge.from_hf_pretrained(tmp_path / "hf")
    ours = bridge.to_megatron()
    # Frames, rows and columns of patches; four patches are one feature.
    sizes = torch.tensor([[1, 4, 6], [1, 2, 8], [1, 6, 2]])
    patches = torch.randn(int(sizes.prod(1).sum()), 96)
    tokens = [[1, IMAGE, 5, 6, IMAGE, 9], [2, 3, 4, 7, IMAGE, 8, 9, 1, 1, 1, 1, 1]]
    features = iter([6, 4, 3])
    repeated = torch.tensor(
        [[token for token in row for _ in range(next(features) if token == IMAGE else 1)] for row in tokens]
    )
    expected = theirs(
        input_ids=repeated, pixel_values=patches, image_grid_thw=sizes, mm_token_type_ids=(repeated == IMAGE).int()
    ).logits
    rows = torch.tensor([tokens[0] + [0] * 6, tokens[1]])
    logits, _ = ours(patches, rows, None, imgs_sizes=sizes)
    torch.testing.assert_close(logits[:, :14], expected, rtol=0, atol=1e-5)
    assert_written_again(bridge, tmp_path)


def test_files_of_another_form_are_refused(tmp_path: Path) -> None:
    make("clip_vision_model", -2, "default").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())

    def refuse(match: str, **changes: Any) -> None:
        file.write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=match):
            ImageTextBridge.from_hf_pretrained(tmp_path)

    refuse(r"model_type is 'llava_next'; it must be llava or qwen2_vl", model_type="llava_next")
    refuse(r"vision_config.model_type is 'dinov2'; it must be clip", vision_config={"model_type": "dinov2"})
    refuse(r"vision_feature_layer is -4; it must be the number", vision_feature_layer=-4)
    refuse(r"vision_feature_layer is \[-1, -2\]; it must be", vision_feature_layer=[-1, -2])
    refuse(r"class_embedding is \(24,\) in model.safetensors, and config.json makes it \(48,\)",
           vision_config=config["vision_config"] | {"hidden_size": 48})  # fmt: skip
