# SPDX-License-Identifier: Apache-2.0
"""From lines of JSON to token ids: the work of one preprocessing worker.

A document is one JSON object per line. Under each key it has a text, or a list of texts, each of which becomes a
sequence. A text without tokens makes no sequence; a document without sequences still counts as a document, and gets no
end-of-document token (as in Megatron-LM, so that files are equal byte for byte).

With --split-sentences a text is divided by nltk's Punkt, with its parameters on this machine; nothing is downloaded.
The parameters of a language are the four text files of `tokenizers/punkt_tab/LANGUAGE` in an nltk data directory (where
NLTK_DATA points, ~/nltk_data, /usr/share/nltk_data and so on).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core import optional_deps
from megatron.core.datasets.preprocessing.input_files import Chunk, too_long
from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.encoders import DocumentEncoder

_WINDOW_CHARACTERS = 1_000_000
"""Longer texts are cut before they are split: a sentence ends at each cut."""
_NEEDED_BY = "--split-sentences"


class SentenceSplitter:
    """The sentences of a text.

    language        name of a directory of parameters, such as english
    keep_newlines   white space after a sentence stays with it, except after closing quotes and brackets;
                    otherwise all of it is dropped
    Raises ConfigError without nltk and for a language that is not there, DataError for unusable parameters.
    """

    def __init__(self, language: str, *, keep_newlines: bool = False) -> None:
        self._settings = language, keep_newlines
        punkt = optional_deps.require("nltk.tokenize.punkt", needed_by=_NEEDED_BY)
        parameters = _parameters(find_parameters(language))
        variables = _language_variables(keep_newlines)
        self._punkt: Any = punkt.PunktSentenceTokenizer(parameters, lang_vars=variables)

    def __call__(self, text: str) -> list[str]:
        windows = range(0, len(text), _WINDOW_CHARACTERS)
        return [part for at in windows for part in self._punkt.tokenize(text[at : at + _WINDOW_CHARACTERS])]

    def __reduce__(self) -> tuple[Any, ...]:
        """Built again in a process that is not forked: nltk's objects do not pickle their patterns."""
        return _splitter, self._settings


def _splitter(language: str, keep_newlines: bool) -> SentenceSplitter:
    return SentenceSplitter(language, keep_newlines=keep_newlines)


def find_parameters(language: str) -> Path:
    """The directory of a language's parameters. Raises ConfigError that says where it was looked for."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", language):
        raise ConfigError(f"--lang {language[:60]!r} is not the name of a language; give one such as english")
    data = optional_deps.require("nltk.data", needed_by=_NEEDED_BY)
    roots = [Path(root) for root in data.path]
    for root in roots:
        folder = root / "tokenizers" / "punkt_tab" / language
        if folder.is_dir():
            return folder
    others = sorted({path.name for root in roots for path in root.glob("tokenizers/punkt_tab/*/")})
    known = f"; there are {', '.join(others)}" if others else ""
    raise ConfigError(
        f"--split-sentences --lang {language}: no directory tokenizers/punkt_tab/{language} in "
        f"{', '.join(map(str, roots))}{known}; fetch it with `python -m nltk.downloader punkt_tab`, or let NLTK_DATA "
        "point to the data"
    )


def _parameters(folder: Path) -> Any:
    """Punkt's parameters from a directory of text files."""
    punkt = optional_deps.require("nltk.tokenize.punkt", needed_by=_NEEDED_BY)
    found = punkt.PunktParameters()
    found.abbrev_types = set(_lines(folder / "abbrev_types.txt"))
    found.sent_starters = set(_lines(folder / "sent_starters.txt"))
    found.collocations = {tuple(fields) for fields in _table(folder / "collocations.tab")}
    for word, flags in _table(folder / "ortho_context.tab"):
        if not re.fullmatch("[0-9]{1,9}", flags):
            raise DataError(f"{folder / 'ortho_context.tab'}: {word!r} has {flags[:40]!r}, expected a number")
        found.ortho_context[word] = int(flags)
    return found


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"{path}: missing; the Punkt parameters are incomplete, fetch them again") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a usable file of Punkt parameters ({error}); fetch it again") from error
    return content.strip("\n").split("\n") if content.strip("\n") else []


def _table(path: Path) -> list[list[str]]:
    """Lines of two fields."""
    rows = [line.split("\t") for line in _lines(path)]
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise DataError(f"{path}:{number}: expected two fields with a tab between them, found {len(row)}")
    return rows


def _language_variables(keep_newlines: bool) -> Any:
    """Return the variables by which Punkt finds possible ends of sentences; None for its defaults."""
    if not keep_newlines:
        return None
    punkt = optional_deps.require("nltk.tokenize.punkt", needed_by=_NEEDED_BY)
    variables = punkt.PunktLanguageVars()
    # The match ends after the white space instead of before it, so that it stays with the sentence. It begins at the
    # beginning of a word: then a long text without a space takes linear time.
    variables._re_period_context = re.compile(
        rf"(?<!\S)\S*{variables._re_sent_end_chars}\s*(?=(?P<after_tok>{variables._re_non_word_chars}|(?P<next_tok>\S+)))"
    )
    return variables


# ---- documents


_AUDIT_CHARACTERS = 1000
_BLANK = b" \t\r\n\v\f"


class LineError(Exception):
    """Error in one line: its position and its kind."""

    def __init__(self, message: str, column: int | None = None) -> None:
        super().__init__(message)
        self.column = column


@dataclass
class EncodedDocuments:
    """The documents of a chunk under one key (and in one partition), one after the other."""

    tokens: npt.NDArray[Any]
    """[tokens], in the type of the .bin file."""
    sequence_lengths: list[int]
    """Tokens per sequence, over all documents."""
    sequence_counts: list[int]
    """Number of sequences in each document."""


@dataclass
class EncodedChunk:
    """Result of a worker for a chunk."""

    num_bytes: int
    streams: dict[tuple[int, str], EncodedDocuments]
    """By partition and key."""
    num_documents: int = 0
    num_blank_lines: int = 0
    problems: list[str] = field(default_factory=list)
    """A sentence per unusable line; the line's document is left out."""


@dataclass(frozen=True)
class DocumentOptions:
    """Settings by which lines become tokens."""

    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    eod: int | None = None
    partitions: int = 1
    """Line number modulo `partitions` is the partition of a document, unless `partition_lines` is given."""
    partition_lines: int | None = None
    """Consecutive lines in each partition."""
    dtype: str = "int32"
    """Type of the token ids in the .bin file."""
    max_line_bytes: int = 1 << 26
    stop_at_first_problem: bool = True
    split: Callable[[str], list[str]] | None = None
    """Cuts a text into sentences, each of which becomes a sequence."""

    def partition_of(self, line: int) -> int:
        """The partition of a line, counted from 0 over all files."""
        if self.partition_lines is None:
            return line % self.partitions
        return min(line // self.partition_lines, self.partitions - 1)


class ChunkEncoder:
    """Encodes chunks; a call is independent of the calls before it."""

    def __init__(self, encoder: DocumentEncoder, options: DocumentOptions) -> None:
        self.encoder = encoder
        self.options = options

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Raises EncoderMismatch when the fast encoder turns out to differ from the tokenizer."""
        result = EncodedChunk(num_bytes=len(chunk.data), streams={})
        documents, lines = self._parse(chunk, result)
        encoded = self._encode(documents, lines, chunk, result)
        result.num_documents = len(encoded)
        self._audit(documents, chunk)
        partitions = [self.options.partition_of(chunk.first_line_overall + line) for line in lines]
        for number, key in enumerate(self.options.json_keys):
            for partition in range(self.options.partitions):
                chosen = [texts[number] for texts, where in zip(encoded, partitions, strict=True) if where == partition]
                result.streams[partition, key] = self._join(chosen)
        return result

    def _parse(self, chunk: Chunk, result: EncodedChunk) -> tuple[list[list[list[str]]], list[int]]:
        """Texts by document, key and number, and the line (from 0 in the chunk) of each document."""
        documents, lines = [], []
        offset = chunk.byte_offset
        # split, not splitlines: a form feed or a Unicode line separator inside a text ends no line of JSON.
        for number, line in enumerate(chunk.data.removesuffix(b"\n").split(b"\n")):
            try:
                if not line.strip(_BLANK):
                    result.num_blank_lines += 1
                else:
                    documents.append(self._texts(line, offset))
                    lines.append(number)
            except LineError as error:
                result.problems.append(_sentence(chunk, number, error))
                if self.options.stop_at_first_problem:
                    break
            offset += len(line) + 1
        return documents, lines

    def _texts(self, line: bytes, offset: int) -> list[list[str]]:
        """The texts of a line under each key. Raises LineError."""
        if len(line) > self.options.max_line_bytes:
            raise LineError(too_long(self.options.max_line_bytes))
        document = parse_object(line, offset)
        # A lone surrogate can only come from an escape, so lines without one are spared the search.
        texts = [texts_under(document, key, check_surrogates=b"\\u" in line) for key in self.options.json_keys]
        split = self.options.split
        return texts if split is None else [[part for text in of_key for part in split(text)] for of_key in texts]

    def _encode(
        self, documents: list[list[list[str]]], lines: list[int], chunk: Chunk, result: EncodedChunk
    ) -> list[list[list[npt.NDArray[Any]]]]:
        """Ids by document, key and text. Documents that the tokenizer refuses are removed, each with a problem."""
        try:
            flat = iter(
                self.encoder.encode_batch([text for document in documents for texts in document for text in texts])
            )
            return [[[next(flat) for _ in texts] for texts in document] for document in documents]
        except DataError:
            pass
        encoded = []
        good = []
        for document, line in zip(documents, lines, strict=True):
            try:
                encoded.append([self.encoder.encode_batch(texts) for texts in document])
                good.append((document, line))
            except DataError as error:
                result.problems.append(_sentence(chunk, line, LineError(str(error))))
        # In place: the caller's lists must lose the same documents.
        documents[:] = [document for document, _ in good]
        lines[:] = [line for _, line in good]
        return encoded

    def _join(self, documents: Sequence[Sequence[npt.NDArray[Any]]]) -> EncodedDocuments:
        """Put sequences end to end and append the end-of-document tokens."""
        pieces: list[npt.NDArray[Any]] = []
        lengths: list[int] = []
        counts: list[int] = []
        eod = np.array([self.options.eod], dtype=np.uint32) if self.options.append_eod else None
        for texts in documents:
            # An empty text makes no sequence; a document without any gets no end-of-document token, as upstream's.
            sequences = [ids for ids in texts if len(ids)]
            pieces += sequences
            lengths += [len(ids) for ids in sequences]
            counts.append(len(sequences))
            if eod is not None and sequences:
                pieces.append(eod)
                lengths[-1] += 1
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint32)
        # Checked before the conversion, which would wrap in silence.
        limit = np.iinfo(self.options.dtype).max
        if len(tokens) and (largest := int(np.max(tokens))) > limit:
            raise DataError(
                f"token id {largest} does not fit into {self.options.dtype} of the .bin file (up to {limit})"
            )
        return EncodedDocuments(tokens.astype(self.options.dtype), lengths, counts)

    def _audit(self, documents: list[list[list[str]]], chunk: Chunk) -> None:
        """Compare an excerpt of one document with what the tokenizer itself gives."""
        texts = [text for document in documents for texts in document for text in texts if text]
        if texts:
            # Another text and place in every chunk, but the same ones whenever the job is repeated.
            text = texts[chunk.first_line_overall % len(texts)]
            start = chunk.byte_offset % len(text)
            self.encoder.verify(text[start : start + _AUDIT_CHARACTERS])


def parse_object(line: bytes, offset: int = 0) -> dict[str, Any]:
    """The JSON object of a line; `offset` is the byte where the line begins. Raises LineError."""
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise LineError(f"invalid UTF-8: byte 0x{line[error.start]:02x} at byte offset {at} of the file") from error
    except json.JSONDecodeError as error:
        raise LineError(f"invalid JSON: {error.msg}", column=error.pos + 1) from error
    except RecursionError as error:
        raise LineError("invalid JSON: lists or objects nested too deeply") from error
    except ValueError as error:  # Python refuses to convert integers of more than 4300 digits
        raise LineError(f"invalid JSON: {str(error).partition(';')[0]}") from error
    if not isinstance(document, dict):
        raise LineError(f"expected a JSON object, found {_JSON_NAMES[type(document)]}")
    return document


def texts_under(document: dict[str, Any], key: str, *, check_surrogates: bool = True) -> list[str]:
    """The text or texts under a key. Raises LineError.

    A lone surrogate (an escape such as `\\ud800` without its partner) stands for no character and is refused.
    """
    if key not in document:
        found = ", ".join(repr(name) for name in list(document)[:8]) or "none"
        raise LineError(f"key {key!r} is missing; the keys here are {found} (--json-keys names what to read)")
    value = document[key]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            where = "a list with " if isinstance(value, list) else ""
            raise LineError(f"key {key!r} holds {where}{_JSON_NAMES[type(text)]}, expected text or a list of texts")
        if check_surrogates and not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise LineError(
                    f"key {key!r} holds a lone surrogate \\u{ord(text[error.start]):04x} "
                    f"(character {error.start} of the text), which is no character"
                ) from error
    return texts


_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _sentence(chunk: Chunk, line: int, error: LineError) -> str:
    column = "" if error.column is None else f":{error.column}"
    return f"{chunk.path}:{chunk.first_line + line}{column}: {error}"
