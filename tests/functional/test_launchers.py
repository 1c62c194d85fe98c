# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/ that start a training on a cluster: what they run and refuse, and small, on this machine.

MEGATRON_ALL_LAUNCHERS=1 bash tests/run.sh tests/functional/test_launchers.py      trains every script's small run
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.training.flags.read import examine, read_run_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WITHOUT_DATA = ("llama/train_llama3_8b_fp8.sh", "llama/train_llama3_8b_h100_fp8.sh")
"""Scripts that make up data where none are given."""
SCRIPTS = {
    "pretrain_gpt_distributed.sh": 8,
    "llama/train_llama_70b.sh": 64,
    "llama/train_llama3_70b.sh": 64,
    "llama/train_llama3_8b_fp8.sh": 8,
    "llama/train_llama3_8b_h100_fp8.sh": 8,
    "gpt3/train_gpt3.sh 350m": 8,
    "gpt3/train_gpt3.sh 6.7b": 32,
    "gpt3/train_gpt3.sh 175b": 512,
    "mixtral/train_mixtral_8x7b.sh": 64,
    "mixtral/train_mixtral_8x22b.sh": 128,
    "qwen/train_qwen3_30b_a3b.sh": 32,
    "gpt_oss/train_gpt_oss_20b.sh": 16,
    "deepseek/train_deepseek_v2_lite.sh": 8,
    "deepseek/train_deepseek_v3.sh": 1024,
    "hybrid/train_nemotron_h_8b.sh": 64,
    "hybrid/train_qwen3_next_80b_a3b.sh": 64,
    "../.github/skills/megatron-lm-expert/assets/pretrain_llama.sh": 8,
}
"""Script and argument -> processes."""
TRAINED = ("llama/train_llama_70b.sh", "llama/train_llama3_8b_fp8.sh", "deepseek/train_deepseek_v3.sh")
TRAINED_BY_PATH = "examples/llama/train_llama3_70b.sh"
EXAMPLE_SCRIPTS = sorted(path for path in EXAMPLES.rglob("*.sh") if path.name != "steps.sh")
SHELL_FILES = sorted(
    path for place in ("examples", "tools", "tests", ".github") for path in (ROOT / place).rglob("*.sh")
)
SMALL = (
    "--preset gpt2 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 "
    "--seq-length 32 --micro-batch-size 1 --global-batch-size 16 --train-iters 1000000 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 64"
)
"""Flags of a model that trains anywhere."""
NEEDED = ("DATA_PATH", "TOKENIZER_MODEL", "VOCAB_FILE", "MERGE_FILE")


def run(script: str | Path, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script with its arguments, without variables of this process's own job."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_", "WORLD_SIZE"))
    }
    environment = kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"} | variables
    file, *arguments = shlex.split(str(script))
    command = ["bash", str(EXAMPLES / file), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def dry_run(script: str, **variables: str) -> tuple[dict[str, str], list[str]]:
    """The launcher's options, which are torchrun's, and the flags of pretrain_gpt.py."""
    finished = run(script, DRY_RUN="1", GPUS_PER_NODE="8", **variables)
    assert finished.returncode == 0, finished.stderr
    words = shlex.split(finished.stdout)
    program = next(index for index, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    assert words[:2] == ["python", str(ROOT / "tools" / "launch.py")]
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words[2:program])
    return options, words[program + 1 :]


# ---- the whole command


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_command_has_no_problems_at_full_size(script: str) -> None:
    options, flags = dry_run(script)
    world_size = int(options["nproc_per_node"]) * int(options["nnodes"])
    assert world_size == SCRIPTS[script]
    examination = examine(flags, {"WORLD_SIZE": str(world_size)})
    assert [problem.text for problem in examination.problems] == []


def test_the_script_for_70_billion_parameters_has_these_flags() -> None:
    flags = """
        --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --context-parallel-size 1 --sequence-parallel
        --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096
        --micro-batch-size 1 --global-batch-size 1024 --lr 3e-4 --train-iters 100000 --lr-decay-style cosine
        --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0 --bf16 --use-mcore-models
        --transformer-impl transformer_engine --data-path /path/to/data --vocab-file /path/to/vocab.json
        --merge-file /path/to/merges.txt
    """
    options, found = dry_run("llama/train_llama_70b.sh")
    assert found == flags.split()
    assert (options["nproc_per_node"], options["nnodes"]) == ("8", "8")


def test_several_nodes_without_slurm() -> None:
    where = {"NNODES": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "1234", "NODE_RANK": "1"}
    options, _ = dry_run("pretrain_gpt_distributed.sh", **where)
    assert options == {
        "nproc_per_node": "8", "nnodes": "2", "node_rank": "1", "master_addr": "node0", "master_port": "1234",
    }  # fmt: skip


@pytest.mark.parametrize("script", EXAMPLE_SCRIPTS, ids=lambda script: script.name)
def test_a_dry_run_prints_commands_and_does_nothing(script: Path, tmp_path: Path) -> None:
    """Without a GPU, data or SLURM."""
    arguments = {"start.sh": "--preset gpt2", "slurm.sh": str(EXAMPLES / "llama" / "train_llama_70b.sh")}
    out = {name: str(tmp_path / "out") for name in ("QUICKSTART_DIR", "OUT", "WORK_DIR")}
    finished = run(f"{script} {arguments.get(script.name, '')}", DRY_RUN="1", CUDA_VISIBLE_DEVICES="", **out)
    assert finished.returncode == 0, finished.stderr
    assert re.search(r"\bpython (-m megatron\.\w+|\S+\.py) ", finished.stdout)
    assert list(tmp_path.iterdir()) == []


# ---- what is missing


@pytest.mark.parametrize(
    ("script", "variables", "sentence"),
    [
        ("llama/train_llama3_70b.sh", {}, "the variable DATA_PATH is not set; give the prefix of a dataset"),
        ("llama/train_llama3_70b.sh", {"DATA_PATH": "/path/to/data"}, "DATA_PATH=/path/to/data is a placeholder"),
        ("llama/train_llama3_70b.sh", {"DATA_PATH": "/nothing/here"}, "DATA_PATH: /nothing/here.idx does not exist"),
        ("gpt3/train_gpt3.sh 5b", {}, "GPT-3 5b is not known; use 125m, 350m"),
        ("launch/start.sh --preset gpt2", {}, "no GPU was found; set GPUS_PER_NODE, or LAPTOP=1"),
        ("launch/start.sh --preset gpt2", {"GPUS_PER_NODE": "1", "NNODES": "2"}, "MASTER_ADDR is not set"),
        ("launch/start.sh --preset gpt2", {"GPUS_PER_NODE": "1", "SLURM_JOB_ID": "7"}, "there is no srun"),
        ("launch/slurm.sh", {}, "give the training script"),
        ("launch/slurm.sh nothing.sh", {}, "nothing.sh does not exist"),
        ("launch/slurm.sh README.md", {}, "this is no SLURM job; submit it"),
    ],
)
def test_what_is_missing_is_one_sentence(script: str, variables: dict[str, str], sentence: str) -> None:
    if shutil.which("nvidia-smi") and "no GPU" in sentence or shutil.which("srun") and "no srun" in sentence:
        pytest.skip("this machine has it")
    finished = run(script, **variables)
    assert finished.returncode == 2
    (line,) = finished.stderr.splitlines()
    assert line.startswith("error: ") and sentence in line


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script not in WITHOUT_DATA])
def test_a_script_without_its_data_starts_nothing(script: str, tmp_path: Path) -> None:
    """First nothing is given, then a placeholder, then a file that is not there, for each variable in turn."""
    given: dict[str, str] = {"CHECKPOINTS": str(tmp_path / "new" / "checkpoints")}
    asked = []
    while True:
        finished = run(script, GPUS_PER_NODE="0", **given)
        assert finished.returncode == 2
        (line,) = finished.stderr.splitlines()
        if "is not set" not in line:
            break
        name = line.removeprefix("error: the variable ").split()[0]
        assert name in NEEDED
        placeholder = "/path/to/" + re.findall(r"/path/to/(\S+)", " ".join(dry_run(script)[1]))[len(asked)]
        for value, sentence in ((placeholder, "is a placeholder"), (str(tmp_path / "absent"), "does not exist")):
            finished = run(script, **given, **{name: value})
            assert finished.returncode == 2
            assert finished.stderr.startswith(f"error: {name}") and sentence in finished.stderr
        given[name] = str(tmp_path / name)
        (tmp_path / name).touch()
        (tmp_path / f"{name}.idx").touch()
        asked.append(name)
    assert len(asked) >= 2
    # All is there but GPUs: now nothing but the programs is missing, and the directory of checkpoints has its parent.
    assert "no GPU was found" in line


def test_without_python_there_is_one_sentence(tmp_path: Path) -> None:
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    finished = run("launch/start.sh --preset gpt2", PATH=str(tmp_path))
    assert finished.returncode == 2
    assert finished.stderr == "error: there is no python; activate the environment that has torch (README.md)\n"


def test_flags_are_checked_before_processes_start() -> None:
    finished = run(f"launch/start.sh {SMALL} --num-attention-heads 5", GPUS_PER_NODE="8")
    assert finished.returncode == 2
    assert [line.split()[0] for line in finished.stderr.splitlines()] == ["error:"]
    assert "--num-attention-heads 5" in finished.stderr and finished.stdout == ""


# ---- small, on this machine


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_small_run_trains(script: str) -> None:
    if script not in TRAINED and os.environ.get("MEGATRON_ALL_LAUNCHERS") != "1":
        small = shlex.split(run(script, LAPTOP="1", DRY_RUN="1").stdout)
        processes = next(word for word in small if word.startswith("--nproc_per_node=")).partition("=")[2]
        flags = small[next(index for index, word in enumerate(small) if word.endswith("pretrain_gpt.py")) + 1 :]
        assert read_run_config(flags, {"WORLD_SIZE": processes}).world_size == int(processes) <= 4
        return
    finished = run(script, LAPTOP="1")
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "iteration        5/       5" in finished.stdout


# ---- SLURM, by commands that stand for its own


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a batch script of two nodes; its commands write what they were called with."""
    commands = tmp_path / "bin"
    commands.mkdir()
    calls = tmp_path / "calls"
    stubs = {
        # One process of the step, here; its number is what scancel sends signals to.
        "srun": f"""
            echo "srun $*" >> {calls}
            while [ "${{1#--}}" != "$1" ]; do shift; done
            export SLURM_STEP_ID=0 SLURM_NODEID=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1
            echo $$ > {tmp_path}/step
            exec "$@"
        """,
        "scancel": f'echo "scancel $*" >> {calls}; kill -USR1 "$(cat {tmp_path}/step)"',
        "scontrol": f"""
            echo "scontrol $*" >> {calls}
            [ "$1" != show ] || printf 'node3\\nnode4\\n'
        """,
    }
    for name, text in stubs.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{textwrap.dedent(text)}")
        (commands / name).chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    yield {
        "PATH": path, "SLURM_JOB_ID": "123", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[3-4]",
        "GPUS_PER_NODE": "8",
    }  # fmt: skip


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_batch_script_reaches_all_nodes(slurm: dict[str, str], launcher: str) -> None:
    finished = run("launch/start.sh --preset gpt2", DRY_RUN="1", LAUNCHER=launcher, **slurm)
    words = shlex.split(finished.stdout)
    assert words[:3] == ["srun", "--nodes=2", "--kill-on-bad-exit=1"]
    tasks = {"torchrun": "--ntasks-per-node=1", "srun": "--ntasks-per-node=8"}
    assert words[3] == tasks[launcher] and words[-2:] == ["--preset", "gpt2"]


@pytest.mark.parametrize("script", [*SCRIPTS, "launch/start.sh --preset gpt2", f"launch/slurm.sh {TRAINED_BY_PATH}"])
def test_the_copy_that_sbatch_makes_finds_the_checkout(slurm: dict[str, str], tmp_path: Path, script: str) -> None:
    """SLURM runs a copy in its own directory, with the directory of the submission as the working directory."""
    file, *arguments = script.split()
    copy = shutil.copy(EXAMPLES / file, tmp_path / "slurm_script")
    finished = run(shlex.join([str(copy), *arguments]), DRY_RUN="1", **slurm)
    assert finished.returncode == 0 and finished.stderr == ""
    assert shlex.split(finished.stdout)[0] == "srun"
    assert str(ROOT / "pretrain_gpt.py") in finished.stdout or str(EXAMPLES / "launch" / "start.sh") in finished.stdout


def test_each_node_of_a_step_starts_its_own_launcher(slurm: dict[str, str], tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.write_text(
        f'#!/usr/bin/env bash\n[[ "$1" != */launch.py ]] || {{ echo "$*" > {tmp_path}/launcher; exit; }}\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    finished = run(f"launch/start.sh {SMALL}", **slurm)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "launcher").read_text().partition(f" {ROOT / 'pretrain_gpt.py'}")[0].split() == [
        str(ROOT / "tools" / "launch.py"), "--nproc_per_node=8", "--nnodes=2", "--node_rank=1", "--master_addr=node3",
        "--master_port=20123",
    ]  # fmt: skip


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_what_a_rank_said_is_the_last_line_behind_sruns(slurm: dict[str, str], tmp_path: Path, launcher: str) -> None:
    srun = tmp_path / "bin" / "srun"
    lines = [
        "error: 1 was not saved; training goes on",
        "error: the disk is full",
        "error: rank 3: no",
        "srun: error: Exited",
    ]
    srun.write_text("#!/usr/bin/env bash\necho out\n" + "".join(f"echo '{line}' >&2\n" for line in lines) + "exit 74\n")
    finished = run(f"launch/start.sh {SMALL}", LAUNCHER=launcher, **slurm)
    assert finished.returncode == 74
    assert finished.stderr.splitlines() == [*lines, "error: the disk is full"]
    assert finished.stdout == "out\n"


def test_a_job_saves_when_its_time_is_up_and_goes_back_into_the_queue(slurm: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    checkpoints = tmp_path / "checkpoints"
    script.write_text(
        f"source {EXAMPLES}/launch/start.sh\n"
        f"start {SMALL} --log-interval 1 "
        f"--save {checkpoints} --load {checkpoints} ${{EXTRA_FLAGS}}\n"
    )
    command = ["bash", str(EXAMPLES / "launch" / "slurm.sh"), str(script)]
    log = tmp_path / "log"
    with log.open("w") as output:
        job = subprocess.Popen(command, cwd=ROOT, env=os.environ | slurm, stdout=output, stderr=subprocess.STDOUT)
        try:
            while "iteration        2/" not in log.read_text():
                assert job.poll() is None, log.read_text()
                time.sleep(0.2)
            job.send_signal(10)  # SIGUSR1, as of --signal=B:USR1@300
            assert job.wait(120) == 0, log.read_text()
        finally:
            job.kill()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-2:] == ["scancel --signal=USR1 123", "scontrol requeue 123"]
    assert "saved; back into the queue" in log.read_text()
    assert int((checkpoints / "latest_checkpointed_iteration.txt").read_text()) >= 2


# ---- files


def test_shell_files_are_sound() -> None:
    for file in SHELL_FILES:
        subprocess.run(["bash", "-n", str(file)], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    files = [str(file) for file in SHELL_FILES]
    # SC1090, SC1091, SC2154: where start.sh is, and what it sets; SC2086: EXTRA_FLAGS is meant to be several words.
    found = subprocess.run(
        [shellcheck, "--exclude=SC1090,SC1091,SC2086,SC2154", *files], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


def read_manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "launch" / "kubernetes" / name).read_text()))


def list_nodes() -> list[tuple[str, int, dict[str, Any]]]:
    """(manifest, nodes, specification of a pod)."""
    (operator,) = read_manifests("pytorchjob.yaml")
    replicas = operator["spec"]["pytorchReplicaSpecs"]
    nodes = sum(replica["replicas"] for replica in replicas.values())
    found = [("pytorchjob.yaml", nodes, replica["template"]["spec"]) for replica in replicas.values()]
    _, job = read_manifests("indexed_job.yaml")
    return [*found, ("indexed_job.yaml", job["spec"]["completions"], job["spec"]["template"]["spec"])]


@pytest.mark.parametrize(("name", "nodes", "pod"), list_nodes())
def test_a_pod_has_what_a_node_of_a_run_needs(name: str, nodes: int, pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    if name == "pytorchjob.yaml":
        assert read_manifests(name)[0]["spec"]["nprocPerNode"] == str(gpus)
    else:
        assert variables["GPUS_PER_NODE"] == str(gpus) and variables["NNODES"] == str(nodes)
        service, job = read_manifests(name)
        assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
        assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert [problem.text for problem in examine(container["args"], {"WORLD_SIZE": str(nodes * gpus)}).problems] == []
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    for flag in container["args"]:
        _, _, value = flag.partition("=")
        if value.startswith("/"):
            assert any(value.startswith(path) and "persistentVolumeClaim" in volume for path, volume in mounts.items())
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname" and spread["maxSkew"] == 1


@pytest.mark.parametrize("network", ["nvlink", "infiniband", "efa", "ethernet"])
def test_variables_of_a_network(network: str) -> None:
    def call(*arguments: str) -> str:
        command = [sys.executable, str(ROOT / "tools" / "env.py"), "--network", network, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    variables = {entry["name"]: entry for entry in json.loads(call("--format", "json", "--interface", "eth7"))}
    expected = {
        "nvlink": {"NCCL_P2P_LEVEL": "NVL"},
        "infiniband": {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "eth7", "NCCL_CROSS_NIC": "0"},
        "efa": {"FI_PROVIDER": "efa", "NCCL_SOCKET_IFNAME": "eth7"},
        "ethernet": {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth7"},
    }[network]
    assert {name: variables[name]["value"] for name in expected} == expected
    assert all(entry["reason"] for entry in variables.values())
    # What the site has set wins.
    printed = subprocess.run(
        ["bash", "-c", f"{call('--format', 'shell')}\necho $NCCL_DEBUG"], env={"NCCL_DEBUG": "INFO"}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert printed.stdout == "INFO\n"
