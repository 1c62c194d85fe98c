# SPDX-License-Identifier: Apache-2.0
"""The six whole examples of examples/complete, and those of recipes.md, long_context.md and embedding.md."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.core.errors import ConfigError, DataError, TemporaryError
from tests.functional.pretrain_runs import ROOT, TINY, environment, finish, free_port, run, run_ranks
from tests.programs import Program
from tests.unit.hf.test_bridge import assert_same_tensors, read_all

COMPLETE = ROOT / "examples" / "complete"


def load(file: str) -> ModuleType:
    """A program as a module."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def script(name: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of examples/complete."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(COMPLETE / name)], cwd=directory, env=environment({"PATH": path, **variables}),
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip


# ---- 1 and 6: the whole way, and conversion


# Both start a dozen programs, each of which imports torch.
MINUTES = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory that the first script has filled, and what it printed."""
    work = tmp_path_factory.mktemp("pipeline") / "work"
    variables = {"LAPTOP": "1", "WORK_DIR": str(work), "ITERATIONS": "10", "CORPUS_MEGABYTES": "1"}
    done = script("train_pipeline.sh", work.parent, **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return work, done.stdout


@MINUTES
def test_from_text_to_a_model_that_others_open(pipeline: tuple[Path, str]) -> None:
    work, printed = pipeline
    for title in ("1. Raw", "2. Token", "3. The var", "4. Train", "5. How", "6. Text", "7. For"):
        assert f"=== {title}" in printed
    assert "continues from iter_0000010" in printed and "import os" in printed
    assert "verified: every weight bit for bit" in printed
    assert (work / "hf" / "model.safetensors").is_file()


@MINUTES
def test_there_and_back_with_training_between(pipeline: tuple[Path, str], tmp_path: Path) -> None:
    source, converted = pipeline[0] / "hf", tmp_path / "converted"
    variables = {"HF_DIR": str(source), "WORK_DIR": str(converted)}
    # The export of the first script was verified, which is most of a conversion's time.
    done = script("convert_checkpoint.sh", tmp_path, CONVERT_FLAGS="--no-verify", **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert "15 tensors are the same, 0 differ" in done.stdout
    assert_same_tensors(read_all(converted / "hf"), read_all(source))
    assert (converted / "hf-tuned" / "config.json").is_file()


@pytest.mark.parametrize(
    ("name", "variables", "sentence"),
    [
        ("train_pipeline.sh", {}, "WORK_DIR is not set"),
        ("train_pipeline.sh", {"WORK_DIR": "w"}, "neither CORPUS nor CORPUS_URL is set"),
        ("train_pipeline.sh", {"WORK_DIR": "w", "CORPUS": "none"}, "CORPUS=none does not exist"),
        ("convert_checkpoint.sh", {}, "HF_DIR is not set"),
        ("convert_checkpoint.sh", {"HF_DIR": "none"}, "HF_DIR=none has no config.json"),
        ("two_sites.sh", {}, "SITE= is neither 0 nor 1"),
        ("two_sites.sh", {"SITE": "0"}, "HEAD is not set"),
        ("two_sites.sh", {"SITE": "0", "HEAD": "a", "GPUS_PER_NODE": "8"}, "DATA_PATH is not set"),
        (
            "two_sites.sh",
            {"SITE": "0", "HEAD": "a", "GPUS_PER_NODE": "8", "DATA_PATH": "x"},
            "DATA_PATH: x.idx does not",
        ),
    ],
)
def test_what_is_missing_is_one_sentence(name: str, variables: dict[str, str], sentence: str, tmp_path: Path) -> None:
    refused = script(name, tmp_path, **variables)
    assert refused.returncode == 2 and refused.stderr.startswith(f"error: {sentence}"), refused.stderr
    assert refused.stderr.count("\n") == 1


# ---- 2: starting again


def supervise(directory: Path, starts: list[str], **settings: Any) -> tuple[int, int]:
    """(exit code, attempts made) for a command whose n-th start runs the n-th line of bash."""
    module = load("examples/complete/fault_tolerant.py")
    save, counter = directory / "save", directory / "count"
    lines = "\n".join(f"{number}) {line} ;;" for number, line in enumerate(starts, start=1))
    program = f"n=$(($(cat {counter} 2>/dev/null || echo 0) + 1)); echo $n > {counter}; case $n in\n{lines}\nesac"
    supervisor = module.Supervisor(["bash", "-c", program], save, **{"attempts": 3, "pause_seconds": 0.0} | settings)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        code = supervisor.run()
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    return code, int(counter.read_text())


def progress(save: Path, iteration: int) -> str:
    return f"echo {iteration} > {save}/latest_checkpointed_iteration.txt"


def test_what_may_help_is_tried_again_and_nothing_else(tmp_path: Path) -> None:
    save = tmp_path / "save"
    assert supervise(tmp_path, ["exit 75", f"{progress(save, 7)}; exit 75", "kill -9 $$", "exit 0"]) == (0, 4)
    for number, (last, code) in enumerate(
        [("exit 2", 2), ("exit 17", 17), ("exit 70", 70), ("echo 'error: --lr is not given' >&2; exit 1", 2)]
    ):
        assert supervise(tmp_path / str(number), ["exit 75", last]) == (code, 2)


@pytest.fixture(autouse=True)
def directories(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / str(number)).mkdir()


def test_attempts_without_progress_end(tmp_path: Path) -> None:
    with pytest.raises(
        TemporaryError, match="2 attempts in a row have not reached another checkpoint than iteration 0"
    ):
        supervise(tmp_path, ["exit 75"] * 5, attempts=2)


def test_a_signal_makes_the_run_save_and_ends_the_supervisor(tmp_path: Path) -> None:
    """The program as it is started, around a real training."""
    save = tmp_path / "save"
    command = ["examples/complete/fault_tolerant.py", "--save", save, "--", *TINY[:-6], "--train-iters", "100000"]
    program = Program([str(ROOT / command[0]), *command[1:]], environment({}), tmp_path)
    metrics = save / "last_attempt.log"
    deadline = time.monotonic() + 120
    while "iteration " not in (metrics.read_text() if metrics.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.1)
    program.send_signal(signal.SIGTERM)
    output, errors = program.communicate(120)
    assert program.returncode == 0, output + errors
    assert re.search(r"ended with exit code 0 at iteration [1-9]", output)


# ---- 3: two sites


def losses_of(log: str) -> list[float]:
    found = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", log)]
    assert len(found) == 3
    return found


def test_two_sites_train_the_same_run(tmp_path: Path) -> None:
    printed = script("two_sites.sh", tmp_path, LAPTOP="1", DRY_RUN="1")
    first, second = sorted(printed.stdout.splitlines())
    assert second.replace("--node_rank=1", "--node_rank=0") == first
    words = first.split()
    assert {"--nproc_per_node=2", "--nnodes=2"} < set(words), printed.stderr
    flags = words[words.index(str(ROOT / "pretrain_gpt.py")) + 1 :]
    assert "--use-torch-fsdp2 --num-distributed-optimizer-instances 2" in printed.stdout
    done = run_ranks(flags, 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses_of(done.stdout) == pytest.approx(
        losses_of(run(flags[flags.index("--num-layers") :]).stdout), rel=1e-5
    )


def test_two_sites_exchange_weights(tmp_path: Path) -> None:
    ports = {"PORT": free_port(), "EXCHANGE_PORT": free_port()}
    done = script("two_sites.sh", tmp_path, LAPTOP="1", EXCHANGE_EVERY="2", **ports)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "site 1 is connected" in done.stdout and len(losses_of(done.stdout)) == 3
    missing = {"SITE": "0", "HEAD": "a", "GPUS_PER_NODE": "8", "DATA_PATH": "x", "EXCHANGE_EVERY": "2", "DRY_RUN": "1"}
    printed = script("two_sites.sh", tmp_path, **missing).stdout
    assert "--datacenter-id 0 --diloco-address a:29701 --diloco-key-file KEY --data-path x" in printed


# ---- 4: packing


def test_packing_leaves_little_and_loses_nothing() -> None:
    module = load("examples/complete/packed_dataset.py")
    lengths = [5, 3, 8, 1, 4, 4, 2, 7, 6]
    packs = module.pack(lengths, 8)
    assert sorted(number for numbers in packs for number in numbers) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in numbers) <= 8 for numbers in packs)
    assert len(packs) == sum(lengths) // 8, "the forty tokens fill five sequences"
    with pytest.raises(DataError, match="document 1 has 9 tokens and a sequence has room for 8"):
        module.pack([3, 9], 8)


def test_a_documents_loss_does_not_depend_on_what_it_is_packed_with(tmp_path: Path) -> None:
    """Two documents in one sequence, and each in one of its own: the same mean over their tokens."""
    documents = [[(start * 7 + 3 * step) % 50 for step in range(n)] for start, n in ((1, 15), (2, 17))]
    losses = []
    for length, batch in ((32, 1), (16, 2)):
        file = tmp_path / "documents.jsonl"
        # Every tenth line is validation: the first one here.
        lines = [[1, 2], *documents]
        file.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in lines))
        flags = f"--seq-length {length} --micro-batch-size {batch} --global-batch-size {batch} --train-iters 1".split()
        metrics = tmp_path / str(length)
        done = run(
            [*TINY, *flags, "--vocab-size", "50", "--input", file, "--metrics-dir", metrics],
            program="examples/complete/packed_dataset.py", directory=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses.append(json.loads((metrics / "metrics.jsonl").read_text().splitlines()[0])["lm loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# ---- 5: monitoring


def rows(number: int, **last: Any) -> list[dict[str, Any]]:
    row = {
        "consumed_samples": 4, "lm loss": 4.0, "grad_norm": 1.0, "lr": 1e-3, "skipped": False, "mfu": 0.4,
        "iteration_time_seconds": 0.5, "tokens_per_second": 1000.0, "peak_memory_bytes": 2**30,
    }  # fmt: skip
    recent = number - 50
    return [{**row, "iteration": i + 1, **(last if i >= recent else {})} for i in range(number)]


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        ({}, None),
        ({"lm loss": None}, "the loss of iteration 51 is no number"),
        ({"lm loss": 5.0}, "the loss climbs: 5.000 after 4.000"),
        ({"tokens_per_second": 700.0}, "700 tokens per second, 1000 before"),
        ({"skipped": True}, "50 of the last 50 updates were skipped"),
    ],
)
def test_what_is_wrong_is_said(last: dict[str, Any], sentence: str | None) -> None:
    module = load("examples/complete/monitor_run.py")
    assert list(module.find_problems(rows(100, **last), age_seconds=5.0)) == ([] if sentence is None else [sentence])
    silent = list(module.find_problems(rows(100), age_seconds=3600.0))
    assert silent == ["nothing was written for 60 minutes"]


def test_a_run_is_described_and_alerts_reach_a_command(tmp_path: Path) -> None:
    module = load("examples/complete/monitor_run.py")
    timed = {"forward-backward-time": 0.4, "batch-generator-time": 0.1}
    assert module.name_bottleneck(module.list_parts(rows(60, **timed))).startswith("data: ")
    assert module.name_bottleneck(module.list_parts(rows(60))) is None
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows(60, **{"lm loss": None})) + "\n{")
    flags = ["--metrics-dir", tmp_path, "--finished", "--alert", f"cat > {tmp_path}/alert"]
    done = run(flags, program="examples/complete/monitor_run.py")
    assert done.returncode == 1 and "MFU 40.0%" in done.stdout, done.stderr
    assert (tmp_path / "alert").read_text() == "the loss of iteration 11 is no number\n"
    missing = run(["--metrics-dir", tmp_path / "none"], program="examples/complete/monitor_run.py")
    assert missing.returncode == 2 and "start the run with --metrics-dir" in missing.stderr


# ---- recipes, schedule, layers in a platform, positions


def test_power_laws_are_found() -> None:
    module = load("examples/sweep.py")
    a, b = module.fit_power_law([(x, 3.0 * x**-0.25) for x in (10.0, 100.0, 1000.0)])
    assert (a, b) == (pytest.approx(3.0), pytest.approx(0.25))
    with pytest.raises(ConfigError, match="at least two sizes"):
        module.fit_power_law([(10.0, 1.0), (10.0, 2.0)])


def test_a_sweep_repeats_no_finished_run_and_checks_everything_first(tmp_path: Path) -> None:
    """docs/recipes.md has sweeps that train; here the runs are there already."""
    for variant, losses in enumerate(([4.0] * 18 + [3.0, 2.0], [3.5] * 18 + [1.5, None])):
        for seed in (0, 1):
            directory = tmp_path / f"{variant:02d}-{seed}"
            directory.mkdir()
            rows = [{"iteration": i, "lm loss": loss and loss + seed / 10} for i, loss in enumerate(losses)]
            (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--seeds", "2", "--", *TINY, "--train-iters", "20"]
    flags = ["--output", tmp_path, "--vary", "--hidden-size 16", "--vary", "--qk-layernorm"]
    done = run([*flags, *common], program="examples/sweep.py")
    assert done.returncode == 0, done.stderr
    small, large = json.loads((tmp_path / "sweep.json").read_text())
    assert small["losses"] == pytest.approx([2.5, 2.6]) and large["losses"] == [math.inf, math.inf]
    assert large["parameters"] > 3 * small["parameters"] and large["compute"] > small["compute"]
    assert not list(tmp_path.rglob("log.txt"))
    refused = run([*flags, "--vary", "--hidden-size 17", *common], program="examples/sweep.py")
    assert refused.returncode == 2 and "--hidden-size 17" in refused.stderr


def test_the_cosine_starts_again_also_after_a_restart(tmp_path: Path) -> None:
    def train(steps: int, *flags: str | Path) -> list[float]:
        directory = tmp_path / f"metrics-{steps}-{len(flags)}"
        arguments = [*TINY, "--cycle-iters", "4", "--train-iters", str(steps), "--metrics-dir", directory, *flags]
        done = run(arguments, program="examples/custom_scheduler.py")
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["lr"] for line in (directory / "metrics.jsonl").read_text().splitlines()]

    save = ("--save", tmp_path / "save", "--load", tmp_path / "save")
    rates = [*train(3, *save), *train(6, *save, "--log-progress")]
    assert rates == pytest.approx([1e-2 * (1 + c) / 2 for c in (0.5**0.5, 0, -(0.5**0.5), 1, 0.5**0.5, 0)], abs=1e-8)


def test_layers_in_a_platform_train_the_same_on_every_number_of_processes() -> None:
    def losses(processes: int, *flags: str) -> list[float]:
        job = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
        places = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        command = ["examples/embedded_core.py", "--steps", "6", *flags]
        ranks = finish([Program(command, environment(changes if processes > 1 else {}), ROOT) for changes in places])
        assert [rank.returncode for rank in ranks] == [0] * processes, "".join(rank.stderr for rank in ranks)
        return [float(loss) for rank in ranks for loss in re.findall(r"loss ([0-9.]+)", rank.stdout)]

    alone = losses(1)
    assert len(alone) == 6
    assert losses(4, "--tensor-parallel", "2") == pytest.approx(alone, abs=2e-5)


def test_loss_by_position(tmp_path: Path) -> None:
    """Bins double; their means weighted by their lengths are the mean loss. What cannot be is refused."""
    done = run([*TINY, "--train-iters", "1", "--save", tmp_path])
    assert done.returncode == 0, done.stderr

    def table(*flags: str) -> subprocess.CompletedProcess[str]:
        return run(
            ["--load", tmp_path, "--synthetic", "4", "--sequences", "6", *flags], program="tools/loss_by_position.py"
        )

    bins = json.loads(table("--seq-length", "30", "--json").stdout)
    assert [(row["first"], row["last"]) for row in bins] == [(1, 16), (17, 30)]
    one = json.loads(table("--seq-length", "30", "--json", "--batch-size", "1").stdout)
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in bins], rel=1e-5)
    assert "17-30" in table("--seq-length", "30").stdout
    refused = table("--seq-length", "64")
    assert refused.returncode == 2 and "the model has 32 positions" in refused.stderr
