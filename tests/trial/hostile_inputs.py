# SPDX-License-Identifier: Apache-2.0
"""Hostile inputs: does every one of them end in a sentence?

A case is a function of its seed: a command with a value that no one should give, an odd pair of flags, a file that is
damaged or of another kind, a path that leads nowhere, an environment that lies. A command may succeed, or be refused by
one line that begins with "error:" and an exit code that docs/training.md knows. Everything else is a fault: a
traceback, another exit code, a death by signal, a run that does not end, and files in the working directory of a
command that was refused.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import resource
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.errors import NonFiniteError
from megatron.core.setting import Setting
from megatron.training.flags.declarations import declared_flags
from tests.faults.small_datasets import write_dataset
from tests.functional.pretrain_runs import PRETRAIN, environment
from tests.preprocess_runs import HF_FLAGS
from tests.programs import ROOT, Program
from tests.trial.hostile_models import MODELS, can_make_models, describe_change, make_hostile_model, remove_models
from tests.trial.random_layouts import draw_case
from tests.trial.verdict import Verdict

LIMIT_SECONDS = 180.0
# What a program may ask of the machine: a size that gets past the rules must not take the machine down with it.
LIMIT_BYTES = 24 << 30
# 17: a result that is not a number; 74: storage; 75: worth another start (megatron/core/errors.py).
EXIT_CODES = (0, 2, NonFiniteError.exit_code, 74, 75)
TRACES = ("Traceback (most recent call last)", "Fatal Python error", "Segmentation fault", "core dumped")

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 2 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --vocab-size 1000 --tokenizer-type NullTokenizer"
).split()
MOCK = ["--mock-data"]

# Blanks separate words; the second lists have what holds a blank, or nothing.
TEXTS = """-1 0 1 2 7 -0.0 1e-320 1e308 1e400 nan inf -inf 0x10 1_000 １２ ٣ 2.5 2147483647 2147483648
    9223372036854775808 1e40 true None null [] 1,2 --lr - -- ../.. /proc é 🙂 %s $HOME `id` ' " \\ {} * ;
    @file""".split()
TEXTS += ["", " ", "1 2", "\n", "\t", "\udcff", "a" * 5000, "9" * 40]
# Nothing may be written outside the case's directories where a program could do it: whoever runs this may be root.
PATHS = """. .. /proc /dev/null /dev/full /dev/zero /proc/self /proc/x /proc/nowhere/at/all /proc/version - --save
    file:///x s3:// ~ http://localhost:1/x ~nobody/x""".split()
PATHS += ["", " ", "\udcff", "é 🙂", "x" * 300, "a/" * 2000 + "b"]


@dataclass
class HostileCase:
    """One command and what surrounds it. Arguments may name DIRECTORY, the case's own empty one."""

    seed: int
    kind: str
    program: str
    arguments: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    damage: Callable[[Path], None] | None = None
    """Makes or damages files in the case's directory before the program starts."""

    def command(self) -> str:
        """What to type to repeat it."""
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.variables.items())
        typed = shlex.join([os.path.relpath(self.program, ROOT), *self.arguments])
        return f"[{self.kind}, seed {self.seed}] {variables} python {typed}".encode(
            "utf-8", "backslashreplace"
        ).decode()


# ---- drawing a case


def draw_input(seed: int) -> HostileCase:
    """The case of this seed; kinds take turns, so that a few cases see each of them."""
    rng = random.Random(f"input {seed}")
    return KINDS[seed % len(KINDS)](seed, rng)


@functools.cache
def _working_flags() -> tuple[Setting, ...]:
    # --trust-remote-code does what its name says, --traceback asks for one, and compiling takes a minute.
    unwanted = {"--trust-remote-code", "--traceback", "--compile"}
    return tuple(flag for flag in declared_flags() if flag.status == "works" and flag.name not in unwanted)


def _spell(flag: Setting, texts: list[str]) -> list[str]:
    # In one word, so that a value that looks like a flag reaches it.
    return [f"{flag.name}={texts[0]}"] if flag.nargs is None else [flag.name, *texts]


def _bad_value(seed: int, rng: random.Random) -> HostileCase:
    """A working flag with a value from the list."""
    flag = rng.choice([flag for flag in _working_flags() if not flag.is_switch])
    texts = [rng.choice(TEXTS) for _ in range(flag.nargs if isinstance(flag.nargs, int) else rng.choice([1, 1, 2]))]
    return HostileCase(seed, "value", PRETRAIN, [*MODEL, *MOCK, *_spell(flag, texts)])


def _odd_flags(seed: int, rng: random.Random) -> HostileCase:
    """Three working flags at random: switches, choices, and numbers near their bounds."""
    return HostileCase(seed, "flags", PRETRAIN, [*MODEL, *MOCK, *_draw_odd_flags(rng)])


def _draw_odd_flags(rng: random.Random) -> list[str]:
    arguments: list[str] = []
    for flag in rng.sample(_working_flags(), 3):
        if flag.is_switch:
            arguments.append(rng.choice(flag.spellings))
        elif flag.choices:
            arguments += _spell(flag, [str(rng.choice(flag.choices))])
        elif flag.value_type in (int, float):
            count = flag.nargs if isinstance(flag.nargs, int) else 1
            arguments += _spell(flag, [rng.choice(["0", "1", "2", "3", "0.5", "1e-8", "64"]) for _ in range(count)])
        else:
            arguments += _spell(flag, [rng.choice(["DIRECTORY/new", "DIRECTORY/new/below", "word", "1,2"])])
    return arguments


def _bad_path(seed: int, rng: random.Random) -> HostileCase:
    """A path that is not what it should be: in a flag of the trainer, or of a tool."""
    path = rng.choice(
        [*PATHS, *(f"DIRECTORY/{name}" for name in ("file", "pipe", "loop", "closed/x", "file/x", "empty"))]
    )
    flag = rng.choice(
        "--save --load --data-path --tokenizer-model --vocab-file --merge-file --tensorboard-dir --metrics-dir "
        "--data-cache-path --config --pretrained-checkpoint --profile-dir --pipeline-trace-dir --chat-template "
        "--data-args-path --per-split-data-args-path --tokenizer-metadata --memory-snapshot-path".split()
    )
    source = [] if "data" in flag and "cache" not in flag else MOCK
    return HostileCase(seed, "path", PRETRAIN, [*MODEL, *source, f"{flag}={path}"], damage=_make_strange_files)


def _bad_dataset(seed: int, rng: random.Random) -> HostileCase:
    """A dataset with a damaged or missing file."""
    name, how = rng.choice(["data.idx", "data.bin"]), rng.choice(list(DAMAGES))
    arguments = [*MODEL, "--data-path", "DIRECTORY/data", "--data-cache-path", "DIRECTORY/cache", "--split", "1,0,0"]

    def damage(directory: Path) -> None:
        write_dataset(directory / "data", [40, 3, 90, 17, 64], seed=seed)
        DAMAGES[how](directory / name, rng)

    return HostileCase(seed, f"dataset: {name} {how}", PRETRAIN, arguments, damage=damage)


def _bad_checkpoint(seed: int, rng: random.Random) -> HostileCase:
    """A checkpoint with a damaged or missing file."""
    how = rng.choice(list(DAMAGES))
    chosen = rng.random()
    arguments = [*MODEL, *MOCK, "--train-iters", "3", "--load", "DIRECTORY/saved"]

    def damage(directory: Path) -> None:
        shutil.copytree(_saved_run(), directory / "saved")
        files = sorted(path for path in (directory / "saved").rglob("*") if path.is_file())
        DAMAGES[how](files[int(chosen * len(files))], rng)

    return HostileCase(seed, f"checkpoint: {how}", PRETRAIN, arguments, damage=damage)


def _bad_tokenizer(seed: int, rng: random.Random) -> HostileCase:
    """A tokenizer whose files are something else."""
    kind = rng.choice(
        "HuggingFaceTokenizer GPT2BPETokenizer SentencePieceTokenizer Llama2Tokenizer TikTokenizer".split()
    )
    content = _content(rng)
    arguments = [*MODEL[:-2], *MOCK, "--tokenizer-type", kind, "--tokenizer-model", "DIRECTORY/tokenizer.json"]
    if kind == "GPT2BPETokenizer":
        arguments += ["--vocab-file", "DIRECTORY/tokenizer.json", "--merge-file", "DIRECTORY/tokenizer.json"]
    return HostileCase(
        seed, f"tokenizer: {kind}", PRETRAIN, arguments, damage=lambda d: _write(d / "tokenizer.json", content)
    )


def _bad_documents(seed: int, rng: random.Random) -> HostileCase:
    """Raw text for tools/preprocess_data.py that is no text, or no JSON."""
    lines = [_content(rng) for _ in range(rng.randint(1, 5))]
    arguments = ["--input", "DIRECTORY/raw.jsonl", "--output-prefix", "DIRECTORY/data", "--workers", rng.choice("12")]
    arguments += HF_FLAGS
    program = str(ROOT / "tools" / "preprocess_data.py")
    ends = rng.choice([b"\n", b"\r\n", b"\0", b""])
    return HostileCase(
        seed, "documents", program, arguments, damage=lambda d: _write(d / "raw.jsonl", ends.join(lines))
    )


def _bad_settings_file(seed: int, rng: random.Random) -> HostileCase:
    """A --config that is no YAML, or has what no setting is."""
    flag = rng.choice(_working_flags()).name[2:]
    value = rng.choice(
        ["[1, [2]]", "{a: 1}", "&a [*a]", "!!python/object/apply:os.system [id]", ".nan", "2020-01-01", "~", "|"]
    )
    content = rng.choice([f"{flag}: {value}\n".encode(), _content(rng)])
    arguments = [*MODEL, *MOCK, "--config", "DIRECTORY/settings.yaml"]
    return HostileCase(seed, "settings", PRETRAIN, arguments, damage=lambda d: _write(d / "settings.yaml", content))


def _bad_environment(seed: int, rng: random.Random) -> HostileCase:
    """Variables of a launcher that contradict each other."""
    names = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "OMP_NUM_THREADS",
    ]
    texts = ["", "0", "1", "-1", "x", "99999999999", "1.0", " 1", "localhost", "256.256.256.256", "1"]
    variables = {name: rng.choice(texts) for name in rng.sample(names, 3)}
    # A lost peer ends the run after this time.
    arguments = [*MODEL, *MOCK, "--distributed-timeout-minutes", "1"]
    return HostileCase(seed, "environment", PRETRAIN, arguments, variables)


def _bad_tool(seed: int, rng: random.Random) -> HostileCase:
    """A tool with an argument that it did not expect."""
    checkpoint, dataset = ["--load", "DIRECTORY/saved"], "DIRECTORY/data"
    word, path = rng.choice(TEXTS), rng.choice(PATHS)
    output = rng.choice(
        ["", " ", "/proc/x/y", "DIRECTORY/nowhere/x", "DIRECTORY/file/x", "DIRECTORY/loop/x", "x" * 300, "."]
    )
    name, arguments = rng.choice(
        [
            ("generate.py", [*checkpoint, f"--prompt={word}"]),
            ("generate.py", [*checkpoint, "--prompt=1 2", f"--max-new-tokens={word}"]),
            ("generate.py", [*checkpoint, "--prompt=1 2", f"--temperature={word}", f"--top-k={rng.choice(TEXTS)}"]),
            ("generate.py", [f"--load={path}", "--prompt=1 2"]),
            ("merge_datasets.py", [f"--input={path}", "--output-prefix=DIRECTORY/merged"]),
            ("merge_datasets.py", ["--input=DIRECTORY", f"--output-prefix={output}"]),
            ("verify_dataset.py", [f"--input={path}"]),
            ("verify_dataset.py", ["--input", dataset, f"--document={word}", f"--decode={rng.choice(TEXTS)}"]),
            ("draw_schedule.py", [f"--stages={word}", f"--forward-cost={rng.choice(TEXTS)}"]),
            ("draw_schedule.py", [f"--schedule={rng.choice(['zb-v', 'interleaved'])}", f"--output={output}"]),
            ("report_theoretical_memory.py", [*MODEL, f"--hidden-size={word}"]),
            ("build_dataset_cache.py", [*MODEL, f"--data-path={path}"]),
            ("preprocess_data.py", [f"--input={path}", "--output-prefix=DIRECTORY/x", "--workers=1", *HF_FLAGS]),
            ("preprocess_data.py", ["--input=DIRECTORY/file", f"--output-prefix={output}", "--workers=1", *HF_FLAGS]),
            ("list_flags.py", ["--status", word]),
        ]
    )  # fmt: skip

    def prepare(directory: Path) -> None:
        _make_strange_files(directory)
        write_dataset(directory / "data", [40, 3, 90], seed=seed)
        if checkpoint[1] in arguments:
            shutil.copytree(_saved_run(), directory / "saved")

    return HostileCase(seed, f"tool: {name}", str(ROOT / "tools" / name), arguments, damage=prepare)


def _lacks_a_flag(seed: int, rng: random.Random) -> HostileCase:
    """A whole command line, of a model and a layout of the random trial, without one or two of its flags.

    --print-config asks its rules at the number of processes that it is for; some train, in one process.
    """
    layout, trains = draw_case(seed), rng.random() < 0.4
    whole = layout.model if trains else layout.divided
    flags = [word for word in whole if word.startswith("--")]
    missing = set(rng.sample(flags, rng.choice((1, 1, 2))))
    words, keeps = [], True
    for word in [*whole, *(_draw_odd_flags(rng) if rng.random() < 0.4 else ())]:
        keeps = word not in missing if word.startswith("--") else keeps
        words += [word] if keeps else []
    variables = {} if trains else {"WORLD_SIZE": str(layout.world_size)}
    arguments = words if trains else [*words, "--print-config"]
    return HostileCase(seed, f"lacks {' '.join(sorted(missing))}", PRETRAIN, arguments, variables)


def _bad_model_config(seed: int, rng: random.Random) -> HostileCase:
    """A Hugging Face model whose config.json has a field that no one should give."""
    if not can_make_models():
        return _bad_value(seed, rng)
    model = rng.choice(list(MODELS))
    arguments = "--source hf --target megatron --input-path DIRECTORY/model --output-path DIRECTORY/converted".split()
    case = HostileCase(seed, f"config.json: {model}", str(ROOT / "megatron" / "hf" / "convert.py"), arguments)

    def damage(directory: Path) -> None:
        make_hostile_model(directory / "model", model, rng)
        case.kind += f" {describe_change(directory / 'model', model)}"

    case.damage = damage
    return case


KINDS = (
    _bad_value, _odd_flags, _bad_path, _bad_dataset, _bad_checkpoint, _bad_tokenizer, _bad_documents,
    _bad_settings_file, _bad_environment, _bad_tool, _bad_value, _odd_flags, _lacks_a_flag, _bad_model_config,
)  # fmt: skip


# ---- what is hostile about files


CONTENTS = [
    b"", b"\n", b"null", b"[]", b"{}", b"{", b'{"text": 1}', b'{"text": "a\\ud800b"}', b"\xff\xfe\x00a", bytes(64),
    b"[" * 3000, b'{"text": "x"} trailing', b'{"text": "' + b"w " * 5000 + b'"}', b'{"text": NaN}',
    b'{"text": "\xc3\x28"}', b"\xef\xbb\xbf{}",
    b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": ["a"]}}',
]  # fmt: skip


def _content(rng: random.Random) -> bytes:
    """A file's content, or a line of it, of some other kind."""
    return rng.choice([*CONTENTS, rng.randbytes(100)])


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "missing": lambda path, rng: path.unlink(),
    "empty": lambda path, rng: path.write_bytes(b""),
    "cut": lambda path, rng: path.write_bytes(path.read_bytes()[: rng.randrange(max(path.stat().st_size, 1))]),
    "longer": lambda path, rng: path.write_bytes(path.read_bytes() + rng.randbytes(9)),
    "one bit": _flip,
    "other content": lambda path, rng: path.write_bytes(_content(rng)),
    "noise": lambda path, rng: path.write_bytes(rng.randbytes(path.stat().st_size)),
    "a directory": lambda path, rng: _replace_by_directory(path),
    "a pipe": lambda path, rng: _replace_by_pipe(path),
}


def _make_strange_files(directory: Path) -> None:
    """What a path can lead to besides a file or a directory."""
    (directory / "file").write_text("text\n")
    (directory / "empty").touch()
    os.mkfifo(directory / "pipe")
    (directory / "loop").symlink_to("loop")
    # Root may write here all the same.
    (directory / "closed").mkdir(mode=0o500)


@functools.cache
def _saved_run() -> Path:
    """A checkpoint of two iterations, made once."""
    directory = Path(tempfile.mkdtemp(prefix="trial-"))
    job = Program(
        [PRETRAIN, *MODEL, *MOCK, "--save", directory / "saved", "--save-interval", "2"], environment({}), directory
    )
    output, errors = job.communicate(LIMIT_SECONDS)
    assert job.returncode == 0, output + errors
    return directory / "saved"


def remove_saved_run() -> None:
    """Remove what `_saved_run` and conversions were made of."""
    remove_models()
    if _saved_run.cache_info().currsize:
        shutil.rmtree(_saved_run().parent)
        _saved_run.cache_clear()


# ---- judging a case


def judge_input(case: HostileCase) -> Verdict:
    """Run the command in an empty directory and look at how it ends."""
    with tempfile.TemporaryDirectory(prefix="trial-", ignore_cleanup_errors=True) as scratch:
        # Deep enough for ../.. to stay inside.
        directory, place = Path(scratch) / "files", Path(scratch) / "working" / "directory" / "of" / "the" / "case"
        directory.mkdir()
        place.mkdir(parents=True)
        if case.damage is not None:
            case.damage(directory)
        arguments = [argument.replace("DIRECTORY", str(directory)) for argument in case.arguments]
        return Verdict(*_judge(case, arguments, place), case.command())


def _judge(case: HostileCase, arguments: list[str], place: Path) -> tuple[str, str]:
    if any("\0" in argument for argument in arguments):
        return "refused", "not a command line"
    # Names that are no UTF-8 come back as they went in.
    with tempfile.TemporaryFile("w+", newline="", errors="surrogateescape") as log:
        job = Program([case.program, *arguments], environment(case.variables), place, log)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(job.pid, resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        try:
            printed, _ = job.communicate(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "fault", f"not done after {LIMIT_SECONDS:.0f} s"
        finally:
            job.kill()
    last = next((line for line in reversed(printed.splitlines()) if line), "")
    for trace in TRACES:
        if trace in printed:
            return "fault", f"{trace}: {last}"
    if job.returncode not in EXIT_CODES:
        return "fault", f"exit code {job.returncode}: {last}"
    if job.returncode == 0:
        return "ran", last
    sentences = re.findall(r"^(?:error|[a-z_]+\.py: error): .*", printed, re.MULTILINE)
    if not sentences:
        return "fault", f"exit code {job.returncode} without an error: line: {last}"
    left = sorted(path.name for path in place.iterdir())
    if left and job.returncode == 2:
        return "fault", f"refused, but left {', '.join(left)} in the working directory: {sentences[0]}"
    return "refused", sentences[0]
