# SPDX-License-Identifier: Apache-2.0
"""The table of vision towers, and of the projectors behind them, in models that see images: the fields of their
config.json, and the names of their weights.

Rows are as in `family.py`. Their names are as transformers writes them; published files have further words in them
(`find_aliases`). Sources: the configuration classes of transformers, and the files of the published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.errors import CheckpointError
from megatron.core.models.multimodal.llava_model import build_part_config
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.recipes.family import Row

_TOWER, _PROJECTOR, _QWEN = "vision_tower.", "multi_modal_projector.", "visual."
PREFIXES = (_TOWER, _PROJECTOR, _QWEN)
"""Beginnings of the names of what sees images."""
_OURS, _THEIRS = "decoder.layers.{layer}.", _TOWER + "encoder.layers.{layer}."
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu",
    "relu": "relu", "silu": "silu",
}  # fmt: skip


def _build_pairs(ours: str, theirs: str) -> tuple[Row, ...]:
    return tuple(Row(f"{ours}.{name}", (f"{theirs}.{name}",)) for name in ("weight", "bias"))


_ROWS = (
    *_build_pairs(f"{_OURS}input_layernorm", f"{_THEIRS}layer_norm1"),
    *(
        Row(
            f"{_OURS}self_attention.linear_qkv.{name}",
            tuple(f"{_THEIRS}self_attn.{part}_proj.{name}" for part in "qkv"),
            "qkv",
        )
        for name in ("weight", "bias")
    ),
    *_build_pairs(f"{_OURS}self_attention.linear_proj", f"{_THEIRS}self_attn.out_proj"),
    *_build_pairs(f"{_OURS}pre_mlp_layernorm", f"{_THEIRS}layer_norm2"),
    *_build_pairs(f"{_OURS}mlp.linear_fc1", f"{_THEIRS}mlp.fc1"),
    *_build_pairs(f"{_OURS}mlp.linear_fc2", f"{_THEIRS}mlp.fc2"),
    *_build_pairs("conv1", f"{_TOWER}embeddings.patch_embedding"),
    Row("position_embeddings.weight", (f"{_TOWER}embeddings.position_embedding.weight",)),
    *_build_pairs("encoder.linear_fc1", f"{_PROJECTOR}linear_1"),
    *_build_pairs("encoder.linear_fc2", f"{_PROJECTOR}linear_2"),
)
_BLOCK = _QWEN + "blocks.{layer}."
_QWEN_ROWS = (
    *_build_pairs(f"{_OURS}input_layernorm", f"{_BLOCK}norm1"),
    *(
        Row(f"{_OURS}self_attention.linear_qkv.{name}", (f"{_BLOCK}attn.qkv.{name}",), "qkv")
        for name in ("weight", "bias")
    ),
    *_build_pairs(f"{_OURS}self_attention.linear_proj", f"{_BLOCK}attn.proj"),
    *_build_pairs(f"{_OURS}pre_mlp_layernorm", f"{_BLOCK}norm2"),
    *_build_pairs(f"{_OURS}mlp.linear_fc1", f"{_BLOCK}mlp.fc1"),
    *_build_pairs(f"{_OURS}mlp.linear_fc2", f"{_BLOCK}mlp.fc2"),
    Row("conv1.weight", (f"{_QWEN}patch_embed.proj.weight",)),
    *_build_pairs("ln_post", f"{_QWEN}merger.ln_q"),
    *_build_pairs("encoder.linear_fc1", f"{_QWEN}merger.mlp.0"),
    *_build_pairs("encoder.linear_fc2", f"{_QWEN}merger.mlp.2"),
)


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """The vision models of one class of transformers."""

    model_type: str
    """`model_type` of their `vision_config`."""
    subtype: str
    """`model_subtype` of CLIPViTModel; "": it is a Qwen2VLVisionModel."""
    defaults: Mapping[str, Any]
    """Fields of their config, and what they are where a file leaves them out."""
    rows: tuple[Row, ...]
    """Of the tower, and of the projector behind it."""


_SIZES = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "attention_dropout": 0.0,
}  # fmt: skip

TOWERS = (
    VisionTower(
        model_type="clip_vision_model", subtype="clip",
        defaults=_SIZES | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
        rows=(
            *_ROWS,
            Row("class_token", (f"{_TOWER}embeddings.class_embedding",)),
            *_build_pairs("ln_pre", f"{_TOWER}pre_layrnorm"),
        ),
    ),
    VisionTower(
        model_type="siglip_vision_model", subtype="siglip",
        defaults=_SIZES | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
        rows=_ROWS,
    ),
)  # fmt: skip
QWEN2_VL = VisionTower(
    model_type="qwen2_vl_vision", subtype="",
    defaults={
        "depth": 32, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4, "num_heads": 16, "in_channels": 3,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    rows=_QWEN_ROWS,
)  # fmt: skip


@dataclass(frozen=True)
class ImageSettings:
    """The parts of a model that see images, as its config.json says them."""

    tower: VisionTower
    vision: TransformerConfig
    """Of the layers whose output is projected; those behind them compute nothing that is read."""
    projection: TransformerConfig
    image_size: int
    patch_size: int
    drops_class_token: bool
    image_token: int
    merge: int | None = None
    """Patches of a side of the square that one feature is of, where images are of several sizes."""
    frames: int = 1
    """That a patch reaches over."""
    sections: list[int] | None = None
    """`mrope_section` of the text model."""


def read_image_settings(fields: Mapping[str, Any], where: Path, text: TransformerConfig) -> ImageSettings:
    """Read the fields of a config.json, `where`. text: the settings of its text model, whose layout and precision the
    other parts have, too. Raises CheckpointError for a model of another form."""

    def refuse(name: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{where}: {name} is {value!r}; it must be {expected}")

    if fields.get("model_type") == "qwen2_vl":
        return _read_qwen2_vl(fields, text, refuse)
    if fields.get("model_type") != "llava":
        raise refuse("model_type", fields.get("model_type"), "llava or qwen2_vl, whose images are converted")
    stated: Mapping[str, Any] = fields.get("vision_config") or {}
    kind = stated.get("model_type", "clip_vision_model")
    tower = next((tower for tower in TOWERS if tower.model_type == kind), None)
    if tower is None:
        raise refuse("vision_config.model_type", kind, " or ".join(tower.model_type for tower in TOWERS))
    vision = {**tower.defaults, **stated}
    layers, last = vision["num_hidden_layers"], fields.get("vision_feature_layer", -2)
    # Of hidden states, counted from 0: the first is before all layers.
    used = last if not isinstance(last, int) or last >= 0 else layers + 1 + last
    if not isinstance(used, int) or not 0 < used <= layers:
        raise refuse("vision_feature_layer", last, f"the number of one of the {layers} layers' outputs")
    strategy = fields.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full") or (strategy == "default" and tower.subtype != "clip"):
        raise refuse("vision_feature_select_strategy", strategy, "full, or default where there is a class token")
    if vision["num_channels"] != 3:
        raise refuse("vision_config.num_channels", vision["num_channels"], "3")
    if not fields.get("multimodal_projector_bias", True):
        raise refuse("multimodal_projector_bias", False, "true")

    def find_activation(name: str, value: object) -> str:
        if value not in _ACTIVATIONS:
            raise refuse(name, value, f"one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[str(value)]

    vision_config = build_part_config(
        text, num_layers=used, hidden_size=vision["hidden_size"], ffn_hidden_size=vision["intermediate_size"],
        num_attention_heads=vision["num_attention_heads"], layernorm_epsilon=vision["layer_norm_eps"],
        activation_func=find_activation("vision_config.hidden_act", vision["hidden_act"]),
        attention_dropout=vision["attention_dropout"],
    )  # fmt: skip
    vision_config.vision_model_type = tower.subtype  # type: ignore[attr-defined]
    projection = build_part_config(
        text, num_layers=1, hidden_size=text.hidden_size, ffn_hidden_size=text.hidden_size,
        num_attention_heads=text.tensor_model_parallel_size,
        activation_func=find_activation("projector_hidden_act", fields.get("projector_hidden_act", "gelu")),
    )  # fmt: skip
    token = fields.get("image_token_id", fields.get("image_token_index", 32000))
    return ImageSettings(
        tower, vision_config, projection, vision["image_size"], vision["patch_size"], strategy == "default", token
    )


def _read_qwen2_vl(
    fields: Mapping[str, Any],
    text: TransformerConfig,
    refuse: Callable[[str, object, str], CheckpointError],
) -> ImageSettings:
    """The same of Qwen2-VL. refuse: makes the error for a field."""
    stated = fields.get("vision_config") or {}
    vision = {**QWEN2_VL.defaults, **stated}
    width, merge = vision["embed_dim"], vision["spatial_merge_size"]
    if vision["hidden_act"] != "quick_gelu":
        raise refuse("vision_config.hidden_act", vision["hidden_act"], "quick_gelu")
    if vision["in_channels"] != 3:
        raise refuse("vision_config.in_channels", vision["in_channels"], "3")
    # Written with either name, and by earlier releases at the top.
    inner = fields.get("text_config") or fields
    rope = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    vision_config = build_part_config(
        text, num_layers=vision["depth"], hidden_size=width, ffn_hidden_size=int(width * vision["mlp_ratio"]),
        num_attention_heads=vision["num_heads"], activation_func="quick_gelu", layernorm_epsilon=1e-6,
    )  # fmt: skip
    projection = build_part_config(
        text, num_layers=1, hidden_size=text.hidden_size, ffn_hidden_size=width * merge**2,
        num_attention_heads=text.tensor_model_parallel_size, activation_func="gelu", layernorm_epsilon=1e-6,
    )  # fmt: skip
    return ImageSettings(
        QWEN2_VL, vision_config, projection, vision["patch_size"], vision["patch_size"], drops_class_token=False,
        image_token=fields.get("image_token_id", 151655), merge=merge, frames=vision["temporal_patch_size"],
        sections=rope.get("mrope_section", [16, 24, 24]),
    )  # fmt: skip


def is_passed_over(name: str, settings: ImageSettings) -> bool:
    """Return True for a tensor of the tower that nothing that is read depends on: of layers behind those that count,
    and of what makes one vector of all patches. name: as in the files."""
    inner = name.partition(_TOWER)[2].removeprefix("vision_model.")
    layer = re.match(r"encoder\.layers\.(\d+)\.", inner)
    if layer is not None:
        return int(layer[1]) >= (settings.vision.num_layers or 0)
    return inner.startswith(("post_layernorm.", "head.", "embeddings.position_ids"))


def find_aliases(names: Iterable[str], stored: Container[str]) -> dict[str, str]:
    """Map names of the table to the names in the files, where they differ: the tower may be a part of a CLIP or SigLIP
    model, and all may be a part of a model without an output layer."""
    found: dict[str, str] = {}
    for name in names:
        inner = name.replace(_TOWER, f"{_TOWER}vision_model.")
        others = [prefix + other for prefix in ("", "model.") for other in (name, inner)]
        alias = next((other for other in others if other in stored), name)
        found |= {name: alias} if alias != name else {}
    return found
