# SPDX-License-Identifier: Apache-2.0
"""A preprocessing job: lock the output, choose the encoder, run the workers, write what they return in order.
While it runs it shows a bar with the time left on a terminal, else a line now and then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np

from megatron.core.datasets.indexed_dataset import DType
from megatron.core.datasets.preprocessing.documents import (
    ChunkEncoder,
    DocumentOptions,
    EncodedChunk,
    LineError,
    SentenceSplitter,
    parse_object,
    texts_under,
)
from megatron.core.datasets.preprocessing.input_files import (
    Chunk,
    count_lines,
    find_inputs,
    is_compressed,
    read_chunks,
    total_bytes,
)
from megatron.core.datasets.preprocessing.output import DatasetWriter, Level, output_lock
from megatron.core.datasets.preprocessing.worker_pool import WorkerPool
from megatron.core.errors import ConfigError, DataError, StorageError
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.encoders import EncoderMismatch, PlainEncoder, choose_encoder

_BAR_WIDTH = 30
_REDRAW_SECONDS = 0.2


class JobProgress:
    """Documents and bytes so far, and how fast they come.

    log_interval   documents between two lines where the stream is no terminal
    total_bytes    of the input where it is known; without it the bar shows no share and no time left
    """

    def __init__(self, stream: TextIO, log_interval: int, total_bytes: int | None) -> None:
        self._stream = stream
        self._log_interval = log_interval
        self._total_bytes = total_bytes
        self._is_terminal = stream.isatty()
        self._started_at = time.monotonic()
        self._drawn_at = 0.0
        self._next_line = log_interval
        self.documents = 0
        self.bytes = 0

    def add(self, documents: int, num_bytes: int) -> None:
        """Count a chunk, and say so when it is time."""
        self.documents += documents
        self.bytes += num_bytes
        if self._is_terminal:
            if time.monotonic() - self._drawn_at >= _REDRAW_SECONDS:
                self._drawn_at = time.monotonic()
                self._stream.write(f"\r\x1b[K{self._bar()}{self.rates()}")
                self._stream.flush()
        elif self.documents >= self._next_line:
            self._next_line = (self.documents // self._log_interval + 1) * self._log_interval
            self.say(f"processed {self.documents} documents: {self.rates()}")

    def say(self, line: str) -> None:
        """Print a line; a bar makes room for it."""
        print(("\r\x1b[K" if self._is_terminal else "") + line, file=self._stream, flush=True)

    def rates(self) -> str:
        """Documents and megabytes (10^6) of text per second since the start."""
        elapsed_seconds = max(time.monotonic() - self._started_at, 1e-9)
        return f"{self.documents / elapsed_seconds:.1f} docs/s, {self.bytes / elapsed_seconds / 1e6:.2f} MB/s"

    def _bar(self) -> str:
        if not self._total_bytes or not self.bytes:
            return f"{self.bytes / 1e6:.1f} MB  "
        share = min(self.bytes / self._total_bytes, 1.0)
        filled = int(share * _BAR_WIDTH)
        seconds_left = int((time.monotonic() - self._started_at) * (1 - share) / share)
        minutes, seconds = divmod(seconds_left, 60)
        return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%}  {minutes}:{seconds:02d} left  "


# ---- the job


_SAMPLE_BYTES = 1 << 18
_SAMPLE_TEXT = 1 << 12
_SAMPLE_CHARACTERS = 1 << 16
_LISTED_PROBLEMS = 20
_FAST_ONLY = "--use-gigatoken asks for the fast encoder"


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Settings of a job: input, tokens and output; the fields are the flags of tools/preprocess_data.py."""

    input: str
    """A file, or a glob pattern."""
    output_prefix: str
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    partitions: int = 1
    keep_sequential_samples: bool = False
    """Partitions of consecutive lines instead of every n-th line."""
    split_sentences: bool = False
    """A sequence per sentence instead of one per text."""
    keep_newlines: bool = False
    """With split_sentences: white space after a sentence stays with it."""
    lang: str = "english"
    """With split_sentences: the language, a directory of Punkt parameters."""
    log_interval: int = 1000
    """documents"""
    on_bad_line: str = "error"
    """error: the first unusable line ends the job; skip: leave it out, count it and list it at the end."""
    max_bad: int | None = None
    """With on_bad_line skip: more unusable lines than this end the job."""
    max_line_bytes: int = 1 << 26
    overwrite: bool = False
    use_gigatoken: bool = False
    """The fast encoder or none: a tokenizer that has none is refused."""
    max_documents: int | None = None
    """Stop after so many documents of the input, rounded up to whole chunks."""

    @property
    def level(self) -> Level:
        """Unit of a sequence; the last part of the names of the output."""
        return "sentence" if self.split_sentences else "document"

    def problems(self) -> list[str]:
        """A sentence for each value that cannot be used."""
        most = max(256, 16 * (os.cpu_count() or 1))
        found = []
        if not 1 <= self.workers <= most:
            found.append(f"--workers {self.workers} must be between 1 and {most} on this machine")
        if self.partitions < 1:
            found.append(f"--partitions {self.partitions} must be at least 1")
        elif self.workers % self.partitions:
            found.append(
                f"--workers {self.workers} is not divisible by --partitions {self.partitions}; use a multiple of it"
            )
        if self.max_documents is not None and self.max_documents < 1:
            found.append(f"--max-documents {self.max_documents} must be at least 1")
        if self.log_interval < 1:
            found.append(f"--log-interval {self.log_interval} must be at least 1 document")
        if self.max_line_bytes < 1:
            found.append(f"--max-line-bytes {self.max_line_bytes} must be at least 1")
        if self.max_bad is not None and self.max_bad < 0:
            found.append(f"--max-bad {self.max_bad} must be 0 or more")
        if self.max_bad is not None and self.on_bad_line != "skip":
            found.append("--max-bad has an effect only with --on-bad-line skip; add that flag or leave --max-bad out")
        if len(set(self.json_keys)) != len(self.json_keys):
            found.append(f"--json-keys {' '.join(self.json_keys)} names a key twice")
        unusable = [key for key in self.json_keys if "/" in key or "\0" in key or not key]
        found += [f"--json-keys {key!r} cannot be part of a file name; rename the key" for key in unusable]
        return found


@dataclass
class Summary:
    """Summary of a job."""

    prefixes: list[str] = field(default_factory=list)
    """Datasets written, one per key."""
    encoder: str = ""
    dtype: str = ""
    documents: int = 0
    blank_lines: int = 0
    bad_lines: int = 0
    problems: list[str] = field(default_factory=list)
    """Sentences for the first bad lines."""
    sequences: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)


def preprocess(
    options: PreprocessOptions, tokenizer: Tokenizer, progress: Callable[[int], JobProgress] | None = None
) -> Summary:
    """Run a job. Everything that can be checked is checked before work starts; nothing incomplete gets a final name.

    Raises ConfigError and DataError for unusable flags and input, StorageError for a failing disk or a dead worker.
    """
    problems = options.problems()
    if options.append_eod and tokenizer.eod is None:
        problems.append(
            "--append-eod: the tokenizer has no end-of-document token; name it as eos_token in tokenizer_config.json "
            "beside tokenizer.json"
        )
    if problems:
        raise ConfigError(problems)
    # Before the lock and the encoder: a wrong path is answered at once.
    paths = find_inputs(options.input)
    work = document_options(options, paths, tokenizer)
    show = progress or (lambda size: JobProgress(sys.stderr, options.log_interval, size))
    with output_lock(options.output_prefix):
        encoder = choose_encoder(tokenizer, sample_texts(paths, options))
        if options.use_gigatoken and isinstance(encoder, PlainEncoder):
            raise ConfigError(f"{_FAST_ONLY}, and this job would have {encoder.description}; leave it out")
        try:
            return _run(options, paths, ChunkEncoder(encoder, work), show)
        # A worker compared an excerpt and found a difference: everything is encoded again, so that a file never mixes
        # two encoders.
        except EncoderMismatch as reason:
            if options.use_gigatoken:
                raise DataError(f"{_FAST_ONLY}, and {reason}; leave it out") from None
            show(0).say(f"note: starting again without the fast encoder: {reason}")
            plain = PlainEncoder(tokenizer, f"faster encoder set aside: {reason}")
            return _run(options, paths, ChunkEncoder(plain, work), show)


def token_type(tokenizer: Tokenizer) -> str:
    """The type of token ids on disk: two bytes if the vocabulary is small and its largest id fits, else four."""
    dtype = np.dtype(DType.optimal_dtype(tokenizer.vocab_size))
    # Ids may have gaps, so the largest one can lie beyond the number of tokens.
    return "int32" if tokenizer.max_id > np.iinfo(dtype).max else dtype.name


def sample_texts(paths: list[str], options: PreprocessOptions) -> list[str]:
    """Beginnings of the first texts, for verifying an encoder; unusable lines are left to the job."""
    texts: list[str] = []
    with contextlib.suppress(DataError):
        for chunk in itertools.islice(read_chunks(paths, options.max_line_bytes, _SAMPLE_BYTES), 4):
            lines = chunk.data.split(b"\n")
            texts += [text[:_SAMPLE_TEXT] for line in lines for text in _usable_texts(line, options.json_keys)]
            if texts:
                break
    # Spread over the sample: the first lines of a corpus are often alike.
    step = sum(map(len, texts)) // _SAMPLE_CHARACTERS + 1
    return texts[::step]


def _usable_texts(line: bytes, keys: tuple[str, ...]) -> list[str]:
    """The texts of a line; none of an unusable one."""
    try:
        document = parse_object(line)
        return [text for key in keys for text in texts_under(document, key)]
    except LineError:
        return []


def document_options(options: PreprocessOptions, paths: list[str], tokenizer: Tokenizer) -> DocumentOptions:
    """Return how lines become tokens. Lines are counted first where partitions are of consecutive lines."""
    partition_lines = None
    if options.keep_sequential_samples and options.partitions > 1:
        partition_lines = max(-(-count_lines(paths) // options.partitions), 1)
    splitter = SentenceSplitter(options.lang, keep_newlines=options.keep_newlines) if options.split_sentences else None
    return DocumentOptions(
        json_keys=options.json_keys,
        append_eod=options.append_eod,
        eod=tokenizer.eod,
        partitions=options.partitions,
        partition_lines=partition_lines,
        dtype=token_type(tokenizer),
        max_line_bytes=options.max_line_bytes,
        stop_at_first_problem=options.on_bad_line == "error",
        split=splitter,
    )


def _run(
    options: PreprocessOptions, paths: list[str], work: ChunkEncoder, show: Callable[[int], JobProgress]
) -> Summary:
    """Encode all chunks and write them."""
    encoder, dtype = work.encoder, work.options.dtype
    summary = Summary(encoder=encoder.description, dtype=dtype)
    # How much text is in a compressed file is known only at its end.
    progress = show(0 if any(map(is_compressed, paths)) else total_bytes(paths))
    progress.say(
        f"{len(paths)} input file{'s' * (len(paths) > 1)}, {options.workers} worker{'s' * (options.workers > 1)}: "
        f"{encoder.description}"
    )
    chunks: Iterator[Chunk] = read_chunks(paths, options.max_line_bytes, cut_long_lines=options.on_bad_line == "skip")
    if options.max_documents is not None:
        limit = options.max_documents
        chunks = itertools.takewhile(lambda chunk: chunk.first_line_overall < limit, chunks)
    with (
        DatasetWriter(
            options.output_prefix,
            options.json_keys,
            options.partitions,
            dtype,
            overwrite=options.overwrite,
            level=options.level,
        ) as writer,
        WorkerPool[Chunk, EncodedChunk](work, options.workers) as pool,
    ):
        # In the order of the input, whatever the number of workers: the files are the same byte for byte.
        for chunk in pool.map_ordered(chunks):
            _count(chunk, options, summary)
            writer.add(chunk)
            progress.add(chunk.num_documents, chunk.num_bytes)
        # Before finish(), which gives the files their names.
        _check_not_empty(options, summary, writer)
        summary.prefixes = writer.finish()
        summary.sequences, summary.tokens = writer.num_sequences, writer.num_tokens
    progress.say(f"done: {summary.documents} documents, {progress.rates()}")
    return summary


def _count(chunk: EncodedChunk, options: PreprocessOptions, summary: Summary) -> None:
    """Add a chunk to the summary. Raises DataError for a bad line, if bad lines are errors, or for one too many."""
    summary.documents += chunk.num_documents
    summary.blank_lines += chunk.num_blank_lines
    if not chunk.problems:
        return
    if options.on_bad_line == "error":
        raise DataError(f"{chunk.problems[0]} (correct the line, or leave out such lines with --on-bad-line skip)")
    summary.bad_lines += len(chunk.problems)
    summary.problems += chunk.problems[: _LISTED_PROBLEMS - len(summary.problems)]
    if options.max_bad is not None and summary.bad_lines > options.max_bad:
        first = summary.problems[0] if summary.problems else chunk.problems[0]
        raise DataError(f"more than --max-bad {options.max_bad} unusable lines; the first: {first}")


def _check_not_empty(options: PreprocessOptions, summary: Summary, writer: DatasetWriter) -> None:
    """A dataset without a single sequence is of no use to anybody."""
    if not summary.documents:
        skipped = f", {summary.bad_lines} unusable lines were skipped" if summary.bad_lines else ""
        raise DataError(f"--input {options.input}: no documents (blank lines: {summary.blank_lines}{skipped})")
    for key, count in writer.num_sequences.items():
        if not count:
            raise DataError(
                f"--input {options.input}: no documents with text: all {summary.documents} are empty under key {key!r}"
            )


# ---- how many workers are fastest on this machine: short runs whose output is thrown away


def find_fastest(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    counts: Sequence[int],
    max_documents: int,
    say: Callable[[str], None] = print,
) -> int:
    """Run the beginning of a job once with each number of workers, say how fast it was, and return the fastest.

    max_documents   documents of the input to encode, rounded up to half a megabyte of text
    Raises what `preprocess` raises; ConfigError for counts that cannot be.
    """
    trials = [dataclasses.replace(options, workers=count, max_documents=max_documents) for count in counts]
    problems = [problem for trial in trials for problem in trial.problems()]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    speeds: dict[int, float] = {}
    for trial in trials:
        directory = Path(options.output_prefix).parent
        try:
            with tempfile.TemporaryDirectory(prefix=".workers-", dir=directory) as folder:
                prefix = str(Path(folder) / "out")
                started_at = time.monotonic()
                done = preprocess(dataclasses.replace(trial, output_prefix=prefix), tokenizer, _quiet)
                speeds[trial.workers] = done.documents / (time.monotonic() - started_at)
        except FileNotFoundError as error:
            raise ConfigError(f"--output-prefix: there is no directory {directory}; create it") from error
        except OSError as error:
            raise StorageError(f"{directory}: {error.strerror}") from error
        say(f"--workers {trial.workers}: {speeds[trial.workers]:.1f} docs/s ({done.documents} documents)")
    return max(speeds, key=speeds.__getitem__)


def _quiet(size: int) -> JobProgress:
    return JobProgress(io.StringIO(), 1 << 60, size)
