# SPDX-License-Identifier: Apache-2.0
"""Writes the parts of the documents that follow from the code, from a program's output, or from another page.

python tools/write_docs.py            write them anew
python tools/write_docs.py --check    exit 2 when a part is not what would be written

A part stands between two comments, in docs/ and in .github/skills/:

    <!-- generated: KIND WORDS -->
    ...
    <!-- end of generated -->

KIND is a key of `PARTS`, whose functions say what each writes.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.core.errors import ConfigError, command_line  # noqa: E402
from megatron.core.setting import Setting, describe_expected  # noqa: E402
from megatron.training.flags.declarations import declared_flags, program_flags  # noqa: E402
from megatron.training.flags.flag import former_flags, table_flags  # noqa: E402
from megatron.training.flags.read import shown_value  # noqa: E402

PLACES = ("docs", ".github/skills")
PART = re.compile(
    r"(<!-- generated: (?P<kind>[a-z-]+)(?: (?P<words>[^\n]+))? -->\n).*?(<!-- end of generated -->)", re.DOTALL
)
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".json": "json"}


def list_documents() -> list[Path]:
    """The pages in which parts are written, those that others copy from first."""
    return [page for place in PLACES for page in sorted((ROOT / place).rglob("*.md"))]


def write_parts(text: str, page: Path, kinds: frozenset[str] | None = None) -> str:
    """The page's text with its parts anew. kinds: only those."""

    def replace(found: re.Match[str]) -> str:
        kind, words = found["kind"], found["words"] or ""
        if kind not in PARTS:
            raise ConfigError(f"{page}: generated part {kind!r} is not known; use one of {', '.join(PARTS)}")
        if kinds is not None and kind not in kinds:
            return found[0]
        return f"{found[1]}{PARTS[kind](words, page).rstrip()}\n{found[4]}"

    return PART.sub(replace, text)


def show_file(words: str, page: Path) -> str:
    """`file PATH`: a file of the repository as a block of code."""
    file = ROOT / words
    return f"```{LANGUAGES[file.suffix]}\n{file.read_text(encoding='utf-8').rstrip()}\n```\n"


def show_flags(words: str, page: Path) -> str:
    """`flags --a --b`: a table of these flags, with the texts of --help."""
    flags = find_flags()
    rows = ["| flag | value | default | meaning |", "|---|---|---|---|"]
    for name in words.split():
        if name not in flags:
            raise ConfigError(f"{page}: there is no flag {name}")
        flag = flags[name]
        default = "" if flag.default is None else f"`{shown_value(flag, flag.default)}`"
        value = "switch" if flag.is_switch else describe_expected(flag)
        meaning = flag.help if flag.status == "works" else f"{flag.status}: {flag.alternative}"
        rows.append(f"| `{name}` | {escape(value)} | {default} | {escape(meaning)} |")
    return "\n".join(rows)


def find_flags() -> dict[str, Setting]:
    """Every flag of today by each of its spellings."""
    return {name: flag for flag in (*program_flags(), *declared_flags(), *table_flags()) for name in flag.spellings}


def escape(text: str) -> str:
    """Text for a cell of a table, where a bare bar would end it."""
    return text.replace("|", "\\|")


def show_page(words: str, page: Path) -> str:
    """`page PATH`: another page without its title, with its links made to work from here."""
    return read_body(words, page)


def show_chapter(words: str, page: Path) -> str:
    """`chapter PATH`: the same with its headings one level lower."""
    return lower_headings(read_body(words, page))


def read_body(words: str, page: Path) -> str:
    """Everything below the title of a page, as it must stand in another one."""
    text = (ROOT / words).read_text(encoding="utf-8")
    body = re.sub(r"<!-- (generated: .*?|end of generated) -->\n", "", text.split("\n", 1)[1])
    return move_links(body.strip(), (ROOT / words).parent, page.parent)


def show_section(words: str, page: Path) -> str:
    """`section PATH#HEADING`: a section of a page, its headings one level lower."""
    path, _, heading = words.partition("#")
    body = read_body(path, page)
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", body, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ConfigError(f"{page}: {path} has no section {heading!r}")
    return lower_headings(found[0].strip())


def lower_headings(text: str) -> str:
    """## becomes ###, and so on; lines of code that begin with # stay."""
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(b if b.startswith("```") else re.sub(r"^(#+ )", r"#\1", b, flags=re.MULTILINE) for b in blocks)


def move_links(text: str, before: Path, now: Path) -> str:
    """Links relative to one directory, made relative to another."""

    def move(found: re.Match[str]) -> str:
        target, hash_mark, anchor = found[2].partition("#")
        if not target or "://" in target:
            return found[0]
        return f"{found[1]}({os.path.relpath(before / target, now)}{hash_mark}{anchor})"

    return re.sub(r"(\]\s?)\(([^)\s]+)\)", move, text)


def show_output(words: str, page: Path) -> str:
    """`output COMMAND`: a command and what it prints."""
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise ConfigError(f"{page}: {words} ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return f"```bash\n{words}\n```\n\n```text\n{done.stdout.strip()}\n```\n"


def show_network_variables(words: str, page: Path) -> str:
    """`network-variables`: what tools/env.py sets on each network."""
    from megatron.cli.env import NETWORKS, list_variables

    found: dict[tuple[str, str, str], list[str]] = {}
    for network in NETWORKS:
        for variable in list_variables(network, "eth0", "mlx5_0,mlx5_1"):
            found.setdefault((variable.name, variable.value, variable.reason), []).append(network)
    rows = ["| variable | value | on | why |", "|---|---|---|---|"]
    for (name, value, reason), networks in found.items():
        where = "all" if len(networks) == len(NETWORKS) else ", ".join(networks)
        rows.append(f"| `{name}` | `{value}` | {where} | {escape(reason)} |")
    return "\n".join(rows)


def show_peaks(words: str, page: Path) -> str:
    """`peaks`: which devices are known by their data sheets."""
    from megatron.core.dense_peaks import DENSE_PEAKS

    rows = ["| device | 16 bits | TF32 | float32 | FP8 | bfloat16 |", "|---|---|---|---|---|---|"]
    for name, peaks in DENSE_PEAKS.items():
        numbers = (peaks.half, peaks.tf32, peaks.float32, peaks.fp8)
        cells = " | ".join("-" if number is None else f"{number:g}" for number in numbers)
        rows.append(f"| {name} | {cells} | {'yes' if peaks.has_bfloat16 else 'no: --fp16'} |")
    return "\n".join(rows)


def show_upstream_flags(words: str, page: Path) -> str:
    """`upstream-flags`: every flag of Megatron-LM in the order of the alphabet, and what becomes of it here."""
    rows = ["| flag of Megatron-LM | here | what to do |", "|---|---|---|"]
    lines: dict[str, str] = {}
    for flag in (*declared_flags(), *table_flags()):
        what = "nothing" if flag.status == "works" else flag.alternative
        for name in flag.spellings:
            lines[name] = f"| `{name}` | {flag.status} | {escape(what)} |"
    for former in former_flags():
        here = "refused" if former.is_refused else "understood with a note"
        lines.setdefault(former.name, f"| `{former.name}` | {here} | {escape(former.text)} |")
    return "\n".join([*rows, *(lines[name] for name in sorted(lines))])


def show_upstream_names(words: str, page: Path) -> str:
    """`upstream-names`: what programs import from Megatron-LM, and where it is here."""
    from megatron.core.upstream.table import CORE_NAMES
    from megatron.training.upstream.table import TRAINING_NAMES

    absent = {**CORE_NAMES.absent, **TRAINING_NAMES.absent}
    absent |= {f"{module}.{name}": text for module, names in CORE_NAMES.refused.items() for name, text in names.items()}
    defined = {**CORE_NAMES.defined, **TRAINING_NAMES.defined}
    tables = ("public_names", "program_names")
    names: set[tuple[str, str]] = set()
    for table in tables:
        with (ROOT / f"tests/golden/data/{table}.tsv").open(encoding="utf-8", newline="") as file:
            names |= {(row["module"], row["name"]) for row in csv.DictReader(file, delimiter="\t")}
    rows = ["| module | name | here |", "|---|---|---|"]
    for module, name in sorted(names):
        sentence = next((absent[part] for part in list_prefixes(f"{module}.{name}") if part in absent), None)
        place = defined.get(module, {}).get(name)
        here = sentence or ("the same" if place in (None, module) else f"the same; defined in `{place}`")
        can_import = sentence is not None and name in CORE_NAMES.refused.get(module, {})
        rows.append(f"| `{module}` | `{name}` | {'refuses when called: ' if can_import else ''}{escape(here)} |")
    return "\n".join(rows)


def show_program_counts(words: str, page: Path) -> str:
    """`program-counts`: how many of the names that each program imports resolve here, and how many only refuse."""
    from megatron.core.upstream.table import CORE_NAMES

    with (ROOT / "tests/golden/data/program_names.tsv").open(encoding="utf-8", newline="") as file:
        imported = list(csv.DictReader(file, delimiter="\t"))
    tried = {
        "lm-eval": "the package itself, on one process and two",
        "slime": "its calls, in tests of ours",
        "verl": "its calls, in tests of ours",
        "mbridge": "its calls, in tests of ours",
        "mcore-bridge": "its parts of GPTModel, in tests of ours",
    }
    rows = ["| program | names that resolve | of these refuse when called | what was tried |", "|---|---|---|---|"]
    for program in ("lm-eval", "slime", "verl", "mbridge", "mcore-bridge", "ms-swift", "nemo-rl", "modelopt"):
        own = [row for row in imported if program in row["programs"].split(",")]
        missing = [row for row in own if row["name"] == "unified_memory"]
        refused = [row for row in own if row["name"] in CORE_NAMES.refused.get(row["module"], {})]
        counts = f"{len(own) - len(missing)} of {len(own)} | {len(refused)}"
        rows.append(f"| {program} | {counts} | {tried.get(program, 'imports alone')} |")
    return "\n".join(rows)


def list_prefixes(name: str) -> Iterator[str]:
    """a.b.c: a.b, then a.b.c."""
    parts = name.split(".")
    for length in range(2, len(parts) + 1):
        yield ".".join(parts[:length])


PARTS: dict[str, Callable[[str, Path], str]] = {
    "file": show_file,
    "flags": show_flags,
    "page": show_page,
    "chapter": show_chapter,
    "section": show_section,
    "output": show_output,
    "peaks": show_peaks,
    "network-variables": show_network_variables,
    "upstream-flags": show_upstream_flags,
    "upstream-names": show_upstream_names,
    "program-counts": show_program_counts,
}

WITHOUT_PROGRAMS = frozenset(PARTS) - {"output"}
"""Kinds that follow from the code alone, and take no time."""


def write_documents(kinds: frozenset[str] | None = None, *, only_check: bool = False) -> None:
    """Write every document that is not current. kinds: only these parts. only_check: raise ConfigError instead."""
    for page in list_documents():
        before = page.read_text(encoding="utf-8")
        after = write_parts(before, page, kinds)
        name = page.relative_to(ROOT)
        if after != before and only_check:
            raise ConfigError(f"{name} is not current; write it anew with: python tools/write_docs.py")
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {name}")


def main() -> int:
    """Write or check all documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 2 when a document is not current")
    write_documents(only_check=parser.parse_args().check)
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main)())
