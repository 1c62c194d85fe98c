# SPDX-License-Identifier: Apache-2.0
"""The recipe of models that read images and text: GPT's, with LLaVAModel, conversations about images, and a forward
step that hands images over. Their flags are read by argparse, as a script's."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.errors import ConfigError
from megatron.training.config.container import RunConfig
from megatron.training.recipes.forward_step import LossOutput, loss_func
from megatron.training.recipes.gpt import build_gpt_model, build_gpt_recipe
from megatron.training.recipes.gpt_data import choose_dataset
from megatron.training.recipes.recipe import Recipe, SampleCounts

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tokenizers.base import Tokenizer

_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_NORMALISATION = {"clip": _CLIP, "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}
"""Mean and deviation of each colour in the images that published towers were trained on."""


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of pretrain_vlm.py. Where upstream has the name for another program, this one takes its place."""
    parser.conflict_handler = "resolve"
    group = parser.add_argument_group("images")
    add = functools.partial(group.add_argument, type=_read_count)
    group.conflict_handler = "resolve"  # type: ignore[attr-defined]
    group.add_argument(
        "--freeze-LM", action="store_true", dest="freeze_text_model", help="Train no part of the text model."
    )
    group.add_argument(
        "--freeze-ViT", action="store_true", dest="freeze_image_model", help="Train no part of the model of images."
    )
    group.add_argument(
        "--disable-vision-class-token",
        action="store_true",
        help="The text model does not see the class token of images.",
    )
    group.add_argument(
        "--vision-model-type", choices=tuple(_NORMALISATION), default="clip", help="Form of the model of images."
    )
    add("--vision-num-layers", default=24, help="Layers of the model of images.")
    add("--vision-hidden-size", default=1024, help="Width of its features.")
    add("--vision-ffn-hidden-size", default=4096, help="Width of its MLPs.")
    add("--vision-num-attention-heads", default=16, help="Its attention heads.")
    add("--img-h", dest="image_height", default=336, help="Height in pixels that images are resized to.")
    add("--img-w", dest="image_width", default=336, help="Width in pixels that images are resized to.")
    add("--patch-dim", dest="image_patch", default=14, help="Pixels of a patch's side.")
    add("--images-per-sample", default=1, help="Most images of a conversation.")
    group.add_argument(
        "--skip-bad-images",
        action="store_true",
        help="Leave conversations with images that cannot be used out, and count them.",
    )


def _read_count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return value


def build_image_recipe(config: RunConfig, tokenizer: Tokenizer | None = None) -> Recipe:
    """Return what the trainer needs to train the model of images and text that the settings describe; of `extra`, the
    flags of `add_image_flags`. Raises ConfigError and DataError as GPT's recipe, and for data that are no
    conversations."""
    data = config.data
    if data.mock_data or data.sft or data.fim_data or config.preference.dpo:
        raise ConfigError(
            "images come with conversations of a JSONL file; give it as --data-path, without --mock-data, --sft, "
            "--fim-data and --dpo"
        )
    if config.profiling.dry_run:
        raise ConfigError("--dry-run tries models of text; how many images a step has, only its data say: leave it out")
    recipe = build_gpt_recipe(config, tokenizer)
    return Recipe(
        tokenizer=recipe.tokenizer, vocab_size=recipe.vocab_size, padded_vocab_size=recipe.padded_vocab_size,
        build_model=functools.partial(build_image_model, config, recipe.padded_vocab_size),
        build_datasets=functools.partial(build_image_datasets, config, recipe.tokenizer),
        forward_step=forward_step, parallel_axes=("tp", "pp"), max_sequence_length=recipe.max_sequence_length,
    )  # fmt: skip


def count_features(extra: Mapping[str, Any]) -> int:
    """Count the places of the merged sequence that an image takes. Raises ConfigError for images that are not made of
    whole patches."""
    from megatron.core.models.vision.clip_vit_model import get_num_image_embeddings

    return get_num_image_embeddings(
        extra["image_height"], extra["image_width"], extra["image_patch"], extra["vision_model_type"],
        extra["disable_vision_class_token"],
    )  # fmt: skip


def build_image_model(
    config: RunConfig,
    padded_vocab_size: int,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> LLaVAModel:
    """One pipeline chunk of the model; arguments as of `build_gpt_model`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel, build_part_config
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

    text, extra = config.model, config.extra
    length = config.data.seq_length
    assert length is not None, "checked by read_run_config"
    is_clip = extra["vision_model_type"] == "clip"
    vision = build_part_config(
        text, num_layers=extra["vision_num_layers"], hidden_size=extra["vision_hidden_size"],
        ffn_hidden_size=extra["vision_ffn_hidden_size"], num_attention_heads=extra["vision_num_attention_heads"],
        activation_func="quick_gelu" if is_clip else "gelu_tanh", layernorm_epsilon=1e-5 if is_clip else 1e-6,
    )  # fmt: skip
    vision.vision_model_type = extra["vision_model_type"]  # type: ignore[attr-defined]
    projection = build_part_config(
        text, num_layers=1, hidden_size=text.hidden_size, ffn_hidden_size=text.hidden_size,
        num_attention_heads=text.tensor_model_parallel_size, activation_func="gelu",
    )  # fmt: skip
    model = LLaVAModel(
        text, get_gpt_layer_local_spec(), padded_vocab_size, length, vision, get_vit_layer_with_local_spec(),
        extra["disable_vision_class_token"], projection, get_mlp_module_spec().submodules, pre_process=pre_process,
        post_process=post_process, img_h=extra["image_height"], img_w=extra["image_width"],
        patch_dim=extra["image_patch"], pg_collection=pg_collection, vp_stage=vp_stage,
        build_language_model=functools.partial(build_gpt_model, config, padded_vocab_size),
    )  # fmt: skip
    model.freeze(extra["freeze_text_model"], extra["freeze_image_model"], freeze_vision_projection=False)
    return model


def build_image_datasets(config: RunConfig, tokenizer: Tokenizer, num_samples: SampleCounts) -> Sequence[Any]:
    """Training, validation and test data with at least `num_samples` samples; None where there are none. Raises as
    `build_gpt_datasets`."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.image_dataset import ImageConversationDataset, ImageDatasetConfig

    extra, (_, settings) = config.extra, choose_dataset(config, tokenizer)
    mean, deviation = _NORMALISATION[extra["vision_model_type"]]
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings) if field.init}
    of_images = ImageDatasetConfig(
        **given, image_height=extra["image_height"], image_width=extra["image_width"],
        features=count_features(extra), images_per_sample=extra["images_per_sample"], mean=mean, deviation=deviation,
        skip_bad_images=extra["skip_bad_images"],
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(ImageConversationDataset, num_samples, lambda: True, of_images).build()


def forward_step(
    batches: Iterator[dict[str, Tensor]], model: DistributedDataParallel
) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
    """The model on the next microbatch: the loss of each place of the merged sequence, [b, t], and how to reduce it."""
    from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX

    batch = next(batches)
    tokens = batch["tokens"].masked_fill(batch["is_image"], DEFAULT_IMAGE_TOKEN_INDEX)
    output, weights = model(
        batch["images"][batch["has_image"]], tokens, batch["position_ids"], labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )  # fmt: skip
    return output, functools.partial(loss_func, weights)
