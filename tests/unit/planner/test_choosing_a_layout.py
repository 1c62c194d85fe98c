# SPDX-License-Identifier: Apache-2.0
"""docs/choosing_a_layout.md: each layout of its table is accepted, and its memory is what the planner says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.planner.step_memory import StepMemory, find_fullest, predict_step_memory
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import describe_gpt_workload

PAGE = (Path(__file__).parents[3] / "docs" / "choosing_a_layout.md").read_text(encoding="utf-8")
GIGABYTE = 10**9
DEVICE_BYTES = 80 * GIGABYTE
MODELS = {
    "7B": "--preset llama2-7b --seq-length 4096",
    "13B": "--preset llama2-13b --seq-length 4096",
    "70B": "--preset llama2-70b --seq-length 4096",
    "175B": "--preset gpt3-175b --seq-length 2048",
    # 126 layers and the two ends fill 8 stages evenly.
    "405B": "--preset llama3.1-405b --seq-length 8192 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split",
    # Narayanan et al., 2021, table 1.
    "1T": "--num-layers 128 --hidden-size 25600 --num-attention-heads 160 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 51200",
    "8x7B": "--preset mixtral-8x7b --seq-length 4096",
    "30B-A3B": "--preset qwen3-30b-a3b --seq-length 4096",
}


class Layout(NamedTuple):
    """A row of the table. axes: tp, pp, cp, dp; ep: of these, for experts."""

    model: str
    gpus: int
    axes: tuple[int, int, int, int]
    ep: int = 1

    @property
    def processes(self) -> int:
        tp, pp, cp, dp = self.axes
        return tp * pp * cp * dp


ROWS = (
    Layout("7B", 8, (1, 1, 1, 8)), Layout("7B", 8, (2, 1, 1, 4)), Layout("13B", 8, (2, 1, 1, 4)),
    Layout("70B", 32, (4, 2, 1, 4)), Layout("70B", 32, (8, 2, 1, 2)), Layout("70B", 64, (4, 4, 1, 4)),
    Layout("70B", 64, (8, 2, 1, 4)), Layout("175B", 128, (8, 4, 1, 4)), Layout("175B", 256, (8, 8, 1, 4)),
    Layout("405B", 256, (8, 8, 1, 4)), Layout("405B", 256, (8, 8, 2, 2)), Layout("1T", 1024, (8, 16, 1, 8)),
    Layout("1T", 1024, (8, 32, 1, 4)), Layout("8x7B", 64, (2, 4, 1, 8), 8), Layout("30B-A3B", 32, (2, 2, 1, 8), 8),
)  # fmt: skip


def read_layout(row: Layout) -> RunConfig:
    tp, pp, cp, dp = row.axes
    flags = (
        f"{MODELS[row.model]} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--context-parallel-size {cp} --bf16 --use-distributed-optimizer --micro-batch-size 1 "
        f"--global-batch-size {dp * 4 * pp} --lr 1e-4 --train-iters 10 --mock-data --tokenizer-type NullTokenizer"
    )
    if tp > 1:
        flags += " --sequence-parallel"
    if row.ep > 1:
        flags += f" --expert-model-parallel-size {row.ep} --expert-tensor-parallel-size 1"
    return read_run_config(flags.split(), {"WORLD_SIZE": str(row.processes)})


def predict(config: RunConfig) -> StepMemory:
    workload = describe_gpt_workload(config, config.tokenizer.vocab_size or 128256)
    return find_fullest(predict_step_memory(config.model, config.ddp, config.optimizer, workload))


def format_row(row: Layout) -> str:
    memory = predict(read_layout(row))
    total = memory.total
    fits = "yes" if total < 0.9 * DEVICE_BYTES else "barely" if total < DEVICE_BYTES else "no"
    weights, activations = memory.state / GIGABYTE, memory.activations / GIGABYTE
    tp, pp, cp, dp = row.axes
    numbers = (row.gpus, tp, pp, cp, dp, row.ep, f"{weights:.0f}", f"{activations:.0f}", fits)
    return f"| {row.model} | " + " | ".join(map(str, numbers)) + " |"


def test_the_page_has_the_table() -> None:
    header = "| model | GPUs | tp | pp | cp | dp | ep | weights and optimizer (GB) | activations (GB) | fits 80 GB |"
    table = "\n".join([header, "|" + "---|" * 10, *map(format_row, ROWS)])
    assert table in PAGE, f"docs/choosing_a_layout.md needs:\n{table}"


@pytest.mark.parametrize("row", ROWS)
def test_the_axes_make_up_the_gpus(row: Layout) -> None:
    assert row.processes == row.gpus
    assert read_layout(row).data_parallel_size == row.axes[3]


EXAMPLES = re.findall(r"^\|.*\| ([\w.-]+), (\d+) GPUs: tp (\d+), pp (\d+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("preset", "gpus", "tp", "pp"), EXAMPLES)
def test_examples_of_the_tree_fit(preset: str, gpus: str, tp: str, pp: str) -> None:
    flags = (
        f"--preset {preset} --seq-length 4096 --max-position-embeddings 4096 --tensor-model-parallel-size {tp} "
        f"--pipeline-model-parallel-size {pp} --sequence-parallel --bf16 --use-distributed-optimizer "
        f"--micro-batch-size 1 --global-batch-size {4 * int(gpus)} --lr 1e-4 --train-iters 10 --mock-data "
        "--tokenizer-type NullTokenizer"
    )
    if preset == "llama3.1-405b":
        flags += " --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    config = read_run_config(flags.split(), {"WORLD_SIZE": gpus})
    assert predict(config).total < 0.9 * DEVICE_BYTES


def test_the_tree_has_an_example_of_every_branch() -> None:
    assert len(EXAMPLES) == 5
    ranges = re.findall(r"^\| (?:less than \d+B|more) \| ([\d-]+) \| (\d+)(?:-(\d+))?", PAGE, re.MULTILINE)
    assert [row[0] for row in ranges] == ["1-2", "4-8", "8", "8"]
