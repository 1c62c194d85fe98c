# SPDX-License-Identifier: Apache-2.0
"""crc32 of parts of files, combined to the full file's, so that several threads and processes can share it."""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

_SEGMENT_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
"""Short enough to be in the processor's cache still when its checksum is computed."""
_THREADS = 4
"""One waits for the disk while another computes."""

_POLYNOMIAL = 0xEDB88320
"""Of crc32, its coefficients from the lowest bit on: bit 31 is x^0."""
_ONE, _X = 1 << 31, 1 << 30


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """crc32 of two pieces of data, one after the other, from the crc32 of each and the length of the second.

    As crc32_combine() of zlib does, which Python has no name for: the first is moved along by multiplying it, as a
    polynomial over two elements, with x^(8 * second_bytes).
    """
    return _multiply(first, _power_of_x(8 * second_bytes)) ^ second


def _power_of_x(exponent: int) -> int:
    result = _ONE
    for bit, square in enumerate(_SQUARES):
        if exponent >> bit & 1:
            result = _multiply(result, square)
    return result


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, modulo crc32's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _list_squares() -> list[int]:
    squares = [_X]
    while len(squares) < 64:
        squares.append(_multiply(squares[-1], squares[-1]))
    return squares


_SQUARES = _list_squares()
"""x^(2^n), of which every power is a product."""


class FileSegment(NamedTuple):
    """A part of a file."""

    name: str
    """Of the file, below a directory."""
    start: int
    num_bytes: int


def list_segments(sizes: Mapping[str, int]) -> list[FileSegment]:
    """Files of these sizes as parts of 16 MiB at most, each file's in order. Numbers in names count as numbers, so that
    an equal share of all is, with files of equal size, a file for each."""
    segments = []
    for name in sorted(sizes, key=lambda name: [int(part) if part.isdigit() else part for part in _split(name)]):
        starts = range(0, sizes[name], _SEGMENT_BYTES)
        segments += [FileSegment(name, start, min(_SEGMENT_BYTES, sizes[name] - start)) for start in starts]
    return segments


def take_share(segments: Sequence[FileSegment], index: int, count: int) -> list[FileSegment]:
    """Share number `index` of `count` shares of about as many bytes each; concatenated, they are all."""
    total, end, share = sum(segment.num_bytes for segment in segments), 0, []
    for segment in segments:
        middle = end + segment.num_bytes / 2
        end += segment.num_bytes
        if int(middle * count / total) == index:
            share.append(segment)
    return share


def compute_checksums(
    directory: Path, segments: Sequence[FileSegment], on_block: Callable[[int], None] = lambda size: None
) -> list[int]:
    """crc32 of each segment, by several threads. on_block: hears of the bytes of each, on this thread. Raises OSError,
    with the file's name."""
    checksums = []
    with ThreadPoolExecutor(min(_THREADS, max(1, len(segments)))) as threads:
        try:
            results = threads.map(lambda segment: _compute(directory / segment.name, segment), segments)
        except RuntimeError as error:  # a thread cannot be started, which is the system's shortage as others are
            raise OSError(errno.EAGAIN, str(error), os.fspath(directory)) from error
        for segment, crc32 in zip(segments, results, strict=True):
            checksums.append(crc32)
            on_block(segment.num_bytes)
    return checksums


def join_checksums(segments: Sequence[FileSegment], checksums: Sequence[int]) -> dict[str, int]:
    """crc32 of each file from its parts'."""
    files: dict[str, int] = {}
    # Many parts are of one length, and the power takes longer than the rest.
    powers: dict[int, int] = {}
    for name, _, num_bytes, crc32 in ((*segment, crc32) for segment, crc32 in zip(segments, checksums, strict=True)):
        if num_bytes not in powers:
            powers[num_bytes] = _power_of_x(8 * num_bytes)
        files[name] = _multiply(files.get(name, 0), powers[num_bytes]) ^ crc32
    return files


def _compute(path: Path, segment: FileSegment) -> int:
    block = memoryview(bytearray(min(_BLOCK_BYTES, segment.num_bytes)))
    crc32, left = 0, segment.num_bytes
    try:
        # Opened for each segment: the system reads ahead of one place in an open file.
        with open(path, "rb", buffering=0) as file:
            file.seek(segment.start)
            # A file that has become shorter ends early; its checksum then tells.
            while count := file.readinto(block[:left]):
                crc32 = zlib.crc32(block[:count], crc32)
                left -= count
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    return crc32


def _split(name: str) -> list[str]:
    """Text and numbers in turn, beginning with text."""
    return re.split(r"([0-9]+)", name)
