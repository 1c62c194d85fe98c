# SPDX-License-Identifier: Apache-2.0
"""A flag as an argument of argparse, and what a tool's parser needs: errors as ConfigErrors, paths, help, the flags
of the tokenizer. Nothing here loads the configs of training.
"""

from __future__ import annotations

import argparse
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.config_base import get_settings
from megatron.core.errors import ConfigError
from megatron.core.setting import Setting
from megatron.training.config.data import TokenizerConfig
from megatron.training.flags.flag import formers_by_name, table_flags
from megatron.training.flags.given import ParsedFlags, translate


# argparse prints its usage and exits at the first mistake; here all of them come in one error.
class FlagParser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of leaving the program."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class ProgramParser(FlagParser):
    """The parser of a program: its description as it is written, whole flags only, and --traceback."""

    def __init__(self, description: str | None, *, see: str = "", **settings: Any) -> None:
        """see: where a complaint refers to, such as `generate.py --help`."""
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, allow_abbrev=False, **settings)
        self.see = f"; see {see}" if see else ""
        self.add_argument("--traceback", action="store_true", help="show where an error came from")

    def error(self, message: str) -> NoReturn:
        super().error(message + self.see)


def path_text(text: str) -> str:
    """Accept what names a file or a directory: the argparse type of a tool's flags. Raises ArgumentTypeError for an
    empty text, which a config refuses for its fields of type PathText."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty, like a shell variable that is not set; name a path")
    return text


def path(text: str) -> Path:
    """The same, as a Path; which would make the current directory of an empty text."""
    return Path(path_text(text))


class ToolHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of tools that take some of these flags in addition to theirs: the usual spelling only, in at most 100
    columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(100, shutil.get_terminal_size().columns))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, _Record):
            return action.flag.name + format_values(action.flag)
        return super()._format_action_invocation(action)


class _Record(argparse.Action):
    """Records the values of one flag in the ParsedFlags."""

    def __init__(self, flag: Setting, parsed: ParsedFlags, **settings: Any) -> None:
        super().__init__(**settings)
        self.flag = flag
        self.parsed = parsed

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        texts = [values] if isinstance(values, str) else list(values or [])
        self.parsed.give(self.flag, option_string or self.flag.name, texts, "command line")


def add_flag(container: Any, flag: Setting, parsed: ParsedFlags, shown: bool) -> None:
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


def _list_choices(flag: Setting) -> str:
    return "{" + ",".join(map(str, flag.offered_choices)) + "}"


def _name_value(flag: Setting) -> str | tuple[str, ...]:
    """Return what stands for a value in the help."""
    if flag.choices is None or flag.metavar:
        return flag.metavar or {int: "N", float: "X"}.get(flag.value_type, "TEXT")
    choices = _list_choices(flag)
    return choices if len(choices) <= _LONGEST_CHOICES else "NAME"


def format_values(flag: Setting, named: bool = False) -> str:
    """The values after a flag's name in the help: ` N`, ` N ...`, ` {auto,flash}`. named: choices are ` NAME`."""
    if flag.is_switch:
        return ""
    value = "NAME" if named and flag.choices is not None and not flag.metavar else _name_value(flag)
    if isinstance(value, tuple):
        return " " + " ".join(value)
    if isinstance(flag.nargs, int):
        return f" {value}" * flag.nargs
    return {None: f" {value}", "+": f" {value} ...", "*": f" [{value} ...]"}[flag.nargs]


def help_text(flag: Setting) -> str:
    """Return the help of a flag: the docstring of its field, its choices where they are many, its unit, its default."""
    unit = f" In {flag.unit}." if flag.unit else ""
    if flag.choices is not None and not flag.metavar and _name_value(flag) == "NAME":
        unit += f" One of {', '.join(map(str, flag.offered_choices))}."
    if flag.is_switch:
        default = f" (on unless {flag.off_names[0]})" if flag.default else ""
    else:
        default = "" if flag.default is None else f" (default: {flag.format_value(flag.default)})"
    return f"{flag.help}{unit}{default}"


_TOKENIZER = "tokenizer"
_TOKENIZER_FORMER = ("--legacy-tokenizer", "--tiktoken-", "--tokenizer-")


class TokenizerFlags:
    """Declares the flags to a tool's argparse parser, and reads them after it has parsed."""

    def __init__(self, parser: Any) -> None:
        self._parsed = ParsedFlags()
        group = parser.add_argument_group(_TOKENIZER)
        planned = [flag for flag in table_flags() if flag.group == _TOKENIZER]
        for flag in [*get_settings(TokenizerConfig).values(), *planned]:
            add_flag(group, flag, self._parsed, shown=flag.status == "works")

    def translated(self, argv: Sequence[str]) -> list[str]:
        """The command line with flags of other releases replaced by what they mean today."""
        tokens: list[str] = []
        for token in argv:
            former = formers_by_name().get(token.partition("=")[0])
            # A tool's flags may have the name of a former flag of the training program.
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
