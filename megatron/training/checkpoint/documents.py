# SPDX-License-Identifier: Apache-2.0
"""The JSON documents of a checkpoint, looked over before a run uses them.

The manifest says that a file is as somebody wrote it, not that this program did: what a run counts and draws on from
is data from elsewhere, as the tensors are, and what is odd in it is refused with the name of the file and the field.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.serialization import read_document
from megatron.core.errors import CheckpointError
from megatron.training.run import Progress

STATE, RNG, CONFIG = "state", "rng", "config"
"""Names of documents: progress, schedule and optimizer's counts; Python's and numpy's generators; the settings."""
_LARGEST_COUNT = 2**63
_WORD = 2**32
_WORDS = 624
"""Words in the state of a Mersenne twister, which both generators are (Matsumoto and Nishimura 1998)."""


def read_state(checkpoint: Path, *, counts_steps: bool = True) -> dict[str, Any]:
    """`state.json`: progress, optimizer and scheduler, the last two None where they were not saved. Raises
    CheckpointError.

    counts_steps: whether the run's scheduler is this program's, whose state has a count; a user's scheduler checks its
    state itself.
    """
    state = read_document(checkpoint, STATE)
    _require(isinstance(state, dict), checkpoint, STATE, "the whole of it")
    for name in ("progress", "optimizer", "scheduler"):
        part = state.get(name)
        # Both or neither: --no-save-optim leaves None for each.
        may_lack = name != "progress" and name in state and state.get("optimizer") is state.get("scheduler") is None
        _require(isinstance(part, dict) or may_lack, checkpoint, STATE, name)
    # Checkpoints of later releases may hold what this one does not know, of whatever kind.
    for count in dataclasses.fields(Progress):
        _require(_is_count(state["progress"].get(count.name, 0)), checkpoint, STATE, f"progress.{count.name}")
    counts = [("optimizer", "step_count"), *([("scheduler", "num_steps")] if counts_steps else [])]
    for part, name in counts:
        if state[part] is not None:
            _require(_is_count(state[part].get(name)), checkpoint, STATE, f"{part}.{name}")
    scaler = (state["optimizer"] or {}).get("grad_scaler", {})
    _require(isinstance(scaler, dict), checkpoint, STATE, "optimizer.grad_scaler")
    # Older checkpoints have none.
    hooks = state.get("hooks", {})
    _require(isinstance(hooks, dict), checkpoint, STATE, "hooks")
    return state


def read_rng(checkpoint: Path, rank: int) -> dict[str, Any]:
    """`rng.json`: the layout, and an entry for each rank, of which `rank`'s is checked, if there is one.
    Raises CheckpointError."""
    document = read_document(checkpoint, RNG)
    _require(isinstance(document, dict), checkpoint, RNG, "the whole of it")
    layout, ranks = document.get("layout", {}), document.get("ranks")
    is_layout = isinstance(layout, dict) and all(map(_is_count, layout.values()))
    _require(is_layout, checkpoint, RNG, "layout")
    _require(isinstance(ranks, list), checkpoint, RNG, "ranks")
    if rank < len(ranks):
        entry, place = ranks[rank], f"ranks[{rank}]"
        _require(isinstance(entry, dict), checkpoint, RNG, place)
        _require(isinstance(entry.get("torch"), dict), checkpoint, RNG, f"{place}.torch")
        _require(_is_python_state(entry.get("python")), checkpoint, RNG, f"{place}.python")
        _require(_is_numpy_state(entry.get("numpy")), checkpoint, RNG, f"{place}.numpy")
    return document


def _require(is_as_written: bool, checkpoint: Path, name: str, field: str) -> None:
    if not is_as_written:
        raise CheckpointError(
            f"{checkpoint / name}.json is not as this program writes it: {field} is missing or of another kind; "
            "take another checkpoint with --ckpt-step, or the weights alone with --finetune"
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_COUNT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_words(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(_is_count(v) and v < _WORD for v in values)


def _is_python_state(value: Any) -> bool:
    """Return True if this is what `random.getstate()` returned, with the position after the words."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    version, internal, gauss_next = value
    is_state = _are_words(internal, _WORDS + 1) and internal[-1] <= _WORDS
    return version == 3 and is_state and (gauss_next is None or _is_number(gauss_next))


def _is_numpy_state(value: Any) -> bool:
    """Return whether this is what `numpy.random.get_state()` returned."""
    if not isinstance(value, list) or len(value) != 5:
        return False
    name, keys, position, has_gauss, cached = value
    is_state = _are_words(keys, _WORDS) and _is_count(position) and position <= _WORDS
    return name == "MT19937" and is_state and has_gauss in (0, 1) and _is_number(cached)
