# SPDX-License-Identifier: Apache-2.0
"""Text of --help: the flags that most runs use, or a section's, or the flags that a word concerns.

--help            the flags of COMMON_FLAGS, a line or two each
--help SECTION    every flag of a group of settings: model, data, optimizer, ...
--help WORD ...   every flag with these words in its name, its heading or its text, also those that are not available
--help all        everything that works
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from megatron.core.errors import ConfigError
from megatron.core.setting import Setting
from megatron.training.config.run_groups import group_classes, groups_of_fields
from megatron.training.flags.argument import format_values, help_text
from megatron.training.flags.declarations import declared_flags, flags_by_spelling, program_flags
from megatron.training.flags.flag import former_flags, table_flags
from megatron.training.flags.given import ParsedFlags
from megatron.training.flags.parser import ExtraFlags, build_parser

COMMON_FLAGS: dict[str, str] = {
    "Model": "--preset --preset-layout --num-layers --hidden-size --ffn-hidden-size --num-attention-heads "
    "--num-query-groups --seq-length --max-position-embeddings --position-embedding-type --rotary-base "
    "--normalization --swiglu --add-bias-linear --untie-embeddings-and-output-weights --attention-dropout "
    "--hidden-dropout --init-method-std --attention-backend --num-experts --moe-router-topk --moe-ffn-hidden-size",
    "Data and tokenizer": "--data-path --split --mock-data --num-workers --tokenizer-type --tokenizer-model "
    "--vocab-size",
    "Batch, length, number format": "--micro-batch-size --global-batch-size --train-iters --seed --bf16 --compile "
    "--recompute-granularity",
    "Optimizer and schedule": "--optimizer --lr --min-lr --lr-decay-style --lr-warmup-iters --lr-warmup-fraction "
    "--weight-decay --clip-grad",
    "Several processes": "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size "
    "--expert-model-parallel-size --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --use-torch-fsdp2",
    "Checkpoints": "--save --save-interval --load --finetune --use-checkpoint-args",
    "Evaluation and logs": "--eval-interval --eval-iters --log-interval --tensorboard-dir --wandb-project "
    "--metrics-dir",
    "This program": "--config --print-config",
}
"""Heading -> the flags that most runs are described with, in the order in which one thinks of them."""

_INTRODUCTION = "The flags that most runs use, with defaults in brackets."
_COLUMNS = 100
_INDENT = 36
"""Column in which the text of a flag begins."""
_MOST_CHOICES = 8
"""Of a flag with more, the short help does not list them."""
Entry = tuple[str, str]
"""A flag with its values, as it is typed; what it does."""
_SECTIONS = ("program", *group_classes())


def asked_for_help(argv: Sequence[str]) -> list[str] | None:
    """The words after --help (or -h) on a command line; None where help is not asked for."""
    for index, token in enumerate(argv):
        name, _, value = token.partition("=")
        if name in ("--help", "-h"):
            following = iter(argv[index + 1 :])
            words = [value] if value else []
            for word in following:
                if word.startswith("-"):
                    break
                words.append(word)
            return words
    return None


def format_help(words: Sequence[str], extra_flags: ExtraFlags | None = None) -> str:
    """Return the help that these words ask for. extra_flags: a user's flags, which are shown with ours.

    Raises ConfigError for words that nothing is known about.
    """
    own = {"Flags of this script": _describe_own(extra_flags)}
    if not words:
        short = {heading: [_abridge(name) for name in names.split()] for heading, names in COMMON_FLAGS.items()}
        return _layout({**short, **own}, _introduce())
    if list(words) == ["all"]:
        return _layout({**_by_heading(_working_flags()), **own})
    section = words[0] if len(words) == 1 else ""
    if section in _SECTIONS:
        return _layout(_by_heading(flag for flag in _working_flags() if _find_section(flag) == section))
    found = _search(words, own)
    if not any(found.values()):
        raise ConfigError(
            f"--help {' '.join(words)}: no flag has that in its name or text; give another word, all, or a section: "
            f"{', '.join(_SECTIONS)}"
        )
    return _layout(found)


def _working_flags() -> list[Setting]:
    return [flag for flag in program_flags() + declared_flags() if flag.status == "works"]


def _find_section(flag: Setting) -> str:
    return groups_of_fields().get(flag.dest, "program")


def _introduce() -> str:
    ways = {
        "--help WORD": "those with a word in their names or texts, for example --help rotary",
        "--help SECTION": f"those of a section: {', '.join(_SECTIONS)}",
        "--help all": f"all {len(_working_flags())} that work; docs/flags.md has the planned and the refused ones, too",
    }
    lines = [line for way in ways.items() for line in _format_entry(*way, indent=18)]
    return "\n".join(["usage: pretrain_gpt.py --flag value ...", "", f"{_INTRODUCTION} To see others:", *lines])


# ---- choosing


def _by_heading(flags: Iterable[Setting]) -> dict[str, list[Entry]]:
    headed: dict[str, list[Entry]] = {}
    for flag in flags:
        headed.setdefault(flag.group, []).append((_spell(flag), help_text(flag)))
    return headed


def _search(words: Sequence[str], own: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
    """Flags in whose name, heading or text each word begins a word: those that work, are noted, or are refused.

    own: a user's flags, by heading.
    """
    patterns = [re.compile(rf"(?<![a-z0-9]){re.escape(_plain(word))}") for word in words]

    def fits(*texts: str) -> bool:
        plain = _plain(" ".join(texts))
        return all(pattern.search(plain) for pattern in patterns)

    found = _by_heading(
        flag
        for flag in _working_flags()
        if fits(*flag.spellings, _find_section(flag), flag.group, flag.help, *map(str, flag.offered_choices))
    )
    found |= {heading: [entry for entry in entries if fits(*entry)] for heading, entries in own.items()}
    refused = [flag for flag in table_flags() if fits(*flag.spellings, flag.explanation)]
    formers = [former for former in former_flags() if fits(former.name, former.text)]
    found["Understood with a note"] = [
        (former.name, _as_sentence(former.text)) for former in formers if not former.is_refused
    ]
    found["Planned"] = [
        (_spell(flag), f"Comes with {flag.explanation}.") for flag in refused if flag.status == "planned"
    ]
    found["Not supported"] = [
        (_spell(flag), _as_sentence(flag.explanation)) for flag in refused if flag.status == "not supported"
    ]
    found["Not supported"] += [(former.name, _as_sentence(former.text)) for former in formers if former.is_refused]
    return found


def _as_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _plain(text: str) -> str:
    """In small letters, with words as they are spoken: `--min-lr` is `min lr`."""
    return re.sub(r"[-_\s]+", " ", text.lower()).strip()


def _describe_own(extra_flags: ExtraFlags | None) -> list[Entry]:
    if extra_flags is None:
        return []
    # As argparse formats a user's declarations.
    formatter = argparse.HelpFormatter("")
    actions = [action for action in build_parser(ParsedFlags(), extra_flags, [])._actions if action.dest != "help"]
    return [
        (formatter._format_action_invocation(action), formatter._expand_help(action) if action.help else "")
        for action in actions
        if action.help != argparse.SUPPRESS
    ]


# ---- writing


def _spell(flag: Setting) -> str:
    """The usual spelling, how to switch it off, and its values. Aliases work, and would only make this longer."""
    return " | ".join([*flag.names[:1], *flag.off_names[:1]]) + format_values(flag)


def _abridge(name: str) -> Entry:
    """A flag with the beginning of its text, on one line where that says enough."""
    flag = flags_by_spelling()[name]
    text = re.sub(r" \([^()]*\b[12][0-9]{3}\)", "", flag.help)  # without (Author, year)
    text = re.split(r"[.;:](?:\s|$)", text)[0]
    end = ""
    if flag.choices is not None and len(flag.offered_choices) <= _MOST_CHOICES:
        end = f": {', '.join(map(str, flag.offered_choices))}"
    if flag.default not in (None, False, [], ""):
        end += f" [{f'on; {flag.off_names[0]}' if flag.is_switch else flag.format_value(flag.default)}]"
    room = _COLUMNS - _INDENT - len(end)
    # Less and less of it.
    plain = re.sub(r" \([^()]*\)", "", text)
    text = next((part for part in (text, plain, plain.split(", which")[0]) if len(part) <= room), text)
    return (flag.name if flag.is_switch else flag.name + format_values(flag, named=True)), text + end


def _layout(headed: dict[str, list[Entry]], introduction: str = "") -> str:
    """Headings with their entries in two columns, within the terminal and _COLUMNS."""
    parts = [introduction] if introduction else []
    for heading, entries in headed.items():
        if entries:
            lines = [line for entry in entries for line in _format_entry(*entry)]
            parts.append("\n".join([*textwrap.wrap(f"{heading}:", _find_width()), *lines]))
    return "\n\n".join(parts) + "\n"


def _format_entry(left: str, right: str, indent: int = _INDENT) -> Iterator[str]:
    width = _find_width()
    indent = min(indent, width // 2)
    beginnings = textwrap.wrap(
        left, width - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    texts = textwrap.wrap(right, width - indent, break_on_hyphens=False)
    if texts and len(beginnings) == 1 and len(left) + 4 <= indent:
        yield f"  {left}".ljust(indent) + texts.pop(0)
    else:
        yield from (f"  {line}" for line in beginnings)
    yield from (" " * indent + line for line in texts)


def _find_width() -> int:
    return max(40, min(_COLUMNS, shutil.get_terminal_size().columns))
