# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model that reads images and text as an object, from Python: as our model, and back.

bridge = ImageTextBridge.from_hf_pretrained("llava-1.5-7b-hf")
model = bridge.to_megatron()        # LLaVAModel; with pg_collection on several processes
...                                 # train it, change it
bridge.save_hf("result")

The text part goes by the table of families, as `AutoBridge`'s models do; the others by vision_towers.py. What the files
hold beyond the model, such as layers behind the one whose features are read, is copied from the source.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.mapping import model_state
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.qwen2_vl_vision_model import Qwen2VLVisionModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.core.tensor_parallel.parameters import declare_vocabulary
from megatron.hf.checkpoints import fresh_directory
from megatron.hf.conversion import Source, open_source, write_json_and_files
from megatron.hf.entries import Entry, list_shapes, list_their_shapes
from megatron.hf.rows import list_names, read_part, split_name
from megatron.hf.tensor_files import write_tensors
from megatron.hf.vision_towers import PREFIXES, ImageSettings, find_aliases, is_passed_over, read_image_settings
from megatron.hf.weight_stream import WeightStream
from megatron.training.recipes.family import find_row
from megatron.training.recipes.gpt import build_gpt_model
from megatron.training.recipes.hf_config import CONFIG_JSON, read_json

_TEXT = "language_model."
_WEIGHTS = (".safetensors", ".bin", ".index.json")


class ImageTextBridge:
    """A model with its names and settings at Hugging Face; `from_hf_pretrained` makes it."""

    def __init__(self, source: Source) -> None:
        """source: of the text model. Raises CheckpointError or ConfigError as `from_hf_pretrained`."""
        self._source = source
        self._fields = read_json(source.path / CONFIG_JSON)
        self.config = source.config
        """Our settings of the text model."""
        self._entries = self._list_entries()
        self._passed_over = self._check_tensors()
        self._model: LLaVAModel | None = None

    @classmethod
    def from_hf_pretrained(cls, path: str | Path) -> ImageTextBridge:
        """Look at a directory that `save_pretrained()` wrote; weights are read later. Raises CheckpointError or
        ConfigError for missing files and tensors, other shapes, unknown models."""
        return cls(open_source(Path(path), asked_by="from_hf_pretrained()"))

    @property
    def settings(self) -> ImageSettings:
        """The settings of the parts that see images, on one process."""
        return read_image_settings(self._fields, self._source.path / CONFIG_JSON, self.config.model)

    def to_megatron(
        self, pg_collection: ProcessGroupCollection | None = None, *, sequence_parallel: bool = False
    ) -> LLaVAModel:
        """Return the model with the weights, or this process's part of it, on torch's default device, in the dtype of
        the files. pg_collection: groups of tensor and pipeline parallelism; one process when None."""
        groups = ProcessGroupCollection.single() if pg_collection is None else pg_collection
        model = self._build(groups, perform_initialization=False, sequence_parallel=sequence_parallel)
        parameters = {get_placement(param, name).name: param for name, param in list_parameters(model)}
        with torch.no_grad():
            for entry in self._entries:
                parameter = parameters.get(entry.key)
                if parameter is not None:  # else on another stage
                    parameter.copy_(get_placement(parameter, entry.key).take(entry.join(self._read)))
        self._model = model
        return model

    def save_hf(self, path: str | Path, model: LLaVAModel | None = None) -> Path:
        """Write a Hugging Face directory with the weights of the model; it appears when it is complete. Returns it.

        model: what `to_megatron` returned last when None; of several processes each must call this. All other files,
        and tensors that the model does not read, are the source's. Raises ConfigError, StorageError.
        """
        chosen, directory = model or self._model, Path(path)
        if chosen is None:
            raise ConfigError("there is no model to save; call to_megatron() first, or give the model")
        state = model_state((param.detach(), get_placement(param, name)) for name, param in list_parameters(chosen))
        weights = WeightStream(state, chosen.pg_collection.world, on_all_ranks=False)
        weights.check(self._entries)
        stream = weights.stream(self._entries)
        contents = self._source.tensors.contents
        kept = {name: (contents[name].dtype, contents[name].shape) for name in self._passed_over}
        shapes = dict(list_shapes(self._entries, weights.get_dtype)) | kept
        others = {
            file.name: file
            for file in sorted(self._source.path.iterdir())
            if file.is_file() and file.name != CONFIG_JSON and not file.name.endswith(_WEIGHTS)
        }

        def write() -> None:
            try:
                with fresh_directory(directory, "save_hf()") as temporary:
                    write_json_and_files(temporary, self._fields, others)
                    write_tensors(temporary, shapes, itertools.chain(stream, self._read_passed_over()))
            finally:
                # The other ranks send what they hold, whatever happened to the file.
                for _ in stream:
                    pass

        if not weights.receives:
            for _ in stream:
                pass
        on_first_rank(weights.group, write)
        return directory

    def _read(self, name: str) -> Tensor:
        """A tensor, or one number of it, by its name in the files."""
        return read_part(self._source.tensors.read, name)

    def _read_passed_over(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._passed_over:
            yield name, self._source.tensors.read(name)

    def _build(
        self, groups: ProcessGroupCollection, *, on_meta: bool = False, **changes: bool
    ) -> LLaVAModel:  # fmt: skip
        tp, stage, stages = groups.tp.size(), groups.pp.rank(), groups.pp.size()
        text = self.config.model.on_one_process(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=stages, init_model_with_meta_device=on_meta,
            **changes,
        )  # fmt: skip
        settings = read_image_settings(self._fields, self._source.path / CONFIG_JSON, text)
        text.mrope_section = settings.sections
        config = self.config.with_groups(model=text)
        vocab_size = self._vocab_size
        size: dict[str, Any] = {
            "patch_dim": settings.patch_size,
            "img_h": settings.image_size,
            "img_w": settings.image_size,
        }
        length = config.gpt.max_position_embeddings
        assert length is not None, "checked by read_run_config"
        model = LLaVAModel(
            text, get_gpt_layer_local_spec(), vocab_size, length, settings.vision, get_vit_layer_with_local_spec(),
            settings.drops_class_token, settings.projection, get_mlp_module_spec().submodules,
            pre_process=stage == 0, post_process=stage == stages - 1, image_token_index=settings.image_token,
            pg_collection=groups, **size,
            build_vision_model=_choose_vision_model(settings, size), merge=settings.merge,
            # Rows are added where the ranks could not share the vocabulary.
            build_language_model=functools.partial(build_gpt_model, config, -(-vocab_size // tp) * tp),
        )  # fmt: skip
        declare_vocabulary(model, vocab_size)
        return model

    @property
    def _vocab_size(self) -> int:
        return next(e.placement.logical_shape[0] for e in self._source.entries if e.placement.kind == "embedding")

    def _list_entries(self) -> list[Entry]:
        """The parameters of the whole model, each with its tensors by their names in the files."""
        source, contents = self._source, self._source.tensors.contents
        entries = [
            dataclasses.replace(entry, placement=entry.placement.renamed(_TEXT + entry.key)) for entry in source.entries
        ]
        aliases, settings = dict(source.aliases), self.settings
        for name, parameter in list_parameters(self._build(ProcessGroupCollection.single(), on_meta=True)):
            placement = get_placement(parameter, name)
            part, _, own = placement.name.partition(".")
            if part == _TEXT.removesuffix("."):
                continue
            row = find_row(settings.tower, own)
            assert row is not None, f"the table of towers has no row for {own}"
            config = settings.vision if part == "vision_model" else settings.projection
            names = list_names(row, own, config)
            aliases |= find_aliases(names[0], contents)
            entries.append(Entry(placement, row, names, config))

        def rename(name: str) -> str:
            base = split_name(name)[0]
            return aliases.get(base, base) + name.removeprefix(base)

        return [
            dataclasses.replace(
                entry, names=[[rename(name) for name in names] for names in entry.names],
                copies=tuple(rename(name) for name in entry.copies),
            )
            for entry in entries
        ]  # fmt: skip

    def _check_tensors(self) -> list[str]:
        """Names of tensors that the model does not read. Raises CheckpointError for tensors of its parts that are
        missing, have another shape or no place."""
        contents, problems = self._source.tensors.contents, []
        expected = list_their_shapes(self._entries)
        for name, shape in expected.items():
            stored = contents.get(name)
            if stored is None:
                problems.append(f"{name} is missing")
            elif stored.shape != shape:
                problems.append(f"{name} is {stored.shape} in {stored.file.name}, and config.json makes it {shape}")
        further = sorted(set(contents) - set(expected))
        # What the text model leaves out has been judged when its source was opened.
        of_images = [name for name in further if name.removeprefix("model.").startswith(PREFIXES)]
        problems += [
            f"{name} in {contents[name].file.name} belongs to no model of this form"
            for name in of_images
            if not is_passed_over(name, self.settings)
        ]
        if problems:
            more = f"; and {len(problems) - 5} more" if problems[5:] else ""
            raise CheckpointError(
                f"{self._source.path} does not hold the model that its config.json describes: "
                f"{'; '.join(problems[:5])}{more}"
            )
        return further


def _choose_vision_model(settings: ImageSettings, size: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """The constructor of the tower, without its groups. size: of patches and images."""
    spec, subtype = get_vit_layer_with_local_spec(), settings.tower.subtype
    if settings.merge is not None:
        return functools.partial(
            Qwen2VLVisionModel, settings.vision, spec, settings.patch_size, settings.frames, settings.merge
        )
    return functools.partial(
        CLIPViTModel, settings.vision, spec, ln_post_impl=None, add_class_token=subtype == "clip",
        model_subtype=subtype, **size,
    )  # fmt: skip
