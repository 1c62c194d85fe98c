# SPDX-License-Identifier: Apache-2.0
"""LLaVAModel: a model of images, a projector and a GPT, which reads images as a part of its text.

    images [tiles, 3, height, width] -> vision_model -> features -> vision_projection -> [tiles, features, h]
    tokens [b, s] -> embedding, each image token replaced by its image's features -> [t, b, h] -> language_model

Source: Liu et al., "Visual Instruction Tuning", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError, DataError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.merged_sequence import IGNORE_INDEX as IGNORE_INDEX
from megatron.core.models.multimodal.merged_sequence import MergedSequence
from megatron.core.models.vision.clip_vit_model import CLIPViTModel, get_num_image_embeddings
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.placement import get_placement, place
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.parameters import initialise_parameters
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

DEFAULT_IMAGE_TOKEN_INDEX = -200
"""Number of the image token; it needs no row in the vocabulary."""
IMAGE_TOKEN = "<image>"
_PARTS = ("vision_model", "vision_projection", "language_model")


_SHARED = (
    "tensor_model_parallel_size", "params_dtype", "bf16", "fp16", "perform_initialization", "seed",
    "use_cpu_initialization", "init_model_with_meta_device", "init_method_std",
)  # fmt: skip


def build_part_config(text: TransformerConfig, **fields: Any) -> TransformerConfig:
    """The config of the model of images, or of the projector: layout, dtype and initialisation are the text model's.
    fields: the others, without dropout where they do not say."""
    shared = {name: getattr(text, name) for name in _SHARED} | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerConfig(**shared | fields)


class LLaVAModel(MegatronModule):
    """Images and text to logits or losses of text; on later pipeline stages the language model's part alone."""

    @take_arguments(
        "language_transformer_config language_transformer_layer_spec language_vocab_size language_max_sequence_length "
        "vision_transformer_config vision_transformer_layer_spec drop_vision_class_token vision_projection_config "
        "vision_projection_layer_spec vision_projection_type allow_missing_vision_projection_checkpoint=False "
        "parallel_output share_embeddings_and_output_weights language_position_embedding_type language_rotary_percent "
        "pre_process post_process add_encoder add_decoder=True img_h img_w patch_dim language_rotary_base "
        "language_rope_scaling language_rope_scaling_factor hybrid_layer_pattern=None fp16_lm_cross_entropy=False "
        "image_token_index pixel_shuffle=False conv_merging=False tile_tags=None pg_collection max_num_tiles=... "
        "tokenizer_type=... vp_stage use_vision_backbone_fp8_arch=False dynamic_resolution=False class_token_len=1 "
        "radio_force_eval_mode=False radio_force_cpe_eval_mode=False radio_interpolate_only_cpe=False "
        "radio_cpe_aspect_ratio_select=False radio_disable_cpe=False sound_model=None sound_projection=None "
        "sound_token_index=None temporal_patch_dim=1 separate_video_embedder=False temporal_ckpt_compat=False",
        "images are of one size, and their features go to a GPT as they are",
    )
    def __init__(
        self,
        language_transformer_config: TransformerConfig,
        language_transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        language_vocab_size: int,
        language_max_sequence_length: int,
        vision_transformer_config: TransformerConfig,
        vision_transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        drop_vision_class_token: bool,
        vision_projection_config: TransformerConfig,
        vision_projection_layer_spec: MLPSubmodules,
        vision_projection_type: str = "mlp",
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        language_position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute",
        language_rotary_percent: float = 1.0,
        pre_process: bool = True,
        post_process: bool = True,
        add_encoder: bool = True,
        img_h: int = 336,
        img_w: int = 336,
        patch_dim: int = 14,
        language_rotary_base: float = 10000,
        language_rope_scaling: bool = False,
        language_rope_scaling_factor: float = 8.0,
        image_token_index: int = DEFAULT_IMAGE_TOKEN_INDEX,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        build_vision_model: Callable[..., nn.Module] | None = None,
        build_language_model: Callable[..., GPTModel] | None = None,
        merge: int | None = None,
    ) -> None:
        """Upstream's signature, and three further arguments.

        language_max_sequence_length: of text and features together; longer sequences are cut, and with pipeline
        parallelism all are filled up to it. drop_vision_class_token: the text model does not see it.
        vision_transformer_config.vision_model_type: clip (also where it is not set) or siglip. pre_process,
        post_process: this stage has the embedding, the output layer; add_encoder: the model of images and the
        projector, which belong to the first stage. build_vision_model, build_language_model: functions that build
        these parts in another way, called with pg_collection, and the second with pre_process, post_process and
        vp_stage. merge: images are of several sizes, and a feature is of `merge` times `merge` patches
        (qwen2_vl_vision_model.py). Raises ConfigError for context parallelism, multi-token prediction and layers that
        read tokens.
        """
        super().__init__(language_transformer_config)
        config, groups = language_transformer_config, pg_collection or ProcessGroupCollection.current()
        _check_configs(config, vision_projection_config, groups)
        self.pg_collection, self.vp_stage = groups, vp_stage
        self.pre_process, self.post_process = pre_process, post_process
        self.image_token_index, self.longest = image_token_index, language_max_sequence_length
        kind = getattr(vision_transformer_config, "vision_model_type", "clip")
        self.merge, self.img_seq_len, self.dropped = merge, 1, 0
        """Of these the second: vectors that a tile takes in the text model's sequence."""
        if merge is None:
            self.img_seq_len = get_num_image_embeddings(img_h, img_w, patch_dim, kind, drop_vision_class_token)
            self.dropped = int(kind == "clip" and drop_vision_class_token)
        self.vision_model: nn.Module | None = None
        self.vision_projection: MultimodalProjector | None = None
        if add_encoder and pre_process:
            if build_vision_model is None:
                self.vision_model = CLIPViTModel(
                    vision_transformer_config, vision_transformer_layer_spec, add_class_token=kind == "clip",
                    patch_dim=patch_dim, img_h=img_h, img_w=img_w, model_subtype=kind, pg_collection=groups,
                )  # fmt: skip
            else:
                self.vision_model = build_vision_model(pg_collection=groups)
            width = vision_transformer_config.hidden_size
            assert width is not None
            width *= 1 if merge is None else merge**2
            self.vision_projection = MultimodalProjector(
                vision_projection_config, vision_projection_layer_spec, vision_projection_type, width, groups.tp
            )
        stage: dict[str, Any] = {
            "pre_process": pre_process, "post_process": post_process, "pg_collection": groups, "vp_stage": vp_stage,
        }  # fmt: skip
        if build_language_model is None:
            self.language_model = GPTModel(
                config, language_transformer_layer_spec, language_vocab_size, language_max_sequence_length,
                parallel_output=parallel_output, position_embedding_type=language_position_embedding_type,
                share_embeddings_and_output_weights=share_embeddings_and_output_weights,
                rotary_percent=language_rotary_percent, rotary_base=language_rotary_base,
                rope_scaling=language_rope_scaling, rope_scaling_factor=language_rope_scaling_factor, **stage,
            )  # fmt: skip
        else:
            self.language_model = build_language_model(**stage)
        self._name_and_fill()

    def _name_and_fill(self) -> None:
        """Name the parameters of the parts as parts of this model, and fill them by these names: two parts have layers
        of the same number."""
        for part in _PARTS:
            module = getattr(self, part)
            for name, parameter in [] if module is None else list_parameters(module):
                placement = get_placement(parameter, name)
                place(parameter, placement.renamed(f"{part}.{placement.name}"))
        config = self.config
        initialise_parameters(
            self, seed=config.seed, draw_on_cpu=config.use_cpu_initialization, draw=config.perform_initialization
        )

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """As the language model's."""
        return self.language_model.shared_embedding_or_output_weight()

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Hidden states [t, b, h] from the previous stage, for the next forward call."""
        self.language_model.set_input_tensor(input_tensor)

    def freeze(
        self, freeze_language_model: bool, freeze_vision_model: bool, freeze_vision_projection: bool
    ) -> None:  # fmt: skip
        """Leave parts as they are: their parameters get no gradients. Before DistributedDataParallel is built."""
        frozen = (freeze_vision_model, freeze_vision_projection, freeze_language_model)
        for part, is_frozen in zip(_PARTS, frozen, strict=True):
            module = getattr(self, part)
            for parameter in module.parameters() if is_frozen and module is not None else ():
                parameter.requires_grad_(False)

    @take_arguments(
        "images input_ids position_ids attention_mask=None labels loss_mask inference_context=None num_image_tiles "
        "image_token_index runtime_gather_output packed_seq_params=None imgs_sizes "
        "vision_packed_seq_params=None * inference_params=None",
        "a text about images is read in one pass, each token seeing those before it",
    )
    def forward(
        self,
        images: Tensor | None,
        input_ids: Tensor,
        position_ids: Tensor | None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        num_image_tiles: Tensor | None = None,
        image_token_index: int | None = None,
        runtime_gather_output: bool | None = None,
        imgs_sizes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Loss of every place [b, t] float32 and its weight [b, t] when there are labels, else logits [b, t, v] and
        None, of the t places of text and features (merged_sequence.py).

        images: [tiles, 3, img_h, img_w], in the order of their tokens; None or empty where a batch has none, and
        unread on later stages. input_ids, labels: [b, s] int64, one image token for each image; position_ids: [b, s],
        of learned positions, which features have none of. loss_mask: [b, s], ones when None. num_image_tiles: int
        [images], one of each when None. image_token_index: the constructor's when None. imgs_sizes: with `merge`, int64
        [images, 3], frames, rows and columns of each image's patches; images are patches [n, pixels] then. On a stage
        without output layer: hidden states [t, b, h] and None. Raises DataError where tokens and images do not fit
        each other.
        """
        is_image = input_ids == (self.image_token_index if image_token_index is None else image_token_index)
        found = None if images is None else len(images)
        if self.merge is not None:
            imgs_sizes = input_ids.new_empty(0, 3) if imgs_sizes is None else imgs_sizes.to(is_image.device)
            num_image_tiles, found = imgs_sizes.prod(1) // self.merge**2, found and found // self.merge**2
        elif imgs_sizes is not None:
            raise DataError("images of this model are of one size; leave out imgs_sizes")
        pp, tp = self.pg_collection.pp.size(), self.pg_collection.tp.size()
        plan = MergedSequence.plan(
            is_image, None if num_image_tiles is None else num_image_tiles.to(is_image.device), self.img_seq_len,
            # A later stage has tokens alone.
            num_tiles=(found or 0) if self.pre_process else None, longest=self.longest,
            length=self.longest if pp > 1 else None, multiple=tp if self.config.sequence_parallel else 1,
        )  # fmt: skip
        decoder_input = None
        if self.pre_process:
            features = self._encode(images, imgs_sizes)
            decoder_input = self._embed(input_ids.masked_fill(is_image, 0), position_ids, features, plan)
        if self.config.mrope_section is not None and imgs_sizes is not None:
            squares = imgs_sizes // imgs_sizes.new_tensor((1, self.merge or 1, self.merge or 1))
            position_ids = plan.find_positions(is_image, squares)
        places: Tensor | None = None
        weights: Tensor | None = None
        if labels is not None:
            places = plan.place_labels(labels)
            weights = plan.place_loss_mask(
                torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
            )
            weights = weights.masked_fill(places < 0, 0)
            places = places.clamp(min=0)  # any token will do where the weight is 0
        output = self.language_model(
            input_ids, position_ids, None, decoder_input=decoder_input, labels=places,
            runtime_gather_output=runtime_gather_output,
        )  # fmt: skip
        return output, weights if self.post_process else None

    def _encode(self, images: Tensor | None, sizes: Tensor | None) -> Tensor | None:
        """[tiles, 3, img_h, img_w], or patches of images of these sizes -> [features, h], image after image; None
        without images."""
        if images is None or not len(images) or self.vision_model is None or self.vision_projection is None:
            return None
        if sizes is not None:
            projected: Tensor = self.vision_projection(self.vision_model(images, sizes))
            return projected
        features = self.vision_model(images)[:, self.dropped :].transpose(0, 1).contiguous()
        return self.vision_projection(features).transpose(0, 1).flatten(0, 1)

    def _embed(
        self, input_ids: Tensor, position_ids: Tensor | None, features: Tensor | None, plan: MergedSequence
    ) -> Tensor:
        """The language model's input, [t, b, h], with sequence parallelism [t/tp, b, h]."""
        tp = self.pg_collection.tp
        text: Tensor = self.language_model.embedding(input_ids, position_ids)
        if not self.config.sequence_parallel:
            return plan.merge(text, features)
        # Every rank merges the whole sequence, and goes on with its part.
        text = gather_from_sequence_parallel_region(text, tensor_parallel_output_grad=False, group=tp)
        return scatter_to_sequence_parallel_region(plan.merge(text, features), tp)


def _check_configs(
    language: TransformerConfig, projection: TransformerConfig, groups: ProcessGroupCollection
) -> None:  # fmt: skip
    """Raises ConfigError for what a model of images and text does not have."""
    problems = []
    if groups.cp.size() > 1:
        problems.append(f"{language.say('context_parallel_size')} divides sequences of text alone; use 1")
    if language.mtp_num_layers is not None or language.moe_n_hash_layers:
        problems.append("multi-token prediction and experts chosen by tables read tokens, and features are none")
    if language.hybrid_layer_pattern is not None:
        problems.append(f"{language.say('hybrid_layer_pattern')} is of text alone; leave it out")
    if projection.sequence_parallel:
        problems.append("sequence_parallel of the projector's config is True; images need not divide: make it False")
    if projection.hidden_size != language.hidden_size:
        problems.append(
            f"the projector's hidden_size is {projection.hidden_size}, the text model's {language.hidden_size}; "
            "make them equal"
        )
    if problems:
        raise ConfigError(problems)
