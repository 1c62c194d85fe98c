# SPDX-License-Identifier: Apache-2.0
"""The items of `python -m benchmarks gpu`, each a process of its own:

    python -m benchmarks.gpu_parts operations --out operations.json --seconds 60

An item writes what it has found after every piece. It fails with the last line of its log as the reason; what it found
before stays.
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks import gpu_steps, operations
from benchmarks.curves import compare_curves
from benchmarks.gpu import ROOT
from benchmarks.gpu_item import Part
from benchmarks.measurements import choose_dtype, measure
from benchmarks.step_profile import Watch, list_kernels
from benchmarks.training import PRESETS, StepClock, describe_error, shrink, summarise, train_here
from megatron.core import device as device_module
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.optional_deps import available
from megatron.core.transformer.core_attention.interface import AttentionOptions, Visible
from megatron.core.transformer.core_attention.select import build_attention_backend
from megatron.training.checkpoint.restore import load_checkpoint
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_model
from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size
from megatron.training.run import Hook, Phase, Run

# ---- versions


def tell_versions(part: Part) -> None:
    """Versions, the device, and torch's choice of an attention kernel for the views that layers have."""
    device = device_module.current_device()
    packages = [name for name in ("triton", "transformers", "transformer_engine", "flash_attn") if available(name)]
    facts = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "packages": packages}
    with contextlib.suppress(AttributeError, RuntimeError):
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["memory_gib"] = round(device_module.read_total_memory_bytes() / 2**30, 1)
    part.note(**facts)
    sizes = operations.Sizes(is_tiny=part.is_tiny)
    chosen = {}
    for n, g, d in sizes.heads:
        config = operations.build_config(sizes, kv_channels=d)
        backend = build_attention_backend(config, AttentionOptions.from_config(config, 1), device)
        q, k, v = (sizes.draw(sizes.sequence, sizes.batch, heads, d).permute(1, 2, 0, 3) for heads in (n, g, g))
        number = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=n != g)
        chosen[f"{n}/{g} heads of {d}"] = {"ours": backend.name, "torch": SDPBackend(number).name}
    names = sorted({choice["torch"] for choice in chosen.values()})
    part.note(f"torch {torch.__version__}, {device_module.device_name()}; attention: {', '.join(names)}", sdpa=chosen)


# ---- tests


def run_tests(part: Part) -> None:
    """The tests of a GPU, each file of them in a process of its own (`python -m tests.gpu`)."""
    command = [sys.executable, "-m", "tests.gpu", "--python", shlex.join(part.python), "--at-once", "4"]
    part.note(command=shlex.join(command))
    lines = ["it printed nothing"]
    # At once, line by line: when the time is over before the tests are, the log says how far they came.
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.strip():
            lines.append(line.strip())
        if line.startswith("tests/"):
            part.note(lines[-1])
    code = process.wait()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "DIED"))]
    part.note(lines[-1], failed=failed)
    if code:
        raise RuntimeError(f"tests ended with {code}: {failed[0] if failed else lines[-1][-200:]}")


# ---- curves


def draw_curves(part: Part) -> None:
    """Losses of 30 steps on this device against the CPU's, and bit-for-bit repetitions."""
    outcomes = {}
    for name, outcome in compare_curves(is_tiny=part.is_tiny, deadline=part.deadline(0.9)):
        outcomes[name] = outcome
        wrong = [key for key, value in outcomes.items() if not value["is_right"]]
        said = f"{len(outcomes) - len(wrong)} of {len(outcomes)} curves agree" + (f"; not {wrong}" if wrong else "")
        part.note(said, curves=outcomes)
    if wrong:
        raise RuntimeError("curves differ: " + ", ".join(f"{name}: {outcomes[name]['said']}" for name in wrong))


# ---- profile


def profile_step(part: Part) -> None:
    """Waits, and the kernels that take longest, of steps of a 1B model."""
    watch, clock = Watch(), StepClock(part.deadline())
    preset = part.preset("1b")
    form = part.find_forms(dataclasses.replace(preset, global_batch=preset.micro_batch))[0]
    log = train_here(part.flags(form.preset, 4, f"{form.flags} --log-memory-interval 4"), [watch, clock])
    part.note(memory=[line.strip() for line in log.splitlines() if line.startswith(" [rank")])
    if watch.profile is None:
        raise RuntimeError("the time was over before the step that is profiled; give more --minutes")
    on_device = not device_module.is_cpu(device_module.current_device())
    rows = list_kernels(watch.profile.key_averages(), on_device=on_device)
    busy = sum(row["seconds"] for row in rows)
    seconds = summarise("profiled", clock, 3).seconds
    said = f"{len(watch.waits)} waits of the host; kernels take {1e3 * busy:.0f} ms of a step of {1e3 * seconds:.0f} ms"
    part.note(said, waits=watch.waits, kernels=rows[:30], kernel_seconds=busy, step_seconds=seconds)


# ---- operations


def measure_operations(part: Part) -> None:
    """All of `python -m benchmarks attention linear optimizer loss`, in shares of the ceilings."""
    arguments = argparse.Namespace(tiny=part.is_tiny, rounds=2 if part.is_tiny else 20)
    best = []
    for name in operations.OPERATIONS:
        if time.monotonic() > part.deadline():
            part.note(left_out=name)
            break
        report = operations.run(name, arguments)
        report.print()
        assert report.ceilings is not None
        rates = [m.flops / m.seconds / report.ceilings.product_flops for m in report.measurements if m.flops]
        best.append(f"{name} {100 * max(rates):.0f} %" if rates else name)
        part.note(f"best shares of the product: {', '.join(best)}", **{name: report.as_dict()})


# ---- attention, generation


def measure_attention(part: Part) -> None:
    """Causal attention forward and backward, by the length of the sequence, 32768 tokens in all."""
    sizes = operations.Sizes(is_tiny=part.is_tiny)
    n, g, d = sizes.heads[0]
    config = operations.build_config(sizes, kv_channels=d)
    backend = build_attention_backend(config, AttentionOptions.from_config(config, 1), sizes.device)
    tokens = 64 if part.is_tiny else 512 if device_module.is_cpu(sizes.device) else 32768
    said = []
    for length in (tokens // 16, tokens // 4, tokens):
        if time.monotonic() > part.deadline():
            break
        q, k, v = (sizes.draw(length, tokens // length, heads, d, grad=True) for heads in (n, g, g))
        step = operations.bind_attention(backend, Visible(), q, k, v)
        found = measure(f"{length} tokens", step, 2 if part.is_tiny else 10, flops=6.0 * n * tokens * length * d)
        said.append(f"{length} tokens {found.flops / found.seconds / 1e12:.4g} TFLOP/s")
        part.note(", ".join(said), **{found.name: dataclasses.asdict(found)}, kernel=backend.name)


def generate(part: Part) -> None:
    """New tokens of the engine with a 1B model of random weights: of one text, and of many at once."""
    preset = part.preset("1b")
    config = read_run_config(part.flags(preset, 1), {})
    with torch.device(device_module.current_device()):
        model = build_gpt_model(config, compute_padded_vocab_size(config, build_tokenizer(config))).eval()
    prompt, new, many = (8, 4, 2) if part.is_tiny else (128, 64, 32)
    rates = []
    for texts in (1, many):
        engine = Engine(model, EngineSettings(prompt + new, max_requests=texts, reuses_prefixes=False))
        tokens = [[(7 * text + place) % preset.sizes.vocab for place in range(prompt)] for text in range(texts)]
        found = measure(
            f"{texts} texts",
            lambda: engine.run([Request(each, new, Sampling(greedy=True)) for each in tokens]),  # noqa: B023 - at once
            1 if part.is_tiny else 3,
        )
        rates.append(f"{texts} at once: {texts * new / found.seconds:.1f} tokens/s")
        part.note(f"prompts of {prompt} tokens, {new} new ones; " + ", ".join(rates), **{found.name: rates[-1]})


# ---- two processes


class Losses(Hook):
    """Losses and gradient norms of all steps, for comparison."""

    phase = Phase.SAVE

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_metrics(self, run: Run, rows: Sequence[Any]) -> None:
        """Take over what was read."""
        for row in rows:
            self.rows.append({"loss": row.losses["lm loss"], "grad_norm": row["grad_norm"]})


def run_rank(part: Part, flags: Sequence[str]) -> None:
    """One process of a job: its place comes from the environment."""
    losses = Losses()
    train_here(flags, [losses])
    part.note(rows=losses.rows)


LAYOUTS = {
    "tp2 with sequence parallelism": "--tensor-model-parallel-size 2 --sequence-parallel",
    "dp2 with a distributed optimizer and both overlaps": """--use-distributed-optimizer --overlap-grad-reduce
        --overlap-param-gather""",
}


def train_in_two_processes(part: Part) -> None:
    """Two processes on this GPU, gloo between them, against one process."""
    preset = dataclasses.replace(shrink(PRESETS["1b"]), global_batch=4)
    steps = 3 if part.is_tiny else 10
    flags = [*part.flags(preset, steps), "--log-interval", "1", "--distributed-backend", "gloo"]
    alone = _start_job(part, flags, 1)
    part.note(alone=alone)
    tolerance = 1e-4 if choose_dtype() == torch.float32 else 1e-2
    wrong = []
    for name, layout in LAYOUTS.items():
        rows = _start_job(part, [*flags, *layout.split()], 2)
        pairs = zip(rows, alone, strict=True)
        error = max(abs(a["loss"] - b["loss"]) / max(abs(b["loss"]), 1e-9) for a, b in pairs)
        part.note(**{name: {"rows": rows, "largest_relative_error": error}})
        if error > tolerance:
            wrong.append(f"{name}: losses differ by {error:.2g}, expected at most {tolerance:g}")
    part.note(f"{len(LAYOUTS) - len(wrong)} of {len(LAYOUTS)} layouts give the losses of one process")
    if wrong:
        raise RuntimeError("; ".join(wrong))


def _start_job(part: Part, flags: Sequence[str], processes: int) -> list[dict[str, float]]:
    """Train with so many processes on this machine's first GPU; the rows of the first rank."""
    with tempfile.TemporaryDirectory(prefix="two-processes-", dir=part.scratch) as directory:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        started = []
        for rank in range(processes):
            place = {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [*part.python, "-m", "benchmarks.gpu_parts", "rank", "--out", f"{directory}/{rank}.json"]
            command += ["--seconds", str(part.seconds), "--flags", shlex.join(flags)]
            with Path(directory, f"{rank}.log").open("w") as log:
                started.append(part.start(command, os.environ | place, log))
        for rank, code in enumerate([process.wait() for process in started]):
            if code:
                lines = Path(directory, f"{rank}.log").read_text(errors="replace").strip().splitlines()
                print("\n".join(lines))
                raise RuntimeError(f"rank {rank} ended with {code}: {lines[-1] if lines else ''}")
        content = json.loads(Path(directory, "0.json").read_text(encoding="utf-8"))
    rows: list[dict[str, float]] = content["results"]["rows"]
    return rows


# ---- checkpoint


class Saving(Hook):
    """Saves at the end of a run, and loads at the beginning of one that has something to load; seconds of either."""

    phase = Phase.SAVE

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.seconds = 0.0
        self.path: Path | None = None

    def on_train_start(self, run: Run) -> None:
        """Load a second time: the first was part of setting up."""
        if run.config.checkpoint.load is not None:
            began_at = time.perf_counter()
            load_checkpoint(run)
            device_module.synchronize()
            self.seconds = time.perf_counter() - began_at

    def on_train_end(self, run: Run) -> None:
        """Save once."""
        if run.config.checkpoint.load is None:
            # Only now: with --save the run would save at its end by itself.
            Path(self.directory).mkdir()
            run.config.checkpoint.save = self.directory
            device_module.synchronize()
            began_at = time.perf_counter()
            self.path = save_checkpoint(run)
            self.seconds = time.perf_counter() - began_at


def save_and_load(part: Part) -> None:
    """1B with its optimizer state to this machine's temporary directory, and back."""
    form = part.find_forms(dataclasses.replace(part.preset("1b"), micro_batch=1, global_batch=1))[0]
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=part.scratch) as directory:
        saving = Saving(f"{directory}/a")
        train_here(part.flags(form.preset, 2, f"{form.flags} --exit-interval 1"), [saving])
        assert saving.path is not None
        size = sum(file.stat().st_size for file in saving.path.rglob("*") if file.is_file())
        rate = size / saving.seconds / 1e9
        said = f"{size / 1e9:.2f} GB: saved in {saving.seconds:.1f} s ({rate:.2f} GB/s)"
        part.note(said, bytes=size, save_seconds=saving.seconds)
        loading = Saving(f"{directory}/a")
        train_here(part.flags(form.preset, 2, f"{form.flags} --load {directory}/a"), [loading])
        rate = size / loading.seconds / 1e9
        part.note(f"{said}, loaded in {loading.seconds:.1f} s ({rate:.2f} GB/s)", load_seconds=loading.seconds)


# ---- the program

PARTS: dict[str, Callable[[Part], None]] = {
    "versions": tell_versions,
    "tests": run_tests,
    "curves": draw_curves,
    "profile": profile_step,
    "8b": gpu_steps.train_8b,
    "1b": gpu_steps.train_1b,
    "moe": gpu_steps.train_moe,
    "fp8": gpu_steps.train_fp8,
    "attention": measure_attention,
    "offloading": gpu_steps.train_offloaded,
    "graphs": gpu_steps.train_with_graphs,
    "generation": generate,
    "operations": measure_operations,
    "documents": gpu_steps.train_documents,
    "two-processes": train_in_two_processes,
    "checkpoint": save_and_load,
    "1b-compiled": gpu_steps.train_1b_compiled,
}
"""Name of an item in gpu.py -> what it does."""


def main() -> int:
    """Run one item."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*PARTS, "rank"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="what the item may take (default: 600)")
    parser.add_argument("--scratch", type=Path, help="an empty directory (default: the system's)")
    parser.add_argument("--python", default=sys.executable, help="what starts Python")
    parser.add_argument("--flags", default="", help="of a rank: the flags of pretrain_gpt.py")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    arguments = parser.parse_args()
    part = Part(
        arguments.out, arguments.seconds, shlex.split(arguments.python), is_tiny=arguments.tiny,
        scratch=arguments.scratch,
    )  # fmt: skip
    part.note()
    try:
        if arguments.name == "rank":
            run_rank(part, shlex.split(arguments.flags))
        else:
            PARTS[arguments.name](part)
    except Exception as error:
        part.note(error=describe_error(error))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
