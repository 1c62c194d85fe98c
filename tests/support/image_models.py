# SPDX-License-Identifier: Apache-2.0
"""A tiny model of images and text, on any groups, and a batch for it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX, LLaVAModel
from megatron.core.models.vision.qwen2_vl_vision_model import Qwen2VLVisionModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

IMAGE = DEFAULT_IMAGE_TOKEN_INDEX
TILES = torch.tensor([1, 2, 1])
VOCABULARY, LONGEST = 64, 24


def build_image_model(
    groups: ProcessGroupCollection | None = None,
    *,
    sequence_parallel: bool = False,
    projection_width: int = 32,
    is_qwen: bool = False,
    **options: Any,
) -> LLaVAModel:
    """Build the model, or this process's part. is_qwen: it takes images of any size, as Qwen2-VL does. options: of
    LLaVAModel, in place of the usual ones."""
    groups = ProcessGroupCollection.single() if groups is None else groups
    both: dict[str, Any] = {
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "tensor_model_parallel_size": groups.tp.size(),
    }  # fmt: skip
    text = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, normalization="RMSNorm",
        gated_linear_unit=True, activation_func="silu", add_bias_linear=False, sequence_parallel=sequence_parallel,
        pipeline_model_parallel_size=groups.pp.size(), mrope_section=[1, 1, 2] if is_qwen else None, **both,
    )  # fmt: skip
    vision = TransformerConfig(
        num_layers=2, hidden_size=24, num_attention_heads=2, activation_func="quick_gelu", init_method_std=0.3, **both
    )
    projection = TransformerConfig(
        num_layers=1, hidden_size=projection_width, ffn_hidden_size=32, num_attention_heads=2, init_method_std=0.3,
        **both,
    )  # fmt: skip
    usual: dict[str, Any] = {"img_h": 28, "img_w": 28, "language_position_embedding_type": "rope"}
    if is_qwen:
        tower = functools.partial(Qwen2VLVisionModel, vision, get_vit_layer_with_local_spec(), patch_dim=4)
        usual |= {"merge": 2, "build_vision_model": tower}
    return LLaVAModel(
        text, get_gpt_layer_local_spec(), VOCABULARY, LONGEST, vision, get_vit_layer_with_local_spec(), True,
        projection, get_mlp_module_spec().submodules, pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1, pg_collection=groups, **usual | options,
    )  # fmt: skip


QWEN_SIZES = torch.tensor([[1, 4, 2], [1, 4, 4], [1, 2, 4]])
"""Frames, rows and columns of the patches of three images, which have 2, 4 and 2 features."""


def make_patches() -> Tensor:
    """The patches of images of these sizes."""
    return torch.randn(int(QWEN_SIZES.prod(1).sum()), 96, generator=torch.Generator().manual_seed(2))


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Four tiles of three images, two sequences with their tokens, and labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, 9), generator=generator)
    ids[0, 3] = ids[1, 0] = ids[1, 5] = IMAGE
    return torch.randn(4, 3, 28, 28, generator=generator), ids[:, :-1], ids[:, 1:]
