# SPDX-License-Identifier: Apache-2.0
"""Reads a command line: which flag has which value, and everything that is wrong with it at once.

argparse dispatches; around it stand three things it cannot do: report every problem instead of the first one, refuse
numbers that Python would quietly take ("1_000", "nan", digits of other scripts), and say what a misspelt flag should
have been.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from megatron.core.setting import Setting, describe_expected
from megatron.training.flags.argument import FlagParser, add_flag
from megatron.training.flags.declarations import flags_by_spelling, known_flags
from megatron.training.flags.flag import formers_by_name
from megatron.training.flags.given import Given, ParsedFlags, translate

ExtraFlags = Callable[[argparse.ArgumentParser], Any]
"""A user's function that adds flags, like upstream's `extra_args_provider`."""


# What argparse takes for a value although it starts with a hyphen.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
# What word processors and web pages make of two hyphens.
_LONG_DASHES = ("\u2013", "\u2014")


def build_parser(
    parsed: ParsedFlags,
    extra_flags: ExtraFlags | None = None,
    flags: Iterable[Setting] | None = None,
) -> FlagParser:
    """The parser with all flags, or with these. What --help shows is made elsewhere (help.py)."""
    parser = FlagParser(prog="pretrain_gpt.py", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", default=argparse.SUPPRESS)
    for flag in known_flags() if flags is None else flags:
        add_flag(parser, flag, parsed, shown=False)
    if extra_flags is not None:
        extra_flags(parser)
    return parser


def read_command_line(argv: Sequence[str], parsed: ParsedFlags, extra_flags: ExtraFlags | None = None) -> None:
    """Record every flag of the command line, its problems, and the notes about spellings of other releases."""
    arities: dict[str, int | str | None] = {
        spelling: 0 if flag.is_switch else flag.nargs for spelling, flag in flags_by_spelling().items()
    }
    arities.update((name, former.nargs) for name, former in formers_by_name().items())
    if extra_flags is not None:
        own = build_parser(ParsedFlags(), extra_flags)._actions
        # A throw-away parser: only argparse knows what a user's function has added.
        arities.update((spelling, action.nargs) for action in own for spelling in action.option_strings)
    written: list[str] = []
    translated: dict[str, list[str]] = {}
    occurrences = _join_repeated(_occurrences(argv, arities, parsed))
    for spelling, texts in occurrences:
        former = formers_by_name().get(spelling)
        if former is None:
            written += _unmistakable(spelling, texts, arities)
        else:
            translated[spelling] = translate(former, texts, parsed)
    parsed.notes += _note_repeated(occurrences)
    # What stands for former flags comes first, in the order of their table, so that the more particular spelling wins.
    former_tokens = [token for name in formers_by_name() for token in translated.get(name, [])]
    tokens = former_tokens + written
    # Declaring 900 flags to argparse takes longer than all the rest: only those that occur, unless a user adds some.
    spellings = [token.partition("=")[0] for token in tokens]
    occurring = {
        flags_by_spelling()[name].dest: flags_by_spelling()[name] for name in spellings if name in flags_by_spelling()
    }
    parser = build_parser(parsed, extra_flags, occurring.values() if extra_flags is None else None)
    parsed.extra = vars(parser.parse_args(tokens))
    # A user's parser.set_defaults() of flags that are ours.
    for flag in known_flags() if extra_flags is not None else ():
        if flag.dest in parsed.extra:
            value = parsed.extra.pop(flag.dest)
            parsed.given.setdefault(flag.dest, Given(flag, value, f"{flag.dest}={value}", "script"))


def drop_unknown(argv: Sequence[str], extra_flags: ExtraFlags | None = None) -> list[str]:
    """A command line without the flags that neither this program nor a user's function knows, and without their
    values: they are for another program's parser."""
    known = {*flags_by_spelling(), *formers_by_name(), "-h", "--help", "--version"}
    if extra_flags is not None:
        own = build_parser(ParsedFlags(), extra_flags)._actions
        known |= {name for action in own for name in action.option_strings}
    kept: list[str] = []
    is_kept = False
    for word in argv:
        if word.startswith("--") or word == "-h":
            is_kept = word.partition("=")[0] in known
        if is_kept:
            kept.append(word)
    return kept


def _join_repeated(occurrences: Iterable[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Each flag with its texts; one whose occurrences all count has them together, where it came first."""
    joined: list[tuple[str, list[str]]] = []
    firsts: dict[str, list[str]] = {}
    for spelling, texts in occurrences:
        flag = flags_by_spelling().get(spelling)
        if flag is not None and flag.repeats and flag.dest in firsts:
            firsts[flag.dest] += texts
            continue
        joined.append((spelling, list(texts)))
        if flag is not None:
            firsts[flag.dest] = joined[-1][1]
    return joined


def _note_repeated(occurrences: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    """A note for each flag that was written more than once, unless always alike."""
    by_dest: dict[str, list[str]] = defaultdict(list)
    for spelling, texts in occurrences:
        flag = flags_by_spelling().get(spelling)
        # A user's flags may be meant to be repeated.
        if flag is not None:
            by_dest[flag.dest].append(" ".join([spelling, *texts]))
    for ways in by_dest.values():
        if len(set(ways)) > 1:
            yield f"{', then '.join(ways)}: the last one counts"


def _occurrences(
    argv: Sequence[str], arities: dict[str, int | str | None], parsed: ParsedFlags
) -> Iterator[tuple[str, list[str]]]:
    """Each known flag of the command line with its texts, after checking their number."""
    for spelling, texts in _split(argv):
        if not spelling:
            parsed.misspelt(
                f"unexpected {' '.join(texts)!r} at the start of the command line; every value follows a --flag"
            )
        elif spelling not in arities:
            parsed.misspelt(unknown_flag(spelling, arities))
        elif dashed := _find_long_dash(texts, arities[spelling]):
            right = "--" + dashed.lstrip("-" + "".join(_LONG_DASHES))
            parsed.misspelt(f"{spelling} is followed by {dashed!r}, which begins with a long dash; write {right}")
        else:
            complaint = _wrong_number(spelling, texts, arities[spelling])
            if complaint is None:
                yield spelling, texts
            else:
                known = flags_by_spelling().get(spelling)
                wanted = f"; give {describe_expected(known)}" if known is not None and not known.is_switch else ""
                parsed.misspelt(complaint + wanted, *([known] if known else []))


def _split(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """`--a 1 2 --b=3` -> ("--a", ["1", "2"]), ("--b", ["3"])."""
    spelling: str = ""
    texts: list[str] = []
    for token in argv:
        if token.startswith("--") or token == "-h":
            if spelling or texts:
                yield spelling, texts
            spelling, equals, value = token.partition("=")
            texts = [value] if equals else []
        else:
            texts.append(token)
    if spelling or texts:
        yield spelling, texts


def _find_long_dash(texts: list[str], nargs: int | str | None) -> str | None:
    """Return the text that was meant for a flag. A single word after a flag with a value may be any text."""
    if len(texts) == 1 and nargs != 0:
        return None
    return next((text for text in texts if text.startswith(_LONG_DASHES)), None)


def _wrong_number(spelling: str, texts: list[str], nargs: int | str | None) -> str | None:
    """Return what is wrong with the number of texts after a flag."""
    wanted = 1 if nargs is None else nargs
    for text in texts:
        # One value may begin with a hyphen (-1e-5); among several it is more likely a flag with one hyphen too few.
        several = len(texts) > 1 or nargs in ("*", "+", "?")
        if text == "--" or (several and text.startswith("-") and not _NEGATIVE.fullmatch(text)):
            return f"{spelling} is followed by {text!r}, which looks like a flag and not like a value"
    if nargs in ("*", "?"):
        return None
    if nargs == "+":
        return None if texts else f"{spelling} needs at least one value after it"
    if len(texts) == wanted:
        return None
    found = " ".join(texts)
    if wanted == 0:
        return f"{spelling} is a switch and takes no value, but {found!r} follows; remove the value"
    if not texts:
        return f"{spelling} needs {_count(wanted)} after it"
    return f"{spelling} takes {_count(wanted)}, but {found!r} follows"


def _count(number: int | str) -> str:
    return "a value" if number == 1 else f"{number} values"


def _unmistakable(spelling: str, texts: list[str], arities: dict[str, int | str | None]) -> list[str]:
    """The tokens again, written so that argparse does not take a value such as -1e5 for a flag."""
    if len(texts) == 1 and arities[spelling] is None:
        # With "=" argparse takes whatever follows for the value.
        return [f"{spelling}={texts[0]}"]
    return [spelling, *texts]


def unknown_flag(spelling: str, known: Collection[str]) -> str:
    """The sentence for a flag nobody knows, with what it may have been meant to be."""
    words = spelling.split()
    if len(words) > 1 and words[0] in known:
        shown = spelling if len(spelling) <= 40 else f"{spelling[:37]}..."
        return (
            f"{shown!r} came as one word, with its spaces; remove the quotation marks around it (in bash an array, "
            '"${FLAGS[@]}", keeps the words apart)'
        )
    spelling = spelling if len(spelling) <= 80 else f"{spelling[:77]}..."
    hyphenated = "--" + spelling.lstrip("-").replace("_", "-")
    if hyphenated in known:
        return f"unknown flag {spelling}; flags are written with hyphens: {hyphenated}"
    # A unique beginning is what abbreviations used to mean; five characters are the least that says something.
    longer = [name for name in known if name.startswith(hyphenated)] if len(hyphenated) > 4 else []
    likely = longer if len(longer) == 1 else difflib.get_close_matches(hyphenated, known, n=3, cutoff=0.75)
    if not likely:
        return f"unknown flag {spelling}; --help WORD finds flags by a word in their names and texts"
    return f"unknown flag {spelling}; did you mean {' or '.join(likely)}?"
