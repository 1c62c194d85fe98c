# SPDX-License-Identifier: Apache-2.0
"""The flags that a user gave, where each was written, and what was wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core.setting import Setting, explain_refusal
from megatron.training.flags.flag import FormerFlag, parse_value


@dataclass(frozen=True)
class Problem:
    """One reason why the settings cannot be used."""

    kind: Literal["spelling", "works", "planned", "not supported", "rule"]
    text: str


@dataclass(frozen=True)
class Given:
    """A setting that the user wrote."""

    flag: Setting
    value: Any
    written: str
    """As the user spelled it, with the place if it is in a file."""
    source: str

    def refusal(self) -> Problem | None:
        """Return why the setting is refused for its status; None where it is accepted."""
        refused = explain_refusal(self.flag, self.value, self.written)
        return None if refused is None else Problem(*refused)


@dataclass
class ParsedFlags:
    """Values given, by `dest`, and the problems with them. A later entry replaces an earlier one."""

    given: dict[str, Given] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Spellings of the flags whose value could not be read."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values of the flags that the user's script added."""

    def misspelt(self, text: str, *flags: Setting) -> None:
        """Record a problem with what was written, and that the values of these flags are not known."""
        self.problems.append(Problem("spelling", text))
        # Rules that mention a flag whose value could not be read would judge a default instead.
        self.broken.update(name for flag in flags for name in flag.spellings)

    def give(self, flag: Setting, spelling: str, texts: Sequence[str], source: str, place: str = "") -> None:
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


def translate(former: FormerFlag, texts: list[str], parsed: ParsedFlags, place: str = "") -> list[str]:
    """The command line that a flag of another release stands for; notes it, or refuses it."""
    written = " ".join([former.name, *texts])
    if former.is_refused:
        parsed.problems.append(Problem("not supported", f"{place}{written} is not supported: {former.text}"))
        return []
    parsed.notes.append(f"{place}{former.name} {former.text}")
    return former.replacement([text.lower() if former.name == "--cpu-optimizer-type" else text for text in texts])


def divide_tokens(tokens: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Divide tokens into flags with their values: `--a 1 --b` -> ("--a", ["1"]), ("--b", [])."""
    starts = [i for i, token in enumerate(tokens) if token.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        yield tokens[start], tokens[start + 1 : end]
