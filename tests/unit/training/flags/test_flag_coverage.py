# SPDX-License-Identifier: Apache-2.0
"""The status table is complete and true: every upstream flag once, working flags proven by tests, docs current."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.errors import ConfigError
from megatron.core.setting import CHANGES_THE_RUN, Setting, explain_refusal
from megatron.training.flags.declarations import declared_flags, flags_by_spelling, program_flags
from megatron.training.flags.flag import former_flags, formers_by_name, table_flags
from tests.golden.flag_cases import rows
from tests.support.run_flags import run_config

ROOT = Path(__file__).resolve().parents[4]
DATA = ROOT / "tests" / "golden" / "data" / "flags"
UPSTREAM = rows(DATA / "upstream_flags.tsv")
# Declared flags whose default is not upstream's, and why.
OTHER_DEFAULTS = {
    "--num-query-groups": "None: as many as heads; upstream's 1 is ignored without --group-query-attention",
    "--transformer-impl": "local: plain torch alone is the reference; auto takes Transformer Engine where it is",
    "--distributed-backend": "None: chosen by device, so that a laptop needs no flag",
    "--use-cpu-initialization": "False where upstream has None; both mean no",
    "--no-save-optim": "False where upstream has None; both mean no",
    "--no-save-rng": "False where upstream has None; both mean no",
    "--no-load-optim": "False where upstream has None; both mean no",
    "--no-load-rng": "False where upstream has None; both mean no",
    "--rerun-mode": "disabled: to judge a result before it is used, the host waits for it in every step",
}
# Values that upstream does not have.
FURTHER_CHOICES = {
    "--fp8-recipe": {"rowwise"},
    **dict.fromkeys(("--ckpt-format", "--ckpt-convert-format"), {"upstream_torch_dist"}),
    "--transformer-impl": {"auto"},
    "--moe-router-score-function": {"softmax-share"},
    "--experimental-attention-variant": {"dsv4_hybrid"},  # of its dev branch
}
# Upstream has a switch for either direction, or a negative name, and with it another default.
ASKED_TWICE = {"no_persist_layer_norm", "yarn_correction_range_round_to_int"}
# Flags of other programs that our sentences name.
ELSEWHERE = {"--max-restarts", "--flag", "--help", "--adapter"}


def status_of(spelling: str) -> str:
    flag = flags_by_spelling().get(spelling)
    if flag is not None:
        return flag.status
    former = formers_by_name()[spelling]
    return "not supported" if former.is_refused else "works"


def test_every_upstream_flag_has_one_status(capsys: pytest.CaptureFixture[str]) -> None:
    """838 parser actions with 876 spellings and 56 extras; flags_by_spelling() itself refuses duplicates."""
    core = [row for row in UPSTREAM if row["scope"] == "core"]
    assert len(core) == 838
    assert len({spelling for row in core for spelling in row["options"].split()}) == 876
    assert len(UPSTREAM) == 838 + 56
    counts: Counter[str] = Counter()
    for row in UPSTREAM:
        spellings = row["options"].split()
        unknown = [name for name in spellings if name not in flags_by_spelling() and name not in formers_by_name()]
        assert not unknown
        (status,) = {status_of(spelling) for spelling in spellings}
        counts[status] += 1
    with capsys.disabled():
        print("\nupstream flags by status:", dict(counts))
    assert sum(counts.values()) == 894


def test_no_spelling_is_both_present_and_former() -> None:
    assert not set(flags_by_spelling()) & set(formers_by_name())


def test_no_setting_is_declared_twice() -> None:
    counts = Counter(flag.dest for flag in program_flags() + declared_flags() + table_flags())
    assert not [dest for dest, count in counts.items() if count > 1]


def test_flags_of_earlier_releases_are_known() -> None:
    for row in rows(DATA / "removed_flags.tsv"):
        assert row["flag"] in formers_by_name() or row["flag"] in flags_by_spelling(), row["flag"]


def test_flags_of_the_users_documents_are_known() -> None:
    for row in rows(DATA / "seeds_flags.tsv"):
        if row["kind"] == "flag" and row["upstream_name"] != "torchrun":
            assert row["item"] in flags_by_spelling() or row["item"] in formers_by_name(), row["item"]


@pytest.mark.parametrize("row", [row for row in UPSTREAM if row["scope"] == "core"], ids=lambda row: row["options"])
def test_a_flag_is_what_it_is_upstream(row: dict[str, str]) -> None:
    """Same number of values, same choices, same default, and the spelling does the same."""
    spelling = row["options"].split()[0]
    flag = flags_by_spelling().get(spelling)
    if flag is None:
        assert spelling in formers_by_name()
        return
    is_switch = row["action"] != "store"
    assert flag.is_switch == is_switch
    if is_switch:
        # Upstream stores True in a negative name in this one case.
        switches_off = row["action"] == "store_false" or spelling == "--no-persist-layer-norm"
        assert (spelling in flag.off_names) == switches_off
    elif flag.dest != "step_batch_size_schedule":
        assert str(flag.nargs or "") == row["nargs"]
    if row["choices"] and not row["type"].startswith("enum"):
        assert set(map(str, flag.choices or ())) == set(row["choices"].split(",")) | FURTHER_CHOICES.get(
            spelling, set()
        )
    if spelling in OTHER_DEFAULTS:
        assert default_text(flag) != row["default"]
    elif not row["default"].startswith("env ") and row["dest"] not in ASKED_TWICE:
        assert default_text(flag) == normalised(row["default"])


def default_text(flag: Setting) -> str:
    return normalised("" if flag.default is None else str(flag.default))


def normalised(text: str) -> str:
    """1.0 and 1, 4294967296 and 4294967296.0, [p2p] and ['p2p'] are the same default."""
    text = text.replace("'", "").replace(" ", "").strip("[]")
    try:
        return str(float(text))
    except ValueError:
        return text


@pytest.mark.parametrize("source", ["tests/golden/data/train_a/args.txt", "tests/golden/data/train_b/args.txt"])
def test_flags_of_the_reference_runs_work(source: str) -> None:
    for token in (ROOT / source).read_text().split():
        assert not token.startswith("--") or status_of(token) == "works", token


def test_flags_of_the_quickstart_work() -> None:
    """Those of pretrain_gpt.py; the script also runs other programs."""
    text = (ROOT / "examples" / "quickstart.sh").read_text()
    ours = [name for name in re.findall(r"(?<![\w-])--[a-z][\w-]+", text) if name in flags_by_spelling()]
    assert len(ours) > 20
    assert {name for name in ours if status_of(name) != "works"} <= {"--temperature"}, "tools/generate.py has that one"


def sentences() -> Iterator[str]:
    for flag in program_flags() + declared_flags() + table_flags():
        yield from (flag.explanation, flag.alternative, flag.help)
    for former in former_flags():
        yield from (former.text, " ".join(former.becomes))


def test_sentences_name_flags_that_exist() -> None:
    for sentence in sentences():
        for name in re.findall(r"--[a-z][\w-]*", sentence):
            assert name in flags_by_spelling() or name in formers_by_name() or name in ELSEWHERE, (name, sentence)


def test_refusals_say_why_and_what_instead() -> None:
    for flag in table_flags():
        assert flag.explanation, flag.name
        assert flag.status == "planned" or flag.alternative, flag.name


def test_nobody_is_told_to_leave_out_what_changes_the_run() -> None:
    """Without such a flag another model is trained, or the same one otherwise: no refusal may call that a remedy."""
    sentences = []
    for flag in declared_flags() + table_flags():
        if flag.kind in CHANGES_THE_RUN:
            # A value that no flag has stands for any that is refused.
            refused = flag.planned_choices + flag.unsupported_choices if flag.status == "works" else (object(),)
            sentences += [explain_refusal(flag, value, flag.name) for value in refused]
    assert sentences
    advice = [text for refusal in sentences if refusal is not None for _, text in [refusal] if "leave it out" in text]
    assert not advice
    # What can be left out without a change is noted instead.
    assert not [former.name for former in former_flags() if former.is_refused and "leave it out" in former.text]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--freeze-all-layers",
            "it is part of what is computed, and no other flag gives the same run until then",
        ),
        ("--position-embedding-type mrope", "available are learned_absolute, rope, yarn, none, which give another run"),
        ("--optimizer adaptive_muon", "which give another run"),
        ("--enable-gpt-oss", "spell them out: --position-embedding-type yarn"),
        ("--export-qk-l2-norm", "use --qk-l2-norm, the same layer here"),
        ("--fake-process-group", "leave it out; the numbers stay the same"),
    ],
)
def test_what_a_refusal_advises(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        run_config(flags)


def test_documentation_is_current() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "list_flags.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def markers(path: Path) -> Iterator[str]:
    """Flags named by `pytest.mark.flags(...)` in a test file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.flags"):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


def test_every_working_flag_has_a_test_that_fails_when_it_is_ignored() -> None:
    """Only the markers can be read here; that such a test really fails is what a reviewer looks at."""
    proven = {name for path in sorted((ROOT / "tests").rglob("test_*.py")) for name in markers(path)}
    known = set(flags_by_spelling()) | set(formers_by_name())
    assert not proven - known, "markers that name no flag"
    working = [flag.spellings for flag in program_flags() + declared_flags() if flag.status == "works"]
    working += [(former.name,) for former in former_flags() if former.is_upstream and not former.is_refused]
    missing = [spellings[0] for spellings in working if proven.isdisjoint(spellings)]
    assert not missing, f"{len(missing)} flags work without a test marked with them: {' '.join(missing)}"
