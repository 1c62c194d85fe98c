"""A Hugging Face directory as an object: its model in our classes, and back, from Python.

bridge = AutoBridge.from_hf_pretrained("Llama-3.1-8B")
model = bridge.to_megatron()
...                                 # train it, change it
bridge.save_hf("result")
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.bridge.checkpoints import fresh_directory
from megatron.bridge.conversion import Source, open_source, write_hf_directory
from megatron.bridge.tensor_files import read_json
from megatron.core.errors import ConfigError
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.parameters import declare_vocabulary
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files
from megatron.training.config.container import RunConfig
from megatron.training.recipes.gpt import build_gpt_model


class AutoBridge:
    """The model of a Hugging Face directory, on one process; `from_hf_pretrained` makes it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._fields = read_json(source.path / "config.json")
        self._model: nn.Module | None = None

    @classmethod
    def from_hf_pretrained(cls, path: str | Path) -> AutoBridge:
        """Look at a directory that `save_pretrained()` wrote; weights are read later.

        Raises CheckpointError or ConfigError for missing files and tensors, other shapes, unknown models.
        """
        return cls(open_source(Path(path)))

    @property
    def config(self) -> RunConfig:
        """Our settings of the model, in the number format of its files."""
        return self._source.config

    def to_megatron(self) -> nn.Module:
        """A GPTModel with the weights, on torch's default device, in the number format of the files."""
        vocab_size = self._fields["vocab_size"]
        # Every weight is read below: nothing needs to be drawn.
        settings = self.config.model.on_one_process(perform_initialization=False)
        config = self.config.with_groups(model=settings)
        model = build_gpt_model(config, vocab_size, pg_collection=ProcessGroupCollection.single())
        declare_vocabulary(model, vocab_size)
        parameters = _name_parameters(model)
        with torch.no_grad():
            for entry in self._source.entries:
                parameters[entry.key].copy_(entry.join(self._source.read))
        self._model = model
        return model

    def export_weights(self, model: nn.Module | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the Hugging Face model one after the other, by their names there.

        model: what `to_megatron` returned last, when None. Tensors may share the memory of its parameters. Raises
        ConfigError where there is no model yet, or it is another one.
        """
        parameters = _name_parameters(self._choose(model))
        for entry in self._source.entries:
            yield from entry.split(parameters[entry.key].detach())

    def save_hf(self, path: str | Path, model: nn.Module | None = None) -> Path:
        """Write a Hugging Face directory with the weights of the model; it appears when it is complete. Returns it.

        model: as for `export_weights`. config.json, tokenizer and generation config are those of the source; weights
        keep the model's number format. Raises ConfigError, StorageError.
        """
        parameters = _name_parameters(self._choose(model))
        dtype = next(iter(parameters.values())).dtype
        key = "dtype" if "dtype" in self._fields else "torch_dtype"
        config_json = {**self._fields, key: str(dtype).removeprefix("torch.")}
        files = [*list_tokenizer_files(self.config.tokenizer).values(), self._source.path / "generation_config.json"]
        with fresh_directory(Path(path), "save_hf()") as temporary:
            write_hf_directory(
                temporary, self._source.entries, config_json, {file.name: file for file in files if file.is_file()},
                lambda key: parameters[key].detach().cpu(), lambda key: parameters[key].dtype,
            )  # fmt: skip
        return Path(path)

    def _choose(self, model: nn.Module | None) -> nn.Module:
        chosen = self._model if model is None else model
        if chosen is None:
            raise ConfigError("there is no model to export; call to_megatron() first, or give the model")
        parameters = _name_parameters(chosen)
        for entry in self._source.entries:
            found = parameters.get(entry.key)
            if found is None or tuple(found.shape) != entry.placement.full_shape:
                shape = "missing" if found is None else f"of shape {tuple(found.shape)}"
                raise ConfigError(
                    f"{entry.key} is {shape} in the model, and {entry.placement.full_shape} in {self._source.path}; "
                    "give an undivided model of the same settings"
                )
        return chosen


def _name_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by their names in the whole model."""
    return {get_placement(parameter, name).name: parameter for name, parameter in model.named_parameters()}
