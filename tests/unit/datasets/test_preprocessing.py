# SPDX-License-Identifier: Apache-2.0
"""Parts of preprocessing: cutting files into chunks, the worker pool, and the way back from a failing fast encoder."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing import job
from megatron.core.datasets.preprocessing.input_files import read_chunks
from megatron.core.datasets.preprocessing.job import JobProgress, PreprocessOptions, preprocess
from megatron.core.datasets.preprocessing.worker_pool import WorkerPool
from megatron.core.errors import ConfigError, DataError, StorageError
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.encoders import EncoderMismatch, PlainEncoder
from tests.preprocess_runs import run_tool, write_lines


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"a", b"ab\ncd\n", b"ab\n\n\ncd", b"\xef\xbb\xbfab\ncd\r\n", b"x" * 50 + b"\nend\n"]
)
def test_chunks_hold_every_line_once(content: bytes, chunk_bytes: int, tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(content)
        paths.append(str(tmp_path / name))
    lines = content.removeprefix(b"\xef\xbb\xbf").splitlines(keepends=True)
    chunks = list(read_chunks(paths, max_line_bytes=100, chunk_bytes=chunk_bytes))
    for path in paths:
        assert b"".join(chunk.data for chunk in chunks if chunk.path == path) == b"".join(lines)
    for chunk in chunks:
        before = content[: chunk.byte_offset]
        assert content[chunk.byte_offset :].startswith(chunk.data)
        assert chunk.first_line == before.count(b"\n") + 1
        assert chunk.first_line_overall == chunk.first_line - 1 + (len(lines) if chunk.path == paths[1] else 0)


@pytest.mark.parametrize("chunk_bytes", [1, 5, 16])
def test_lines_over_the_limit_are_cut(chunk_bytes: int, tmp_path: Path) -> None:
    """The rest of such a line is dropped while it is read; the lines after it keep their numbers and offsets."""
    content = b"first\n" + b"x" * 500 + b"\nlast\n"
    (tmp_path / "a").write_bytes(content)
    chunks = list(read_chunks([str(tmp_path / "a")], max_line_bytes=20, chunk_bytes=chunk_bytes, cut_long_lines=True))
    assert max(len(chunk.data) for chunk in chunks) <= 20 + 2 * chunk_bytes
    assert [chunk.data for chunk in chunks if chunk.data.startswith(b"x")] == [b"x" * 21]
    last = chunks[-1]
    assert (last.data, last.first_line, last.byte_offset) == (b"last\n", 3, content.index(b"last"))


def test_lines_over_the_limit_end_the_reading(tmp_path: Path) -> None:
    """At once: what follows is not read."""
    with open(tmp_path / "a", "wb") as file:
        file.write(b"first\n")
        file.truncate(1 << 40)  # a hole of a terabyte
    chunks = read_chunks([str(tmp_path / "a")], max_line_bytes=20)
    with pytest.raises(DataError, match=r"a:2: longer than --max-line-bytes 20;.*--on-bad-line skip"):
        list(chunks)


def slow_square(number: int) -> int:
    time.sleep(0.02 if number % 3 else 0.06)
    return number * number


def explode(number: int) -> int:
    if number == 5:
        raise ConfigError("five")
    if number == 9:
        os._exit(3)
    return number


@pytest.mark.parametrize("count", [1, 3])
def test_pool_keeps_the_order(count: int) -> None:
    with WorkerPool[int, int](slow_square, count) as pool:
        assert list(pool.map_ordered(range(20))) == [number * number for number in range(20)]


def test_pool_reads_only_a_little_ahead() -> None:
    taken = []

    def source() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    with WorkerPool[int, int](slow_square, 2) as pool:
        for result in pool.map_ordered(source()):
            assert len(taken) <= result**0.5 + 1 + 8


def test_pool_passes_errors_on_in_their_turn() -> None:
    with WorkerPool[int, int](explode, 3) as pool:
        results = pool.map_ordered(range(8))
        assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(ConfigError, match="five"):
            next(results)


def test_pool_passes_errors_of_the_source_on_after_earlier_results() -> None:
    def source() -> Iterator[int]:
        yield from range(7)
        raise DataError("seven")

    with WorkerPool[int, int](slow_square, 3) as pool:
        results = pool.map_ordered(source())
        assert [next(results) for _ in range(7)] == [number * number for number in range(7)]
        with pytest.raises(DataError, match="seven"):
            next(results)


def test_pool_reports_a_worker_that_dies() -> None:
    with (
        WorkerPool[int, int](explode, 2) as pool,
        pytest.raises(StorageError, match=r"worker \d \(process \d+\) ended with exit code 3"),
    ):
        list(pool.map_ordered([9]))


def test_worker_leaves_when_its_parent_dies_in_the_middle_of_an_item() -> None:
    with WorkerPool[int, int](slow_square, 1) as pool:
        assert list(pool.map_ordered([1])) == [1]
        (worker,) = pool._workers
        os.write(worker.connection.fileno(), struct.pack("!i", 100) + b"of 100 bytes not all")
        worker.connection.close()
        worker.process.join(20)
        assert worker.process.exitcode == 0


def test_pool_is_stopped_by_a_signal_that_arrives_while_it_starts_a_worker() -> None:
    """What a handler raises in the middle of a fork would be forgotten; the other thread may get the signal, too."""
    forks = []
    end = threading.Event()
    threading.Thread(target=end.wait, daemon=True).start()

    def stop_at_the_first_fork() -> None:
        if not forks:
            forks.append(os.getpid())
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # a handler that is to run now has run

    os.register_at_fork(before=stop_at_the_first_fork)  # stays, without effect
    with WorkerPool[int, int](slow_square, 2) as pool, pytest.raises(KeyboardInterrupt):
        list(pool.map_ordered(range(4)))
    end.set()
    assert forks == [os.getpid()]
    assert not [process for process in multiprocessing.active_children() if process.name.startswith("preprocess-")]


class _Unreliable(PlainEncoder):
    """Right on what is verified in advance, wrong later."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [ids + 1 for ids in super().encode_batch(texts)]

    def verify(self, text: str) -> None:
        raise EncoderMismatch(f"the fast encoder differs from the tokenizer on {text[:60]!r}")


def test_fast_encoder_that_fails_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job starts again with the tokenizer itself, and nothing of the first attempt remains."""
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    monkeypatch.setattr(job, "choose_encoder", lambda tokenizer, sample: _Unreliable(tokenizer))
    source = write_lines(tmp_path / "in.jsonl", *[{"text": f"{number} 7"} for number in range(50)])
    said = io.StringIO()
    options = PreprocessOptions(input=str(source), output_prefix=str(tmp_path / "out"))
    summary = preprocess(options, tokenizer, lambda size: JobProgress(said, 10, size))
    dataset = IndexedDataset(summary.prefixes[0])
    assert [dataset[number].tolist() for number in range(50)] == [[number, 7] for number in range(50)]
    assert "starting again without the fast encoder" in said.getvalue()
    assert len(list(tmp_path.iterdir())) == 3


def test_progress_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = JobProgress(stream, 1, total_bytes=1000)
    progress.add(3, 500)
    assert "[###############...............]  50%" in stream.getvalue() and "docs/s" in stream.getvalue()
    assert "MB/s" in stream.getvalue() and " left" in stream.getvalue()


def test_progress_lines_elsewhere() -> None:
    stream = io.StringIO()
    progress = JobProgress(stream, log_interval=10, total_bytes=None)
    for _ in range(25):
        progress.add(1, 100)
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == [
        "processed 10 documents",
        "processed 20 documents",
    ]


def test_search_for_the_number_of_workers(tmp_path: Path) -> None:
    """Every count is tried on the beginning of the input, the fastest is named, and nothing is written."""
    source = write_lines(tmp_path / "in.jsonl", *[{"text": f"{number} 7 " * 500} for number in range(2000)])
    flags = ["--find-optimal-num-workers", "--workers-to-check", "1", "2", "--max-documents", "50"]
    run = run_tool(
        source, tmp_path / "out", *flags, tokenizer=["--tokenizer-type", "NullTokenizer", "--vocab-size", "9999"]
    )
    assert run.code == 0, run.err
    counts = dict(re.findall(r"^--workers (\d): [0-9.]+ docs/s \((\d+) documents\)$", run.out, re.MULTILINE))
    assert list(counts) == ["1", "2"] and all(50 <= int(count) < 1000 for count in counts.values())
    assert re.search(r"^fastest: --workers [12]$", run.out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == [source]
