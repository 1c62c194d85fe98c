# SPDX-License-Identifier: Apache-2.0
"""Damage .bin/.idx pairs at random: each must be refused with a DataError, or still be what its bytes say.

    python tests/faults/fuzz_indexed_dataset.py --count 100000 --seed 1

A second reader, written plainly and sharing no code with the first, decides what is sound: the reader under test must
accept exactly that. Prints a tally; exit code 1 with the seed and number of the first disagreement.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.errors import DataError

INTERESTING = [0, 1, 2, -1, 9, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1]
ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


def make_pair(directory: Path, dtype: str = "uint16") -> tuple[bytes, bytes]:
    """A small dataset with an empty document and documents of several sequences: (idx bytes, bin bytes)."""
    prefix = directory / "original"
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype) as builder:
        for lengths in ([5], [], [3, 4], [1], [0, 7], [12]):
            builder.add_document(list(range(sum(lengths))), lengths)
        builder.finalize(f"{prefix}.idx")
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


def is_sound(idx: bytes, bin_size: int) -> bool:
    """The format, checked value by value."""
    if len(idx) < 34 or idx[:9] != b"MMIDIDX\x00\x00":
        return False
    version, code, sequences, documents = struct.unpack("<QBQQ", idx[9:34])
    if version != 1 or code not in ITEM_BYTES or sequences == 0 or len(idx) != 34 + 12 * sequences + 8 * documents:
        return False
    lengths = struct.unpack_from(f"<{sequences}i", idx, 34)
    pointers = struct.unpack_from(f"<{sequences}q", idx, 34 + 4 * sequences)
    bounds = struct.unpack_from(f"<{documents}q", idx, 34 + 12 * sequences)
    place = 0
    for length, pointer in zip(lengths, pointers, strict=True):
        if length < 0 or pointer != place:
            return False
        place += length * ITEM_BYTES[code]
    if place != bin_size or documents == 0 or bounds[0] != 0 or bounds[-1] != sequences:
        return False
    return all(a <= b for a, b in zip(bounds, bounds[1:], strict=False))


def mutate(rng: random.Random, idx: bytes, bin_: bytes) -> tuple[bytes, bytes, str]:
    """One to three random injuries: (idx, bin, what was done)."""
    names = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        injury = rng.choice(INJURIES)
        names.append(injury.__name__)
        if injury is cut_tokens:
            bin_ = injury(rng, bin_)
        elif idx:
            idx = injury(rng, idx)
    return idx, bin_, "+".join(names)


def flip_bit(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def set_field(rng: random.Random, data: bytes) -> bytes:
    """Overwrite 1, 4 or 8 bytes, often at a field's place, with an interesting number."""
    width = rng.choice((1, 4, 8))
    places = [9, 17, 18, 26, *range(34, max(35, len(data) - width), 4)]
    at = min(rng.choice(places), max(0, len(data) - width))
    value = rng.choice(INTERESTING) % 256**width
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


def nudge_field(rng: random.Random, data: bytes) -> bytes:
    """Add a small number to a 4-byte word."""
    at = rng.randrange(0, max(1, len(data) - 4))
    value = int.from_bytes(data[at : at + 4], "little") + rng.choice((-2, -1, 1, 2, 8))
    return data[:at] + (value % 2**32).to_bytes(4, "little") + data[at + 4 :]


def cut_index(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def add_junk(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 20))


def swap_words(rng: random.Random, data: bytes) -> bytes:
    words = [data[i : i + 4] for i in range(0, len(data), 4)]
    i, j = rng.randrange(len(words)), rng.randrange(len(words))
    words[i], words[j] = words[j], words[i]
    return b"".join(words)


def drop_block(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 17) :]


def cut_tokens(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.7 else data + rng.randbytes(rng.randrange(1, 5))


INJURIES: list[Callable[[random.Random, bytes], bytes]] = [
    flip_bit,
    flip_bit,
    set_field,
    set_field,
    nudge_field,
    cut_index,
    add_junk,
    swap_words,
    drop_block,
    cut_tokens,
]


def try_one(prefix: Path, idx: bytes, bin_: bytes, mmap: bool) -> str:
    """Open a damaged pair: "refused" or "accepted", AssertionError where that is the wrong answer."""
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(bin_)
    sound = is_sound(idx, len(bin_))
    try:
        dataset = IndexedDataset(str(prefix), mmap=mmap)
    except DataError as error:
        assert not sound, f"refused, though sound: {error}"
        assert str(prefix) in str(error), f"names no file: {error}"
        return "refused"
    assert sound, "accepted, though damaged"
    tokens = b"".join(dataset[i].tobytes() for i in range(len(dataset)))
    assert tokens == bin_, "other tokens than the file's"
    return "accepted"


def fuzz(directory: Path, count: int, seed: int) -> Counter[str]:
    """Try `count` injuries; a tally of outcomes by kind."""
    tally: Counter[str] = Counter()
    pairs = [make_pair(directory, dtype) for dtype in ("uint16", "int32")]
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        idx, bin_, what = mutate(rng, *rng.choice(pairs))
        try:
            outcome = try_one(directory / "damaged", idx, bin_, mmap=rng.random() < 0.5)
        except Exception as error:
            raise AssertionError(f"seed {seed}, mutation {number} ({what}): {type(error).__name__}: {error}") from error
        tally[outcome] += 1
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=in_memory) as directory:
        try:
            print(dict(fuzz(Path(directory), arguments.count, arguments.seed)))
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
