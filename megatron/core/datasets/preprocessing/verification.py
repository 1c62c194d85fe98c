# SPDX-License-Identifier: Apache-2.0
"""Compare token datasets with the text they were made from, document by document.

Independent of how they were made: texts go to the tokenizer one by one, in one process, without the fast encoder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing.documents import DocumentOptions, LineError, parse_object, texts_under
from megatron.core.datasets.preprocessing.input_files import find_inputs, read_chunks
from megatron.core.datasets.preprocessing.job import PreprocessOptions, document_options
from megatron.core.datasets.preprocessing.output import output_prefixes
from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.base import Tokenizer

_SHOWN_TOKENS = 8


@dataclass
class Verified:
    """Counts of what was compared, and found equal."""

    prefixes: list[str]
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    bad_lines: int = 0
    """Unusable lines, left out as with --on-bad-line skip."""
    texts: int = 0
    restored: int = 0
    """Texts that detokenizing gives back to the letter."""


@dataclass(frozen=True)
class _Line:
    """A document of the input."""

    place: str
    """file:line"""
    number: int
    """Number of the line, counted from 0 over all files."""
    texts: list[list[str]]
    """The texts of each key, in the order of the keys."""


def verify_tokenization(options: PreprocessOptions, tokenizer: Tokenizer, max_documents: int | None = None) -> Verified:
    """Check the output of a preprocessing job with these options, its parts where it has several.

    max_documents   compare only the first so many documents of the input, and not whether there are more
    Raises DataError that names file, line and dataset at the first difference; ConfigError for unusable options.
    """
    problems = options.problems()
    if options.append_eod and tokenizer.eod is None:
        problems.append("--append-eod: the tokenizer has no end-of-document token")
    if max_documents is not None and max_documents < 1:
        problems.append(f"--documents {max_documents} must be at least 1")
    if problems:
        raise ConfigError(problems)
    paths = find_inputs(options.input)
    work = document_options(options, paths, tokenizer)
    whole, parts = output_prefixes(options.output_prefix, options.json_keys, options.partitions, options.level)
    result = Verified(prefixes=[*parts.values()])
    readers = {part: _DocumentReader(prefix, tokenizer) for part, prefix in parts.items()}
    for line in itertools.islice(_lines(paths, options, work, result), max_documents):
        partition = work.partition_of(line.number)
        for key, texts in zip(options.json_keys, line.texts, strict=True):
            readers[partition, key].compare(line.place, texts, work, result)
        result.documents += 1
    if max_documents is None:
        for reader in readers.values():
            reader.check_end()
        if options.partitions > 1:
            for key, prefix in whole.items():
                _check_whole(prefix, [parts[partition, key] for partition in range(options.partitions)])
                result.prefixes.append(prefix)
    return result


def _lines(
    paths: Sequence[str], options: PreprocessOptions, work: DocumentOptions, result: Verified
) -> Iterator[_Line]:
    """The documents of the input. Raises DataError for an unusable line, unless such lines are skipped."""
    is_skipping = options.on_bad_line == "skip"
    for chunk in read_chunks(paths, options.max_line_bytes, cut_long_lines=is_skipping):
        for number, line in enumerate(chunk.data.removesuffix(b"\n").split(b"\n")):
            place = f"{chunk.path}:{chunk.first_line + number}"
            try:
                if not line.strip():
                    continue
                if len(line) > options.max_line_bytes:
                    raise LineError(f"longer than --max-line-bytes {options.max_line_bytes}")
                document = parse_object(line)
                texts = [texts_under(document, key) for key in options.json_keys]
            except LineError as error:
                if not is_skipping:
                    raise DataError(f"{place}: {error}") from error
                result.bad_lines += 1
                continue
            yield _Line(place, chunk.first_line_overall + number, texts)


class _DocumentReader:
    """The documents of a dataset, one after the other."""

    def __init__(self, prefix: str, tokenizer: Tokenizer) -> None:
        self._prefix = prefix
        self._dataset = IndexedDataset(prefix)
        self._tokenizer = tokenizer
        self._document = 0

    def compare(self, place: str, texts: list[str], work: DocumentOptions, result: Verified) -> None:
        """Compare the next document with the texts of a line."""
        starts = self._dataset.document_indices
        where = f"{place}: document {self._document} of {self._prefix}"
        if self._document + 1 >= len(starts):
            raise DataError(f"{where} is missing: the dataset ends before it; was it made from this input?")
        parts = texts if work.split is None else [part for text in texts for part in work.split(text)]
        encoded = [(part, self._tokenizer.tokenize(part)) for part in parts]
        # What documents.py makes of the texts, written a second time on purpose: a check that shared the encoding would
        # share its faults.
        expected = [ids for _, ids in encoded if ids]
        if expected and work.append_eod and work.eod is not None:
            expected[-1] = [*expected[-1], work.eod]
        first, last = int(starts[self._document]), int(starts[self._document + 1])
        for number, ids in enumerate(expected[: last - first]):
            found = self._dataset[first + number].tolist()
            if found != ids:
                raise DataError(f"{where}, sequence {number}: {self._difference(found, ids)}")
        if last - first != len(expected):
            raise DataError(
                f"{where} has {last - first} sequences, its text makes {len(expected)}; was it made with these flags?"
            )
        self._document += 1
        result.sequences += len(expected)
        result.tokens += sum(map(len, expected))
        result.texts += len(encoded)
        # Counted, not demanded: many tokenizers normalise spaces or characters.
        result.restored += sum(self._tokenizer.detokenize(ids) == part for part, ids in encoded)

    def check_end(self) -> None:
        """Raise DataError if the dataset goes on."""
        documents = len(self._dataset.document_indices) - 1
        if documents != self._document:
            raise DataError(
                f"{self._prefix} has {documents} documents, the input has {self._document} for it; "
                "was it made from this input?"
            )

    def _difference(self, found: list[int], expected: list[int]) -> str:
        """Return where two lists of ids part, with what follows there."""
        at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
        if at is None:
            at = min(len(found), len(expected))
        shown = [self._shown(ids[at : at + _SHOWN_TOKENS]) for ids in (found, expected)]
        return (
            f"token {at} of {len(found)}: found {shown[0]}, the text makes {shown[1]}; was it made with this tokenizer "
            "and these flags?"
        )

    def _shown(self, ids: list[int]) -> str:
        return f"{ids} {self._tokenizer.detokenize(ids)[:60]!r}" if ids else "its end"


def _check_whole(prefix: str, part_prefixes: list[str]) -> None:
    """Raise DataError unless a dataset is its parts put together."""
    whole = IndexedDataset(prefix)
    sequence = document = 0
    starts = whole.document_indices
    for part_prefix in part_prefixes:
        part = IndexedDataset(part_prefix)
        documents = len(part.document_indices)
        if starts[document : document + documents].tolist() != (part.document_indices + sequence).tolist():
            raise DataError(f"{prefix}: its documents are not those of {part_prefix} from document {document} on")
        # Sequence by sequence: comparing whole files would need as much memory as they have bytes.
        for number in range(len(part)):
            if whole[sequence + number].tolist() != part[number].tolist():
                raise DataError(
                    f"{prefix}: sequence {sequence + number} differs from sequence {number} of {part_prefix}"
                )
        sequence, document = sequence + len(part), document + documents - 1
    if (len(whole), len(starts) - 1) != (sequence, document):
        raise DataError(f"{prefix} has {len(whole)} sequences, its parts have {sequence}")
