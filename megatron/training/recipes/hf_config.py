# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory's config.json and tokenizer as flags of ours: the model that a run is to train on.

Loads neither torch nor any weight, so that a command line with --load hf:DIR is checked as fast as any other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.errors import CheckpointError, ConfigError
from megatron.training.recipes.families import FAMILIES, find_family
from megatron.training.recipes.family import Family
from megatron.training.recipes.family_flags import build_flags

CONFIG_JSON = "config.json"
PREDICTION = "num_nextn_predict_layers"
LENGTH = "--max-position-embeddings"
_MOST_TOKENS = 2**31 - 1
WITHOUT_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
"""Settings that a config.json does not mean by saying nothing: published models are trained on without dropout."""


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a JSON document. Raises CheckpointError."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointError(f"{path} {reason}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must hold an object with fields")
    return content


def read_model_fields(path: Path) -> dict[str, Any]:
    """The fields of a config.json that describe a model of text. Raises CheckpointError."""
    return take_text_model(read_json(path))


def take_text_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model that sees images, too, the fields of the part that reads and writes text; else all."""
    text = fields.get("text_config")
    is_qwen2_vl = str(fields.get("model_type")).startswith("qwen2_vl")
    if isinstance(text, Mapping):
        of_all = ("torch_dtype", "dtype", "quantization_config", *(("tie_word_embeddings",) if is_qwen2_vl else ()))
        text = {name: fields[name] for name in of_all if name in fields} | dict(text)
    else:
        text = dict(fields)
    return _read_as_qwen2(text) if is_qwen2_vl else text


def _read_as_qwen2(text: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Qwen2-VL's text model as Qwen 2's, which it is where a text has no images."""
    ropes = {name: dict(text[name]) for name in ("rope_parameters", "rope_scaling") if isinstance(text.get(name), dict)}
    for rope in ropes.values():
        rope.pop("mrope_section", None)
        for name in ("rope_type", "type"):
            if rope.get(name) == "mrope":
                rope[name] = "default"
    usual = {"rms_norm_eps": 1e-5} | ({} if "rope_parameters" in text else {"rope_theta": 1000000.0})
    of_images = ("vision_config", "vision_start_token_id", "vision_end_token_id", "vision_token_id", "image_token_id",
                 "video_token_id")  # fmt: skip
    kept = {name: value for name, value in text.items() if name not in of_images}
    return usual | kept | ropes | {"model_type": "qwen2"}


def find_family_of(fields: Mapping[str, Any], where: Path, families: Sequence[Family] = FAMILIES) -> Family:
    """The family of a config.json. Raises CheckpointError for one that is not known."""
    try:
        return find_family(str(fields.get("model_type")), families)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def keep_stored_prediction(fields: Mapping[str, Any], names: Container[str] | None) -> dict[str, Any]:
    """The fields of a config.json with the layers of multi-token prediction of which the files hold weights.

    names: of the tensors in the files; all layers are kept where it is None. transformers reads such models without
    these layers, writes them so, and leaves the field as it was.
    """
    name = PREDICTION if PREDICTION in fields else "num_mtp_layers"
    layers, further = fields.get("num_hidden_layers"), fields.get(name)
    if names is None or not isinstance(layers, int) or not isinstance(further, int):
        return dict(fields)
    # As many as there are, however many the field says.
    stored = itertools.takewhile(
        lambda number: f"model.layers.{number}.eh_proj.weight" in names, range(layers, layers + further)
    )
    return {**fields, name: len(list(stored))}


def list_stored_names(directory: Path) -> set[str] | None:
    """Names of the tensors in a directory's safetensors files; None where it has none. Raises CheckpointError."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        return set(read_weight_map(index))
    if not single.is_file():
        return None
    try:
        with single.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except OSError as error:
        raise CheckpointError(f"{single} cannot be read: {error.strerror or error}") from None
    except (ValueError, MemoryError, OverflowError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{single} is no safetensors file, or was cut off; download it again")
    return set(header)


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> the file that it is in, of a model.safetensors.index.json. Raises CheckpointError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map with the file of each tensor; download it again")
    return weight_map


def list_model_flags(fields: Mapping[str, Any], where: Path, families: Sequence[Family] = FAMILIES) -> list[str]:
    """The flags of the model that a config.json describes, and of its tokenizer, as words of a command line.

    fields: of the config.json `where`; the tokenizer is next to it. Raises CheckpointError or ConfigError for a
    model that cannot be built.
    """
    family = find_family_of(fields, where, families)
    vocab_size = fields.get("vocab_size")
    if not isinstance(vocab_size, int) or not 2 <= vocab_size <= _MOST_TOKENS:
        raise CheckpointError(f"{where}: vocab_size is {vocab_size!r}; it must be the number of the embedding's rows")
    try:
        words = " ".join(build_flags(family, fields)).split()
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{where} has fields that describe no {family.name} model: {error}") from None
    if LENGTH not in words:
        # Files of a family without a limit have none.
        words += [LENGTH, "2048"]
    return [*words, *WITHOUT_DROPOUT, *list_tokenizer_flags(where.parent, vocab_size)]


def list_tokenizer_flags(directory: Path, vocab_size: int) -> list[str]:
    """The directory's tokenizer where it has one; the vocabulary has all rows of the embedding in any case."""
    kinds = {"tokenizer.json": ("HuggingFaceTokenizer", directory),
             "tokenizer.model": ("Llama2Tokenizer", directory / "tokenizer.model")}  # fmt: skip
    for file, (kind, path) in kinds.items():
        if (directory / file).is_file():
            found = ["--tokenizer-type", kind, "--tokenizer-model", str(path.resolve())]
            return [*found, "--vocab-size", str(vocab_size)]
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size)]
