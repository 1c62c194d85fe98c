# SPDX-License-Identifier: Apache-2.0
"""Names of a hybrid's tensors in checkpoints that name them otherwise: a GPT's, and upstream's.

    hybrid *-*E, layers 0 to 3               GPT, layers 0 and 1
    decoder.layers.2.self_attention.*        decoder.layers.1.self_attention.*
    decoder.layers.3.mlp.*                   decoder.layers.1.mlp.*
    decoder.final_norm.*                     decoder.final_layernorm.*
    a layer with a state (M, G, K)           nothing: it starts with its initial values

    here                                     upstream's torch_dist
    mixer.in_proj.weight                     mixer.in_proj.weight.z, .x, .B, .C, .dt: each section by itself

Only names change: every format can be read, in any layout, with the optimizer's state.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, SlicedTensor
from megatron.core.errors import CheckpointError
from megatron.core.placement import Piece
from megatron.core.plan.model_plan import ModelPlan
from megatron.core.plan.read import read_plan
from megatron.core.plan.state_kinds import STATE_KINDS
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.upstream_checkpoints.sections import KNOWN_KINDS, has_sections, list_rows
from megatron.training.checkpoint.differences import Change
from megatron.training.checkpoint.save_directories import say_once
from megatron.training.run import Run

_LAYER = re.compile(r"(?P<start>(?:.*\.)?decoder)\.layers\.(?P<number>\d+)\.(?P<rest>.+)")
_OF_MLP = ("mlp.", "mlp_hyper_connection.", "pre_mlp_layernorm.", "post_mlp_layernorm.")
_FINAL_NORMS = {True: ("final_norm", "final_layernorm"), False: ("final_layernorm", "final_norm")}


# ---- hybrid and GPT


Rename = Callable[[str], str | None]


def find_renaming(run: Run, changes: Sequence[Change], source: object) -> Rename:
    """Return our names -> names in a checkpoint of a GPT, where this is a hybrid, or the other way round; the same
    names where both are of one kind. Of a hybrid's layers with a state a GPT has nothing (None), and a line says so.

    source: the checkpoint, for messages. Raises CheckpointError where no layers correspond.
    """
    patterns = {change.setting.dest: change for change in changes}
    change = patterns.get("hybrid_layer_pattern")
    if change is None or (change.then is None) == (change.now is None):
        return lambda name: name
    letters, is_hybrid = change.now or change.then, change.now is not None
    config: TransformerConfig = run.config.model
    layers = patterns["num_layers"].then if "num_layers" in patterns else config.num_layers
    places = _pair_layers(letters, layers if is_hybrid else config.num_layers, str(source), may_be_fresh=is_hybrid)
    numbers = places if is_hybrid else {place: number for number, place in places.items()}
    fresh = [layer.number for layer in read_plan(config).decoder if layer.number - 1 not in places] if is_hybrid else []
    if fresh and not config.perform_initialization:
        raise CheckpointError(
            f"{source} is of a GPT, which has nothing for layers {_list(fresh)} of the pattern {letters}; leave out "
            "--no-initialization, so that they start with initial values"
        )
    if fresh:
        what = f"a GPT has no counterpart of layers {_list(fresh)} of the pattern {letters}"
        say_once(run.groups.world, f"{source}: {what}, which start with their initial values")
    ours, theirs = _FINAL_NORMS[is_hybrid]

    def rename(name: str) -> str | None:
        found = _LAYER.fullmatch(name)
        if found is None:
            return name.replace(f"decoder.{ours}.", f"decoder.{theirs}.")
        number, rest = int(found["number"]), found["rest"]
        part = "mlp" if rest.startswith(_OF_MLP) else "attention"
        key = number if is_hybrid else (number, part)
        place: Any = numbers.get(key)  # type: ignore[arg-type]
        if place is None:
            return None
        return f"{found['start']}.layers.{place[0] if is_hybrid else place}.{rest}"

    return rename


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _pair_layers(letters: str, layers_of_both: int, source: str, *, may_be_fresh: bool) -> dict[int, tuple[int, str]]:
    """Pair each layer of a hybrid with a GPT's layer and its part: the n-th attention, the n-th MLP. layers_of_both:
    the GPT's layers, each with both parts. may_be_fresh: layers with a state have no counterpart."""
    kinds = {"*": "attention", "+": "attention", "-": "mlp", "E": "mlp"}
    main, _, prediction = letters.partition("/")
    main, counts, places = main.replace("|", ""), {"attention": 0, "mlp": 0}, {}
    of_states = {kind.letter for kind in STATE_KINDS}
    for number, letter in enumerate(main):
        part = kinds.get(letter)
        if letter in of_states and may_be_fresh:
            continue
        if part is None or prediction.strip("/"):
            what = "multi-token prediction" if part is not None else f"the letter {letter}"
            raise CheckpointError(f"{source}: a GPT has no counterpart of {what} in the pattern {letters}")
        places[number] = (counts[part], part)
        counts[part] += 1
    if set(counts.values()) != {layers_of_both}:
        raise CheckpointError(
            f"{source}: the pattern {letters} has {counts['attention']} layers of attention and {counts['mlp']} of "
            f"MLPs or experts, the GPT {layers_of_both} layers with one of each; give it as many"
        )
    return places


def rename_tensors(tensors: Iterable[ShardedTensor], rename: Rename) -> list[ShardedTensor]:
    """Return what to load in place of tensors: the same memory under other names, without what has none."""
    renamed = []
    for tensor in tensors:
        fallback = None if tensor.fallback_key is None else rename(tensor.fallback_key)
        if (name := rename(tensor.key)) is not None:
            renamed.append(dataclasses.replace(tensor, key=name, fallback_key=fallback))
    return renamed


# ---- sections in upstream's files


def ask_for_sections(config: TransformerConfig, tensors: ShardedStateDict) -> ShardedStateDict:
    """Return what to load in place of tensors where each section of a mixer's projection is a separate tensor."""
    plan, asked = read_plan(config), {}
    for key, tensor in tensors.items():
        sections = _find_sections(config, plan, tensor.fallback_key or key)
        if not sections:
            asked[key] = tensor
        start = 0
        for name, rows in sections.items():
            asked[f"{key}.{name}"] = _take_rows(tensor, name, start, rows)
            start += rows
    return asked


def _find_sections(config: TransformerConfig, plan: ModelPlan, key: str) -> dict[str, int]:
    """Return the rows of each section of a mixer's tensor; nothing for others. key: maybe of optimizer state."""
    if not has_sections(key):
        return {}
    layer = plan.find(key[re.search(r"(decoder|mtp)\.layers\.|$", key).start() :])  # type: ignore[union-attr]
    kind = next((kind for kind in KNOWN_KINDS if layer is not None and layer.has(kind.name)), None)
    return {} if kind is None else list_rows(kind, config, key)


def _take_rows(tensor: ShardedTensor, name: str, start: int, rows: int) -> ShardedTensor:
    """The part of a tensor that is rows [start, start + rows) of the whole one, in the same memory."""
    blocks, views = [], []
    for index, block in enumerate(tensor.blocks):
        (first, length), (local, _) = block.box[0], block.local_box[0]
        low, high = max(first, start), min(first + length, start + rows)
        if low >= high:
            continue
        box = ((low - start, high - low), *block.box[1:])
        blocks.append(Piece(box, ((local + low - first, high - low), *block.local_box[1:]), block.owned))
        if isinstance(tensor, SlicedTensor):
            views.append(tensor.views[index][low - first : high - first])
    fallback = None if tensor.fallback_key is None else f"{tensor.fallback_key}.{name}"
    changes: dict[str, Any] = {"views": tuple(views)} if isinstance(tensor, SlicedTensor) else {}
    return dataclasses.replace(
        tensor, key=f"{tensor.key}.{name}", global_shape=(rows, *tensor.global_shape[1:]), blocks=tuple(blocks),
        fallback_key=fallback, **changes,
    )  # fmt: skip
