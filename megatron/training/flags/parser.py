# SPDX-License-Identifier: Apache-2.0
"""Reads a command line: which flag has which value, and everything that is wrong with it at once.

argparse dispatches; around it stand three things it cannot do: report every problem instead of the first one, refuse
numbers that Python would quietly take ("1_000", "nan", digits of other scripts), and say what a misspelt flag should
have been.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from megatron.core.errors import ConfigError
from megatron.core.setting import describe_expected, explain_refusal
from megatron.training.config.data import TokenizerConfig
from megatron.training.config.program import ProgramFlags
from megatron.training.flags.declarations import (
    Flag,
    FormerFlag,
    declared_flags,
    flags_of,
    former_flags,
    parse_value,
    table_flags,
)

ExtraFlags = Callable[[argparse.ArgumentParser], Any]
"""A user's function that adds flags of its own, as upstream's `extra_args_provider`."""


@dataclass(frozen=True)
class Problem:
    """One reason why the settings cannot be used."""

    kind: Literal["spelling", "works", "planned", "not supported", "rule"]
    text: str


@dataclass(frozen=True)
class Given:
    """A setting that the user wrote."""

    flag: Flag
    value: Any
    written: str
    """As the user spelled it, with the place when it stands in a file."""
    source: str

    def refusal(self) -> Problem | None:
        """Why the setting is refused for its status; None where it is accepted."""
        refused = explain_refusal(self.flag, self.value, self.written)
        return None if refused is None else Problem(*refused)


@dataclass
class ParsedFlags:
    """What was given, by `dest`, and what was wrong with it. A later entry replaces an earlier one."""

    given: dict[str, Given] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Spellings of the flags whose value could not be read."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values of the flags that the user's own script added."""

    def misspelt(self, text: str, *flags: Flag) -> None:
        """Record a problem with what was written, and that the values of these flags are not known."""
        self.problems.append(Problem("spelling", text))
        # Rules that mention a flag whose value could not be read would judge a default instead.
        self.broken.update(name for flag in flags for name in flag.spellings)

    def give(self, flag: Flag, spelling: str, texts: Sequence[str], source: str, place: str = "") -> None:
        """Read the texts after one flag and record the value."""
        try:
            value: Any = [parse_value(flag, text) for text in texts]
        except ValueError as error:
            self.misspelt(f"{place}{error}", flag)
            return
        if flag.is_switch:
            value = spelling not in flag.off_names
        elif flag.nargs is None:
            value = value[0]
        written = " ".join([spelling, *texts])
        self.given[flag.dest] = Given(flag, value, f"{written} ({place.rstrip(': ')})" if place else written, source)


@functools.cache
def program_flags() -> tuple[Flag, ...]:
    """Return the flags of the program itself: --config, --print-config, ..."""
    return tuple(flags_of(ProgramFlags, "program"))


@functools.cache
def flags_by_spelling() -> dict[str, Flag]:
    """Every spelling this program knows, but for those of other releases."""
    known: dict[str, Flag] = {}
    for flag in known_flags():
        for spelling in flag.spellings:
            if spelling in known:
                # A mistake of ours, not of the user; a test runs into it first.
                raise AssertionError(f"{spelling} is declared twice: {known[spelling].dest} and {flag.dest}")
            known[spelling] = flag
    return known


@functools.cache
def formers_by_name() -> dict[str, FormerFlag]:
    """Return the spellings of other releases, by name."""
    return {former.name: former for former in former_flags()}


# What argparse takes for a value although it starts with a hyphen.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


# argparse prints its usage and exits at the first mistake; here all of them come in one error.
class FlagParser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of leaving the program."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def path_text(text: str) -> str:
    """Accept what names a file or a directory: the argparse type of a tool's own flags. Raises ArgumentTypeError for an
    empty text, which a config refuses for its fields of type PathText."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty, like a shell variable that is not set; name a path")
    return text


def path(text: str) -> Path:
    """The same, as a Path; which would make the current directory of an empty text."""
    return Path(path_text(text))


class ToolHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """For tools that take some of these flags beside their own: the usual spelling only, in at most 100 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(100, shutil.get_terminal_size().columns))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, _Record):
            return action.flag.name + format_values(action.flag)
        return super()._format_action_invocation(action)


class _Record(argparse.Action):
    """Records the values of one flag in the ParsedFlags."""

    def __init__(self, flag: Flag, parsed: ParsedFlags, **settings: Any) -> None:
        super().__init__(**settings)
        self.flag = flag
        self.parsed = parsed

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        texts = [values] if isinstance(values, str) else list(values or [])
        self.parsed.give(self.flag, option_string or self.flag.name, texts, "command line")


def known_flags() -> tuple[Flag, ...]:
    """Every flag of today: the program's, the configs', the table's."""
    return program_flags() + declared_flags() + table_flags()


def build_parser(
    parsed: ParsedFlags,
    extra_flags: ExtraFlags | None = None,
    flags: Iterable[Flag] | None = None,
) -> FlagParser:
    """The parser with all flags, or with these. What --help shows is made elsewhere (help.py)."""
    parser = FlagParser(prog="pretrain_gpt.py", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", default=argparse.SUPPRESS)
    for flag in known_flags() if flags is None else flags:
        add_flag(parser, flag, parsed, shown=False)
    if extra_flags is not None:
        extra_flags(parser)
    return parser


def add_flag(container: Any, flag: Flag, parsed: ParsedFlags, shown: bool) -> None:
    """Declare one flag to argparse."""
    container.add_argument(
        *flag.spellings,
        action=functools.partial(_Record, flag, parsed),
        dest=flag.dest,
        nargs=0 if flag.is_switch else flag.nargs,
        # Absent instead of None: what was not written stays apart from what was written as the default.
        default=argparse.SUPPRESS,
        metavar=None if flag.is_switch else _name_value(flag),
        help=help_text(flag).replace("%", "%%") if shown else argparse.SUPPRESS,
    )


_LONGEST_CHOICES = 40
"""Characters of a list of choices that stands for the value; a longer one is part of the text."""


def _list_choices(flag: Flag) -> str:
    return "{" + ",".join(map(str, flag.offered_choices)) + "}"


def _name_value(flag: Flag) -> str | tuple[str, ...]:
    """What stands for a value in the help."""
    if flag.choices is None or flag.metavar:
        return flag.metavar or {int: "N", float: "X"}.get(flag.value_type, "TEXT")
    choices = _list_choices(flag)
    return choices if len(choices) <= _LONGEST_CHOICES else "NAME"


def format_values(flag: Flag, named: bool = False) -> str:
    """The values after a flag's name in the help: ` N`, ` N ...`, ` {auto,flash}`. named: choices are ` NAME`."""
    if flag.is_switch:
        return ""
    value = "NAME" if named and flag.choices is not None and not flag.metavar else _name_value(flag)
    if isinstance(value, tuple):
        return " " + " ".join(value)
    if isinstance(flag.nargs, int):
        return f" {value}" * flag.nargs
    return {None: f" {value}", "+": f" {value} ...", "*": f" [{value} ...]"}[flag.nargs]


def help_text(flag: Flag) -> str:
    """Return the help of a flag: the docstring of its field, its choices where they are many, its unit, its default."""
    unit = f" In {flag.unit}." if flag.unit else ""
    if flag.choices is not None and not flag.metavar and _name_value(flag) == "NAME":
        unit += f" One of {', '.join(map(str, flag.offered_choices))}."
    if flag.is_switch:
        default = f" (on unless {flag.off_names[0]})" if flag.default else ""
    else:
        default = "" if flag.default is None else f" (default: {flag.format_value(flag.default)})"
    return f"{flag.help}{unit}{default}"


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
    occurrences = list(_occurrences(argv, arities, parsed))
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


def _note_repeated(occurrences: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    """A note for each flag that was written more than once, unless always alike."""
    by_dest: dict[str, list[str]] = defaultdict(list)
    for spelling, texts in occurrences:
        flag = flags_by_spelling().get(spelling)
        # Flags of a user's own may be meant to be repeated.
        if flag is not None:
            by_dest[flag.dest].append(" ".join([spelling, *texts]))
    for ways in by_dest.values():
        if len(set(ways)) > 1:
            yield f"{', then '.join(ways)}: the last one counts"


def translate(former: FormerFlag, texts: list[str], parsed: ParsedFlags, place: str = "") -> list[str]:
    """The command line that a flag of another release stands for; notes it, or refuses it."""
    written = " ".join([former.name, *texts])
    if former.is_refused:
        parsed.problems.append(Problem("not supported", f"{place}{written} is not supported: {former.text}"))
        return []
    parsed.notes.append(f"{place}{former.name} {former.text}")
    return former.replacement([text.lower() if former.name == "--cpu-optimizer-type" else text for text in texts])


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


def _wrong_number(spelling: str, texts: list[str], nargs: int | str | None) -> str | None:
    """What is wrong with the number of texts after a flag."""
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


def unknown_flag(spelling: str, known: Iterable[str]) -> str:
    """The sentence for a flag nobody knows, with what it may have been meant to be."""
    spelling = spelling if len(spelling) <= 80 else f"{spelling[:77]}..."
    hyphenated = "--" + spelling.lstrip("-").replace("_", "-")
    candidates = list(known)
    if hyphenated in candidates:
        return f"unknown flag {spelling}; flags are written with hyphens: {hyphenated}"
    # A unique beginning is what abbreviations used to mean; five characters are the least that says something.
    longer = [name for name in candidates if name.startswith(hyphenated)] if len(hyphenated) > 4 else []
    likely = longer if len(longer) == 1 else difflib.get_close_matches(hyphenated, candidates, n=3, cutoff=0.75)
    if not likely:
        return f"unknown flag {spelling}; --help WORD finds flags by a word in their names and texts"
    return f"unknown flag {spelling}; did you mean {' or '.join(likely)}?"


_TOKENIZER = "tokenizer"
_TOKENIZER_FORMER = ("--legacy-tokenizer", "--tiktoken-", "--tokenizer-")


class TokenizerFlags:
    """Declares the flags to a tool's argparse parser, and reads them after it has parsed."""

    def __init__(self, parser: Any) -> None:
        self._parsed = ParsedFlags()
        group = parser.add_argument_group(_TOKENIZER)
        planned = [flag for flag in table_flags() if flag.group == _TOKENIZER]
        for flag in [*flags_of(TokenizerConfig, _TOKENIZER), *planned]:
            add_flag(group, flag, self._parsed, shown=flag.status == "works")

    def translated(self, argv: Sequence[str]) -> list[str]:
        """The command line with flags of other releases replaced by what they mean today."""
        tokens: list[str] = []
        for token in argv:
            former = formers_by_name().get(token.partition("=")[0])
            # A tool's own flags may have the name of a former flag of the training program.
            if former is None or not token.startswith(_TOKENIZER_FORMER):
                tokens.append(token)
            else:
                tokens += translate(former, token.split("=", 1)[1:], self._parsed)
        return tokens

    def config(self) -> TokenizerConfig:
        """The settings that the command line gave. Raises ConfigError with every problem."""
        refusals = [entry.refusal() for entry in self._parsed.given.values()]
        problems = [*self._parsed.problems, *(problem for problem in refusals if problem is not None)]
        if problems:
            raise ConfigError([problem.text for problem in problems])
        return TokenizerConfig(**{dest: entry.value for dest, entry in self._parsed.given.items()})

    @property
    def notes(self) -> list[str]:
        """Sentences for the user, about flags of other releases."""
        return self._parsed.notes
