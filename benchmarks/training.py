# SPDX-License-Identifier: Apache-2.0
"""Training steps of the real trainer, against the same model in plain torch, in transformers, and of other checkouts.

    python -m benchmarks 1b                        # on a GPU: bfloat16, 8 sequences of 4096 tokens
    python -m benchmarks 125m --steps 5            # on a CPU: float32, 4 sequences of 256 tokens
    python -m benchmarks 1b --compile --peer ../Megatron-LM

    ours         pretrain_gpt.py's own run: data, schedule, optimizer, hooks; on a GPU bfloat16 weights, with main
                 weights, gradients and optimizer state in float32
    plain torch  benchmarks/plain_llama.py: float32 weights, autocast to bfloat16 on a GPU, fused AdamW
    hf           LlamaForCausalLM or MixtralForCausalLM (sdpa attention) in the same way
    PATH         the checkout's own pretrain_gpt.py with our flags and --transformer-impl local, by its own log

Each is measured alone, one after the other, in the same run. A step is a whole global batch: clear, forward and
backward of every micro-batch, norm, clipping, update. The time of `ours` includes reading its data; the others' data
lie on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measurements import (
    FLOP_FORMULA,
    Measurement,
    Report,
    choose_dtype,
    measure,
    measure_ceilings,
)
from benchmarks.plain_llama import ModelSizes, PlainLlama
from megatron.core import device as device_module
from megatron.core.errors import MegatronError, MemoryShortageError, explain_refused_memory
from megatron.core.optional_deps import available, require
from megatron.training.flags.read import read_run_config
from megatron.training.launch.launch import add_world_size
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.run import Hook, Phase, Run, Step
from megatron.training.training import run_recipe

# The least state in which Adam trains an 8B model on one GPU of 141 GB: 12 bytes for each parameter.
SMALL_STATE = """--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
    --main-grads-dtype bf16 --grad-reduce-in-bf16"""


@dataclass(frozen=True)
class Preset:
    """A model, its batch on a GPU, and the flags that go with it."""

    text: str
    sizes: ModelSizes
    sequence: int
    micro_batch: int
    global_batch: int
    flags: str = ""
    flags_of_bf16: str = ""


PRESETS: dict[str, Preset] = {
    "125m": Preset("Llama of 134M parameters", ModelSizes(12, 768, 2048, 12, 12, 32000), 2048, 16, 32),
    "1b": Preset("Llama 3.2 1B", ModelSizes(16, 2048, 8192, 32, 8, 128256, tied=True), 4096, 8, 16),
    "8b-slice": Preset("16 of the 32 layers of Llama 3.1 8B", ModelSizes(16, 4096, 14336, 32, 8, 128256), 4096, 2, 16),
    "8b": Preset("Llama 3.1 8B", ModelSizes(32, 4096, 14336, 32, 8, 128256), 4096, 2, 16, "", SMALL_STATE),
    "moe": Preset(
        "8 experts of a 1B model, top-2", ModelSizes(16, 2048, 5632, 16, 8, 32000, experts=8), 4096, 4, 16,
        "--moe-grouped-gemm --moe-permute-fusion --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    ),
}  # fmt: skip


def shrink(preset: Preset) -> Preset:
    """The same kind of model, small enough to try every line in a moment."""
    sizes = replace(preset.sizes, layers=2, hidden=64, ffn=96, heads=4, groups=2, vocab=512)
    return replace(preset, sizes=sizes, sequence=32, micro_batch=1, global_batch=2)


def fit_to_cpu(preset: Preset) -> Preset:
    """The same model with batches for which a processor needs seconds."""
    return replace(preset, sequence=256, micro_batch=4, global_batch=4)


def build_flags(preset: Preset, dtype: torch.dtype, iterations: int, more: Sequence[str] = ()) -> list[str]:
    """The flags of pretrain_gpt.py for the preset; `more` stand behind them and win."""
    sizes = preset.sizes
    flags = f"""--num-layers {sizes.layers} --hidden-size {sizes.hidden} --ffn-hidden-size {sizes.ffn}
        --num-attention-heads {sizes.heads} --group-query-attention --num-query-groups {sizes.groups} --swiglu
        --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0
        --attention-dropout 0 --seq-length {preset.sequence} --max-position-embeddings {preset.sequence}
        --micro-batch-size {preset.micro_batch} --global-batch-size {preset.global_batch} --lr 1e-4 --clip-grad 1.0
        --weight-decay 0.1 --train-iters {iterations} --eval-iters 0 --log-interval {iterations} --mock-data
        --tokenizer-type NullTokenizer --vocab-size {sizes.vocab} --make-vocab-size-divisible-by 1
        --num-workers 0 {preset.flags}""".split()
    if not sizes.tied:
        flags.append("--untie-embeddings-and-output-weights")
    if sizes.experts:
        flags += ["--num-experts", str(sizes.experts), "--moe-router-topk", str(sizes.topk)]
    return [*flags, *(["--bf16", *preset.flags_of_bf16.split()] if dtype == torch.bfloat16 else []), *more]


# ---- ours


class StepClock(Hook):
    """The time of every step on the device, and the memory of the run."""

    phase = Phase.SAVE

    def __init__(self, deadline: float = math.inf) -> None:
        """deadline: of time.monotonic(); the run ends in order after the first step that is done later."""
        self.deadline = deadline
        self.marks: list[tuple[device_module.Mark, device_module.Mark]] = []
        self.facts: dict[str, Any] = {}
        self.losses: list[Tensor] = []

    def wrap_step(self, step: Step) -> Step:
        """Mark before and after, hooks of the run included."""

        def timed(run: Run, batches: Iterator[Any]) -> None:
            before = device_module.mark()
            step(run, batches)
            self.marks.append((before, device_module.mark()))
            if time.monotonic() > self.deadline:
                run.stop_reason = "the time for this measurement is over"

        return timed

    def on_train_start(self, run: Run) -> None:
        """Note what does not change."""
        self.facts["parameters"] = sum(p.numel() for chunk in run.model for p in chunk.module.parameters())
        self.facts["flops_per_token"] = run.flops_per_token
        self.facts["tokens"] = (run.config.training.global_batch_size or 0) * run.seq_length
        self.facts["bytes_after_setup"] = device_module.read_memory_stats()["allocated_bytes"]

    def on_step_end(self, run: Run, result: Any) -> None:
        """Keep the loss on the device."""
        self.losses.extend(result.losses.values())

    def on_train_end(self, run: Run) -> None:
        """Note the peak."""
        device_module.synchronize()
        self.facts["peak_bytes"] = device_module.read_memory_stats()["peak_bytes"]

    def seconds(self) -> list[float]:
        """Of every step."""
        return [max(device_module.measure_seconds_between(*pair), 1e-9) for pair in self.marks]


def train_here(flags: Sequence[str], hooks: Sequence[Hook] = (), **recipe_parts: Any) -> str:
    """Run pretrain_gpt.py's training in this process; returns what it printed. Raises MegatronError.

    recipe_parts: functions that stand in for those of the GPT recipe, such as build_datasets.
    """
    log = io.StringIO()
    # Also what an earlier run has left that failed: when it ended, its error still held its memory.
    free()
    device_module.reset_peak_memory()
    try:
        with contextlib.redirect_stdout(log):
            config = read_run_config(list(flags), add_world_size(os.environ))
            run_recipe(config, replace(build_gpt_recipe(config), **recipe_parts), hooks)
    finally:
        free()
    return log.getvalue()


def free() -> None:
    """Give memory back for what comes next."""
    gc.collect()
    device_module.release_cached_memory()


def measure_ours(name: str, flags: Sequence[str], warm_ups: int, deadline: float = math.inf) -> Measurement:
    """Time the trainer's steps; the first ones do not count. deadline: see StepClock. Raises MegatronError."""
    clock = StepClock(deadline)
    log = train_here(flags, [clock])
    return summarise(name, clock, warm_ups, log)


def summarise(name: str, clock: StepClock, warm_ups: int, log: str = "") -> Measurement:
    """What a clock has seen."""
    # Of a run that its deadline has ended early the last step counts at least.
    seconds = clock.seconds()[min(warm_ups, len(clock.marks) - 1) :]
    facts = clock.facts
    middle = statistics.median(seconds)
    details = {
        "tokens/s": round(facts["tokens"] / middle, 1),
        "peak GiB": round(facts["peak_bytes"] / 2**30, 2),
        "parameters": facts["parameters"],
        "loss": float(clock.losses[-1]) if clock.losses else None,
        "seconds": seconds,
        "log": log.splitlines(),
    }
    flops = None if facts["flops_per_token"] is None else float(facts["flops_per_token"] * facts["tokens"])
    return Measurement(name, middle, min(seconds), flops=flops, details=details)


# ---- others


def build_plain(preset: Preset, device: torch.device) -> nn.Module:
    """The model in plain torch: (tokens, labels) -> loss."""
    return PlainLlama(preset.sizes, preset.sequence, device)


class HuggingFace(nn.Module):
    """The model in transformers: (tokens, labels) -> loss."""

    def __init__(self, preset: Preset, device: torch.device) -> None:
        super().__init__()
        transformers = require("transformers", needed_by="the comparison with Hugging Face")
        sizes = preset.sizes
        kind, more = "Llama", {}
        if sizes.experts:
            kind, more = "Mixtral", {"num_local_experts": sizes.experts, "num_experts_per_tok": sizes.topk}
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=sizes.vocab, hidden_size=sizes.hidden, intermediate_size=sizes.ffn,
            num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.groups,
            max_position_embeddings=preset.sequence, tie_word_embeddings=sizes.tied, attn_implementation="sdpa",
            use_cache=False, **more,
        )  # fmt: skip
        with device:
            self.model = getattr(transformers, f"{kind}ForCausalLM")(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        # It shifts the labels itself, so that they are the tokens.
        return self.model(input_ids=tokens, labels=tokens).loss


def build_peer_step(build: Callable[..., nn.Module], preset: Preset, *, compiled: bool) -> Callable[[], None]:
    """A step of another implementation: gradients of all micro-batches, clipping, fused AdamW."""
    device = device_module.current_device()
    model = build(preset, device)
    forward = torch.compile(model) if compiled else model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)
    shape = (preset.micro_batch, preset.sequence + 1)
    batches = [
        torch.randint(0, preset.sizes.vocab, shape, device=device)
        for _ in range(preset.global_batch // preset.micro_batch)
    ]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for tokens in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=choose_dtype() == torch.bfloat16):
                loss = forward(tokens[:, :-1], tokens[:, 1:])
            (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


@dataclass
class Peers:
    """Who is measured beside ours."""

    builders: dict[str, Callable[..., nn.Module]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    compiled: bool = False

    @classmethod
    def find(cls, preset: Preset, *, compiled: bool) -> Peers:
        """Those that are installed here and have such a model."""
        peers = cls(compiled=compiled)
        if preset.sizes.experts:
            peers.notes.append("plain torch is left out: it has no experts")
        else:
            peers.builders["plain torch"] = build_plain
        if available("transformers"):
            peers.builders["hf"] = HuggingFace
        else:
            peers.notes.append("transformers is not installed: no comparison with Hugging Face")
        return peers

    def measure(self, preset: Preset, rounds: int) -> list[Measurement]:
        """Time each of them; one that cannot run becomes a note."""
        found = []
        for name, build in self.builders.items():
            for compiled in (False, True) if self.compiled else (False,):
                title = f"{name} compiled" if compiled else name
                try:
                    step = build_peer_step(build, preset, compiled=compiled)
                    tokens = preset.global_batch * preset.sequence
                    timed = measure(title, step, rounds)
                    found.append(replace(timed, details={"tokens/s": round(tokens / timed.seconds, 1)}))
                    del step
                except (RuntimeError, MemoryError, MegatronError) as error:
                    self.notes.append(f"{title} is left out: {describe_error(error)}")
                free()
        return found


def describe_error(error: BaseException) -> str:
    """The class and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def is_memory_shortage(error: BaseException) -> bool:
    """Whether the device, or the machine, had too little memory."""
    return isinstance(error, MemoryShortageError) or explain_refused_memory(error) is not None


def measure_checkout(path: Path, flags: Sequence[str], warm_ups: int) -> Measurement:
    """Time the pretrain_gpt.py of another checkout by the log that it writes. Raises RuntimeError where it fails."""
    program = path.resolve() / "pretrain_gpt.py"
    variables = {
        "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29555",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(path.resolve()),
    }  # fmt: skip
    command = [sys.executable, str(program), *flags, "--log-interval", "1", "--transformer-impl", "local"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, cwd=path.resolve())
    found = re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", done.stdout)
    seconds = [float(text) / 1e3 for text in found][warm_ups:]
    if done.returncode or not seconds:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(f"exit code {done.returncode}: {lines[-1] if lines else 'it printed nothing'}")
    return Measurement(str(path), statistics.median(seconds), min(seconds), details={"command": shlex.join(command)})


# ---- the benchmark


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of all presets."""
    parser.add_argument("--steps", type=int, default=10, help="steps that count (default: 10)")
    parser.add_argument("--warm-ups", type=int, default=3, help="steps before them (default: 3)")
    parser.add_argument("--compile", action="store_true", help="measure everything under torch.compile, too")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--peer", type=Path, metavar="PATH", help="a checkout with a pretrain_gpt.py of its own")
    parser.add_argument("--flags", default="", help="more flags of pretrain_gpt.py, for ours (and for --peer)")


def choose_preset(name: str, *, is_tiny: bool) -> Preset:
    """The preset as this device can run it."""
    if is_tiny:
        return shrink(PRESETS[name])
    on_cpu = device_module.is_cpu(device_module.current_device())
    return fit_to_cpu(PRESETS[name]) if on_cpu else PRESETS[name]


def run(name: str, arguments: argparse.Namespace) -> Report:
    """Measure a preset."""
    preset, dtype = choose_preset(name, is_tiny=arguments.tiny), choose_dtype()
    more = shlex.split(arguments.flags)
    iterations = arguments.warm_ups + arguments.steps
    flags = build_flags(preset, dtype, iterations, more)
    ceilings = measure_ceilings(dtype, is_tiny=arguments.tiny)
    notes = [
        FLOP_FORMULA,
        f"{preset.text}, {preset.global_batch} sequences of {preset.sequence} tokens in micro-batches of "
        f"{preset.micro_batch}; ours is pretrain_gpt.py {shlex.join(flags)}",
    ]
    found = [measure_ours("ours", flags, arguments.warm_ups)]
    if arguments.compile:
        try:
            found.append(measure_ours("ours compiled", [*flags, "--compile"], arguments.warm_ups))
        except (RuntimeError, MegatronError) as error:
            notes.append(f"ours compiled is left out: {describe_error(error)}")
    if not arguments.no_peers:
        peers = Peers.find(preset, compiled=arguments.compile)
        found += peers.measure(preset, arguments.steps)
        notes += peers.notes
        notes.append(
            "peers keep weights in float32"
            + (" and compute in bfloat16 by autocast" if dtype == torch.bfloat16 else "")
            + ", with fused AdamW; their data lie on the device"
        )
    if arguments.peer is not None:
        try:
            found.append(measure_checkout(arguments.peer, flags, arguments.warm_ups))
            notes.append(f"{arguments.peer}: its own pretrain_gpt.py with these flags, by its own log; what it fuses")
            notes[-1] += " depends on the packages that it finds"
        except (RuntimeError, OSError) as error:
            notes.append(f"{arguments.peer} is left out: {describe_error(error)}")
    flops = found[0].flops
    # The same model and batch: the same operations. What is compared is a step's time.
    found = [replace(m, flops=flops, baseline=_find_baseline(m.name, found)) for m in found]
    return Report(f"{name}: a training step", found, ceilings, notes)


def _find_baseline(name: str, found: Sequence[Measurement]) -> str:
    """Ours is compared with the fastest of the others of its kind, eager or compiled; the others with ours."""
    compiled = name.endswith(" compiled")
    rivals = [m for m in found if m.name.endswith(" compiled") == compiled and not m.name.startswith("ours")]
    if name.startswith("ours"):
        return min(rivals, key=lambda m: m.seconds).name if rivals else ""
    return "ours compiled" if compiled and any(m.name == "ours compiled" for m in found) else "ours"
