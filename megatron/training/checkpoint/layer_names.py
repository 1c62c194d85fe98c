# SPDX-License-Identifier: Apache-2.0
"""What a hybrid asks of checkpoints that name its tensors otherwise: a GPT's, and upstream's.

    hybrid *-*E, layers 0 to 3               GPT, layers 0 and 1
    decoder.layers.2.self_attention.*        decoder.layers.1.self_attention.*
    decoder.layers.3.mlp.*                   decoder.layers.1.mlp.*
    decoder.final_norm.*                     decoder.final_layernorm.*

    here                                     upstream's torch_dist
    mixer.in_proj.weight                     mixer.in_proj.weight.z, .x, .B, .C, .dt: each section by itself

Only names change: every format can be read, in any layout, with the optimizer's state.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, SlicedTensor
from megatron.core.errors import CheckpointError
from megatron.core.placement import Piece
from megatron.core.plan.model_plan import ModelPlan
from megatron.core.plan.read import read_plan
from megatron.core.plan.state_kinds import list_delta_2_sections, list_delta_sections, list_mamba_sections
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.checkpoint.differences import Change
from megatron.training.run import Run

_LAYER = re.compile(r"(?P<start>(?:.*\.)?decoder)\.layers\.(?P<number>\d+)\.(?P<rest>.+)")
_FINAL_NORMS = {True: ("final_norm", "final_layernorm"), False: ("final_layernorm", "final_norm")}


# ---- hybrid and GPT


def find_renaming(run: Run, changes: Sequence[Change], source: str) -> Callable[[str], str] | None:
    """Return our names -> names in a checkpoint of a GPT, where this is a hybrid, or the other way round; None where
    both are the same. Raises CheckpointError where no layers correspond."""
    patterns = {change.setting.dest: change for change in changes}
    change = patterns.get("hybrid_layer_pattern")
    if change is None or (change.then is None) == (change.now is None):
        return None
    letters = change.now or change.then
    config: TransformerConfig = run.config.model
    layers = patterns["num_layers"].then if "num_layers" in patterns else config.num_layers
    places = _pair_layers(letters, layers if change.then is None else config.num_layers, source)
    is_hybrid = change.now is not None
    numbers = places if is_hybrid else {place: number for number, place in places.items()}
    ours, theirs = _FINAL_NORMS[is_hybrid]

    def rename(name: str) -> str:
        found = _LAYER.fullmatch(name)
        if found is None:
            return name.replace(f"decoder.{ours}.", f"decoder.{theirs}.")
        number, rest = int(found["number"]), found["rest"]
        part = "mlp" if rest.startswith(("mlp.", "pre_mlp_layernorm.", "post_mlp_layernorm.")) else "attention"
        key = number if is_hybrid else (number, part)
        place: Any = numbers[key]  # type: ignore[index]
        return f"{found['start']}.layers.{place[0] if is_hybrid else place}.{rest}"

    return rename


def _pair_layers(letters: str, layers_of_both: int, source: str) -> dict[int, tuple[int, str]]:
    """Pair each layer of a hybrid with a GPT's layer and its part: the n-th attention, the n-th MLP. layers_of_both:
    the GPT's layers, each with both parts."""
    kinds = {"*": "attention", "+": "attention", "-": "mlp", "E": "mlp"}
    main, _, prediction = letters.partition("/")
    main, counts, places = main.replace("|", ""), {"attention": 0, "mlp": 0}, {}
    for number, letter in enumerate(main):
        part = kinds.get(letter)
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


def rename_tensors(tensors: ShardedStateDict, rename: Callable[[str], str]) -> ShardedStateDict:
    """What to load in place of tensors: the same memory under other names."""
    renamed = {}
    for key, tensor in tensors.items():
        fallback = None if tensor.fallback_key is None else rename(tensor.fallback_key)
        renamed[rename(key)] = dataclasses.replace(tensor, key=rename(tensor.key), fallback_key=fallback)
    return renamed


# ---- sections in upstream's files


def ask_for_sections(config: TransformerConfig, tensors: ShardedStateDict) -> ShardedStateDict:
    """What to load in place of tensors where each section of a mixer's projection is a tensor of its own."""
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
    found = re.fullmatch(r"(?:.*\.)?((?:decoder|mtp)\.layers\..+)\.(?:in_proj\.weight|conv1d\.(?:weight|bias))", key)
    layer = None if found is None else plan.find(f"{found[1]}.")
    if layer is None:
        return {}
    lists = {
        "mamba": (list_mamba_sections, ("x", "B", "C")),
        "gated_delta_net": (list_delta_sections, ("query", "key", "value")),
        "gated_delta_net_2": (list_delta_2_sections, ("query", "key", "value")),
    }
    for kind, (list_sections, convolved) in lists.items():
        if layer.has(kind):
            sections = list_sections(config)
            return {name: sections[name] for name in convolved} if ".conv1d." in key else sections
    return {}


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
