"""Split texts into sentences with nltk's Punkt and its parameters on this machine; nothing is downloaded.

The parameters of a language are the four text files of `tokenizers/punkt_tab/LANGUAGE` in an nltk data directory
(where NLTK_DATA points, ~/nltk_data, /usr/share/nltk_data and so on).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron.core import optional_deps
from megatron.core.errors import ConfigError, DataError

_WINDOW_CHARACTERS = 1_000_000
"""Longer texts are cut before they are split, as in Megatron-LM: a sentence ends at each cut."""
_NEEDED_BY = "--split-sentences"


class SentenceSplitter:
    """The sentences of a text.

    language        name of a directory of parameters, such as english
    keep_newlines   white space behind a sentence stays with it, but for that behind closing quotes and brackets;
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
        """Made anew in a process that is not forked: nltk's objects do not pickle their patterns."""
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
    """How Punkt finds possible ends of sentences; None for its own way."""
    if not keep_newlines:
        return None
    punkt = optional_deps.require("nltk.tokenize.punkt", needed_by=_NEEDED_BY)
    variables = punkt.PunktLanguageVars()
    # The match ends behind the white space instead of before it, so that it stays with the sentence. It begins at the
    # beginning of a word: then a long text without a space takes linear time.
    variables._re_period_context = re.compile(
        rf"(?<!\S)\S*{variables._re_sent_end_chars}\s*(?=(?P<after_tok>{variables._re_non_word_chars}|(?P<next_tok>\S+)))"
    )
    return variables
