# SPDX-License-Identifier: Apache-2.0
"""Memory by formula equals the reference's, and the tool says so."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli.report_theoretical_memory import describe_workload, estimate, read
from megatron.core.errors import ConfigError
from megatron.core.plan.read import read_plan
from megatron.planner.memory import describe_memory
from megatron.planner.step_memory import list_kept
from tests.functional.pretrain_runs import ROOT, environment

CASES = json.loads((Path(__file__).parent / "data" / "flops_memory.json").read_text())
NAMES = ["gpt3_small", "gpt3_175b_tp8pp16", "llama3_8b", "tiny_b", "mixtral_8x7b", "tiny_mla_moe_mtp"]
MEGABYTE = 1024 * 1024


def flags_of(name: str) -> tuple[list[str], dict[str, str]]:
    case = CASES[name]
    return shlex.split(case["cli"]), {"WORLD_SIZE": str(case["world_size"])}


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_reference(name: str) -> None:
    memory = estimate(read(*flags_of(name)))
    weights, activations, total = CASES[name]["result"]["weight_opt_MB,act_MB,total_MB"]
    assert memory.weight_and_optimizer / MEGABYTE == pytest.approx(weights, rel=1e-12)
    assert memory.activations / MEGABYTE == pytest.approx(activations, rel=1e-12)
    assert memory.total / MEGABYTE == pytest.approx(total, rel=1e-12)


def test_context_parallelism_divides_tokens_and_state() -> None:
    """No reference: upstream's sequence is divided among the cp processes, and so is the optimizer's state."""
    flags, variables = flags_of("llama3_8b")
    whole = estimate(read(flags, variables))
    divided = estimate(read([*flags, "--context-parallel-size", "2"], variables))
    assert divided.activations == whole.activations / 2
    assert divided.weight_and_optimizer == whole.weight_and_optimizer, "dp x cp stays 16"


def test_a_pipeline_holds_no_more_microbatches_than_there_are() -> None:
    flags, variables = flags_of("gpt3_175b_tp8pp16")
    many = estimate(read(flags, variables))
    few = estimate(read([*flags, "--global-batch-size", "32"], variables))  # 4 microbatches for 16 stages
    assert (many.microbatches_in_flight, few.microbatches_in_flight) == (16, 4)
    assert few.activations == many.activations / 4


def test_the_form_without_scores_needs_sequence_parallelism_and_selective_recomputation() -> None:
    """Llama 2 7B, TP 2: s b h (18 + 4 f / h) / TP is 230 MB a layer; else s b h (10 + 24 / TP), and 5 % on top."""
    flags = "--preset llama2-7b --seq-length 4096 --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --train-iters 1"
    flags += " --tensor-model-parallel-size 2 --bf16 --mock-data --tokenizer-type NullTokenizer"
    s, h, f = 4096, 4096, 11008
    long, short = s * h * 22, s * (18 * h + 4 * f) / 2
    ends = s * (8 + h) + 2 * s * (h + 32000 / 2)
    for further, layer in (
        ("", long),
        ("--sequence-parallel", long),
        ("--sequence-parallel --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", long),
        ("--recompute-granularity selective", long),
        ("--sequence-parallel --recompute-granularity selective", short),
    ):
        config = read(shlex.split(f"{flags} {further}"), {"WORLD_SIZE": "2"})
        memory = estimate(config)
        assert memory.layer_activations == layer
        form, megabytes = (" (precise, without SP)", "352.0") if layer == long else ("", "230.0")
        line = f"Activation memory footprint per transformer layer{form}: {megabytes} MB"
        assert line in describe_memory(memory, config.model)
        if layer == long:
            assert memory.activations == pytest.approx(1.05 * (32 * long + ends))


def squeeze(text: str) -> list[str]:
    """The lines of a report with single spaces; without the name of the function that upstream prints before one."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("compute_activation_memory")]


@pytest.mark.parametrize("name", NAMES)
def test_the_report_has_the_lines_of_the_reference_and_no_others(name: str) -> None:
    config = read(*flags_of(name))
    assert squeeze(describe_memory(estimate(config), config.model)) == squeeze(CASES[name]["result"]["report_text"])


def test_inputs_that_wait_in_eight_bits_count_half() -> None:
    """In what the planner keeps of a layer, of which the reference knows nothing: 2 h + f values a token of one byte
    instead of two; scales of 32 values take one more."""

    def count(*further: str) -> float:
        config = read([*flags, *further], variables)
        rows = list_kept(config.model, describe_workload(config), read_plan(config.model).decoder[0])
        return sum(row.bytes for branch in rows for row in branch)

    flags, variables = flags_of("llama3_8b")
    # Four ranks share the channels, and with sequence parallelism the tokens, too.
    for divided, values in (([], 4096 * (2 * 4096 + 14336 / 4)), (["--sequence-parallel"], 1024 * (2 * 4096 + 14336))):
        plain = count(*divided)
        for recipe, spared in (("tensorwise", 1.0), ("mxfp8", 31 / 32)):
            fp8 = count(*divided, "--fp8-format", "hybrid", "--fp8-recipe", recipe)
            assert plain - fp8 == pytest.approx(values * spared)
    assert count(*divided, "--fp8-format", "hybrid", "--no-fp8-wgrad") == plain


def test_the_report_says_what_virtual_stages_cost() -> None:
    flags = "--num-layers 32 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128"
    flags += " --micro-batch-size 1 --global-batch-size 64 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 1000"
    flags += " --tokenizer-type NullTokenizer --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"
    plain = estimate(read(shlex.split(flags), {"WORLD_SIZE": "32"}))
    flags += " --num-layers-per-virtual-pipeline-stage 2"  # 4 chunks on each of 4 stages: 1 + 3 / (4 x 4)
    config = read(shlex.split(flags), {"WORLD_SIZE": "32"})
    lines = describe_memory(estimate(config), config.model).splitlines()
    at = lines.index("Memory penalty from interleaved schedule: 1.19")
    assert lines[at + 1] == "Number of in-flight microbatches: 5"
    assert estimate(config).activations == pytest.approx(plain.activations * 1.1875)


def test_the_tool_prints_the_report() -> None:
    flags, variables = flags_of("gpt3_175b_tp8pp16")
    command = [sys.executable, str(ROOT / "tools" / "report_theoretical_memory.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(variables), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Number of parameters in total: 174641012736" in done.stderr
    assert "FLOPs of a global batch (as upstream counts): " in done.stderr
    assert squeeze(done.stdout) == squeeze(CASES["gpt3_175b_tp8pp16"]["result"]["report_text"])


def test_an_illegal_layout_is_refused() -> None:
    flags, _ = flags_of("llama3_8b")
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size"):
        read(flags, {"WORLD_SIZE": "6"})
