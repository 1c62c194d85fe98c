# SPDX-License-Identifier: Apache-2.0
"""Sequences packed from documents of different lengths, with little padding: a dataset of one's own.

    python examples/complete/packed_dataset.py --input documents.jsonl <flags of pretrain_gpt.py>

Each line of the file is an object {"tokens": [5, 7, ...]}; without --input documents are made up. Whole documents are
put into sequences by best fit: the longest first, each where it leaves the least room. None sees another, as each
brings its bounds (cu_seqlens), so that a document's loss does not depend on what it is packed with.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import functools
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.errors import DataError, say  # noqa: E402
from megatron.training.config.container import RunConfig  # noqa: E402
from megatron.training.flags.read import read_run_config  # noqa: E402
from megatron.training.launch.launch import add_world_size, leave, run_job  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of documents for each sequence of `room` tokens, by best fit of the longest first.

    Raises DataError for a document that no sequence holds.
    """
    too_long = [number for number, length in enumerate(lengths) if length > room]
    if too_long:
        number = too_long[0]
        raise DataError(
            f"document {number} has {lengths[number]} tokens and a sequence has room for {room}; "
            "cut documents beforehand, or give a larger --seq-length"
        )
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens that are free, number of the pack), sorted
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect.bisect_left(free, (lengths[number], -1))
        if place == len(free):
            packs.append([])
            left, chosen = room, len(packs) - 1
        else:
            left, chosen = free.pop(place)
        packs[chosen].append(number)
        bisect.insort(free, (left - lengths[number], chosen))
    return packs


class PackedDocuments:
    """A dataset: it has a length, and gives sample i, the same whenever it is asked."""

    def __init__(self, documents: Sequence[Sequence[int]], seq_length: int, samples: int, seed: int) -> None:
        self.documents, self.seq_length, self.samples = documents, seq_length, samples
        # A document of n tokens gives n - 1 pairs of a token and the one after it.
        self.packs = pack([len(document) - 1 for document in documents], seq_length)
        # Packs are sorted by the lengths of their documents; training wants them mixed.
        random.Random(seed).shuffle(self.packs)

    def __len__(self) -> int:
        return self.samples

    @property
    def padding(self) -> float:
        """The share of positions without a token."""
        used = sum(len(document) - 1 for document in self.documents)
        return 1 - used / (len(self.packs) * self.seq_length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """tokens, labels, position_ids int64 [s]; loss_mask float32 [s]; cu_seqlens int32 [s + 1], max_seqlen int32."""
        import torch

        tokens: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        counts: list[float] = []
        bounds = [0]
        for number in self.packs[index % len(self.packs)]:
            document = list(self.documents[number])
            tokens += document[:-1]
            labels += document[1:]
            positions += range(len(document) - 1)
            counts += [1.0] * (len(document) - 1)
            bounds.append(len(tokens))
        fill = self.seq_length - len(tokens)
        longest = max([fill, *(end - start for start, end in zip(bounds, bounds[1:], strict=False))])
        # What is left over is one more document, whose tokens do not count; bounds are as many in every sample.
        bounds += [self.seq_length] * (self.seq_length + 1 - len(bounds))
        return {
            "tokens": torch.tensor(tokens + [0] * fill),
            "labels": torch.tensor(labels + [0] * fill),
            "position_ids": torch.tensor(positions + list(range(fill))),
            "loss_mask": torch.tensor(counts + [0.0] * fill),
            "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
            "max_seqlen": torch.tensor(longest, dtype=torch.int32),
        }


def read_documents(path: str) -> list[list[int]]:
    """The token ids of each line. Raises DataError with the line that cannot be used."""
    documents = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--input {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            tokens = [int(token) for token in json.loads(line)["tokens"]]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f'--input {path}, line {number}: expected {{"tokens": [numbers]}}, found {line[:60]!r}'
            ) from error
        if len(tokens) > 1:  # a single token has none after it
            documents.append(tokens)
    if not documents:
        raise DataError(f"--input {path} has no document of two tokens or more")
    return documents


def make_documents(number: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Counting documents of random lengths, most of them short."""
    draw = random.Random(1)
    lengths = [min(longest, 2 + int(draw.expovariate(4 / longest))) for _ in range(number)]
    return [[(start + step) % vocab_size for step in range(length)] for start, length in enumerate(lengths)]


def build_datasets(config: RunConfig, num_samples: Sequence[int | None]) -> list[PackedDocuments | None]:
    """Training, validation and test data; None where no samples are wanted. A count of None: all there are."""
    assert config.data.seq_length is not None, "checked by read_run_config"
    path, length = config.extra["input"], config.data.seq_length
    documents = read_documents(path) if path else make_documents(400, length + 1, config.tokenizer.vocab_size or 50)
    # Every tenth document is kept for validation, so that training never sees it.
    parts = [[d for i, d in enumerate(documents) if i % 10], documents[::10], documents[::10]]
    datasets: list[PackedDocuments | None] = []
    for part, samples in zip(parts, num_samples, strict=True):
        wanted = len(part) if samples is None else samples
        datasets.append(PackedDocuments(part, length, wanted, 1234) if wanted else None)
    if datasets[0] is not None:
        say(f"{len(parts[0])} documents in {len(datasets[0].packs)} sequences, {datasets[0].padding:.1%} padding")
    return datasets


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flag of this script, beside those of pretrain_gpt.py."""
    parser.add_argument("--input", help='file of documents, a line each: {"tokens": [5, 7, ...]}')


def main() -> int:
    """Read the flags, then train."""
    config = read_run_config(sys.argv[1:], add_world_size(os.environ), add_flags)
    from megatron.training.recipes.gpt import build_gpt_recipe
    from megatron.training.training import run_recipe

    recipe = dataclasses.replace(build_gpt_recipe(config), build_datasets=functools.partial(build_datasets, config))
    run_recipe(config, recipe)
    return 0


if __name__ == "__main__":
    leave(run_job(main, os.environ))
