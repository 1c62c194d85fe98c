# SPDX-License-Identifier: Apache-2.0
"""Step 2 of the quickstart: a JSONL corpus from the Python standard library that is on every machine, or with --from
from text files of your own.

Each line is `{"text": content of one file, "path": its name}`. The order is a fixed shuffle, so that the validation
split is a fair sample and the same machine always gives the same corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def list_files(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Every file below a folder with one of these endings, but tests and installed packages, sorted."""
    found = []
    for folder, subfolders, names in os.walk(root):
        # In place: os.walk then does not enter them.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


def documents(files: list[Path], root: Path, max_bytes: int) -> Iterator[dict[str, str]]:
    """The files' texts in a fixed random order until `max_bytes` are reached; what is not UTF-8 is left out."""
    random.Random(0).shuffle(files)
    total = 0
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if total and total + len(text) > max_bytes:
            return
        total += len(text)
        if text.strip():
            yield {"text": text, "path": path.relative_to(root).as_posix()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument(
        "--from", dest="folder", type=Path, help="a folder of text files, instead of the library's sources"
    )
    parser.add_argument("--suffix", action="append", help="of these files, may be repeated (default: .txt and .md)")
    parser.add_argument("--megabytes", type=float, default=12, help="stop after about this much text (default: 12)")
    arguments = parser.parse_args()

    root = arguments.folder or Path(sysconfig.get_paths()["stdlib"])
    suffixes = tuple(arguments.suffix or (".txt", ".md")) if arguments.folder else (".py",)
    files = list_files(root, suffixes)
    if not files:
        remedy = (
            "give the folder with --from and the endings with --suffix" if arguments.folder else "give --from FOLDER"
        )
        print(f"error: {root} has no files that end with {' or '.join(suffixes)}; {remedy}", file=sys.stderr)
        return 2
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = arguments.output.with_name(arguments.output.name + ".tmp")
    count = size = 0
    with unfinished.open("w", encoding="utf-8") as stream:
        for document in documents(files, root, int(arguments.megabytes * 1e6)):
            stream.write(json.dumps(document) + "\n")
            count += 1
            size += len(document["text"])
    # Renamed when complete: an interrupted run leaves no half a corpus behind.
    unfinished.replace(arguments.output)
    print(f"{arguments.output}: {count} documents, {size / 1e6:.1f} MB of text from {root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
