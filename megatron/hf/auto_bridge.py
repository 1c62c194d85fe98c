# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model as an object, from Python: as our model on one process, and out of a running one.

bridge = AutoBridge.from_hf_pretrained("Llama-3.1-8B")
model = bridge.to_megatron()
...                                 # train it, change it
bridge.save_hf("result")

for name, tensor in bridge.export_weights(run.model):   # on all ranks of a run, whatever its layout
    ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import model_state
from megatron.core.errors import ConfigError
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stacked_parameters import list_parameters
from megatron.core.tensor_parallel.parameters import declare_vocabulary
from megatron.hf.conversion import Source, open_source
from megatron.hf.entries import Entry, list_entries
from megatron.hf.running import GENERATION_CONFIG, describe_run, list_files, write_model
from megatron.hf.weight_stream import WeightStream
from megatron.training.checkpoint.run_tensors import build_sharded_chunk_state
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files
from megatron.training.config.container import RunConfig
from megatron.training.recipes.families import FAMILIES
from megatron.training.recipes.family import Family
from megatron.training.recipes.gpt import build_gpt_model
from megatron.training.recipes.hf_config import CONFIG_JSON, read_model_fields

if TYPE_CHECKING:
    from megatron.core.distributed.model_chunk import ModelChunk
    from megatron.training.run import Run


class AutoBridge:
    """A model with its names and settings at Hugging Face; `from_hf_pretrained` and `from_run` make it."""

    def __init__(
        self,
        config: RunConfig,
        entries: list[Entry],
        config_json: Mapping[str, Any],
        files: Mapping[str, Path],
        *,
        source: Source | None = None,
        model: nn.Module | Sequence[ModelChunk] | None = None,
    ) -> None:
        """files: name in a Hugging Face directory -> what else belongs there. model: what is exported when none is
        given."""
        self.config = config
        """Our settings of the model."""
        self._entries = entries
        self._config_json = config_json
        self._files = files
        self._source = source
        self._model = model

    @classmethod
    def from_hf_pretrained(cls, path: str | Path, families: Sequence[Family] = FAMILIES) -> AutoBridge:
        """Look at a directory that `save_pretrained()` wrote; weights are read later.

        families: known families; put yours first: (MINE, *FAMILIES). Raises CheckpointError or
        ConfigError for missing files and tensors, other shapes, unknown models.
        """
        source = open_source(Path(path), asked_by="from_hf_pretrained()", families=families)
        files = [*list_tokenizer_files(source.config.tokenizer).values(), source.path / GENERATION_CONFIG]
        kept = {file.name: file for file in files if file.is_file()}
        fields = read_model_fields(source.path / CONFIG_JSON)
        fields.pop("quantization_config", None)  # weights are dequantised when they are read
        return cls(source.config, source.entries, fields, kept, source=source)

    @classmethod
    def from_run(cls, run: Run) -> AutoBridge:
        """The model of a run. Raises ConfigError for one that no family of Hugging Face's computes."""
        vocab_size = run.recipe.vocab_size
        family, config_json = describe_run(run.config, vocab_size)
        entries = list_entries(family, run.config, vocab_size)
        return cls(run.config, entries, config_json, list_files(run.config), model=run.model)

    def to_megatron(self) -> nn.Module:
        """Return a GPTModel with the weights, on torch's default device, in the dtype of the files."""
        if self._source is None:
            raise ConfigError("to_megatron() reads a Hugging Face directory; this model comes from a run")
        vocab_size = self._config_json["vocab_size"]
        # Every weight is read below: nothing needs to be drawn.
        settings = self.config.model.on_one_process(perform_initialization=False)
        config = self.config.with_groups(model=settings)
        model = build_gpt_model(config, vocab_size, pg_collection=ProcessGroupCollection.single())
        declare_vocabulary(model, vocab_size)
        parameters = {get_placement(param, name).name: param for name, param in list_parameters(model)}
        with torch.no_grad():
            for entry in self._entries:
                parameters[entry.key].copy_(entry.join(self._source.read))
        self._model = model
        return model

    def export_weights(
        self, model: nn.Module | Sequence[ModelChunk] | None = None, *, on_all_ranks: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the Hugging Face model one after the other, by their names there, on the model's device.

        model: an undivided model, or this rank's chunks of a run (`run.model`); what `to_megatron` returned last, or
        the model of the run, when None. Of a run every rank must call this and take all tensors; they come to all
        ranks, or only to the first. Tensors may share memory with the parameters: do not train in between. Raises
        ConfigError where there is no model yet, or it is another one.
        """
        return self._open_stream(model, on_all_ranks=on_all_ranks).stream(self._entries)

    def save_hf(self, path: str | Path, model: nn.Module | Sequence[ModelChunk] | None = None) -> Path:
        """Write a Hugging Face directory with the weights of the model; it appears when it is complete. Returns it.

        model: as for `export_weights`; of a run every rank must call this. config.json, tokenizer and generation config
        are the source's; weights keep the model's dtype. Raises ConfigError, StorageError.
        """
        weights = self._open_stream(model, on_all_ranks=False)
        key = "dtype" if "dtype" in self._config_json else "torch_dtype"
        number_format = str(weights.get_dtype(self._entries[0].key)).removeprefix("torch.")
        config_json = {**self._config_json, key: number_format}
        write_model(Path(path), self._entries, config_json, self._files, weights, asked_by="save_hf()")
        return Path(path)

    def _open_stream(self, model: nn.Module | Sequence[ModelChunk] | None, *, on_all_ranks: bool) -> WeightStream:
        chosen = self._model if model is None else model
        if chosen is None:
            raise ConfigError("there is no model to export; call to_megatron() first, or give the model")
        if isinstance(chosen, nn.Module):
            named = list_parameters(chosen)
            state = model_state((param.detach(), get_placement(param, name)) for name, param in named)
            weights = WeightStream(state, ProcessGroupCollection.single().world)
        else:
            state = build_sharded_chunk_state(chosen)
            weights = WeightStream(state, chosen[0].groups.world, on_all_ranks=on_all_ranks)
        weights.check(self._entries)
        return weights
