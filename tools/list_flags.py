# SPDX-License-Identifier: Apache-2.0
"""Lists every known flag with its status, and writes docs/flags.md.

python tools/list_flags.py                     counts by status
python tools/list_flags.py --status planned    the flags of one status, one per line
python tools/list_flags.py --write             write docs/flags.md
python tools/list_flags.py --check             exit 2 when docs/flags.md is not what --write would write
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.core.errors import ConfigError, command_line  # noqa: E402
from megatron.core.setting import Setting, Status, describe_expected  # noqa: E402
from megatron.training.flags.declarations import declared_flags, program_flags  # noqa: E402
from megatron.training.flags.flag import FormerFlag, former_flags, table_flags  # noqa: E402
from megatron.training.flags.read import shown_value  # noqa: E402
from tools.write_docs import WITHOUT_PROGRAMS, write_documents  # noqa: E402

DOCUMENT = ROOT / "docs" / "flags.md"
STATUSES: tuple[Status, ...] = ("works", "planned", "not supported")
INTRODUCTION = """\
# Flags

Every flag of Megatron-LM has one status here, none is silently ignored:

- **works**: it has its effect, and a test fails when it is ignored;
- **understood with a note**: nothing is to be done for it here, and the model that is trained is the same;
- **planned**: it belongs to a coming capability. Its default is accepted, other values are refused with a sentence;
- **not supported**: refused with the reason and what to do instead.

A setting that only a GPU can follow and that changes no number (`--attention-backend fused`, `--profile`,
`--distributed-backend nccl`) gives way on a machine without one; a note, also of `--print-config`, says what takes its
place.

`python pretrain_gpt.py --help` shows the flags that most runs use, `--help WORD` those with a word in their names or
texts (`--help rotary`), `--help SECTION` those of a group of settings (`--help optimizer`), and `--help all` every one
that works.

`python pretrain_gpt.py --print-config …` checks a command line without touching data or devices. With `WORLD_SIZE=64`
in the environment it checks it for 64 processes. `--config FILE.yaml` reads the same flags from a file, with `-` or `_`
in their names; the command line wins. Flags are never abbreviated, `--flag=value` and `--flag value` are the same, and
the last one of a repeated flag counts, with a note.

This file is written by `python tools/list_flags.py --write`.
"""


def list_all_flags() -> list[Setting]:
    """Return every flag of today."""
    return [*program_flags(), *declared_flags(), *table_flags()]


def select_by_status(status: Status) -> list[Setting]:
    """Return the flags of one status."""
    return [flag for flag in list_all_flags() if flag.status == status]


def list_noted_flags() -> list[FormerFlag]:
    """Return the spellings of other releases that are understood with a note."""
    return [former for former in former_flags() if not former.is_refused]


def document() -> str:
    """Return the text of docs/flags.md."""
    return "\n".join([INTRODUCTION, *_counts(), *_works(), *_notes(), *_planned(), *_not_supported()]) + "\n"


def _counts() -> Iterator[str]:
    yield "| status | flags |\n|---|---|"
    for status in STATUSES:
        yield f"| {status} | {len(select_by_status(status))} |"
    yield f"| spellings of other releases, understood with a note | {len(list_noted_flags())} |"
    yield f"| spellings of other releases, refused | {len(former_flags()) - len(list_noted_flags())} |"


def _works() -> Iterator[str]:
    yield "\n## Works"
    for group, flags in groupby(select_by_status("works"), key=lambda flag: flag.group):
        yield f"\n### {group}\n\n| flag | value | default | meaning |\n|---|---|---|---|"
        for flag in flags:
            default = "" if flag.default is None else f"`{shown_value(flag, flag.default)}`"
            value = "" if flag.is_switch else _cell(describe_expected(flag))
            yield f"| {_spelled(flag.spellings)} | {value} | {default} | {_cell(flag.help)} |"


def _notes() -> Iterator[str]:
    yield "\n## Understood with a note\n\n| flag | note |\n|---|---|"
    for former in list_noted_flags():
        yield f"| `{former.name}` | {_cell(former.text)} |"


def _planned() -> Iterator[str]:
    yield "\n## Planned\n\nAlso the values in parentheses of flags that work otherwise:\n"
    for flag in select_by_status("works"):
        if flag.planned_choices:
            yield f"- `{flag.name}` ({', '.join(map(str, flag.planned_choices))}) comes with {flag.explanation}"
    # groupby only joins neighbours, hence sorted first.
    flags = sorted(select_by_status("planned"), key=lambda flag: flag.explanation)
    for capability, members in groupby(flags, key=lambda flag: flag.explanation):
        yield f"\n### With {capability}\n\n| flag | accepted now | until then |\n|---|---|---|"
        for flag in members:
            # Values that change nothing pass already, so that scripts which write defaults out still run.
            accepted = "not given" if flag.default is None else f"`{shown_value(flag, flag.default)}`"
            accepted += "".join(f", `{shown_value(flag, value)}`" for value in flag.neutral)
            yield f"| {_spelled(flag.spellings)} | {accepted} | {_cell(flag.alternative)} |"


def _not_supported() -> Iterator[str]:
    yield "\n## Not supported"
    flags = sorted(select_by_status("not supported"), key=lambda flag: (flag.explanation, flag.alternative))
    for (reason, alternative), members in groupby(flags, key=lambda flag: (flag.explanation, flag.alternative)):
        yield f"\n{_sentence(reason)}: {alternative}.\n"
        yield ", ".join(_spelled(flag.spellings) for flag in members)
    yield "\n### Of earlier releases\n\n| flag | reason |\n|---|---|"
    for former in former_flags():
        if former.is_refused:
            yield f"| `{former.name}` | {_cell(former.text)} |"


def _spelled(spellings: Iterable[str]) -> str:
    return " ".join(f"`{spelling}`" for spelling in spellings)


def _cell(text: str) -> str:
    # A bare bar would end the cell of a Markdown table.
    return text.replace("|", "\\|")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def list_status(status: Status) -> None:
    """One line per flag: spellings, then the capability or the reason."""
    for flag in select_by_status(status):
        print(" ".join(flag.spellings), flag.explanation, sep="\t" if flag.explanation else "")
    if status == "works":
        for former in list_noted_flags():
            # Spellings that only older releases knew are left out of the count of upstream's flags.
            if former.is_upstream:
                print(former.name, f"{former.text} (a note)", sep="\t")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", choices=STATUSES, help="List the flags of one status.")
    what.add_argument("--write", action="store_true", help="Write docs/flags.md.")
    what.add_argument("--check", action="store_true", help="Check that docs/flags.md is current.")
    arguments = parser.parse_args()
    if arguments.status is not None:
        list_status(arguments.status)
    elif arguments.write:
        DOCUMENT.write_text(document(), encoding="utf-8")
        # Other documents have tables of flags, too.
        write_documents(WITHOUT_PROGRAMS)
    elif arguments.check:
        if not DOCUMENT.is_file() or DOCUMENT.read_text(encoding="utf-8") != document():
            raise ConfigError("docs/flags.md is not current; write it anew with: python tools/list_flags.py --write")
    else:
        for status in STATUSES:
            print(f"{len(select_by_status(status)):4d} {status}")
        print(f"{len(list_noted_flags()):4d} of other releases, understood with a note")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main)())
