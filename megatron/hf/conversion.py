# SPDX-License-Identifier: Apache-2.0
"""A whole model from a Hugging Face directory to a checkpoint of ours, and back; each result is compared with its
source.

    table of families -> entries: for every parameter of ours, its tensors in their files
    import:  their tensors, as they are written, are joined to ours;   export: ours are split
    verify:  the result is read again and taken apart in the other direction, and must be the source, bit for bit

Tensors are made one by one, when they are written, and none is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.agreement import on_every_rank, on_first_rank, with_everyone
from megatron.core.dist_checkpointing.directory import saved_iterations
from megatron.core.dist_checkpointing.durable import storage_errors, write_file
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.errors import CheckpointError
from megatron.core.paths import explain_no_directory
from megatron.core.placement import Box
from megatron.core.process_groups_config import Group
from megatron.hf.adapters import AdaptedCheckpoint
from megatron.hf.checkpoints import (
    ALONE,
    DeferredTensor,
    OpenCheckpoint,
    fresh_directory,
    read_carried,
    write_checkpoint,
)
from megatron.hf.compressed import GLOBAL_SCALE, PACKED, CompressedWeights
from megatron.hf.compressed import SCALE as COMPRESSED_SCALE
from megatron.hf.entries import Entry, count_values, list_entries, list_shapes, list_their_shapes
from megatron.hf.progress import ConversionProgress
from megatron.hf.quantised import SCALE, DequantisedTensors, FP8Weights
from megatron.hf.rows import join_numbers, read_part, split_name
from megatron.hf.settings import build_config_json, read_settings
from megatron.hf.tensor_files import (
    TensorDirectory,
    is_buffer,
    list_own_names,
    open_tensors,
    plan_files,
    write_tensors,
)
from megatron.training.checkpoint.tokenizer_assets import DIRECTORY as TOKENIZER
from megatron.training.checkpoint.tokenizer_assets import list_tokenizer_files
from megatron.training.config.container import RunConfig
from megatron.training.recipes.families import FAMILIES, find_family
from megatron.training.recipes.family import Family, find_row
from megatron.training.recipes.family_flags import list_unknown
from megatron.training.recipes.hf_config import (
    CONFIG_JSON,
    PREDICTION,
    keep_stored_prediction,
    read_model_fields,
    take_text_model,
)

CARRIED = "huggingface"
"""Directory of a checkpoint for the files of the source that only Hugging Face's programs read."""
_CARRIED_FILES = (CONFIG_JSON, "generation_config.json")
_EMBEDDING = "embedding.word_embeddings.weight"
_GPT2_PREFIX = "transformer."
_TEXT_PREFIXES = ("language_model.", "model.language_model.")


# ---- import


@dataclass(frozen=True)
class Source:
    """A Hugging Face directory that has been checked: each of its tensors has a place in the model."""

    path: Path
    config: RunConfig
    entries: list[Entry]
    tensors: TensorDirectory
    aliases: Mapping[str, str]
    """Name in the table -> name in the file, where they differ."""
    notes: list[str]

    def read(self, name: str) -> Tensor:
        """A tensor by its name in the table."""
        return read_part(lambda base: self.tensors.read(self.aliases.get(base, base)), name)

    def read_box(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, by its name in the table: (start, length) for each dimension."""
        base, index = split_name(name)
        return self.tensors.read_box(self.aliases.get(base, base), box if index is None else ((index, 1),))

    def find_dtype(self, entry: Entry) -> torch.dtype:
        """Return the dtype of a parameter of ours. Raises CheckpointError where their tensors have several."""
        named = {split_name(name)[0] for names in entry.names for name in names}
        stored = {name: self.tensors.contents[self.aliases.get(name, name)] for name in sorted(named)}
        first_name, first = next(iter(stored.items()))
        for name, tensor in stored.items():
            if tensor.dtype != first.dtype:
                raise CheckpointError(
                    f"{tensor.file}: {name} is {tensor.dtype}, and {first_name} is {first.dtype}; tensors that become "
                    f"{entry.key} must have one number format"
                )
        return first.dtype


def open_source(
    path: Path,
    *,
    tensor_ranks: int = 1,
    stages: int = 1,
    asked_by: str = "--input-path",
    families: Sequence[Family] = FAMILIES,
    with_prediction: bool = True,
) -> Source:
    """Look at a Hugging Face directory, without reading weights, and check all that can be checked.

    tensor_ranks, stages: a layout that the model must be able to have. asked_by: what named the path, for errors.
    families: those that are known. with_prediction: with its layers of multi-token prediction. Raises CheckpointError
    or ConfigError for missing files and tensors, other shapes, unknown models.
    """
    if problem := explain_no_directory(path):
        raise CheckpointError(f"{asked_by} {path} {problem}")
    if saved_iterations(path) or (path / METADATA_NAME).exists():
        remedy = "give --source megatron" if asked_by == "--input-path" else "leave hf: out"
        raise CheckpointError(f"{asked_by} {path} holds checkpoints, not a model of Hugging Face; {remedy}")
    where = path / CONFIG_JSON
    fields = read_model_fields(where)
    tensors, notes = open_tensors(path), []
    if (quantisation := fields.get("quantization_config")) is not None:
        quantised = DequantisedTensors(tensors, quantisation, where)
        tensors, notes = quantised, [quantised.note]
    further, fields = (
        fields.get(PREDICTION),
        keep_stored_prediction(fields, tensors.contents if with_prediction else ()),
    )
    if with_prediction and further != fields.get(PREDICTION):
        notes = [
            *notes,
            f"config.json says {PREDICTION} {further}, and the files hold {fields[PREDICTION]} such layers",
        ]
    sizes: dict[torch.dtype, int] = {}
    for stored in tensors.contents.values():
        sizes[stored.dtype] = sizes.get(stored.dtype, 0) + torch.Size(stored.shape).numel()
    # Some models keep a few small tensors in float32; the dtype of most values is the model's.
    dtype = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    config = read_settings(fields, where, dtype, tensor_ranks=tensor_ranks, stages=stages, families=families)
    family = find_family(str(fields["model_type"]), families)
    if unknown := list_unknown(family, fields):
        notes = [*notes, f"fields of config.json that no {family.name} model has are passed over: {', '.join(unknown)}"]
    entries = [
        # Not every file with further layers has these copies.
        dataclasses.replace(entry, copies=tuple(name for name in entry.copies if name in tensors.contents))
        for entry in list_entries(family, config, fields["vocab_size"])
    ]
    aliases = _find_aliases(list_their_shapes(entries), tensors, family.published)
    entries = [_follow_shapes(entry, tensors, aliases) for entry in entries]
    notes += _check_tensors(path, family, entries, tensors, aliases)
    source = Source(path, config, entries, tensors, aliases, notes)
    for entry in entries:
        source.find_dtype(entry)
    return source


def _follow_shapes(entry: Entry, tensors: TensorDirectory, aliases: Mapping[str, str]) -> Entry:
    """A stack of sections, which transformers cuts into equal parts when it saves one, as these files cut it."""
    first = tensors.contents.get(aliases.get(entry.names[0][0], entry.names[0][0]))
    if entry.row.form != "stacked" or not entry.row.sections or first is None:
        return entry
    by_section = dataclasses.replace(entry, row=dataclasses.replace(entry.row, form="sections"))
    expected = list_their_shapes([by_section])[entry.names[0][0]]
    return by_section if tuple(first.shape) == expected else entry


def _find_aliases(names: Iterable[str], tensors: TensorDirectory, published: Mapping[str, str]) -> dict[str, str]:
    """Map names to the names in the files: published GPT-2 leaves out a prefix, vision models have one more. published:
    see Family."""
    found: dict[str, str] = {}
    for name in names:
        # Before the name, or in place of its first word; the output layer of such a model may stand alone.
        first, second = _TEXT_PREFIXES
        others = [name.removeprefix(_GPT2_PREFIX), first + name, second + name.removeprefix("model.")]
        others += [name.replace(written, there) for written, there in published.items()]
        stored = next((other for other in (name, *others) if other in tensors.contents), name)
        found |= {name: stored} if stored != name else {}
    return found


def _check_tensors(
    path: Path, family: Family, entries: list[Entry], tensors: TensorDirectory, aliases: Mapping[str, str]
) -> list[str]:
    """Raise CheckpointError for tensors that are missing, have another shape or no place; returns notes."""
    expected = {aliases.get(name, name): shape for name, shape in list_their_shapes(entries).items()}
    problems = []
    for name, shape in expected.items():
        stored = tensors.contents.get(name)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != shape:
            problems.append(f"{name} is {stored.shape} in {stored.file.name}, and config.json makes it {shape}")
    layers = entries[0].config.num_layers or 0
    notes, unused, left_out = [], [], []
    sees_images = any(name.startswith(_TEXT_PREFIXES) for name in expected)  # `visual.`: Qwen2-VL without prefixes
    of_text = (*_TEXT_PREFIXES, "lm_head.", *family.left_out)
    of_images = [n for n in tensors.contents if n.startswith("visual.") or (sees_images and not n.startswith(of_text))]
    if of_images:
        notes.append(f"{len(of_images)} tensors are left out, which are not of the text model: {of_images[0]}, ...")
    for name in sorted(set(tensors.contents) - set(expected) - set(of_images)):
        beyond = [int(part) for part in name.split(".") if part.isdigit()][:1]
        if is_buffer(name):
            continue
        if _is_tied_head(family, name, expected):
            notes.append(f"{name} is left out: config.json ties it to the embedding")
        elif (beyond and beyond[0] >= layers) or name.startswith(family.left_out):
            left_out.append(name)
        else:
            unused.append(f"{name} in {tensors.contents[name].file.name} belongs to no {family.name} model")
    if left_out:
        notes.append(
            f"{len(left_out)} tensors of layers behind the {layers} of the model are left out: {left_out[0]}, ..."
            if not left_out[0].startswith(family.left_out)
            else f"{len(left_out)} tensors that transformers does not read either are left out: {left_out[0]}, ..."
        )
    problems += unused
    if problems:
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if problems[5:] else ""
        raise CheckpointError(f"{path} does not hold the model that its config.json describes: {shown}{more}")
    return notes


def _is_tied_head(family: Family, name: str, expected: Mapping[str, object]) -> bool:
    """Return whether a tensor is the output layer of a model whose output layer is the embedding."""
    row = find_row(family, "output_layer.weight")
    names = ("lm_head.weight",) if row is None else row.theirs
    return name in names and name not in expected


def import_model(
    source: Source,
    output: Path,
    *,
    verify: bool = True,
    check: Callable[[Path], object] | None = None,
    group: Group = ALONE,
) -> Path:
    """Write the model of a Hugging Face directory as a checkpoint directory `output`. Returns `output`.

    verify: read it again and compare. check: called with the directory while it still has another name, by the first
    process. group: processes that all call this and do an equal share each. Raises CheckpointError, ConfigError or
    StorageError on all of them; `output` then does not exist.
    """
    with fresh_directory(output, group=group) as temporary:
        progress = ConversionProgress("converting", count_values(source.entries), group)

        def make(entry: Entry) -> Tensor:
            ours = entry.join(source.read)
            progress.advance(ours)
            return ours

        tensors = {
            entry.key: DeferredTensor.of(entry.placement, source.find_dtype(entry), functools.partial(make, entry))
            for entry in source.entries
        }
        carried = {f"{CARRIED}/{name}": source.path / name for name in _CARRIED_FILES}
        files = {name: file for name, file in carried.items() if file.is_file()}
        attachments = list_tokenizer_files(source.config.tokenizer) | files
        write_checkpoint(temporary, tensors, source.config, attachments, group)
        progress.end()
        if verify:
            verify_weights(source.entries, OpenCheckpoint(temporary, group=group).read, source.read, group)
        if check is not None:
            on_first_rank(group, lambda: check(temporary))
    return output


# ---- export


@dataclass(frozen=True)
class Model:
    """A checkpoint of ours that can be written as a Hugging Face directory."""

    checkpoint: OpenCheckpoint
    config: RunConfig
    entries: list[Entry]
    config_json: Mapping[str, object]
    adapters: AdaptedCheckpoint | None = None
    """The checkpoint's adapters, where it has some."""

    def read(self, key: str) -> Tensor:
        """A weight of ours, with the adapters of its layer in it. Raises CheckpointError."""
        return self.checkpoint.read(key) if self.adapters is None else self.adapters.read(key)


def open_model(
    root: Path, iteration: int | None = None, families: Sequence[Family] = FAMILIES, group: Group = ALONE
) -> Model:
    """Look at a checkpoint of ours: which family's model it is.

    root: a directory of checkpoints, or one of them. families: those that are known. group: processes that all call
    this. Raises CheckpointError or ConfigError on all of them.
    """
    checkpoint = OpenCheckpoint(root, iteration, group)
    return with_everyone(group, lambda: _describe(checkpoint, families))


def _describe(checkpoint: OpenCheckpoint, families: Sequence[Family]) -> Model:
    adapted = checkpoint.read_config()
    config = adapted.with_groups(model=adapted.model.without_adapters())
    if _EMBEDDING not in checkpoint.contents:
        raise CheckpointError(f"{checkpoint.path} has no {_EMBEDDING}; it is no checkpoint of a GPT model")
    vocab_size = checkpoint.read_shape(_EMBEDDING)[0]
    dtype = checkpoint.contents[_EMBEDDING].dtype
    carried = read_carried(checkpoint, CARRIED, CONFIG_JSON)
    carried = None if carried is None else take_text_model(carried)
    family, config_json = build_config_json(config, vocab_size, dtype, carried, families)
    entries = list_entries(family, config, vocab_size)
    for entry in entries:
        if entry.key not in checkpoint.contents:
            raise CheckpointError(f"{checkpoint.path} has no {entry.key}, and its settings say that the model has it")
        if checkpoint.read_shape(entry.key) != entry.placement.logical_shape:
            raise CheckpointError(
                f"{checkpoint.path}: {entry.key} is {checkpoint.read_shape(entry.key)}, and the settings make it "
                f"{entry.placement.logical_shape}"
            )
    adapters = None if adapted.model.lora_rank is None else AdaptedCheckpoint(checkpoint, adapted, vocab_size)
    return Model(checkpoint, config, entries, config_json, adapters)


def export_model(
    model: Model,
    output: Path,
    *,
    verify: bool = True,
    check: Callable[[Path], object] | None = None,
    group: Group = ALONE,
    weight_format: str | None = None,
) -> Path:
    """Write a checkpoint of ours as a Hugging Face directory `output`. Returns `output`.

    weight_format: round the matrices of linear layers to one of convert.WEIGHT_FORMATS. verify: read it again and
    compare. check: called with the directory while it still has another name, by the first process. group: processes
    that all call this; each writes some of the files, and compares a share. Raises CheckpointError, ConfigError or
    StorageError on all of them; `output` then does not exist.
    """
    checkpoint = model.checkpoint
    carried = {name: file for name, file in checkpoint.list_attachments(CARRIED).items() if name != CONFIG_JSON}
    others = carried | checkpoint.list_attachments(TOKENIZER)
    shapes = list_shapes(model.entries, lambda key: checkpoint.contents[key].dtype)
    config_json, store = model.config_json, _store_plainly
    if weight_format is not None:
        weights = (
            FP8Weights(model.entries)
            if weight_format == "fp8-block"
            else CompressedWeights(model.entries, weight_format)
        )
        shapes, store = weights.list_shapes(shapes), weights.store
        config_json = {**config_json, "quantization_config": weights.describe()}
    files = plan_files(shapes, group.size())
    share = (group.rank(), group.size())
    own = list_own_names(files, share)

    def write(directory: Path) -> None:
        progress = ConversionProgress("converting", count_values(model.entries), group)
        if group.rank() == 0:
            write_json_and_files(directory, config_json, others)
        tensors = split_all(model.entries, model.read, own, store)
        write_tensors(directory, shapes, watch(tensors, progress), files, share=share)
        progress.end()

    with fresh_directory(output, group=group) as temporary:
        on_every_rank(group, lambda: write(temporary))
        if verify:
            tensors = with_everyone(group, lambda: open_tensors(temporary))
            verify_weights(model.entries, model.read, tensors.read, group, store)
        if check is not None:
            on_first_rank(group, lambda: check(temporary))
    return output


def write_hf_directory(
    directory: Path,
    entries: list[Entry],
    config_json: Mapping[str, object],
    files: Mapping[str, Path],
    tensors: Iterator[tuple[str, Tensor]],
    get_dtype: Callable[[str], torch.dtype],
    *,
    by_a_run: bool = False,
) -> None:
    """Fill an empty directory with a model: config.json, other files to copy by their names there, and the weights.

    tensors: theirs with their names, in the order of the entries. get_dtype: dtype of a parameter of ours, by our name.
    by_a_run: a later run may replace the directory. Raises StorageError.
    """
    progress = ConversionProgress("converting", count_values(entries))
    write_json_and_files(directory, config_json, files)
    write_tensors(directory, list_shapes(entries, get_dtype), watch(tensors, progress), by_a_run=by_a_run)
    progress.end()


def watch(tensors: Iterator[tuple[str, Tensor]], progress: ConversionProgress) -> Iterator[tuple[str, Tensor]]:
    """The same tensors; each is counted once it has been used."""
    for name, tensor in tensors:
        yield name, tensor
        progress.advance(tensor)


def write_json_and_files(directory: Path, config_json: Mapping[str, object], files: Mapping[str, Path]) -> None:
    """Write config.json, and copy other files to their names there. Raises StorageError."""
    with storage_errors(f"writing {directory}"):
        # Sorted and indented, as transformers writes it.
        content = json.dumps(config_json, indent=2, sort_keys=True) + "\n"
        write_file(directory / CONFIG_JSON, content.encode())
        for name, file in files.items():
            shutil.copyfile(file, directory / name)


Store = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]
"""Function that writes what becomes of a tensor of theirs: names and tensors."""


def _store_plainly(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor


def split_all(
    entries: Iterable[Entry],
    read: Callable[[str], Tensor],
    wanted: Collection[str] | None = None,
    store: Store = _store_plainly,
) -> Iterator[tuple[str, Tensor]]:
    """Yield their names and tensors. read: a parameter of ours, by our name. wanted: names that are written; all when
    None."""

    def list_parts() -> Iterator[tuple[str, Tensor]]:
        for entry in entries:
            # A tensor and its scale may be in different files.
            bases = list_their_shapes([entry])
            theirs = [base + end for base in bases for end in ("", SCALE, PACKED, COMPRESSED_SCALE, GLOBAL_SCALE)]
            if wanted is None or any(name in wanted for name in theirs):
                yield from entry.split(read(entry.key))

    for name, tensor in join_numbers(list_parts()):
        yield from ((n, part) for n, part in store(name, tensor) if wanted is None or n in wanted)


# ---- the proof


def verify_weights(
    entries: list[Entry],
    read_ours: Callable[[str], Tensor],
    read_theirs: Callable[[str], Tensor],
    group: Group = ALONE,
    store: Store = _store_plainly,
) -> None:
    """Compare a checkpoint of ours with their files, bit for bit; each process of `group` compares a share. Raises
    CheckpointError that lists what differs, on all."""
    progress = ConversionProgress("comparing", count_values(entries), group)

    def compare() -> list[str]:
        differing = []
        for entry in entries[group.rank() :: group.size()]:
            ours = read_ours(entry.key)
            written = (pair for name, tensor in entry.split(ours) for pair in store(name, tensor))
            for name, tensor in written:
                if describe := _compare(tensor, read_part(read_theirs, name)):
                    differing.append(f"{name} {describe}")
            progress.advance(ours)
        progress.end()
        return differing

    differing = sum(on_every_rank(group, compare), [])
    if differing:
        raise CheckpointError(
            f"the result is not the source, {len(differing)} tensors differ: {'; '.join(differing[:5])}; "
            "this is a fault of the disk or of the program"
        )


def _compare(found: Tensor, expected: Tensor) -> str | None:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"is {found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    # Bytes, not numbers: NaN differs from itself, and 0 equals -0.
    same = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, expected)]
    if torch.equal(*same):
        return None
    return f"differs by up to {(found.double() - expected.double()).abs().max().item():.2e}"
