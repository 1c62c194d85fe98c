# SPDX-License-Identifier: Apache-2.0
"""--preset: published models by name, proven by the number of parameters that their placements count."""

from __future__ import annotations

import re
import shlex

import pytest

from megatron.core.placement import get_placement
from megatron.hf.settings import build_empty_model
from megatron.planner.parameters import PlacedCounts, count_whole
from megatron.training.config.container import RunConfig
from megatron.training.config.model import ACTIVATION_SWITCHES
from megatron.training.flags.read import examine
from megatron.training.recipes.presets import PRESETS, Preset
from tests.support.run_flags import SMALLEST_RUN

UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}
RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --seq-length 64"


def read_preset(name: str, flags: str = "") -> RunConfig:
    examination = examine([*shlex.split(RUN), "--preset", name, *shlex.split(flags)], {})
    assert [problem.text for problem in examination.problems] == []
    return examination.config


def count(config: RunConfig, preset: Preset) -> PlacedCounts:
    model = build_empty_model(config, preset.fields["vocab_size"])
    return count_whole(get_placement(parameter, name) for name, parameter in model.named_parameters())


def read_published(text: str) -> tuple[float, float]:
    """A published number, and one unit of its last digit: 8.03B -> 8.03e9, 1e7."""
    number, unit = float(text[:-1]), UNITS[text[-1]]
    digits = len(text[:-1].partition(".")[2])
    return number * unit, unit * 10.0**-digits


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_were_published(name: str) -> None:
    preset = PRESETS[name]
    config = read_preset(name)
    # Every flag of a published model counts in it.
    assert config.notes == ()
    counts = count(config, preset)
    published, digit = read_published(preset.parameters)
    assert abs(counts.total - published) <= digit / 2, f"{counts.total:,}"
    if preset.active is None:
        assert config.model.num_moe_experts is None
        return
    active = counts.count_active(config.model.moe_router_topk, config.model.num_moe_experts or 1)
    published, digit = read_published(preset.active)
    # Some count the embedding and the output layer among what works on a token, some one of them, some neither.
    counted = [active, active - counts["embedding"], active - counts["embedding"] - counts["head"]]
    assert min(abs(number - published) for number in counted) <= digit, f"{counted}"


@pytest.mark.flags("--preset")
def test_a_preset_stands_for_its_flags_and_what_is_given_wins() -> None:
    config = read_preset("Llama3.2-1B", "--num-layers 2 --kv-channels 64")
    sources = config.sources
    assert (config.model.num_layers, sources["--num-layers"]) == (2, "command line")
    assert (config.model.hidden_size, sources["--hidden-size"]) == (2048, "preset")
    assert config.model.num_query_groups == 8 and config.gpt.untie_embeddings_and_output_weights is False
    assert (config.tokenizer.vocab_size, sources["--vocab-size"]) == (128256, "preset")
    assert config.model.hidden_dropout == 0
    assert config.notes == ("--preset llama3.2-1b means --num-layers 16; what is given instead wins",)


@pytest.mark.parametrize(
    ("name", "given", "replaced"),
    [
        ("llama3.2-1b", "--squared-relu", "--swiglu"),
        ("gpt3-125m", "--swiglu", "--openai-gelu"),
        ("llama3.2-1b", "", ""),
    ],
)
def test_another_activation_takes_the_place_of_the_presets(name: str, given: str, replaced: str) -> None:
    config = read_preset(name, f"--num-layers 2 {given}")
    activation = {
        switch for switch in ACTIVATION_SWITCHES if config.sources[f"--{switch.replace('_', '-')}"] != "default"
    }
    assert activation == {(given or "--swiglu")[2:].replace("-", "_")}
    (note,) = config.notes
    assert replaced in note and ("--swiglu" in note) == (replaced == "--swiglu")


def test_the_tokenizer_says_how_many_tokens_there_are() -> None:
    flags = SMALLEST_RUN.replace("NullTokenizer", "HuggingFaceTokenizer --tokenizer-model somewhere")
    words = re.sub(r"--vocab-size \d+", "", flags).split()
    assert examine([*words, "--preset", "llama3-8b"], {}).config.sources["--vocab-size"] == "default"


def test_an_unknown_preset_is_refused_once() -> None:
    problems = examine([*RUN.split(), "--preset", "lama3-8b"], {}).problems
    (problem,) = problems
    assert re.fullmatch(
        "--preset lama3-8b is not known; did you mean llama3-8b or .*--preset list shows all [0-9]+", problem.text
    )


def test_the_list_of_presets(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.training.flags.read import read_run_config

    with pytest.raises(SystemExit, match="0"):
        read_run_config(["--preset", "list"], {})
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "parameters", "active", "layers", "hidden", "context", "GPUs", "family"]
    assert len(lines) == len(PRESETS) and max(map(len, lines)) <= 100
    assert next(line for line in lines if line.startswith("mixtral-8x7b ")).split() == [
        "mixtral-8x7b", "46.7B", "12.9B", "32", "4096", "32K", "32,64", "Mixtral",
    ]  # fmt: skip
