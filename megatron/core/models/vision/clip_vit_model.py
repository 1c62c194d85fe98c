# SPDX-License-Identifier: Apache-2.0
"""CLIPViTModel: images to the features of their patches, as CLIP and SigLIP compute them.

    patches     a convolution whose stride is its width                 Dosovitskiy et al., "ViT", 2021
    clip        class token before them, learned positions, a norm before the layers       Radford et al., 2021
    siglip      learned positions alone, a norm after the layers                           Zhai et al., 2023

Activation and epsilon of the norms are the config's: quick_gelu and 1e-5 of CLIP, gelu_tanh and 1e-6 of SigLIP.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import current_device
from megatron.core.errors import ConfigError
from megatron.core.models.common.embeddings.language_model_embedding import PositionEmbedding
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.parameters import declare_parameter, initialise_parameters, parameter_dtype
from megatron.core.transformer.initialisers import embedding_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

_CHANNELS = 3
"""Red, green, blue."""
SUBTYPES = ("clip", "siglip")


class PatchEmbedding(MegatronModule):
    """A vector for each square of `patch_dim` times `patch_dim` pixels, the same on every rank; of `frames`
    frames, where they are given."""

    def __init__(self, config: TransformerConfig, patch_dim: int, *, bias: bool, frames: int | None = None) -> None:
        super().__init__(config)
        assert config.hidden_size is not None
        self.patch_dim, dtype = patch_dim, parameter_dtype(config)
        self.weight = declare_parameter(
            (config.hidden_size, _CHANNELS, *([] if frames is None else [frames]), patch_dim, patch_dim),
            kind="filter", init=embedding_initialiser(config), dtype=dtype,
        )  # fmt: skip
        self.bias = declare_parameter((config.hidden_size,), dtype=dtype) if bias else None

    def forward(self, images: Tensor) -> Tensor:
        """[b, 3, height, width] -> [b, patches, h], row by row, in the weight's dtype; or patches that are cut out
        already, [patches, channels * frames * pixels] -> [patches, h]."""
        if images.dim() == 2:
            return F.linear(images.to(self.weight.dtype), self.weight.flatten(1), self.bias)
        found = F.conv2d(images.to(self.weight.dtype), self.weight, self.bias, stride=self.patch_dim)
        return found.flatten(2).transpose(1, 2)


class CLIPViTModel(VisionModule):
    """A vision transformer: [b, 3, height, width] -> [b, s, h], s being the patches and, before them, the class
    token."""

    @take_arguments(
        "transformer_config transformer_layer_spec ln_pre_impl ln_post_impl add_class_token class_token_len=1 "
        "patch_dim img_h img_w model_subtype pg_collection vp_stage=None",
        "there is one class token at most, and the model is whole on its stage",
    )
    def __init__(
        self,
        transformer_config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        ln_pre_impl: Any = build_norm,
        ln_post_impl: Any = build_norm,
        add_class_token: bool = True,
        patch_dim: int = 14,
        img_h: int = 336,
        img_w: int = 336,
        model_subtype: str = "clip",
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Upstream's signature.

        ln_pre_impl, ln_post_impl: the norm before the layers, which clip has, and after them, which siglip has; None
        leaves it out. img_h, img_w, patch_dim: pixels. Raises ConfigError for another model_subtype than clip and
        siglip, and for images that are not made of whole patches.
        """
        super().__init__(transformer_config, pg_collection)
        if model_subtype not in SUBTYPES:
            raise ConfigError(f"model_subtype {model_subtype} is not known; use {' or '.join(SUBTYPES)}")
        config, is_clip = transformer_config, model_subtype == "clip"
        assert config.hidden_size is not None
        self.img_h, self.img_w, self.add_class_token = img_h, img_w, add_class_token
        self.seq_length = count_patches(img_h, img_w, patch_dim) + int(add_class_token)
        """Features of an image."""
        with torch.device("meta" if config.init_model_with_meta_device else current_device()):
            self.conv1 = PatchEmbedding(config, patch_dim, bias=not is_clip)
            self.class_token = None
            if add_class_token:
                self.class_token = declare_parameter(
                    (config.hidden_size,), init=embedding_initialiser(config), dtype=parameter_dtype(config)
                )
            self.position_embeddings = PositionEmbedding(config, self.seq_length)
            norms = ln_pre_impl if is_clip else None, None if is_clip else ln_post_impl
            self.ln_pre, self.ln_post = (
                None if norm is None else build_module(norm, config, config.hidden_size) for norm in norms
            )
            self.decoder = TransformerBlock(
                config, transformer_layer_spec, post_layer_norm=False, pg_collection=self.pg_collection
            )
        initialise_parameters(
            self, seed=config.seed, draw_on_cpu=config.use_cpu_initialization, draw=config.perform_initialization
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Images [b, 3, img_h, img_w] -> features [b, s, h]. attention_mask: bool [b or 1, 1, s, s], True where a patch
        may not be seen; all are when None. Raises ConfigError for images of another size."""
        if x.shape[1:] != (_CHANNELS, self.img_h, self.img_w):
            raise ConfigError(
                f"images are {tuple(x.shape)}, and the model of images takes [b, {_CHANNELS}, {self.img_h}, "
                f"{self.img_w}]; resize them first"
            )
        features = self.conv1(x)
        if self.class_token is not None:
            features = torch.cat((self.class_token.expand(len(x), 1, -1), features), dim=1)
        features = features + self.position_embeddings(torch.arange(self.seq_length, device=x.device))
        if self.ln_pre is not None:
            features = self.ln_pre(features)
        features = self.decoder(features.transpose(0, 1).contiguous(), attention_mask)
        if self.ln_post is not None:
            features = self.ln_post(features)
        return features.transpose(0, 1).contiguous()


def count_patches(img_h: int, img_w: int, patch_dim: int) -> int:
    """Count the patches of an image. Raises ConfigError where they do not fill it."""
    if img_h % patch_dim or img_w % patch_dim:
        raise ConfigError(
            f"images of {img_w} x {img_h} pixels are not made of patches of {patch_dim} x {patch_dim}; "
            f"use {math.ceil(img_w / patch_dim) * patch_dim} x {math.ceil(img_h / patch_dim) * patch_dim}"
        )
    return (img_h // patch_dim) * (img_w // patch_dim)


@take_arguments(
    "img_h img_w patch_dim vision_model_type disable_vision_class_token class_token_len=1 pixel_shuffle=False "
    "use_tile_tags=False max_num_tiles=... tokenizer_type=...",
    "features go to the text model as they are",
)
def get_num_image_embeddings(
    img_h: int, img_w: int, patch_dim: int, vision_model_type: str, disable_vision_class_token: bool
) -> int:
    """Return how many vectors of the text model's sequence an image, or a tile of one, takes.

    vision_model_type: clip or siglip, ConfigError for another; of these clip has a class token.
    disable_vision_class_token: it is left out.
    """
    if vision_model_type not in SUBTYPES:
        raise ConfigError(f"vision_model_type {vision_model_type} is not known; use {' or '.join(SUBTYPES)}")
    has_token = vision_model_type == "clip" and not disable_vision_class_token
    return count_patches(img_h, img_w, patch_dim) + int(has_token)
