# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a directory of checkpoints, and the remedies. Looks only: nothing is changed.

diagnosis = diagnose(Path("checkpoints"), with_checksums=True, on_bytes=progress.add)
diagnosis.findings      every Finding: what was found, what to do
diagnosis.chosen        the checkpoint that --load would take
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron.core.dist_checkpointing import non_persistent
from megatron.core.dist_checkpointing.directory import iteration_directory, list_leftovers, saved_iterations
from megatron.core.dist_checkpointing.directory_lock import PATIENCE_SECONDS, list_holders
from megatron.core.dist_checkpointing.finding import check_number
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, Manifest, checksum, read_manifest, verify_file
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.torch_dist import METADATA_NAME
from megatron.core.dist_checkpointing.validation import check_coverage
from megatron.core.errors import CheckpointError, format_bytes
from megatron.core.paths import explain_no_directory
from megatron.core.upstream_checkpoints.common_state import (
    FSDP_DTENSOR,
    FSDP_REMEDY,
    RELEASE,
    TORCH_DCP,
    find_upstream_checkpoint,
    is_release,
    name_format,
)
from megatron.core.upstream_checkpoints.rank_file import FILE_NAME, find_legacy_file
from megatron.core.upstream_checkpoints.rank_files import open_legacy

Level = Literal["problem", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """Something that stands out."""

    level: Level
    """problem: a checkpoint is lost, or the next load or save fails. warning: it may. note: as it should be."""
    what: str
    remedy: str


@dataclass(frozen=True)
class Condition:
    """State of one checkpoint."""

    path: Path
    iteration: int | None
    damage: list[str]
    """Reasons that keep a run from taking it."""
    files: int
    bytes: int
    contradictions: list[str] = field(default_factory=list)
    """Contradictions that a run finds only when it loads it: its files are as they were written, and do not belong
    together."""


@dataclass
class Diagnosis:
    """Findings in a directory."""

    root: Path
    checkpoints: list[Condition] = field(default_factory=list)
    """Oldest first; before them the ones of `non_persistent`."""
    findings: list[Finding] = field(default_factory=list)
    chosen: Path | None = None
    """Directory that --load takes; None where there is none that it can."""

    def add(self, level: Level, what: str, remedy: str) -> None:
        """Note a finding."""
        self.findings.append(Finding(level, what, remedy))


def count_listed_bytes(root: Path) -> int:
    """Bytes that the manifests of all checkpoints in the directory name: what a diagnosis with checksums reads."""
    total = 0
    for path in _checkpoint_directories(root):
        try:
            total += _count_bytes(read_manifest(path))
        except CheckpointError:
            continue
    return total


def diagnose(
    root: Path, *, with_checksums: bool = True, on_bytes: Callable[[int], None] = lambda size: None
) -> Diagnosis:
    """Look at a directory of checkpoints, or at one checkpoint.

    with_checksums: read every file; otherwise only its size is compared. on_bytes: hears of the bytes of each block
    that was read. Raises CheckpointError where there is no directory that can be listed.
    """
    obstacle = explain_no_directory(root)
    if obstacle is not None:
        raise CheckpointError(f"{root} {obstacle}; give the directory of --save or --load, or one checkpoint")
    try:
        os.listdir(root)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed: {error.strerror}; allow reading with chmod u+rx") from error
    diagnosis = Diagnosis(root)
    for path in reversed(_checkpoint_directories(root)):
        foreign = explain_foreign_format(path)
        if foreign is not None and not (path / MANIFEST_NAME).exists():
            diagnosis.add("warning", f"{path} {foreign[0]}", foreign[1])
            for damage in _examine_foreign(path):
                diagnosis.add("problem", damage, f"copy {path.name} once more from where it was written")
            continue
        diagnosis.checkpoints.append(_examine(path, with_checksums, on_bytes))
    good = {condition.path for condition in diagnosis.checkpoints if not condition.damage}
    if (root / MANIFEST_NAME).exists():
        diagnosis.chosen = root if root in good else None
    else:
        _look_at_root(diagnosis, good)
    _report_damage(diagnosis)
    return diagnosis


def explain_other_content(path: Path) -> tuple[str, str] | None:
    """Return what is in a directory that is no checkpoint of ours, as the end of a sentence, and what to do; None where
    nothing is recognised: `explain_foreign_format`, else `explain_wrong_level`."""
    return explain_foreign_format(path) or explain_wrong_level(path)


def explain_nothing(root: Path) -> str:
    """Return what is to be said of a place without a checkpoint of ours, as the end of a sentence."""
    return explain_no_directory(root) or "; ".join(explain_other_content(root) or ("holds no checkpoint",))


def explain_foreign_format(path: Path) -> tuple[str, str] | None:
    """Return the kind of another program's checkpoint that is in a directory, as the end of a sentence, and what to do;
    None where nothing is recognised."""
    if any(path.glob(f"mp_rank_*/{FILE_NAME}")):
        return (
            "is a checkpoint in upstream's torch format, which has no checksums",
            f"--load {path.parent} takes it as it is; whether it is undamaged cannot be told",
        )
    if find_upstream_checkpoint(path) is not None:
        try:
            found = name_format(path, read_metadata(path / METADATA_NAME))
        except CheckpointError as error:
            return ("looks like a checkpoint in upstream's torch_dist format, and cannot be read", str(error))
        if found == FSDP_DTENSOR:
            return (
                f"is a checkpoint in upstream's format {found}, which is not read",
                FSDP_REMEDY,
            )
        if found is not None:
            is_whole = found == "torch_dist"
            named = f"upstream's {found} format" if found in ("torch_dist", TORCH_DCP) else "torch's format"
            return (
                f"is a checkpoint {'' if is_whole else 'of weights '}in {named}, which has no checksums",
                f"--load {path.parent} takes it {'as it is' if is_whole else 'with --finetune'}; whether it is "
                "undamaged cannot be told",
            )
    if (path / METADATA_NAME).is_file():
        return (
            f"has no {MANIFEST_NAME}: the file was lost, or another program wrote it with torch.distributed.checkpoint",
            "restore it from a copy; without a manifest it cannot be told whether it is complete and undamaged",
        )
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return (
            "is a model of Hugging Face, not a checkpoint of a run",
            f"training starts from it with --load {shlex.quote(f'hf:{path}')}; for everything else convert it with "
            f"python -m megatron.bridge.convert --source hf --target megatron --input-path {shlex.quote(str(path))} "
            "--output-path DIR",
        )
    return None


def explain_wrong_level(root: Path) -> tuple[str, str] | None:
    """Return which directories in this one hold the checkpoints that it does not hold itself: what it is, and what to
    do."""
    below = [entry for entry in sorted(root.iterdir()) if entry.is_dir() and saved_iterations(entry)]
    if len(below) < 2:
        return (f"holds no checkpoint itself, {below[0]} does", f"give {below[0]}") if below else None
    further = f", {below[2]}" + (" and others" if len(below) > 3 else "") if len(below) > 2 else ""
    return f"holds no checkpoint itself, these directories do: {below[0]}, {below[1]}{further}", "give one of them"


# ---- one checkpoint


def _checkpoint_directories(root: Path) -> list[Path]:
    """Newest first; after them those that do not stay."""
    if (root / MANIFEST_NAME).exists():
        return [root]
    places = (root, root / non_persistent.DIRECTORY_NAME)
    found = [iteration_directory(place, iteration) for place in places for iteration in saved_iterations(place)]
    return [*found, root / RELEASE] if is_release(root) else found


def _count_bytes(manifest: Manifest) -> int:
    return sum(record.bytes for record in manifest.files.values())


def _examine(path: Path, with_checksums: bool, on_bytes: Callable[[int], None]) -> Condition:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Condition(path, None, [str(error)], 0, 0)
    damage = []
    try:
        check_number(path, manifest)
    except CheckpointError as error:
        damage.append(str(error))
    # Every file, where loading stops at the first one: who restores them wants the whole list.
    for name, record in manifest.files.items():
        try:
            verify_file(path / name, record, (lambda file: checksum(file, on_bytes)) if with_checksums else None)
        except CheckpointError as error:
            damage.append(str(error))
    # A damaged table of contents would contradict everything.
    contradictions = [] if damage else _examine_contents(path)
    return Condition(path, manifest.iteration, damage, len(manifest.files), _count_bytes(manifest), contradictions)


def _examine_contents(path: Path) -> list[str]:
    """Return whether an undamaged table of contents is one, and all it names is there."""
    try:
        metadata = read_metadata(path / METADATA_NAME)
        check_coverage(metadata)
    except CheckpointError as error:
        return [str(error)]
    names = {stored.relative_path for stored in (metadata.storage_data or {}).values()}
    return [
        f"{path / METADATA_NAME} names {name!r}, which is not there"
        for name in sorted(names)
        if Path(name).name != name or not (path / name).is_file()
    ]


def _examine_foreign(path: Path) -> list[str]:
    """Return what another program's checkpoint lacks: files of ranks, or boxes of tensors."""
    try:
        if any(path.glob(f"mp_rank_*/{FILE_NAME}")):
            file = find_legacy_file(path)
            if file is not None:
                open_legacy(file)
        elif (path / METADATA_NAME).is_file():
            return _examine_contents(path)
    except CheckpointError as error:
        return [str(error)]
    return []


def _report_damage(diagnosis: Diagnosis) -> None:
    for condition in diagnosis.checkpoints:
        for damage in condition.damage:
            other, name = diagnosis.chosen, condition.path.name
            instead = "" if other is None else f"a run takes {other.name} instead; "
            diagnosis.add("problem", damage, f"{instead}{name} itself can only be restored from a copy")
        for contradiction in condition.contradictions:
            diagnosis.add("problem", contradiction, f"move {condition.path.name} away: a run takes it and fails")


# ---- the directory around them


def _look_at_root(diagnosis: Diagnosis, good: set[Path]) -> None:
    root = diagnosis.root
    oddities: list[str] = []
    candidates = non_persistent.list_all_candidates(root, root / non_persistent.DIRECTORY_NAME, oddities)
    if is_release(root):
        oddities.clear()
    diagnosis.chosen = next((path for path in candidates if path in good), None)
    # Whether one that does not stay is newer is not a question of numbers.
    newest = max((path for path in good if path.parent == root), default=None, key=lambda path: path.name)
    if diagnosis.chosen is not None and diagnosis.chosen.parent != root:
        newest = None
    for oddity in oddities:
        follow = (
            "" if diagnosis.chosen is None else f", and the next save writes it anew; a run loads {diagnosis.chosen}"
        )
        diagnosis.add("warning", oddity, f"the tracker is only a hint{follow}")
    if diagnosis.chosen is not None and newest is not None and newest != diagnosis.chosen and not oddities:
        diagnosis.add(
            "warning",
            f"the tracker names {diagnosis.chosen.name}, and there is a newer good checkpoint, {newest.name}",
            f"a run goes back to {diagnosis.chosen.name}; --ckpt-step {int(newest.name[5:])} takes the newer one",
        )
    _look_at_holders(diagnosis)
    _look_at_storage(diagnosis)
    if not diagnosis.checkpoints and not diagnosis.findings:
        _look_around(diagnosis)


def _look_at_holders(diagnosis: Diagnosis) -> None:
    """Locks, and what interrupted saves have left."""
    root, is_in_use = diagnosis.root, False
    for name, holder in list_holders(root).items():
        is_gone = None if holder is None else holder.is_gone()
        who = holder or "a run that did not write its name"
        if is_gone:
            diagnosis.add("note", f"{name} is left of {who}, which has ended", "the next run takes the directory over")
        elif is_gone is False:
            is_in_use = True
            diagnosis.add("note", f"{root} is in use by {who}", "wait for its end or stop it before starting another")
        else:
            diagnosis.add(
                "warning",
                f"{name} belongs to {who}; whether that still runs cannot be seen from here",
                "start the next run: it watches for a sign of life of the other for "
                f"{PATIENCE_SECONDS:.0f} s, and takes over without one",
            )
    others = root / non_persistent.DIRECTORY_NAME
    for entry in list_leftovers(root) + (list_leftovers(others) if others.is_dir() else []):
        size = format_bytes(sum(1.0 * size for size in _sizes(entry)))
        if is_in_use:
            diagnosis.add("note", f"{entry.name} ({size}) is a save under way", "leave it alone")
        else:
            diagnosis.add(
                "warning",
                f"{entry.name} ({size}) is left of an interrupted save",
                f"the next run with --save {root} finishes or removes it",
            )


def _sizes(entry: Path) -> Iterator[int]:
    for path in (entry, *entry.rglob("*")) if entry.is_dir() else (entry,):
        try:
            yield path.lstat().st_size if not path.is_dir() else 0
        except OSError:
            continue


def _look_at_storage(diagnosis: Diagnosis) -> None:
    """Permissions and room for the next save."""
    root = diagnosis.root
    system = os.statvfs(root)
    if system.f_flag & os.ST_RDONLY:
        diagnosis.add("problem", f"{root} lies on a file system that is mounted read-only", "mount it writable")
    elif not os.access(root, os.W_OK | os.X_OK):
        owner = root.stat().st_uid
        diagnosis.add(
            "problem",
            f"{root} cannot be written to by user {os.getuid()}; it belongs to user {owner}",
            f"give it to you with chown, or allow it with chmod; --load {root} alone needs no writing",
        )
    largest = max((condition.bytes for condition in diagnosis.checkpoints), default=0)
    free = shutil.disk_usage(root).free
    # A save is complete before an older checkpoint is removed, so there must be room for one more.
    if free < largest:
        diagnosis.add(
            "problem",
            f"{root} has {format_bytes(free)} left; the largest checkpoint has {format_bytes(largest)}",
            f"free {format_bytes(largest - free)}, for example by removing old iterations; a save that finds no room "
            "leaves the others as they are",
        )
    if system.f_files and system.f_favail < 1000:
        diagnosis.add("warning", f"{root} has room for {system.f_favail} more files only", "remove files")


def _look_around(diagnosis: Diagnosis) -> None:
    """There is no checkpoint: is it another format, or another directory?"""
    root = diagnosis.root
    other = explain_other_content(root)
    if other is not None:
        diagnosis.add("warning", f"{root} {other[0]}", other[1])
    elif any(root.iterdir()):
        diagnosis.add("warning", f"{root} holds no checkpoint", "is it another directory that you mean?")
    else:
        diagnosis.add("note", f"{root} is empty", f"a run with --load {root} --save {root} starts from the beginning")
