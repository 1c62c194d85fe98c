"""Upstream's `torch` checkpoints: a pickled file for each model-parallel rank,
iter_0000010/mp_rank_00/model_optim_rng.pt.

    {"model": {"decoder.layers.0.mlp.linear_fc1.weight": tensor, ...}, "args": argparse.Namespace, "iteration": 10, ...}

The file is read with torch's restricted unpickler (safe_pickle.read_restricted).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.directory import TRACKER_NAME, iteration_directory, saved_iterations
from megatron.core.dist_checkpointing.mapping import OPTIMIZER_PREFIX, ShardedTensor
from megatron.core.dist_checkpointing.safe_pickle import read_restricted
from megatron.core.dist_checkpointing.upstream_dist import CommonState, parse_common_state
from megatron.core.dist_checkpointing.validation import fits, refuse_mismatch
from megatron.core.errors import CheckpointError

FILE_NAME = "model_optim_rng.pt"
_NESTINGS = ("model", "state_dict", "module")
_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\."
    r"(local_experts\.(?P<number>\d+)\.(?P<part>linear_fc[12]\.(weight|bias))"
    r"|(?P<grouped_part>linear_fc[12]\.(weight|bias))(?P<grouped_number>\d+))"
)
"""One expert's tensor: under a name of its own, or numbered, as upstream's grouped layers have them."""


def find_legacy_file(root: Path, iteration: int | None = None) -> Path | None:
    """The file of rank 0 in a directory of upstream checkpoints (or in one checkpoint); None when there is none.

    The tracker names an iteration or `release`; without one, the newest iteration or `release/` is taken.
    """
    candidates = [root]
    if iteration is not None:
        candidates = [iteration_directory(root, iteration)]
    else:
        tracker = root / TRACKER_NAME
        text = tracker.read_bytes()[:64].decode("ascii", "replace").strip() if tracker.is_file() else ""
        if re.fullmatch("[0-9]{1,12}", text):
            candidates.append(iteration_directory(root, int(text)))
        candidates.append(root / "release")
        candidates += [iteration_directory(root, saved) for saved in saved_iterations(root)]
    for candidate in candidates:
        ranks = sorted(path.parent.name for path in candidate.glob(f"mp_rank_*/{FILE_NAME}"))
        if ranks:
            return candidate / ranks[0] / FILE_NAME
    return None


class LegacyWeights(NamedTuple):
    """The full tensors of a file."""

    tensors: dict[str, Tensor]
    """Upstream's parameter name -> the full tensor, on the CPU; its optimizer state under the keys of mapping.py."""
    ignored: list[str]
    """Names beside them that have no place here: `_extra_state`."""
    common: CommonState
    """What is no tensor."""


def read_legacy_weights(path: Path, *, with_optimizer: bool = False) -> LegacyWeights:
    """The weights in a file, and the optimizer's state.

    Raises CheckpointError when the file is damaged, names a class we do not know, or has no state that can be used.
    """
    content = read_restricted(path, str(path), mmap=True)
    # mmap: tensors are read from the file when they are copied, so the whole model is never in memory twice.
    weights = _innermost(content)
    if weights is None:
        raise CheckpointError(f"{path} holds no weights; expected {{'model': {{name: tensor}}}}")
    ignored = [name for name, value in weights.items() if "_extra_state" in name or not isinstance(value, Tensor)]
    kept = {name.removeprefix("module."): value for name, value in weights.items() if name not in ignored}
    # Weights may stand in a file of their own, without anything beside them.
    common = parse_common_state({} if weights is content else content, str(path))
    try:
        state = _name_optimizer_state(content.get("optimizer"), kept, path) if with_optimizer else {}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the optimizer state is not as upstream writes it ({error!r})") from None
    return LegacyWeights(_with_stacked_experts(kept | state, path), ignored, common)


def _name_optimizer_state(optimizer: Any, weights: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The optimizer's tensors by key; upstream numbers the parameters group by group, in the model's order.

    A group holds the parameters with weight decay, or the vectors, which have none.
    """
    refusal = "pass --no-load-optim or --finetune"
    if not isinstance(optimizer, dict):
        raise CheckpointError(f"{path} holds no optimizer state; {refusal}")
    main = optimizer.get("fp32_from_fp16_params")
    inner = optimizer.get("optimizer", optimizer)  # mixed precision wraps it
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
        raise CheckpointError(f"{path}: the state of upstream's distributed optimizer lies elsewhere; {refusal}")
    found: dict[str, Tensor] = {}
    for number, group in enumerate(inner["param_groups"]):
        names = [name for name, tensor in weights.items() if _is_undecayed(name, tensor) == (group["wd_mult"] == 0)]
        if len(names) != len(group["params"]):
            raise CheckpointError(
                f"{path}: group {number} of the optimizer has {len(group['params'])} parameters, the weights that "
                f"belong there are {len(names)}; {refusal}"
            )
        kinds = [dict(inner["state"].get(index, {})) for index in group["params"]]
        for position, (name, state) in enumerate(zip(names, kinds, strict=True)):
            state.pop("step", None)
            if main is not None:
                state["fp32_param"] = main[number][position]
            for kind, tensor in state.items():
                if tensor.shape != weights[name].shape:
                    raise CheckpointError(
                        f"{path}: {kind} of {name} is {tuple(tensor.shape)}, the weight is "
                        f"{tuple(weights[name].shape)}; {refusal}"
                    )
                found[f"{OPTIMIZER_PREFIX}{kind}.{name}"] = tensor
    return found


def _is_undecayed(name: str, tensor: Tensor) -> bool:
    """Upstream's rule: vectors and biases are in a group without weight decay."""
    return tensor.dim() == 1 or name.endswith(".bias")


def _with_stacked_experts(weights: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The same with one tensor [experts, ...] in place of each expert's own."""
    others, by_name = {}, defaultdict[str, dict[int, Tensor]](dict)
    for name, tensor in weights.items():
        found = _EXPERT.fullmatch(name)
        if found is None:
            others[name] = tensor
            continue
        number, part = found["number"] or found["grouped_number"], found["part"] or found["grouped_part"]
        by_name[f"{found['experts']}.{part}"][int(number)] = tensor
    for name, experts in by_name.items():
        # Experts are numbered from 0 without gaps; a gap means that the file is one rank's part of them.
        missing = sorted(set(range(max(experts) + 1)) - set(experts))
        if missing or len({tensor.shape for tensor in experts.values()}) > 1:
            what = f"expert {missing[0]} is missing" if missing else "the experts differ in shape"
            raise CheckpointError(f"{path} cannot be used: {name}: {what}")
        others[name] = torch.stack([experts[number] for number in range(len(experts))])
    return others


def fill_from_full(
    tensors: Iterable[ShardedTensor], weights: Mapping[str, Tensor], elsewhere: Collection[str] = ()
) -> None:
    """Copy full tensors into this process's shards, converted to their number format.

    elsewhere: names that other processes hold. Raises ModelMismatchError that lists every name and shape which does not
    fit.
    """
    tensors = list(tensors)
    problems = []
    sources: dict[str, Tensor] = {}
    for tensor in tensors:
        keys = (key for key in (tensor.key, tensor.fallback_key) if key is not None and key in weights)
        key = next(keys, None)
        if key is None:
            problems.append(f"{tensor.key} is missing (the model's shape is {tensor.global_shape})")
            continue
        sources[tensor.key] = weights[key]
        if not fits(tensor, tuple(weights[key].shape), None):
            found = tuple(weights[key].shape)
            problems.append(f"{tensor.key} is {found} in the checkpoint, {tensor.global_shape} in the model")
    parameters = {name for name in weights if not name.startswith(OPTIMIZER_PREFIX)}
    unknown = sorted(parameters - {tensor.key for tensor in tensors} - set(elsewhere))
    problems += [f"{name} is in the checkpoint only" for name in unknown]
    refuse_mismatch(problems)
    for tensor in tensors:
        _fill(tensor, sources[tensor.key])


def _fill(tensor: ShardedTensor, full: Tensor) -> None:
    rows = full.shape[0] if full.dim() else 1
    for index, block in enumerate(tensor.blocks):
        target = tensor.block(index)
        # Rows that the file lacks keep the values that they were initialised with.
        if block.box and tensor.valid_rows is not None:  # the file may be padded to fewer rows than we are
            start, length = block.box[0]
            length = max(0, min(length, rows - start))
            target, box = target[:length], ((start, length), *block.box[1:])
        else:
            box = block.box
        target.copy_(full[tuple(slice(start, start + length) for start, length in box)])


def _innermost(content: Any) -> dict[str, Any] | None:
    """The dictionary of weights, whether it stands alone or below `model`, `state_dict` or `module`."""
    while isinstance(content, dict):
        if any(isinstance(value, Tensor) for value in content.values()):
            return content
        content = next((content[key] for key in _NESTINGS if isinstance(content.get(key), dict)), None)
    return None
