# SPDX-License-Identifier: Apache-2.0
"""Rows J1 to J15 of the fault catalogue: bad raw text, bad tokenizers, dying processes and full disks.

Every case ends with one error line and the exit code of its row, and leaves no output.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing.input_files import read_chunks
from megatron.core.errors import DataError
from tests.preprocess_runs import DATA, HF_FLAGS, NULL_FLAGS, Run, command, run_tool, write_lines

GOOD = {"text": "Hello world"}
LIMIT_SECONDS = 120  # against a hang; no measure of speed
"""An idle machine needs a second or two; a loaded one must not fail, a program that hangs or starts 64 workers must."""


def refused(run: Run, folder: Path, *words: str, code: int = 2) -> None:
    """The run ended in time, with this code and one sentence, and left no output of any kind."""
    assert run.code == code, run.err
    for word in words:
        assert word in run.error
    assert run.seconds < LIMIT_SECONDS
    left = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".idx", ".lock") or ".tmp" in path.name]
    assert not left


def sequences(prefix: Path, key: str = "text") -> list[list[int]]:
    return [tokens.tolist() for tokens in IndexedDataset(f"{prefix}_{key}_document")]


BAD_LINES = [
    # row, line, what the message says after the file and the line's number
    ("J1", b'{"text": "a" "b"}', ":14: invalid JSON: Expecting ',' delimiter"),
    ("J1", b'{"text": "a"', ":13: invalid JSON"),
    ("J1", b"text", ":1: invalid JSON: Expecting value"),
    ("J1", b'{"text": "a"} x', ":15: invalid JSON: Extra data"),
    ("J2", b'{"id": 3, "title": "x"}', ": key 'text' is missing; the keys here are 'id', 'title'"),
    ("J2", b"{}", ": key 'text' is missing; the keys here are none"),
    ("J2", b'{"text": 3}', ": key 'text' holds a number, expected text or a list of texts"),
    ("J2", b'{"text": null}', ": key 'text' holds null"),
    ("J2", b'{"text": true}', ": key 'text' holds true or false"),
    ("J2", b'{"text": {"a": "b"}}', ": key 'text' holds an object"),
    ("J2", b'{"text": ["a", 3]}', ": key 'text' holds a list with a number"),
    ("J3", b'["text"]', ": expected a JSON object, found a list"),
    ("J3", b"17", ": expected a JSON object, found a number"),
    ("J3", b'"text"', ": expected a JSON object, found text"),
    ("J4", b'{"text": "a\x00b"}', ":12: invalid JSON: Invalid control character"),
    ("J4", b"\x00\x00\x00", ":1: invalid JSON"),
    ("J4", b'{"text": "a\\ud800b"}', ": key 'text' holds a lone surrogate \\ud800 (character 1 of the text)"),
    ("J5", b'{"text": "caf\xe9"}', ": invalid UTF-8: byte 0xe9 at byte offset 61 of the file"),
    ("J6", b'{"text": ' + b"[" * 100_000, ": invalid JSON: lists or objects nested too deeply"),
    ("J6", b'{"text": "a", "n": ' + b"7" * 10_000 + b"}", ": invalid JSON: Exceeds the limit (4300 digits)"),
    ("J6", b'{"text": "' + b"a" * 2000 + b'"}', ": longer than --max-line-bytes 200000"),
]


@pytest.mark.parametrize("case", BAD_LINES, ids=lambda case: f"{case[0]}-{case[1][:24]!r}")
def test_J1_to_J6_bad_line(case: tuple[str, bytes, str], tmp_path: Path) -> None:
    row, line, message = case
    limit = 1000 if "--max-line-bytes" in message else 200_000
    source = write_lines(tmp_path / "in.jsonl", GOOD, GOOD, line, GOOD)
    run = run_tool(source, tmp_path / "out", "--max-line-bytes", str(limit))
    refused(run, tmp_path, f"{source}:3{message.replace('200000', str(limit))}", "--on-bad-line skip")


def test_J1_to_J6_skip_counts_and_lists(tmp_path: Path) -> None:
    """With --on-bad-line skip, the good lines are all there, and the bad ones are counted and listed."""
    lines = [item for _, line, message in BAD_LINES if "--max-line-bytes" not in message for item in (GOOD, line)]
    source = write_lines(tmp_path / "in.jsonl", *lines)
    run = run_tool(source, tmp_path / "out", "--on-bad-line", "skip", "--append-eod", "--workers", "2")
    assert run.code == 0, run.err
    bad = len(lines) // 2
    assert sequences(tmp_path / "out") == [[40, 533, 324, 312, 268, 76, 68, 0]] * bad
    assert f"warning: {bad} unusable lines were skipped:" in run.err
    assert f"  {source}:2:14: invalid JSON" in run.err and f"  {source}:4:13:" in run.err
    assert "error: " not in run.err


def test_J1_max_bad(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD, "x", "y", "z")
    assert run_tool(source, tmp_path / "enough", "--on-bad-line", "skip", "--max-bad", "3").code == 0
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (tmp_path / "out").mkdir()
    run = run_tool(source, tmp_path / "out" / "out", "--on-bad-line", "skip", "--max-bad", "2")
    refused(run, tmp_path / "out", "more than --max-bad 2 unusable lines; the first:", f"{source}:2:1: invalid JSON")


def test_J1_the_first_bad_line_is_named(tmp_path: Path) -> None:
    """With several workers and chunks too, the error is about the first bad line of the file."""
    long = {"text": "word " * 20_000}
    source = write_lines(tmp_path / "in.jsonl", *[long] * 12, "bad", *[long] * 12, "worse", *[GOOD] * 100)
    refused(run_tool(source, tmp_path / "out", "--workers", "3"), tmp_path, f"{source}:13:1: invalid JSON")


def test_J3_blank_lines(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD, "", "   \t", GOOD, "\r")
    run = run_tool(source, tmp_path / "out")
    assert run.code == 0 and "note: 3 blank lines were skipped" in run.err
    assert len(sequences(tmp_path / "out")) == 2


def test_J4_accepted_oddities(tmp_path: Path) -> None:
    """A BOM, CRLF, an escaped NUL and a surrogate pair are text like any other."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        b'\xef\xbb\xbf{"text": "Hello world"}\r\n{"text": "a\\u0000b"}\r\n{"text": "\\ud83d\\ude00"}\r\n'
    )
    assert run_tool(source, tmp_path / "out").code == 0
    plain = write_lines(
        tmp_path / "plain.jsonl", GOOD, {"text": "a\0b"}, json.dumps({"text": "😀"}, ensure_ascii=False)
    )
    assert run_tool(plain, tmp_path / "plain").code == 0
    assert sequences(tmp_path / "out") == sequences(tmp_path / "plain")
    assert len(sequences(tmp_path / "out")) == 3


def test_J5_offset_after_a_bom(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"text": "\xff"}\n')
    refused(run_tool(source, tmp_path / "out"), tmp_path, "byte 0xff at byte offset 13 of the file")


def test_J6_huge_line_in_bounded_memory(tmp_path: Path) -> None:
    """A line of 300 MB ends the job, naming the flag; with skip, the job goes on; neither holds the line in memory."""
    source = tmp_path / "in.jsonl"
    with open(source, "wb") as file:
        file.write(b'{"text": "a"}\n{"text": "')
        for _ in range(300):
            file.write(b"a" * (1 << 20))
        file.write(b'"}\n{"text": "b"}\n')
    address_space = 1 << 30

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    for flags, code in ((["--on-bad-line", "error"], 2), (["--on-bad-line", "skip"], 0)):
        line = command(source, tmp_path / "out", ["--max-line-bytes", "1000000", *flags])
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, preexec_fn=limit)
        assert done.returncode == code, done.stderr
        assert f"{source}:2: longer than --max-line-bytes 1000000" in done.stderr
    assert len(sequences(tmp_path / "out")) == 2


@pytest.mark.parametrize("content", [b"", b"\n \n", b'{"text": ""}\n{"text": ""}\n'])
def test_J7_no_documents(content: bytes, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    refused(run_tool(source, tmp_path / "out", "--append-eod"), tmp_path, str(source), "no documents")


def test_J7_all_lines_skipped(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "x", "y")
    run = run_tool(source, tmp_path / "out", "--on-bad-line", "skip")
    refused(run, tmp_path, "no documents", "2 unusable lines were skipped")


def test_J8_last_line_without_newline(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "a"}\n{"text": "b"}')
    assert run_tool(source, tmp_path / "out").code == 0
    assert len(sequences(tmp_path / "out")) == 2
    source.write_bytes(b'{"text": "a"}\n{"text": "b')
    (tmp_path / "cut").mkdir()
    refused(
        run_tool(source, tmp_path / "cut" / "out"),
        tmp_path / "cut",
        f"{source}:2:10: invalid JSON: Unterminated string",
    )


def test_J10_inputs_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nothing")
    for source, words in (
        (tmp_path, "is a directory"),
        (tmp_path / "pipe.jsonl", "is not a regular file"),
        (tmp_path / "dangling.jsonl", "cannot be read: No such file"),
        (tmp_path / "none.jsonl", "no such file"),
        (tmp_path / "none*.jsonl", "no such file"),
    ):
        refused(run_tool(source, tmp_path / "out"), tmp_path, f"--input {source}", words)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_J10_unreadable_input(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    source.chmod(0)
    refused(run_tool(source, tmp_path / "out"), tmp_path, f"--input {source}: cannot be read: Permission denied")


def test_J10_input_that_changes_while_it_is_read(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[GOOD] * 1000)
    vanishing = write_lines(tmp_path / "other.jsonl", GOOD)
    chunks = read_chunks([str(source), str(vanishing)], max_line_bytes=1000, chunk_bytes=4096)
    next(chunks)
    with open(source, "ab") as file:
        file.write(b'{"text": "more"}\n')
    with pytest.raises(DataError, match=r"in\.jsonl: changed while it was read"):
        list(chunks)
    chunks = read_chunks([str(source), str(vanishing)], max_line_bytes=1000, chunk_bytes=4096)
    next(chunks)
    vanishing.unlink()
    with pytest.raises(DataError, match=r"other\.jsonl: vanished before it was read"):
        list(chunks)


@contextlib.contextmanager
def running(source: Path, prefix: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A job that is at work: it has started to write and is not done."""
    process = subprocess.Popen(
        command(source, prefix, flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not children(process.pid):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.01)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def long_input(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough work for many seconds."""
    source = tmp_path_factory.mktemp("long") / "in.jsonl"
    text = (DATA / "corpus" / "public_small.jsonl").read_bytes()
    with open(source, "wb") as file:
        for _ in range(400):
            file.write(text)
    return source


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("workers", ["1", "3"])
def test_J11_killed_worker(workers: str, long_input: Path, tmp_path: Path) -> None:
    with running(long_input, tmp_path / "out", "--workers", workers) as process:
        time.sleep(0.3)
        victim = children(process.pid)[-1]
        started_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    run = Run(process.returncode, out, err, time.monotonic() - started_at)
    refused(run, tmp_path, f"(process {victim}) was killed by signal 9 (SIGKILL)", code=74)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_J11_stopped_by_a_signal(number: signal.Signals, long_input: Path, tmp_path: Path) -> None:
    with running(long_input, tmp_path / "out", "--workers", "2") as process:
        workers = children(process.pid)
        process.send_signal(number)
        process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert not any(alive(worker) for worker in workers)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_J11_killed_main(long_input: Path, tmp_path: Path) -> None:
    """Nothing loadable is left, the workers leave by themselves, and the next job cleans up and succeeds."""
    with running(long_input, tmp_path / "out", "--workers", "2") as process:
        time.sleep(0.5)
        workers = children(process.pid)
        process.kill()
        process.wait()
        deadline = time.monotonic() + LIMIT_SECONDS
        while any(alive(worker) for worker in workers):
            assert time.monotonic() < deadline, "workers outlive their parent"
            time.sleep(0.05)
    assert not list(tmp_path.glob("*.idx")) and not list(tmp_path.glob("*.bin"))
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    run = run_tool(source, tmp_path / "out")
    assert run.code == 0, run.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_J12_disk_full(long_input: Path, tmp_path: Path) -> None:
    """A file that may not grow further (as on a full disk): exit code 74, the path, and no temporary file."""
    run = run_tool(long_input, tmp_path / "out", file_size_limit=1 << 20)
    refused(run, tmp_path, "out_text_document.bin: File too large", code=74)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(("injection", "name"), [
    ("fsync:error=EIO:when=1", "out_text_document.bin"),
    ("fsync:error=EIO:when=2", "out_text_document.idx"),
    ("rename,renameat,renameat2:error=ENOSPC:when=1", "out_text_document.idx"),
])  # fmt: skip
def test_J12_failing_disk(injection: str, name: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    strace = ["strace", "-o", os.devnull, "-e", f"inject={injection}"]
    done = subprocess.run([*strace, *command(source, tmp_path / "out")], capture_output=True, text=True, timeout=60)
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    refused(Run(done.returncode, done.stdout, done.stderr, 0), tmp_path, name, code=74)


def test_J12_output_that_cannot_be_written(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for directory, words in (
        (tmp_path / "no", "does not exist; create it"),
        (source, "is a file, not a directory; choose another"),
        (tmp_path / "loop", "is a symbolic link that leads back to itself"),
        (Path("/proc"), "takes no files; choose another directory"),
    ):
        refused(run_tool(source, directory / "out"), tmp_path, f"--output-prefix {directory}/out", words)
    (tmp_path / "out_text_document.idx").mkdir()
    run = run_tool(source, tmp_path / "out", "--overwrite")
    assert run.code == 2 and "out_text_document.idx: is a directory" in run.error


@pytest.mark.flags("--tokenizer-model", "--tokenizer-type")
@pytest.mark.parametrize(("flags", "words"), [
    (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/no"], "--tokenizer-model /no: no such file"),
    (["--tokenizer-type", "HuggingFaceTokenizer"], "needs --tokenizer-model"),
    (["--tokenizer-type", "MultimodalTokenizer", "--tokenizer-model", "x"], "--tokenizer-type MultimodalTokenizer"),
    (["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "/no"], "--tokenizer-model /no: no such file"),
    (["--tokenizer-type", "TikTokenizer", "--tokenizer-model", "/no"], "--tokenizer-model /no: no such file"),
    (["--tokenizer-type", "BertWordPieceCase", "--vocab-file", "/no"], "--vocab-file /no: no such file"),
    (["--tokenizer-type", "HugingFace"], "--tokenizer-type HugingFace is not one of its values"),
    (["--tokenizer-type", "NullTokenizer", "--vocab-size", "1e3"], "--vocab-size 1e3 is not valid"),
    (["--tokenizer-type", "NullTokenizer"], "needs --vocab-size"),
])  # fmt: skip
def test_J13_no_tokenizer(flags: list[str], words: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    refused(run_tool(source, tmp_path / "out", tokenizer=flags), tmp_path, words)


def test_J13_eod_missing_is_noticed_before_work(long_input: Path, tmp_path: Path) -> None:
    model = shutil.copytree(DATA / "tok" / "hf_bpe1k", tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
    run = run_tool(long_input, tmp_path / "out", "--append-eod", tokenizer=tokenizer)
    refused(run, tmp_path, "--append-eod: the tokenizer has no end-of-document token; name it as eos_token")
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    assert run_tool(source, tmp_path / "out", tokenizer=tokenizer).code == 0


@pytest.mark.flags("--vocab-size")
@pytest.mark.parametrize("text", ["1 100", "1 x", "70000", "-1", "99999999999999999999"])
def test_J13_ids_out_of_range(text: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"text": "1 99"}, {"text": text})
    refused(run_tool(source, tmp_path / "out", tokenizer=NULL_FLAGS), tmp_path, f"{source}:2: ")
    run = run_tool(source, tmp_path / "skip", "--on-bad-line", "skip", tokenizer=NULL_FLAGS)
    assert run.code == 0 and sequences(tmp_path / "skip") == [[1, 99]]


@pytest.mark.parametrize(("vocab_size", "dtype"), [("65499", "uint16"), ("65500", "int32"), ("70001", "int32")])
def test_J13_token_type(vocab_size: str, dtype: str, tmp_path: Path) -> None:
    largest = str(int(vocab_size) - 1)
    source = write_lines(tmp_path / "in.jsonl", {"text": f"0 {largest}"})
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", vocab_size]
    assert run_tool(source, tmp_path / "out", tokenizer=tokenizer).code == 0
    assert IndexedDataset(str(tmp_path / "out_text_document")).dtype == dtype
    assert sequences(tmp_path / "out") == [[0, int(largest)]]


def test_J13_large_id_in_a_small_vocabulary(tmp_path: Path) -> None:
    """A vocabulary with holes: few tokens, but an id that needs more than 16 bits."""
    model = shutil.copytree(DATA / "tok" / "hf_bpe1k", tmp_path / "model")
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["vocab"]["H"] = 70_000
    (model / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
    source = write_lines(tmp_path / "in.jsonl", {"text": "H"})
    assert run_tool(source, tmp_path / "out", tokenizer=tokenizer).code == 0
    assert sequences(tmp_path / "out") == [[70_000]]


def test_J14_existing_output(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    other = write_lines(tmp_path / "other.jsonl", GOOD, GOOD)
    assert run_tool(source, tmp_path / "out").code == 0
    run = run_tool(other, tmp_path / "out")
    assert run.code == 2 and "out_text_document.bin exists; pass --overwrite" in run.error
    assert len(sequences(tmp_path / "out")) == 1
    assert run_tool(other, tmp_path / "out", "--overwrite").code == 0
    assert len(sequences(tmp_path / "out")) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_J14_two_jobs_on_one_prefix(long_input: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    with running(long_input, tmp_path / "out") as first:
        run = run_tool(source, tmp_path / "out", "--overwrite")
        assert run.code == 2 and f"process {first.pid} on " in run.error and "is writing it now" in run.error
        assert first.poll() is None


@pytest.mark.parametrize(("flags", "words"), [
    (["--workers", "0"], "--workers 0 must be between 1 and"),
    (["--workers", "-4"], "--workers -4 must be between 1 and"),
    (["--workers", "1000000"], "--workers 1000000 must be between 1 and"),
    (["--workers", "two"], "--workers: invalid int value: 'two'"),
    (["--workers", "3", "--partitions", "2"], "--workers 3 is not divisible by --partitions 2"),
    (["--partitions", "0"], "--partitions 0 must be at least 1"),
    (["--log-interval", "0"], "--log-interval 0 must be at least 1"),
    (["--max-bad", "3"], "--max-bad has an effect only with --on-bad-line skip"),
    (["--json-keys", "text", "text"], "names a key twice"),
    (["--json-keys", "../text"], "cannot be part of a file name"),
    (["--aplend-eod"], "--aplend-eod is not a flag of this tool; did you mean --append-eod?"),
    (["--append_eod"], "did you mean --append-eod?"),
    (["--find-optimal-num-workers", "--workers-to-check", "1", "0"], "--workers 0 must be between 1 and"),
    (["--find-optimal-num-workers", "--max-documents", "0"], "--max-documents 0 must be at least 1"),
    (["--tokenizer-metadata", "/no"], "--tokenizer-metadata /no: No such file"),
    (["stray"], "'stray' does not belong to any flag"),
])  # fmt: skip
def test_J15_flags(flags: list[str], words: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    refused(run_tool(source, tmp_path / "out", *flags), tmp_path, words)


def test_J15_many_workers_for_little_work(tmp_path: Path) -> None:
    """Processes are started as there is work for them."""
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    assert run_tool(source, tmp_path / "out", "--workers", "64").seconds < LIMIT_SECONDS
    assert sequences(tmp_path / "out") == [[40, 533, 324, 312, 268, 76, 68]]


def test_flags_without_effect_are_noted(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    run = run_tool(source, tmp_path / "out", "--make-vocab-size-divisible-by", "64", tokenizer=HF_FLAGS)
    assert run.code == 0 and "note: --make-vocab-size-divisible-by has no effect here" in run.err
