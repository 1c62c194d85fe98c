# SPDX-License-Identifier: Apache-2.0
"""--use-checkpoint-args: the model flags that a checkpoint was trained with, so that they need not be written again.

They come before the flags of the YAML file and of the command line, which win. Our checkpoints' are read without torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from megatron.core.config_base import get_settings
from megatron.core.dist_checkpointing.directory import iteration_directory, latest_iteration
from megatron.core.dist_checkpointing.durable import read_file
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.paths import explain_no_directory
from megatron.core.setting import FieldKind, Setting
from megatron.core.transformer.config_fields.adapters import AdapterFields
from megatron.core.transformer.config_fields.architecture import ArchitectureFields
from megatron.core.transformer.config_fields.attention import AttentionFields
from megatron.core.transformer.config_fields.compressed_attention import CompressedAttentionFields
from megatron.core.transformer.config_fields.hyper_connections import HyperConnectionFields
from megatron.core.transformer.config_fields.latent_attention import LatentAttentionFields
from megatron.core.transformer.config_fields.moe import MoEFields
from megatron.core.transformer.config_fields.mtp import MTPFields
from megatron.core.transformer.config_fields.mup import MuPFields
from megatron.core.transformer.config_fields.pipeline import PipelineFields
from megatron.core.transformer.config_fields.positions import PositionFields
from megatron.core.transformer.config_fields.sparse_attention import SparseAttentionFields
from megatron.core.transformer.config_fields.state_mixers import StateMixerFields
from megatron.training.checkpoint.tokenizer_assets import use_saved_files
from megatron.training.config.checkpoint import find_hf_directory
from megatron.training.config.data import TokenizerConfig
from megatron.training.config.model import GPTModelFlags
from megatron.training.flags.declarations import declared_flags
from megatron.training.flags.given import Given, ParsedFlags, Problem
from megatron.training.flags.parser import read_command_line
from megatron.training.recipes.hf_config import (
    CONFIG_JSON,
    keep_stored_prediction,
    list_model_flags,
    list_stored_names,
    read_model_fields,
)

_DOCUMENT, _TENSORS = "config.json", "tensors.json"
# Classes whose fields say what the model is.
_MODEL = (
    ArchitectureFields, AttentionFields, LatentAttentionFields, SparseAttentionFields, StateMixerFields, PositionFields,
    CompressedAttentionFields, HyperConnectionFields, MoEFields, MTPFields, MuPFields, AdapterFields, GPTModelFlags,
)  # fmt: skip
# Names code to run, which only a user's own command line may do.
_NEVER = "spec"


def add_checkpoint_arguments(parsed: ParsedFlags) -> None:
    """Enter what the checkpoint says and nobody has said otherwise, where --use-checkpoint-args is given."""
    given = {dest: entry.value for dest, entry in parsed.given.items()}
    if not given.get("use_checkpoint_args"):
        return
    root = given.get("load") or given.get("pretrained_checkpoint")
    if root is None:
        return  # CheckpointConfig says so
    try:
        # --load comes first, unless it is where a run will save, and empty as yet.
        if (directory := find_hf_directory(root)) is not None:
            _enter_hugging_face(parsed, directory, given)
            return
        path = _checkpoint(Path(root), given.get("ckpt_step"))
        if path is None and _enter_upstream(parsed, Path(root), given):
            return
        base = given.get("pretrained_checkpoint")
        if path is None and base is not None and base != root:
            # The run will begin with it. --ckpt-step is one of --load.
            if (origin := find_hf_directory(base)) is not None:
                _enter_hugging_face(parsed, origin, given)
                return
            root, path = base, _checkpoint(Path(base), None)
            if path is None and _enter_upstream(parsed, Path(base), given | {"ckpt_step": None}):
                return
        # The first start of a script that also serves to continue.
        if path is None and given.get("save") == root:
            parsed.notes.append(
                f"--use-checkpoint-args: {root} holds no checkpoint yet; the flags alone say what to do"
            )
            return
        if path is None:
            what = explain_no_directory(Path(root)) or "holds no checkpoint with settings"
            raise CheckpointError(f"--use-checkpoint-args: {root} {what}; write the flags out")
        _enter(parsed, path, given)
    except (CheckpointError, ConfigError) as error:
        parsed.problems.append(Problem("rule", str(error)))
        # What the checkpoint was to say is not missing on the command line.
        said = {"seq_length"}.union(*(get_settings(cls) for cls in (*_MODEL, TokenizerConfig))) - parsed.given.keys()
        absent = (flag for flag in declared_flags() if flag.dest in said)
        parsed.broken.update(name for flag in absent for name in flag.spellings)


def _checkpoint(root: Path, step: int | None) -> Path | None:
    if (root / _DOCUMENT).exists():
        return root
    iteration = latest_iteration(root) if step is None else step
    path = None if iteration is None else iteration_directory(root, iteration)
    return path if path is not None and (path / _DOCUMENT).exists() else None


def _enter(parsed: ParsedFlags, path: Path, given: dict[str, Any]) -> None:
    try:
        stored = json.loads(read_file(path / _DOCUMENT))
        values = {**stored["model"], **stored["gpt"], "seq_length": stored["data"]["seq_length"]}
        tokenizer = _tokenizer(stored["tokenizer"], path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path / _DOCUMENT} holds no settings that can be used ({error})") from error
    _enter_values(parsed, values, tokenizer, given, _read_rows(path))


def _read_rows(path: Path) -> int | None:
    """Tokens that a checkpoint has a row for; None where it does not say."""
    try:
        rows = json.loads(read_file(path / _TENSORS))["valid_rows"].get("embedding.word_embeddings.weight")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return rows if type(rows) is int else None


def _enter_hugging_face(parsed: ParsedFlags, directory: Path, given: dict[str, Any]) -> None:
    """Enter the model and the tokenizer of a Hugging Face directory; note those where the command line wins."""
    if problem := explain_no_directory(directory):
        raise CheckpointError(f"--use-checkpoint-args: {directory} {problem}")
    where = directory / CONFIG_JSON
    theirs = ParsedFlags()
    fields = keep_stored_prediction(read_model_fields(where), list_stored_names(directory))
    read_command_line(list_model_flags(fields, where), theirs)
    own_tokenizer = "tokenizer_type" in given or not given.get("use_tokenizer_model_from_checkpoint_args", True)
    for dest, entry in theirs.given.items():
        if own_tokenizer and dest in ("tokenizer_type", "tokenizer_model"):
            continue
        if dest in parsed.given:
            ours = parsed.given[dest].value
            if ours != entry.value:
                note = f"--use-checkpoint-args: {entry.flag.name} {ours} is given; {where} has {entry.value}"
                parsed.notes.append(note)
        else:
            parsed.given[dest] = dataclasses.replace(entry, source="checkpoint")


def _enter_upstream(parsed: ParsedFlags, root: Path, given: dict[str, Any]) -> bool:
    """Enter the settings of a checkpoint that upstream wrote; False where there is none."""
    # Loads torch, in whose format upstream keeps its settings.
    from megatron.core.upstream_checkpoints.common_state import find_setting
    from megatron.core.upstream_checkpoints.settings import read_upstream_settings

    found = read_upstream_settings(root, given.get("ckpt_step"))
    if found is None:
        return False
    path, args = found
    named = {flag.dest: find_setting(args, flag.dest, flag.name) for flag in declared_flags()}
    # The padded size follows from the vocabulary's and the layout; upstream writes down what it was.
    values = {name: value for name, value in named.items() if value is not None and name != "padded_vocab_size"}
    try:
        tokenizer = _tokenizer(values, path)
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no settings that can be used ({error})") from error
    _enter_values(parsed, values, tokenizer, given)
    return True


def _enter_values(
    parsed: ParsedFlags,
    values: dict[str, Any],
    tokenizer: dict[str, Any],
    given: dict[str, Any],
    rows: int | None = None,
) -> None:
    """Enter the values that are wanted and that nobody has given; note those where the command line wins. rows: of the
    checkpoint's embedding."""
    wanted = list_model_settings() | {"seq_length"}
    if given.get("use_mp_args_from_checkpoint_args"):
        wanted |= {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
        wanted |= set(_fields_of(("layout",), PipelineFields))
    if given.get("use_tokenizer_model_from_checkpoint_args", True) and "tokenizer_type" not in given:
        wanted |= set(tokenizer)
        values = values | tokenizer
    elif rows is not None:
        # Published models have more rows than tokens.
        wanted |= {"vocab_size"}
        values = values | {"vocab_size": rows}
    for flag in declared_flags():
        value = values.get(flag.dest)
        if flag.dest not in wanted or value is None:
            continue
        # Upstream writes a single value where several are possible.
        value = [value] if isinstance(flag.default, list) and not isinstance(value, list) else value
        if flag.dest in parsed.given:
            ours = parsed.given[flag.dest].value
            if ours != value:
                parsed.notes.append(f"--use-checkpoint-args: {flag.name} {ours} is given; the checkpoint has {value}")
        elif value != flag.default:
            parsed.given[flag.dest] = _given(flag, value)


def _given(flag: Setting, value: Any) -> Given:
    # JSON has no pairs.
    value = tuple(value) if flag.dest == "window_size" and isinstance(value, list) else value
    return Given(flag, value, flag.spell(value), "checkpoint")


def list_model_settings() -> set[str]:
    """Names of the settings that say what the model is, which are taken from a checkpoint."""
    return set(_fields_of(("shape", "function", "shorthand", "numerics"), *_MODEL)) - {_NEVER}


def _fields_of(kinds: Container[FieldKind | None], *classes: type) -> Iterator[str]:
    """The fields that these classes declare, of these kinds."""
    for declaring in classes:
        declared, settings = vars(declaring)["__annotations__"], get_settings(declaring)
        yield from (name for name in declared if settings[name].kind in kinds)


def _tokenizer(stored: dict[str, Any], path: Path) -> dict[str, Any]:
    """The tokenizer's settings, with the files that the checkpoint carries."""
    known = {field.name for field in dataclasses.fields(TokenizerConfig)}
    settings = TokenizerConfig(**{name: value for name, value in stored.items() if name in known})
    return vars(use_saved_files(settings, path))
