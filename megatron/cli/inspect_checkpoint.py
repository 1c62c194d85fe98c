# SPDX-License-Identifier: Apache-2.0
"""Contents of a checkpoint: its tensors as a tree, with shapes, dtypes, bytes, norms, and the run's settings.

    python tools/checkpoint/inspect_checkpoint.py checkpoints --norms --only "decoder.layers.0.*"
    python tools/checkpoint/inspect_checkpoint.py --diff checkpoints/iter_0000100 checkpoints/iter_0000200

PATH is one checkpoint, or a directory of them, of which the newest is taken (or --iteration). Read are our checkpoints
and upstream's, torch_dist and torch; nothing in them is executed. Layers of the same structure are one line, unless
--norms or --all asks for each. With --diff the exit code is 0 where both hold the same values and settings, else 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.byte_progress import ByteProgress
from megatron.core.errors import ConfigError, command_line, format_bytes
from megatron.training.flags.argument import ProgramParser, path

if TYPE_CHECKING:
    import torch

    from megatron.core.upstream_checkpoints.stored_tensors import StoredCheckpoint, StoredTensor

_KINDS = ("weights", "optimizer", "random numbers")
_DOCUMENTS = {"settings": "config", "state": "state"}
"""Name in the report -> document of our checkpoints."""
_LISTED_SETTINGS = 40


def make_parser() -> ProgramParser:
    """Build the parser of the command line."""
    parser = ProgramParser(__doc__)
    parser.add_argument("path", nargs="?", type=path, metavar="PATH", help="a checkpoint, or a directory of them")
    parser.add_argument("--diff", nargs=2, type=path, metavar=("A", "B"), help="compare two checkpoints")
    parser.add_argument("--iteration", type=int, metavar="N", help="which one of a directory of checkpoints")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="tensors whose name fits, such as 'decoder.*'")
    parser.add_argument("--norms", action="store_true", help="read every tensor: norm, largest value, NaN and infinity")
    parser.add_argument("--all", action="store_true", help="a line for every tensor, also of layers that are alike")
    parser.add_argument("--config", action="store_true", help="print the run's settings, too")
    parser.add_argument("--json", action="store_true", help="print JSON: every tensor, state and settings")
    return parser


# ---- one checkpoint


@dataclass(frozen=True)
class Measures:
    """Statistics of a tensor's values, its padding left out."""

    norm: float
    """Of all finite values, as one vector."""
    largest: float
    """Largest absolute value of the finite ones."""
    not_finite: int

    def __str__(self) -> str:
        bad = f"  {self.not_finite} NaN OR INFINITE" if self.not_finite else ""
        return f"norm {self.norm:.6g}  largest {self.largest:.3g}{bad}"


def measure(tensor: StoredTensor, progress: ByteProgress) -> Measures:
    """Read a tensor box by box. Raises CheckpointError."""
    import torch

    from megatron.core.upstream_checkpoints.stored_tensors import trim_padding

    squares, largest, not_finite = 0.0, 0.0, 0
    for box, saved in tensor.boxes():
        values = trim_padding(tensor, box, saved).double()
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        squares += float(values.square().sum())
        largest = max(largest, float(values.abs().max())) if values.numel() else largest
        not_finite += bad
        progress.add(saved.nbytes)
    return Measures(math.sqrt(squares), largest, not_finite)


def select(checkpoint: StoredCheckpoint, pattern: str) -> list[StoredTensor]:
    """The tensors whose key fits. Raises ConfigError where none does."""
    chosen = [tensor for tensor in checkpoint.tensors if fnmatch.fnmatchcase(tensor.key, pattern)]
    if not chosen and checkpoint.tensors:
        raise ConfigError(
            f"--only {pattern}: none of the {len(checkpoint.tensors)} tensors of {checkpoint.path} has such a name; "
            f"the first is {checkpoint.tensors[0].key}"
        )
    return chosen


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_documents(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """State and settings of the run where the checkpoint has them as JSON; upstream's are pickled and not read."""
    from megatron.core.dist_checkpointing.serialization import read_document

    return {
        name: read_document(checkpoint.path, document)
        for name, document in _DOCUMENTS.items()
        if checkpoint.format == "torch_dist" and (checkpoint.path / f"{document}.json").exists()
    }


def describe(
    checkpoint: StoredCheckpoint, tensors: Sequence[StoredTensor], measures: Mapping[str, Measures]
) -> dict[str, Any]:
    """The report as JSON."""
    from megatron.core.upstream_checkpoints.stored_tensors import count_bytes, kind_of

    entries = {}
    for tensor in tensors:
        entry: dict[str, Any] = {
            "kind": kind_of(tensor.key),
            "shape": list(tensor.shape),
            "dtype": _name(tensor.dtype),
            "bytes": count_bytes(tensor),
        }
        if tensor.valid_rows is not None:
            entry["valid_rows"] = tensor.valid_rows
        if tensor.key in measures:
            found = measures[tensor.key]
            entry |= {"norm": found.norm, "largest": found.largest, "not_finite": found.not_finite}
        entries[tensor.key] = entry
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "iteration": checkpoint.iteration,
        "world_size": checkpoint.world_size,
        "tensors": entries,
        "objects": checkpoint.objects,
        **read_documents(checkpoint),
    }


# ---- the tree


Tree = dict[str, Any]
"""Part of a name -> subtree, or the text of a tensor's line."""


def build_tree(lines: Mapping[str, str]) -> Tree:
    """Nest lines by the dots of their keys."""
    tree: Tree = {}
    for key, line in lines.items():
        *above, last = key.split(".")
        node = tree
        for part in above:
            child = node.setdefault(part, {})
            # A tensor whose name is a prefix of another's is listed below it, under its own name.
            if isinstance(child, str):
                child = node[part] = {"": child}
            node = child
        node[last] = {"": line, **node[last]} if isinstance(node.get(last), dict) else line
    return tree


def format_tree(tree: Tree, *, merge: bool, indent: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name with its indentation, line) in order; merge: numbered neighbours that are alike become one."""
    for name, child in _merge_alike(tree) if merge else sorted(tree.items(), key=_by_number):
        # A chain without branches is one line.
        while isinstance(child, dict) and len(child) == 1:
            part, child = next(iter(child.items()))
            name = f"{name}.{part}" if part else name
        if isinstance(child, str):
            yield indent + name, child
        else:
            yield indent + name, ""
            yield from format_tree(child, merge=merge, indent=indent + "  ")


def _by_number(item: tuple[str, Any]) -> tuple[int, str]:
    return (int(item[0]), "") if item[0].isdecimal() else (-1, item[0])


def _merge_alike(tree: Tree) -> Iterator[tuple[str, Any]]:
    runs: list[tuple[str, str, Any]] = []
    for name, child in sorted(tree.items(), key=_by_number):
        follows = runs and name.isdecimal() and runs[-1][1].isdecimal() and int(name) == int(runs[-1][1]) + 1
        if follows and runs[-1][2] == child:
            runs[-1] = (runs[-1][0], name, child)
        else:
            runs.append((name, name, child))
    for first, last, child in runs:
        yield (first if first == last else f"{first}-{last} ({int(last) - int(first) + 1} alike)"), child


def print_checkpoint(
    checkpoint: StoredCheckpoint, tensors: Sequence[StoredTensor], measures: Mapping[str, Measures], *, merge: bool
) -> None:
    """Print summary and tree."""
    from megatron.core.upstream_checkpoints.stored_tensors import count_bytes, kind_of

    facts = [f"format {checkpoint.format}"]
    if checkpoint.iteration is not None:
        facts.append(f"iteration {checkpoint.iteration}")
    if checkpoint.world_size is not None:
        facts.append(f"written by {checkpoint.world_size} process{'es' if checkpoint.world_size > 1 else ''}")
    print(f"{checkpoint.path}: {', '.join(facts)}")
    lines = {}
    for kind in _KINDS:
        members = [tensor for tensor in tensors if kind_of(tensor.key) == kind]
        if members:
            elements = sum(math.prod(tensor.shape) for tensor in members)
            size = format_bytes(sum(map(count_bytes, members)))
            print(f"  {kind:16}{len(members):8,} tensors {elements:18,} elements {size:>12}")
    for tensor in tensors:
        used = "" if tensor.valid_rows is None else f" ({tensor.valid_rows} rows used)"
        shape = f"{list(tensor.shape)}{used}"
        line = f"{shape:26} {_name(tensor.dtype):10} {format_bytes(count_bytes(tensor)):>10}"
        lines[tensor.key] = f"{line}  {measures[tensor.key]}" if tensor.key in measures else line
    if checkpoint.objects:
        print(f"  pickled objects {len(checkpoint.objects):8,}, which are not opened")
    rows = list(format_tree(build_tree(lines), merge=merge))
    width = max((len(name) for name, _ in rows), default=0)
    print()
    for name, line in rows:
        print(f"{name:{width}}  {line}".rstrip())


def flatten(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as `model.num_layers` -> value."""
    if not isinstance(settings, dict):
        return {prefix: settings}
    return {
        key: value
        for name, child in settings.items()
        for key, value in flatten(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def show(arguments: argparse.Namespace) -> int:
    """Print one checkpoint."""
    from megatron.core.upstream_checkpoints.stored_tensors import count_bytes, open_checkpoint

    checkpoint = open_checkpoint(arguments.path, arguments.iteration)
    tensors = select(checkpoint, arguments.only)
    measures: dict[str, Measures] = {}
    if arguments.norms:
        with ByteProgress(f"reading {checkpoint.path.name}", sum(map(count_bytes, tensors))) as progress:
            measures = {tensor.key: measure(tensor, progress) for tensor in tensors}
    if arguments.json:
        print(json.dumps(describe(checkpoint, tensors, measures), indent=1))
        return 0
    print_checkpoint(checkpoint, tensors, measures, merge=not (arguments.norms or arguments.all))
    if arguments.config:
        settings = flatten(read_documents(checkpoint).get("settings", {}))
        print("\nsettings" if settings else "\nno settings that can be read without opening a pickle")
        for name, value in settings.items():
            print(f"  {name} = {json.dumps(value)}")
    return 0


# ---- two checkpoints


@dataclass(frozen=True)
class Difference:
    """Differences of a tensor that both checkpoints have."""

    relative: float
    """Norm of the difference over the norm of the first; infinite where only the first is zero."""
    largest: float
    """Largest absolute difference of an element."""
    elements: int
    """Elements that differ."""


def compare(first: StoredTensor, second: StoredTensor) -> Difference | str | None:
    """Return None for the same values; a sentence where shapes or dtypes differ. Raises CheckpointError."""
    import torch

    from megatron.core.upstream_checkpoints.stored_tensors import trim_padding

    a, b = (trim_padding(t, tuple((0, size) for size in t.shape), t.read()) for t in (first, second))
    # The vocabulary may be padded for another tensor-parallel size: rows that mean nothing are not compared.
    if a.shape != b.shape:
        return f"shape {list(a.shape)}, then {list(b.shape)}"
    if a.dtype == b.dtype and torch.equal(a, b):
        return None
    x, y = a.double(), b.double()
    # NaN in both places is no difference.
    differs = (x != y) & ~(x.isnan() & y.isnan())
    if not bool(differs.any()):
        return None if a.dtype == b.dtype else f"{_name(a.dtype)}, then {_name(b.dtype)}, with the same values"
    delta = torch.where(differs, x - y, 0.0)
    norm = float(x.norm())
    relative = float(delta.norm()) / norm if norm else math.inf
    return Difference(relative, float(delta.abs().max()), int(differs.sum()))


def diff(arguments: argparse.Namespace) -> int:
    """Compare two checkpoints and print what differs; 1 when anything does."""
    from megatron.core.upstream_checkpoints.stored_tensors import count_bytes, open_checkpoint

    one, other = (open_checkpoint(place, arguments.iteration) for place in arguments.diff)
    firsts = {tensor.key: tensor for tensor in select(one, arguments.only)}
    seconds = {tensor.key: tensor for tensor in select(other, arguments.only)}
    both = [key for key in firsts if key in seconds]
    differing: dict[str, Difference | str] = {}
    with ByteProgress("comparing", sum(count_bytes(firsts[key]) for key in both)) as progress:
        for key in both:
            found = compare(firsts[key], seconds[key])
            if found is not None:
                differing[key] = found
            progress.add(count_bytes(firsts[key]))
    only_first = [key for key in firsts if key not in seconds]
    only_second = [key for key in seconds if key not in firsts]
    before, after = (flatten(read_documents(checkpoint).get("settings", {})) for checkpoint in (one, other))
    # One with settings and one without (upstream pickles them) cannot be compared.
    names = dict.fromkeys([*before, *after]) if before and after else {}
    absent = "(absent)"
    settings = {
        name: [before.get(name, absent), after.get(name, absent)]
        for name in names
        if before.get(name, absent) != after.get(name, absent)
    }
    is_same = not (differing or only_first or only_second or settings)
    if arguments.json:
        values = {k: d if isinstance(d, str) else vars(d) for k, d in differing.items()}
        report = {
            "first": str(one.path),
            "second": str(other.path),
            "same": len(both) - len(differing),
            "different": values,
            "only_first": only_first,
            "only_second": only_second,
            "settings": settings,
        }
        print(json.dumps(_without_infinity(report), indent=1))
        return 0 if is_same else 1
    print(f"A {one.path}\nB {other.path}")
    print(f"{len(both) - len(differing)} tensors are the same, {len(differing)} differ")
    lines = {
        key: found
        if isinstance(found, str)
        else f"relative {found.relative:.2e}  largest {found.largest:.3g}  {found.elements} elements"
        for key, found in differing.items()
    }
    lines |= dict.fromkeys(only_first, "only in A") | dict.fromkeys(only_second, "only in B")
    rows = list(format_tree(build_tree(lines), merge=False))
    width = max((len(name) for name, _ in rows), default=0)
    for name, line in rows:
        print(f"  {name:{width}}  {line}".rstrip())
    for index, (name, (old, new)) in enumerate(settings.items()):
        if index == _LISTED_SETTINGS:
            print(f"  and {len(settings) - index} more settings; --json has all")
            break
        print(f"  setting {name}: {json.dumps(old)}, then {json.dumps(new)}")
    return 0 if is_same else 1


def _without_infinity(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have, with null."""
    if isinstance(value, dict):
        return {key: _without_infinity(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@command_line
def main() -> int:
    arguments = make_parser().parse_args()
    if (arguments.path is None) == (arguments.diff is None):
        raise ConfigError("give one PATH, or --diff A B")
    return show(arguments) if arguments.diff is None else diff(arguments)
