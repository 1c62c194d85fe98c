# SPDX-License-Identifier: Apache-2.0
"""Bad flags and environment, by the ids of the fault catalogue: one sentence each, exit code 2, never a traceback."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.core.flag_texts import LONGEST, layer_pattern
from megatron.core.setting import Setting
from megatron.training.flags.declarations import declared_flags, known_flags
from megatron.training.flags.flag import table_flags
from megatron.training.flags.parser import unknown_flag
from megatron.training.flags.read import examine, read_run_config
from tests.golden.flag_cases import rows

ROOT = Path(__file__).resolve().parents[2]
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 64"
).split()
WORKING = [flag for flag in declared_flags() if flag.status == "works"]
VALUED = [flag for flag in WORKING if not flag.is_switch]
NUMERIC = [flag for flag in VALUED if flag.value_type in (int, float)]


def problems(*argv: str, world_size: int = 1, **environ: str) -> list[str]:
    return [problem.text for problem in examine([*BASE, *argv], environ | {"WORLD_SIZE": str(world_size)}).problems]


@contextlib.contextmanager
def bounded_memory(limit_bytes: int) -> Iterator[None]:
    """What runs in here asks Python for no more than this: a time would depend on the machine."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def test_the_base_is_accepted() -> None:
    assert not problems()


# F1: unknown flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--num-layer", "--num-layers"),
        ("--num_layers", "--num-layers"),
        ("--micro-batch", "--micro-batch-size"),
        ("--gloabl-batch-size", "--global-batch-size"),
        ("--untie-embeddings", "--untie-embeddings-and-output-weights"),
    ],
)
def test_F1_unknown_flag_names_the_nearest(typed: str, meant: str) -> None:
    sentence = only(problems(typed, "3"))
    assert typed in sentence and meant in sentence


def test_F1_every_problem_is_said_at_once() -> None:
    found = problems("--num-layer", "3", "--lr", "x", "--bf16", "1", "--num-workers", "--freeze-all-layers")
    assert len(found) == 5


def test_F1_flags_within_quotation_marks_and_with_long_dashes() -> None:
    sentence = only(problems("--num-workers 2 --seed 3"))
    assert "'--num-workers 2 --seed 3' came as one word" in sentence and "quotation marks" in sentence
    assert only(problems("--num-workers", "2", "\u2014bf16")).endswith("begins with a long dash; write --bf16")


def test_F1_nonsense_has_no_suggestion() -> None:
    assert "did you mean" not in unknown_flag("--" + "q" * 1000, ["--lr"])


@pytest.mark.parametrize("argv", [["stray"], ["--lr", "1", "2"], ["--"], ["--="], ["---lr", "1"], ["-x"], ["--lr="]])
def test_F1_malformed_command_lines(argv: list[str]) -> None:
    assert examine([*argv, *BASE], {}).problems


# F2: numbers ---------------------------------------------------------------------------------------------------------

BAD_NUMBERS = [
    "",
    "x",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1_000",
    "٣",
    "１２",
    " 3",
    "3 ",
    "0x10",
    "1,000",
    "1" * 100,
    "--",
]


@pytest.mark.parametrize("flag", NUMERIC, ids=lambda flag: flag.name)
def test_F2_bad_numbers(flag: Setting) -> None:
    """Each names the flag, the value and the range."""
    negative = [] if flag.value_type is float and flag.minimum is None and flag.parse is None else ["-5"]
    for text in [*BAD_NUMBERS, *negative, "2.5" if flag.value_type is int and flag.parse is None else "nan"]:
        texts = [text] * (flag.nargs if isinstance(flag.nargs, int) else 1)
        argv = [f"{flag.name}={text}"] if flag.nargs is None else [flag.name, *texts]
        found = [line for line in problems(*argv) if flag.name in line]
        assert found, (flag.name, text)
        assert "give " in found[0] or "needs" in found[0], found


def test_F2_zero_where_it_makes_no_sense() -> None:
    assert "at least 1" in only(problems("--seq-length", "0"))


@settings(max_examples=150)
@given(st.sampled_from(VALUED), st.text(max_size=20))
def test_F2_any_text_is_read_or_refused_with_the_flag_named(flag: Setting, text: str) -> None:
    number = flag.nargs if isinstance(flag.nargs, int) else 1
    argv = [f"{flag.name}={text}"] if flag.nargs is None else [flag.name, *[text.lstrip("-")] * number]
    result = examine([*BASE, *argv], {})
    if flag.value_type in (int, float) and not text.strip("+0123456789.eE"):
        return
    if flag.value_type in (int, float) or flag.choices:
        assert any(flag.name in problem.text for problem in result.problems)


# F3, F4: sizes that must divide each other ---------------------------------------------------------------------------


def test_F3_world_size_is_divisible_by_the_layout() -> None:
    found = problems("--tensor-model-parallel-size", "3", world_size=8)
    assert any("3 x --pipeline" in line and "8 processes" in line and "2 or 4" in line for line in found)


def test_F3_experts_are_carved_out_of_data_parallelism() -> None:
    flags = ["--num-experts", "8", "--expert-model-parallel-size", "8", "--disable-bias-linear"]
    assert not [line for line in problems(*flags, world_size=8) if "processes of a pipeline stage" in line]
    assert [line for line in problems(*flags, world_size=4) if "= 8 does not divide the 4 processes" in line]


@pytest.mark.parametrize(
    ("flags", "world_size", "named"),
    [
        ("--tensor-model-parallel-size 8", 8, ("--num-attention-heads 4", "--tensor-model-parallel-size 8")),
        ("--pipeline-model-parallel-size 8", 8, ("--num-layers 4", "--pipeline-model-parallel-size 8", "8 layers")),
        ("--num-experts 9 --expert-model-parallel-size 2", 2, ("--num-experts 9", "--expert-model-parallel-size 2")),
        ("--global-batch-size 12", 8, ("--global-batch-size 12", "--micro-batch-size 1", "8 or 16")),
        ("--num-query-groups 3 --group-query-attention", 1, ("--num-query-groups 3", "--num-attention-heads 4")),
        ("--hidden-size 66", 1, ("--hidden-size 66", "--num-attention-heads 4")),
    ],
)
def test_F4_violations_name_flags_and_nearest_values(flags: str, world_size: int, named: tuple[str, ...]) -> None:
    found = problems(*flags.split(), world_size=world_size)
    assert any(all(name in line for name in named) for line in found), found


# F5: contradictions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "--fp16 --bf16",
        "--train-samples 100",
        "--min-lr 1",
        "--swiglu --squared-relu",
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 2",
        "--lr-decay-samples 5",
        "--lr-warmup-iters 10",
        "--lr-decay-style WSD",
        "--weight-decay-incr-style linear",
        "--start-weight-decay 0.1",
        "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
        "--data-path a",
        "--max-position-embeddings 32",
        "--position-embedding-type rope --kv-channels 15",
        "--ckpt-step 5",
        "--step-batch-size-schedule 0:8",
        "--rampup-batch-size 3 2 100",
    ],
)
def test_F5_contradictions_are_refused(flags: str) -> None:
    assert [problem for problem in examine([*BASE, *flags.split()], {}).problems if problem.kind == "rule"]


@pytest.mark.parametrize(
    ("flags", "world_size", "note"),
    [
        ("--sequence-parallel", 1, "--sequence-parallel has no effect"),
        ("--save-interval 5", 1, "--save-interval 5 has no effect without --save"),
        ("--eval-iters 5", 1, "without --eval-interval"),
        ("--num-query-groups 2", 1, "implies --group-query-attention"),
        ("--split '99,1,0'", 1, "quotes"),
    ],
)
def test_F5_what_has_no_effect_is_noted(flags: str, world_size: int, note: str) -> None:
    result = examine([*BASE, *flags.split()], {"WORLD_SIZE": str(world_size)})
    assert not result.problems and result.config is not None
    assert any(note in line for line in result.config.notes)


def examples(flag: Setting) -> list[list[str]]:
    """The flag with each of its choices, both states, or values at the edges of its range."""
    repeats = flag.nargs if isinstance(flag.nargs, int) else 1
    if flag.is_switch:
        return [[names[0]] for names in (flag.names, flag.off_names) if names]
    if flag.choices:
        texts = [str(choice) for choice in flag.choices]
    elif flag.value_type in (int, float):
        least, most = max(flag.minimum or 0, 0), flag.maximum
        texts = [str(int(least)), str(int(max(least, 1))), "7" if most is None else str(int(most))]
    else:
        texts = ["x"]
    return [[flag.name, *[text] * repeats] for text in dict.fromkeys(texts)]


def pairwise_cover(values: list[tuple[int, list[str]]], width: int) -> Iterator[list[str]]:
    """Command lines of up to `width` flags, in which all values of different flags stand together at least once.

    Greedy: each takes the value next that makes the most new pairs with those it has. values: (flag's number, tokens).
    """
    flag_of = np.asarray([number for number, _ in values])
    missing = flag_of[:, None] != flag_of[None, :]
    while missing.any():
        chosen = [int(missing.sum(axis=1).argmax())]
        new_pairs = missing[chosen[0]].astype(np.int64)
        while len(chosen) < width:
            new_pairs[flag_of == flag_of[chosen[-1]]] = -len(values) * width
            best = int(new_pairs.argmax())
            if new_pairs[best] <= 0:
                break
            chosen.append(best)
            new_pairs += missing[best]
        missing[np.ix_(chosen, chosen)] = False
        yield [token for k in chosen for token in values[k][1]]


def test_F5_no_pair_of_values_ends_in_a_traceback() -> None:
    """Every pair of values of working flags; `examine` raises nothing, and all it says names flags, a line each."""
    values = [(number, tokens) for number, flag in enumerate(WORKING) for tokens in examples(flag)]
    deep_lines = 0
    for argv in pairwise_cover(values, 60):
        # A plan of the most layers takes a second, whatever stands beside it: rules meet it a few times, and then a
        # number that is as far above every number of ranks, stages and depths among the examples.
        if (at := argv.index("--num-layers") + 1 if "--num-layers" in argv else 0) and argv[at] == "65536":
            deep_lines += 1
            argv[at] = "65536" if deep_lines <= 3 else "2048"
        result = examine([*BASE, *argv], {})
        assert all("--" in problem.text and "\n" not in problem.text for problem in result.problems)


@pytest.mark.parametrize("width", [2, 5])
def test_the_cover_leaves_no_pair_out(width: int) -> None:
    values = [(flag, [f"--{flag}", str(value)]) for flag in range(6) for value in range(1 + flag % 3)]
    lines = [" ".join(line) + " " for line in pairwise_cover(values, width)]
    for (flag, tokens), (other, others) in itertools.combinations(values, 2):
        pair = [" ".join(tokens) + " ", " ".join(others) + " "]
        assert flag == other or any(all(text in line for text in pair) for line in lines)


# F6: flags we do not have --------------------------------------------------------------------------------------------


def upstream_examples() -> list[tuple[str, list[str]]]:
    """Every upstream flag with a value that is not its default."""
    examples = []
    for row in rows(ROOT / "tests" / "golden" / "data" / "flags" / "upstream_flags.tsv"):
        number = int(row["nargs"]) if row["nargs"].isdecimal() else 1
        choice = next((c for c in row["choices"].split(",") if c and c != row["default"].strip("[]")), None)
        value = choice or (
            "7" if row["type"] in ("int", "float", "tuple_type") or row["type"].endswith("freq_type") else "text"
        )
        value = "7,7" if row["type"] == "tuple_type" else value
        for spelling in row["options"].split():
            examples.append((spelling, [spelling] + ([] if row["action"] != "store" else [value] * number)))
    return examples


def test_F6_no_upstream_flag_is_silently_ignored() -> None:
    """Each is either a setting that arrives, or refused by name, or noted by name."""
    for spelling, tokens in upstream_examples():
        result = examine([*BASE, *tokens], {})
        named = [problem.text for problem in result.problems if spelling in problem.text]
        noted = [note for note in result.config.notes if spelling in note]
        arrived = [flag for flag in known_flags() if spelling in flag.spellings]
        assert named or noted or arrived, spelling
        if arrived and arrived[0].status != "works" and not named:
            value = result.value_of(arrived[0].dest)
            neutral = value == arrived[0].default or value in arrived[0].neutral or spelling == "--sequence-parallel"
            assert neutral, f"{spelling} was taken without effect"


# F9 (the part that flags see): WORLD_SIZE ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.5", "٢", "99999999999", "1_0"])
def test_F9_world_size_is_a_number(text: str) -> None:
    found = [problem.text for problem in examine(BASE, {"WORLD_SIZE": text}).problems]
    assert "WORLD_SIZE" in only(found)


# F14: configuration files --------------------------------------------------------------------------------------------


def with_file(path: Path, text: str | bytes) -> list[str]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return problems("--config", str(path))


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("num-layers: [1", 1, "not valid YAML"),
        ("lr: 1\n\tbf16: true", 2, "not valid YAML"),
        ("bf16: true\nlr: 1\nbf16: false", 3, "given twice, first in line 1"),
        ("seq-length: 64\nseq_length: 64", 2, "given twice"),
        ("num_layer: 3", 1, "did you mean"),
        ("lr: fast", 1, "--lr"),
        ("\nseq_length: 1_000", 2, "--seq-length"),
        ("bf16: 3", 1, "true or false"),
        ("model:\n  num-layers: 3", 1, "unknown flag"),
        ("lr: {a: 1}", 1, "top level"),
        ("- num-layers", 1, "flag: value"),
        ("a: &x 1\nb: *x", 2, "aliases"),
        ("lr: [1, 2]", 1, "takes 1 value"),
        ("? [a]\n: 1", 1, "name of a flag"),
        ("lr: !!python/object/apply:os.system [true]", 1, "lr"),
        ("pipeline-model-parallel-comm-backend: ucc", 1, "planned"),
    ],
)
@pytest.mark.flags("--config")
def test_F14_bad_files_are_named_with_the_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = tmp_path / "run.yaml"
    found = with_file(path, text)
    assert any(f"{path}:{line}" in sentence and said in sentence for sentence in found), found


def test_F14_bombs_are_bounded(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    bomb = "a: &a [x,x]\n" + "".join(f"{b}: &{b} [*{a},*{a}]\n" for a, b in itertools.pairwise(letters))
    for text in (bomb, "lr: " + "[" * 60_000, "x" * 10_000_000, "lr: " + "9" * 100_000, b"\xff\xfe\x00", b"lr: \x00"):
        with bounded_memory(100 << 20):
            assert with_file(tmp_path / "run.yaml", text)


def test_F14_missing_files_and_directories(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.yaml"):
        assert str(path) in only(problems("--config", str(path)))


@pytest.mark.flags("--config")
def test_F14_a_good_file_is_read_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("num_layers: 7\nlr: 2e-4\nbf16: yes\nno-rope-fusion: true\ndata-path: [0.3, a, 0.7, b]\nsplit: ~\n")
    base = " ".join(BASE).replace("--num-layers 4", "").replace("--mock-data", "").replace("--lr 1e-3", "--lr 5e-4")
    config = read_run_config([*base.split(), "--config", str(path)], {})
    assert (config.model.num_layers, config.model.bf16, config.optimizer.lr) == (7, True, 5e-4)
    assert config.model.apply_rope_fusion is False
    assert config.data.data_path == ["0.3", "a", "0.7", "b"]
    assert config.sources["--num-layers"] == "file"
    assert config.sources["--lr"] == "command line"
    assert config.sources["--split"] == "default"


# F15: list expressions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "([1]*10**9)", "[1]*999999999", "(" * 10_000, "[0]*60000+[1]*60000", "([1]*300)*300", "__import__('os')",
        "[1 for _ in x]", "[", "]", "[1]*", "+", "[1]**2", "[1.5]", "[x]", "1e9", "[1]*-1", "lambda: 1", "[٣]",
    ],
)  # fmt: skip
def test_F15_expressions_are_read_not_run(text: str) -> None:
    with bounded_memory(10 << 20):
        found = problems("--moe-layer-freq", text)
    assert any("--moe-layer-freq" in line and "list expression" in line for line in found)


def test_F15_patterns() -> None:
    assert layer_pattern("([0]*2+[1]*6)") == [0] * 2 + [1] * 6
    assert layer_pattern("[0]+[1]*26") == [0] + [1] * 26
    assert layer_pattern("[1, 0]*2") == [1, 0, 1, 0]
    assert layer_pattern("3") == 3
    assert len(layer_pattern(f"[1]*{LONGEST}")) == LONGEST  # type: ignore[arg-type]


@settings(max_examples=200)
@given(st.text(alphabet="[]()*+,0123456789 ", max_size=40))
def test_F15_any_text_is_a_bounded_list_or_refused(text: str) -> None:
    try:
        value = layer_pattern(text)
    except ValueError:
        return
    assert isinstance(value, int) or len(value) <= LONGEST


# The program itself --------------------------------------------------------------------------------------------------


def program(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *argv]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environ}, timeout=120
    )


@pytest.mark.flags("--print-config")
def test_print_config_checks_for_any_world_size() -> None:
    result = program(*BASE, "--print-config", WORLD_SIZE="4")
    assert result.returncode == 0 and not result.stderr
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in result.stdout.splitlines() if line.startswith("--")}
    assert lines["--num-layers"].split() == ["4", "command", "line"]
    assert lines["--adam-eps"].split() == ["1e-08", "default"]
    assert "4 processes (WORLD_SIZE, environment), data-parallel size 4" in result.stdout


@pytest.mark.flags("--print-config")
def test_print_config_lists_all_violations() -> None:
    result = program(*BASE, "--print-config", "--global-batch-size", "9", "--min-lr", "1", WORLD_SIZE="8")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: --") for line in lines)


@pytest.mark.flags("--traceback")
def test_traceback_on_demand() -> None:
    assert "Traceback" not in program("--nonsense").stderr
    assert "Traceback" in program("--nonsense", "--traceback").stderr


@pytest.mark.flags("--version")
def test_version() -> None:
    result = program("--version")
    assert result.returncode == 0 and result.stdout.count(".") >= 2


def test_help_is_grouped() -> None:
    result = program("--help", "all")
    assert result.returncode == 0
    assert "--micro-batch-size N" in result.stdout and "--no-persist-layer-norm" in result.stdout
    listed = set(re.findall(r"^ +(--[\w-]+)", result.stdout, re.MULTILINE))
    assert {"--micro-batch-size", "--log-straggler"} <= listed
    refused = {flag.name for flag in table_flags()}
    assert refused and not refused & listed, "planned and refused flags are in docs/flags.md"


def test_reading_flags_does_not_import_torch() -> None:
    code = (
        "import sys; from megatron.training.flags.read import read_run_config; read_run_config(sys.argv[1:], {});"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *BASE], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert result.stdout.strip() == "False"


def test_a_user_may_add_flags() -> None:
    def add(parser: object) -> None:
        parser.add_argument_group("mine").add_argument("--my-rate", type=float, default=0.5)  # type: ignore[attr-defined]

    assert read_run_config([*BASE, "--my-rate", "2"], {}, add).extra == {"my_rate": 2.0}
    assert read_run_config(BASE, {}, add).extra == {"my_rate": 0.5}
    with pytest.raises(ConfigError, match="my-rate"):
        read_run_config([*BASE, "--my-rate", "x"], {}, add)
