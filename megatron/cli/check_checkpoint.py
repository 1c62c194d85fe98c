# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a directory of checkpoints, and the remedies. Changes nothing.

    python tools/checkpoint/doctor.py checkpoints
    python -m megatron doctor --save checkpoints     without a directory: this machine, or under torchrun all of them

Looks at the tracker, every checkpoint's manifest and files (sizes and checksums), the table of contents, what
interrupted saves have left, locks, permissions, room on the disk, and other programs' formats; says which checkpoint a
run with --load would take. Exit code 0: nothing is wrong; 1: there are problems or warnings; 2: it could not look.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.byte_progress import ByteProgress
from megatron.core.errors import ConfigError, command_line, format_bytes
from megatron.training.flags.argument import ProgramParser, path

if TYPE_CHECKING:
    from megatron.core.upstream_checkpoints.diagnosis import Diagnosis


def make_parser() -> ProgramParser:
    """Build the parser of the command line."""
    parser = ProgramParser(__doc__)
    parser.add_argument(
        "path", type=path, metavar="DIR", nargs="?",
        help="the directory of --save or --load, or one checkpoint; without it the machine is looked at",
    )  # fmt: skip
    parser.add_argument("--save", type=path, help="of the machine: the directory whose disk is tried")
    parser.add_argument("--quick", action="store_true", help="compare sizes only; do not read the files")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def print_diagnosis(diagnosis: Diagnosis, *, quick: bool) -> None:
    """Print a line for each checkpoint, then each finding with its remedy, then what --load takes."""
    total = format_bytes(sum(condition.bytes for condition in diagnosis.checkpoints))
    count = len(diagnosis.checkpoints)
    print(f"{diagnosis.root}: {count} checkpoint{'' if count == 1 else 's'}, {total}")
    for condition in diagnosis.checkpoints:
        checked = "complete (sizes only)" if quick else "complete, checksums fit"
        state = "DAMAGED" if condition.damage or condition.contradictions else checked
        name, size = _name(diagnosis, condition.path), format_bytes(condition.bytes)
        print(f"  {name:14} {condition.files:6} files {size:>10}  {state}")
    for finding in diagnosis.findings:
        print(f"\n{finding.level}: {finding.what}\n  what to do: {finding.remedy}")
    if diagnosis.checkpoints:
        print()
        if diagnosis.chosen is None:
            print(f"A run with --load {diagnosis.root} finds nothing that it can load.")
        else:
            print(f"A run with --load {diagnosis.root} continues from {_name(diagnosis, diagnosis.chosen)}.")


def _name(diagnosis: Diagnosis, checkpoint: Path) -> str:
    """A checkpoint as seen from the directory that was asked about."""
    return checkpoint.name if checkpoint == diagnosis.root else str(checkpoint.relative_to(diagnosis.root))


@command_line
def main() -> int:
    arguments = make_parser().parse_args()
    # torch is loaded only now: --help and a mistyped flag need none.
    if arguments.path is None:
        from megatron.cli.check_machine import check_machines

        return check_machines(arguments.save, as_json=arguments.json)
    if arguments.save is not None:
        raise ConfigError("--save names the disk to try on a machine; leave DIR out to look at the machine")
    from megatron.core.upstream_checkpoints.diagnosis import count_listed_bytes, diagnose

    total = 0 if arguments.quick else count_listed_bytes(arguments.path)
    with ByteProgress("reading", total) as progress:
        diagnosis = diagnose(arguments.path, with_checksums=not arguments.quick, on_bytes=progress.add)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(diagnosis), indent=1, default=str))
    else:
        print_diagnosis(diagnosis, quick=arguments.quick)
    return int(any(finding.level != "note" for finding in diagnosis.findings))
