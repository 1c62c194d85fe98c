# SPDX-License-Identifier: Apache-2.0
"""--preset-layout: each layout is accepted by the rules of a run, fits 80 GB by formula, and is documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cli.plan_search import GAPS
from megatron.planner.devices import find_device
from megatron.planner.step_memory import find_fullest, predict_step_memory
from megatron.planner.step_time import shorten
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import examine, read_run_config
from megatron.training.recipes.gpt import describe_gpt_workload
from megatron.training.recipes.layouts import LAYOUTS, PresetLayout, choose_layout

PAGE = Path(__file__).parents[4] / "docs" / "choosing_a_layout.md"
GIGABYTE = 10**9
DEVICE = find_device("h100")
RUN = "--bf16 --lr 1e-4 --train-iters 10 --mock-data --tokenizer-type NullTokenizer"
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


def read(name: str, layout: PresetLayout, gpus: int, flags: str = "") -> RunConfig:
    batch = 32 * gpus * layout.micro_batch_size
    words = (
        f"--preset {name} --preset-layout {RUN} --seq-length {layout.seq_length} "
        f"--micro-batch-size {layout.micro_batch_size} --global-batch-size {batch} {flags}"
    )
    return read_run_config(words.split(), {"WORLD_SIZE": str(gpus)})


def predict_bytes(config: RunConfig) -> float:
    batch = 2 * config.model.pipeline_model_parallel_size
    workload = describe_gpt_workload(config, config.tokenizer.vocab_size or 0, shorten(config.model, batch))
    return find_fullest(predict_step_memory(config.model, config.ddp, config.optimizer, workload)).total


@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda case: case if isinstance(case, str) else str(case.gpus))
def test_each_layout_is_legal_and_fits(name: str, layout: PresetLayout) -> None:
    config = read(name, layout, layout.gpus)
    assert config.data_parallel_size * layout.tp * layout.pp * layout.cp == layout.gpus
    beside = DEVICE.reserved_bytes + 6 * DEVICE.communicator_bytes
    assert predict_bytes(config) * GAPS + beside < DEVICE.memory_bytes
    # More GPUs are more replicas of it.
    more = read(name, layout, 3 * layout.gpus)
    assert choose_layout(name, 3 * layout.gpus) != layout or more.data_parallel_size == 3 * config.data_parallel_size


@pytest.mark.flags("--preset-layout")
def test_the_layout_follows_the_number_of_processes_and_what_is_given_wins() -> None:
    def sizes(gpus: int, flags: str = "") -> tuple[int, int, int | None]:
        config = read("llama3-70b", LAYOUTS["llama3-70b"][0], gpus, flags)
        assert any(note.startswith("--preset-layout means --tensor-model-parallel-size 8") for note in config.notes)
        virtual = config.model.virtual_pipeline_model_parallel_size
        return config.model.tensor_model_parallel_size, config.model.pipeline_model_parallel_size, virtual

    assert (sizes(32), sizes(64), sizes(96)) == ((8, 4, 4), (8, 2, 4), (8, 4, 4))
    assert sizes(32, "--tensor-model-parallel-size 4")[0] == 4
    config = read("llama3-70b", LAYOUTS["llama3-70b"][0], 32)
    assert config.sources["--tensor-model-parallel-size"] == config.sources["--sequence-parallel"] == "preset"
    without = examine(f"--preset llama3-70b {RUN}".split(), {"WORLD_SIZE": "32"}).config
    assert without.model.tensor_model_parallel_size == 1


@pytest.mark.parametrize(
    ("flags", "gpus", "sentence"),
    [
        (
            "--preset llama3-70b --preset-layout",
            48,
            "has layouts for 32 and 64 GPUs, or multiples of them",
        ),
        ("--preset pythia-70m --preset-layout", 1, "has layouts for no number of GPUs, and this run has 1 process;"),
        ("--preset-layout", 8, "--preset-layout is the layout of a preset; give --preset NAME, or leave it out"),
    ],
)
def test_without_a_layout_there_is_a_sentence(flags: str, gpus: int, sentence: str) -> None:
    problems = [problem.text for problem in examine(f"{flags} {RUN}".split(), {"WORLD_SIZE": str(gpus)}).problems]
    assert any(sentence in problem for problem in problems)


def format_row(name: str, layout: PresetLayout) -> str:
    memory = predict_bytes(read(name, layout, layout.gpus))
    axes = (layout.tp, layout.pp, layout.layers_per_chunk or "-", layout.cp, layout.ep)
    cells = (layout.gpus, *axes, layout.micro_batch_size, layout.seq_length, f"{memory / GIGABYTE:.0f}")
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


def test_the_page_has_the_layouts() -> None:
    header = "| preset | GPUs | tp | pp | layers per chunk | cp | ep | micro-batch | tokens | memory (GB) |"
    table = "\n".join([header, "|" + "---|" * 10, *(format_row(*case) for case in CASES)])
    assert table in PAGE.read_text(encoding="utf-8"), f"docs/choosing_a_layout.md needs:\n{table}"
