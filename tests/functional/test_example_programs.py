# SPDX-License-Identifier: Apache-2.0
"""examples/programs: reinforcement learning, weights handed over, and lm-evaluation-harness as a user runs it."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.evaluate import main as evaluate
from megatron.core import parallel_state as mpu
from megatron.hf.convert import convert, parse_arguments
from tests.functional.pretrain_runs import ROOT, environment, finish, free_port
from tests.parallel.harness import run_distributed
from tests.programs import Program

EXAMPLES = "examples/programs"
TASK = """\
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def run(program: str, *flags: str | Path, **variables: str) -> str:
    done = finish([Program([f"{EXAMPLES}/{program}", *flags], environment(variables), ROOT)])[0]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from tests.support.huggingface_models import SIZES, randomised

    directory = tmp_path_factory.mktemp("hf")
    alphabet = ["<eod>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eod>").save_pretrained(directory)
    sizes = SIZES | {"vocab_size": len(alphabet), "max_position_embeddings": 128}
    config = transformers.LlamaConfig(**sizes, eos_token_id=0, bos_token_id=0)
    randomised(transformers.LlamaForCausalLM(config)).save_pretrained(directory)
    return directory


def learn(steps: int, tensor_parallel: int) -> list[float]:
    """Rewards of the example's steps, on this process."""
    torch.set_num_threads(1)
    import importlib.util

    spec = importlib.util.spec_from_file_location("reinforce", ROOT / EXAMPLES / "reinforce.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rewards: list[float] = module.learn(steps, tensor_parallel)
    return rewards


def learn_on_both_layouts() -> list[list[float]]:
    """Rewards of three steps on two tensor-parallel ranks, and on two replicas."""
    divided = learn(3, 2)
    mpu.destroy_model_parallel()
    return [divided, learn(3, 1)]


def test_reinforcement_learning_improves_its_reward_and_does_so_on_every_layout() -> None:
    (alone,) = run_distributed(learn, 1, 24, 1)
    assert sum(alone[:4]) / 4 < 0.6 and sum(alone[-4:]) / 4 > sum(alone[:4]) / 4 + 0.1
    (divided, first), (others, second) = run_distributed(learn_on_both_layouts, 2)
    assert divided == others == pytest.approx(alone[:3], abs=1e-6)
    assert first == second and all(0.4 < reward < 0.7 for reward in first)


THREADS = """\
import runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are found in /proc")
def test_no_thread_of_a_process_group_outlives_a_program(tmp_path: Path) -> None:
    """It would abort the process if it let a tensor go during the interpreter's clean-up."""
    (tmp_path / "threads.py").write_text(THREADS)
    programs = []
    for name, flag in (
        (f"{EXAMPLES}/reinforce.py", "--steps"),
        ("examples/run_simple_mcore_train_loop.py", "--iterations"),
        ("examples/embedded_core.py", "--steps"),
    ):
        port = free_port()
        for rank in ("0", "1"):
            job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            programs.append(Program([tmp_path / "threads.py", name, flag, "1"], environment(job), ROOT))
    for done in finish(programs):
        assert done.returncode == 0, done.stderr[-2000:]
        assert "gloo" not in done.stdout.splitlines()[-1], done.stdout


def test_weights_are_handed_to_a_hugging_face_model(model: Path) -> None:
    printed = run("sync_weights.py", "--model", model)
    found = re.search(r"losses ([\d. ]+); logits apart by (\S+); left out: \[\]", printed)
    assert found is not None, printed
    losses = [float(loss) for loss in found[1].split()]
    assert losses == sorted(losses, reverse=True) and len(losses) == 3 and float(found[2]) < 1e-5


INDEX_LESS = """\
import runpy, sys
from lm_eval.tasks import TaskManager
# To index the harness's own tasks takes each process 12 seconds.
TaskManager.__init__.__defaults__ = (None, None, False, None)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_lm_evaluation_harness_gives_what_it_gives_for_hugging_face(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `megatron_lm` model on one process and two, `evaluate --tasks`, and its `hf` model."""
    manager = pytest.importorskip("lm_eval.tasks").TaskManager
    monkeypatch.setattr(manager.__init__, "__defaults__", (None, None, False, None))
    (tmp_path / "index_less.py").write_text(INDEX_LESS)
    checkpoint, tasks = tmp_path / "checkpoint", tmp_path / "tasks"
    paths = ["--input-path", str(model), "--output-path", str(checkpoint)]
    convert(parse_arguments(["--source", "hf", "--target", "megatron", "--no-verify", *paths]))
    tasks.mkdir()
    questions = [
        {"q": f"{word} sat on the", "choices": ["mat", "red hill", "dog"], "gold": number % 3}
        for number, word in enumerate(["the cat", "a", "over", "many small dogs"])
    ]
    (tasks / "data.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tasks / "local.yaml").write_text(TASK.format(data=tasks / "data.jsonl"))
    flags = ["--tasks", "local_choice", "--include_path", tasks, "--batch_size", "2", "--log_samples"]
    arguments = f"load={checkpoint},tokenizer_model={model},seq_length=64"
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    port, programs = free_port(), []

    def start(name: str, further: str = "", **job: str) -> None:
        words: list[str | Path] = [tmp_path / "index_less.py", f"{EXAMPLES}/evaluate_with_lm_eval.py"]
        words += ["--model", "megatron_lm", "--model_args", arguments + further]
        programs.append(Program([*words, *flags, "--output_path", tmp_path / name], environment(variables | job), ROOT))

    start("alone")
    for rank in ("0", "1"):  # as torchrun starts them
        job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        start("together", ",devices=2,tensor_model_parallel_size=2", **job)
    result = tmp_path / "engine.json"
    asked = ["--load", checkpoint, "--tasks", "local_choice", "--include-path", tasks, "--output", result]
    monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, asked)])
    # Accelerate, which the harness's model uses, takes these for a job of several processes.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert evaluate() == 0
    reference = evaluate_hugging_face(model, tasks)
    for done in finish(programs):
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    reported = [
        json.loads(next((tmp_path / name).rglob("results_*.json")).read_text())["results"]["local_choice"]
        for name in ("alone", "together")
    ]
    engine = json.loads(result.read_text())["results"]["local_choice"]
    for measure in ("acc,none", "acc_norm,none"):
        expected = reference["results"]["local_choice"][measure]
        assert [row[measure] for row in (*reported, engine)] == [expected] * 3
    theirs = [[float(each[0][0]) for each in row["resps"]] for row in reference["samples"]["local_choice"]]
    assert len(theirs) == len(questions) and len(theirs[0]) == 3
    for name in ("alone", "together"):
        files = sorted((tmp_path / name).rglob("samples_*.jsonl"))
        rows = [json.loads(line)["resps"] for file in files for line in file.read_text().splitlines()]
        for mine, own in zip(rows, theirs, strict=True):
            assert [float(each[0][0]) for each in mine] == pytest.approx(own, abs=1e-5)
            assert all(math.isfinite(float(each[0][0])) for each in mine)


def evaluate_hugging_face(model: Path, tasks: Path) -> dict[str, Any]:
    """What the harness itself finds of the directory by its `hf` model."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found: dict[str, Any] = simple_evaluate(
        "hf", model_args=f"pretrained={model},dtype=float32,max_length=64", tasks=["local_choice"], batch_size=2,
        device="cpu", task_manager=TaskManager(include_path=str(tasks)), bootstrap_iters=0,
    )  # fmt: skip
    return found
