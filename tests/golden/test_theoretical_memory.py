"""Memory by formula equals the reference's, and the tool says so."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.errors import ConfigError
from tests.functional.pretrain_runs import ROOT, environment
from tools.report_theoretical_memory import estimate, read

CASES = json.loads((Path(__file__).parent / "data" / "flops_memory.json").read_text())
NAMES = ["gpt3_small", "gpt3_175b_tp8pp16", "llama3_8b", "tiny_b", "mixtral_8x7b"]
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


def test_the_tool_prints_the_reference_lines() -> None:
    flags, variables = flags_of("gpt3_175b_tp8pp16")
    command = [sys.executable, str(ROOT / "tools" / "report_theoretical_memory.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(variables), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    squeezed = " ".join(CASES["gpt3_175b_tp8pp16"]["result"]["report_text"].split())
    for line in done.stdout.splitlines():
        assert line.replace(" (with SP)", "") in squeezed, line
    assert len(done.stdout.splitlines()) == 10


def test_an_illegal_layout_is_refused() -> None:
    flags, _ = flags_of("llama3_8b")
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size"):
        read(flags, {"WORLD_SIZE": "6"})
