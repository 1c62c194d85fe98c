# SPDX-License-Identifier: Apache-2.0
"""The random-number state of every process, as a checkpoint keeps it.

torch's generators (of the CPU, of the GPU, and the named streams of the tensor-parallel tracker) are tensors, one set
for each rank; Python's and numpy's generators are numbers in a JSON document, one entry for each rank.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.collectives import all_gather_object
from megatron.core.device import get_rng_state, set_rng_state
from megatron.core.dist_checkpointing.mapping import RNG_PREFIX, ShardedStateDict, ShardedTensor
from megatron.core.process_groups_config import Group
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

_STREAM = "stream."


def get_torch_states() -> dict[str, torch.Tensor]:
    """This process's states by name: "cpu", "cuda", "stream.<name>"; uint8."""
    # A prefix, so that a stream called "cpu" would not be taken for the generator of the CPU.
    streams = {_STREAM + name: state for name, state in get_cuda_rng_tracker().get_states().items()}
    return get_rng_state() | streams


def build_sharded_rng_state(rank: int) -> ShardedStateDict:
    """The states as entries of a checkpoint. Loading fills them; `restore` then makes them effective."""
    entries = (ShardedTensor.whole(f"{RNG_PREFIX}{rank}.{name}", state) for name, state in get_torch_states().items())
    return {entry.key: entry for entry in entries}


def build_rng_document(group: Group, layout: Mapping[str, int], ranks: Collection[int]) -> dict[str, Any]:
    """Return what is not a tensor: one entry for each rank, and the sizes of the parallel axes. ranks: those whose
    numbers this process has, of which each is of one member of `group`."""
    # Both generators have states of a few thousand numbers: small enough for JSON, which can be looked at.
    version, internal, gauss_next = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    entry = {
        "python": [version, list(internal), gauss_next],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": {state: values.numel() for state, values in get_torch_states().items()},
    }
    entries = {rank: entry for ranks, entry in all_gather_object((tuple(ranks), entry), group) for rank in ranks}
    return {"layout": dict(layout), "ranks": [entries[rank] for rank in sorted(entries)]}


@dataclass(frozen=True)
class RandomState:
    """All generators of this process at one moment."""

    python: tuple[Any, ...]
    numpy: Any
    torch: dict[str, torch.Tensor]

    @classmethod
    def take(cls) -> RandomState:
        """The state now."""
        # Every step does this. As a dictionary: numpy takes ten times as long for its older form.
        streams = {_STREAM + name: state for name, state in get_cuda_rng_tracker().look_at_states().items()}
        return cls(random.getstate(), np.random.get_state(legacy=False), get_rng_state() | streams)

    def put_back(self) -> None:
        """Let all generators go on from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        _restore_torch(self.torch)


def explain_unrestorable_state(document: dict[str, Any], group: Group, layout: Mapping[str, int]) -> str | None:
    """None when this job can continue the saved states; otherwise the reason, the same on all ranks."""
    if len(document["ranks"]) != group.size():
        saved = len(document["ranks"])
        return f"the checkpoint was saved by {saved} process{'' if saved == 1 else 'es'}, this run has {group.size()}"
    # Older checkpoints do not say their layout; for them the number of processes has to be enough.
    then = document.get("layout", dict(layout))
    if list(then.items()) != list(layout.items()):
        return f"the checkpoint was saved with the layout {_layout_text(then)}, this run has {_layout_text(layout)}"
    ours = {name: values.numel() for name, values in get_torch_states().items()}
    # Names and lengths differ between a CPU and a GPU; a state of one means nothing to the other.
    fits = ours == document["ranks"][group.rank()]["torch"]
    return None if all(all_gather_object(fits, group)) else "the checkpoint was saved on another kind of device"


def _layout_text(layout: Mapping[str, int]) -> str:
    """`tp 2, pp 4`: the axes that are divided, in order."""
    divided = (f"{axis} {size}" for axis, size in layout.items() if size > 1 and axis in ("tp", "cp", "dp", "pp"))
    return ", ".join(divided)


def restore(document: dict[str, Any], tensors: ShardedStateDict, rank: int) -> None:
    """Continue this process's generators from the document and from the loaded entries of `build_sharded_rng_state`."""
    entry = document["ranks"][rank]
    version, internal, gauss_next = entry["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, cached = entry["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    prefix = f"{RNG_PREFIX}{rank}."
    states = {key.removeprefix(prefix): tensor.data for key, tensor in tensors.items() if key.startswith(prefix)}
    _restore_torch(states)


def _restore_torch(states: Mapping[str, torch.Tensor]) -> None:
    # Before the streams, which are stored apart: setting them does not touch the generators set here.
    set_rng_state({name: state for name, state in states.items() if not name.startswith(_STREAM)})
    streams = {name.removeprefix(_STREAM): state for name, state in states.items() if name.startswith(_STREAM)}
    get_cuda_rng_tracker().set_states(streams)
