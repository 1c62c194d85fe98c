# SPDX-License-Identifier: Apache-2.0
"""--help: short for most, whole for those who ask, and never wider than a terminal."""

from __future__ import annotations

import argparse
import re

import pytest

from megatron.core.errors import ConfigError
from megatron.training.config.run_groups import groups_of_fields
from megatron.training.flags.declarations import declared_flags, flags_by_spelling, program_flags
from megatron.training.flags.help import COMMON_FLAGS, asked_for_help, format_help
from megatron.training.flags.read import read_run_config


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def flags_in(text: str) -> set[str]:
    """The flags that have an entry of their own."""
    return set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixing-weight", type=float, default=0.5, help="How much of it, %(default)s of 1.")


def test_help_without_words_is_short() -> None:
    common = " ".join(COMMON_FLAGS.values()).split()
    assert 50 <= len(common) == len(set(common)) <= 70
    assert {flags_by_spelling()[name].status for name in common} == {"works"}
    text = format_help([])
    assert len(text.splitlines()) <= 110, "two screens"
    assert flags_in(text) >= set(common)
    for way in ("--help WORD", "--help SECTION", "--help all", "docs/flags.md"):
        assert way in text


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("words", [[], ["all"], ["parallel"]])
def test_lines_fit_the_terminal_and_100_columns(
    words: list[str], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, format_help(words).splitlines())) <= min(100, columns)


def test_all_is_every_flag_that_works_with_all_of_its_choices() -> None:
    text = format_help(["all"])
    working = [flag for flag in program_flags() + declared_flags() if flag.status == "works"]
    assert flags_in(text) == {flag.name for flag in working}
    for flag in working:
        assert all(str(choice) in text for choice in flag.offered_choices), flag.name


def test_a_section_has_its_flags_and_no_others() -> None:
    expected = {
        flag.name
        for flag in declared_flags()
        if groups_of_fields()[flag.dest] == "optimizer" and flag.status == "works"
    }
    assert flags_in(format_help(["optimizer"])) == expected


def test_words_are_looked_for_in_names_and_texts() -> None:
    text = format_help(["weight", "decay"])
    assert {"--weight-decay", "--start-weight-decay", "--apply-wd-to-qk-layernorm"} <= flags_in(text)
    assert flags_in(format_help(["weight-decay"])) == flags_in(text) == flags_in(format_help(["Weight_Decay"]))
    assert "--accumulate-allreduce-grads-in-fp32" not in flags_in(format_help(["lr"])), "a word begins with it"


def test_what_is_not_available_is_found_too() -> None:
    text = format_help(["fake", "process"])
    assert re.search(r"Planned:\n(.*\n)*?  --fake-process-group .*Comes with the layout planner", text)
    assert "Understood with a note:" in format_help(["router", "fusion"])
    assert "Not supported:" in format_help(["retro"])


def test_a_word_that_nothing_has() -> None:
    with pytest.raises(ConfigError, match="--help nosuchword: no flag has that .* program, model, gpt, ddp"):
        format_help(["nosuchword"])


def test_flags_of_a_script_are_shown() -> None:
    for words in ([], ["all"], ["mixing"]):
        text = format_help(words, add_flags)
        assert re.search(r"Flags of this script:\n  --mixing-weight MIXING_WEIGHT +How much of it, 0.5 of 1.", text)
    assert "--mixing-weight" not in format_help(["optimizer"], add_flags)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], None),
        (["--num-layers", "2"], None),
        (["--help"], []),
        (["-h"], []),
        (["--nonsense", "--help", "--lr", "1"], []),
        (["--num-layers", "--help", "weight", "decay", "--lr", "1"], ["weight", "decay"]),
        (["--help=rope"], ["rope"]),
    ],
)
def test_what_follows_help(argv: list[str], words: list[str] | None) -> None:
    assert asked_for_help(argv) == words


def test_help_comes_before_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        read_run_config(["--nonsense", "--help", "rotary"], {})
    assert stop.value.code == 0
    assert "--rotary-base" in capsys.readouterr().out
