# SPDX-License-Identifier: Apache-2.0
"""Qwen2VLVisionModel: images of any sizes to features, each of a square of patches (Wang et al., "Qwen2-VL", 2024).

patches     of two frames, which a still image has twice; the patches of a square lie one behind the other
positions   rotary: half of a head's pairs of channels turn by the row of a patch, the others by its column
attention   from each patch to all others of its frame
features    the patches of a square side by side, after a norm of each
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.device import current_device
from megatron.core.errors import ConfigError
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.vision.clip_vit_model import PatchEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.parameters import initialise_parameters
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import Rotation
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class Qwen2VLVisionModel(VisionModule):
    """A vision transformer: patches [n, 3 * frames * patch_dim^2] of all images -> [n / merge^2, merge^2 * h]."""

    def __init__(
        self,
        transformer_config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        patch_dim: int = 14,
        frames: int = 2,
        merge: int = 2,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """patch_dim: pixels of a patch's side. frames: that a patch reaches over. merge: patches of a square's side.
        Raises ConfigError for heads whose width does not divide by 4."""
        super().__init__(transformer_config, pg_collection)
        config, self.merge = transformer_config, merge
        assert config.hidden_size is not None and config.kv_channels is not None
        if config.kv_channels % 4:
            raise ConfigError(f"a head has {config.kv_channels} channels; rows and columns need a multiple of 4")
        with torch.device(current_device()):
            self.rotary_pos_emb = RotaryEmbedding(config.kv_channels, 0.5)
        with torch.device("meta" if config.init_model_with_meta_device else current_device()):
            self.conv1 = PatchEmbedding(config, patch_dim, bias=False, frames=frames)
            self.decoder = TransformerBlock(
                config, transformer_layer_spec, post_layer_norm=False, pg_collection=self.pg_collection
            )
            self.ln_post = build_norm(config, config.hidden_size)
        initialise_parameters(
            self, seed=config.seed, draw_on_cpu=config.use_cpu_initialization, draw=config.perform_initialization
        )

    def forward(self, patches: Tensor, sizes: Tensor) -> Tensor:
        """sizes: int64 [images, 3], how many times `frames` each image lasts, and how many patches it is high and wide,
        of which both are multiples of `merge`."""
        frame, row, column = self._locate(len(patches), sizes)
        angles = torch.cat([at[:, None] * self.rotary_pos_emb.inv_freq.to(at.device) for at in (row, column)], dim=-1)
        states = self.conv1(patches)[:, None]  # [n, 1, h]
        is_apart = frame[None, None, :, None] != frame
        states = self.decoder(states, is_apart, Rotation(angles.cos(), angles.sin(), interleaved=False))
        return self.ln_post(states).reshape(-1, self.merge**2 * states.shape[-1])

    def _locate(self, patches: int, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each patch the number of its frame, counted in all images, and its row and column there."""
        ends = sizes.prod(1).cumsum(0)
        place = torch.arange(patches, device=sizes.device)
        image = torch.searchsorted(ends, place, right=True).clamp(max=len(sizes) - 1)
        times, height, width = sizes[image].unbind(1)
        place = place - (ends[image] - times * height * width)
        frame, place = place // (height * width), place % (height * width)
        frames = sizes[:, 0].cumsum(0) - sizes[:, 0]
        square, inner, squares = place // self.merge**2, place % self.merge**2, width // self.merge
        row = square // squares * self.merge + inner // self.merge
        return frames[image] + frame, row, square % squares * self.merge + inner % self.merge
