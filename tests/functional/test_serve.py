# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron serve` as a user runs it: it says what it loads, answers, and ends when it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.functional.pretrain_runs import ROOT, environment, finish, free_port, run
from tests.programs import Program
from tests.support.tiny_training import train_tiny

ANY_PORT = ("--host", "127.0.0.1", "--port", "0")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve") / "tiny"
    train_tiny("--save", root, "--save-interval", "6", "--position-embedding-type", "rope")
    return root


def test_it_answers_and_ends_within_seconds(checkpoints: Path) -> None:
    command = [sys.executable, "-m", "megatron", "serve", "--load", str(checkpoints), *ANY_PORT]
    command += ["--inference-max-seq-length", "100000", "--shutdown-timeout", "0.5"]
    variables = environment({"MEGATRON_API_KEY": "secret"})
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        # The port is open, and says that it is not ready, before the model is there.
        address = process.stderr.readline().split()[2].rstrip(",")
        assert httpx.get(f"{address}/live", timeout=30).status_code == 200
        assert httpx.get(f"{address}/ready", timeout=30).status_code in (200, 503)
        assert process.stderr.readline().startswith("ready: tiny at http://127.0.0.1:")
        headers = {"Authorization": "Bearer secret"}
        with httpx.Client(base_url=address, timeout=60, headers=headers) as client:
            body = {"model": "tiny", "prompt": "3 4 5", "temperature": 0, "max_tokens": 7}
            answer = client.post("/v1/completions", json=body).json()
            printed = run(
                ("--load", checkpoints, "--prompt", "3 4 5", "--greedy", "--max-new-tokens", "7"),
                program="tools/generate.py",
                directory=Path("/"),
            ).stdout
            assert f"3 4 5 {answer['choices'][0]['text'].strip()}" == printed.strip()
            assert client.get("/v1/models", headers={"Authorization": "no"}).status_code == 401
            endless = {"prompt": "3", "max_tokens": 10**6, "stream": True, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=endless) as stream:
                lines = stream.iter_lines()
                next(lines)
                began = time.monotonic()
                process.send_signal(signal.SIGTERM)
                assert sum(1 for _ in lines) < 10**5
        # 5 s of the 10 are the default of what is 0.5 here: the rest does not depend on it.
        assert process.wait(timeout=100) == 0
        assert time.monotonic() - began < 5.5
        assert "secret" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_a_signal_ends_it_while_the_model_is_loaded(checkpoints: Path) -> None:
    command = [sys.executable, "-m", "megatron", "serve", "--load", str(checkpoints), *ANY_PORT]
    process = subprocess.Popen(command, cwd=ROOT, env=environment({}), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        assert process.stderr.readline().startswith("listening on")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


def test_bad_input_is_one_sentence(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for arguments, words in (
        (("--load", tmp_path / "nothing"), "--load"),
        (("--load", checkpoints, "--port", "70000"), "--port 70000 must be 0 to 65535"),
        (("--load", checkpoints, "--api-key", ""), "--api-key is empty"),
        (("--load", checkpoints, "--api-key-file", tmp_path / "empty"), "--api-key is empty"),
        (("--load", checkpoints, *ANY_PORT, "--inference-max-seq-length", "0"), "max_sequence_length 0"),
        (("--load", tmp_path, *ANY_PORT), "holds no checkpoint"),
    ):
        done = run(("serve", *arguments), program=str(ROOT / "megatron" / "__main__.py"))
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def start_ranks(program: str, arguments: Sequence[str | Path], log: Path | None = None) -> list[Program]:
    """A program on two processes, with the variables that torchrun gives them."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    command = [ROOT / "megatron" / "__main__.py", program, *arguments]
    return [
        Program(
            command,
            environment({**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
            ROOT,
            None if log is None else log.open("a"),
        )
        for rank in range(2)
    ]


def read_address(log: Path) -> str:
    """The server's address, once it is ready."""
    for _ in range(600):
        if "ready: tiny at " in log.read_text():
            return log.read_text().split("ready: tiny at ")[1].split()[0]
        time.sleep(0.2)
    raise AssertionError(log.read_text())


def test_a_model_on_two_processes(checkpoints: Path, tmp_path: Path) -> None:
    """Every program gives what one process gives; one that loses the other says so, and ends with 75."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "3 4 5 6 7 8 9"}\n')
    prompt = ("--load", checkpoints, "--prompt", "3 4 5", "--greedy", "--max-new-tokens", "7")
    log = tmp_path / "log"
    serving = start_ranks("serve", ("--load", checkpoints, *ANY_PORT), log)  # tensor parallelism, as nothing is said
    stages = start_ranks("generate", (*prompt, "--pipeline-model-parallel-size", "2"))
    measure = ("--load", checkpoints, "--data", texts, "--output")
    measuring = start_ranks("evaluate", (*measure, tmp_path / "two", "--tensor-model-parallel-size", "2"))
    try:
        expected = run(prompt, program="tools/generate.py").stdout
        assert [done.stdout for done in finish(stages)] == [expected, ""]
        assert run(("evaluate", *measure, tmp_path / "one"), program=str(ROOT / "megatron/__main__.py")).returncode == 0
        assert [done.returncode for done in finish(measuring)] == [0, 0]
        one, two = (json.loads((tmp_path / name).read_text())["files"][str(texts)]["loss"] for name in ("one", "two"))
        assert one == pytest.approx(two, abs=1e-5)
        with httpx.Client(base_url=read_address(log), timeout=100) as client:
            body = {"prompt": "3 4 5", "temperature": 0, "max_tokens": 7}
            answer = client.post("/v1/completions", json=body).json()
            assert f"3 4 5 {answer['choices'][0]['text'].strip()}" == expected.strip()
            serving[1].kill()
            assert client.post("/v1/completions", json=body).status_code == 503
        assert serving[0].wait(timeout=100) == 75
        assert "rank 1 has ended" in log.read_text()
    finally:
        for program in (*serving, *stages, *measuring):
            program.kill()
