#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Converting a Hugging Face directory to a checkpoint and back: memory, and time against copying the files.

    OMP_NUM_THREADS=1 python benchmarks/conversion.py
    OMP_NUM_THREADS=1 python benchmarks/conversion.py --gigabytes 10 --rounds 1 --directory /data

A Llama of 16-bit weights is made, with the shapes of Llama 3's 8B but for the vocabulary, and as many layers as make
it so large, in shards of half a gigabyte. In each round, so that a slow disk slows all of them:

    copy        the files are copied, in blocks of 16 MiB, and flushed
    convert     what `python -m megatron.bridge.convert --no-verify` does
    verified    with every weight read again from the result and from the source, and compared bit for bit, which the
                command does by default; it also compares logits, whose time is that of the model and is left out

Files to be read are in the system's memory or not as the system decides, alike for all three. Printed are medians of
ratios to the copy, and the peak of memory beyond what the process had before, which comes from the largest tensor.
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.checkpointing import BLOCK_BYTES, read_memory, reset_peak
from benchmarks.conditions import print_conditions
from megatron.hf.conversion import export_model, import_model, open_model, open_source
from megatron.hf.tensor_files import write_tensors

HIDDEN, FEEDFORWARD, HEADS, GROUPS, VOCABULARY = 4096, 14336, 32, 8, 32000
SHARD_BYTES = 500_000_000


class Cost(NamedTuple):
    """Of one way of converting."""

    seconds: float
    peak_bytes: int


def list_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape, as Llama's files have them."""
    kv = HIDDEN // HEADS * GROUPS
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (FEEDFORWARD, HIDDEN),
        "mlp.up_proj": (FEEDFORWARD, HIDDEN), "mlp.down_proj": (HIDDEN, FEEDFORWARD),
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def make_directory(directory: Path, gigabytes: float) -> None:
    """A directory as save_pretrained() leaves it, without a tokenizer."""
    one = sum(torch.Size(shape).numel() for shape in list_shapes(1).values())
    per_layer = sum(torch.Size(shape).numel() for shape in list_shapes(2).values()) - one
    layers = max(1, round((gigabytes * 1e9 / 2 - one) / per_layer) + 1)
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "hidden_act": "silu",
        "intermediate_size": FEEDFORWARD, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "vocab_size": VOCABULARY, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shapes = list_shapes(layers)
    # Drawing so many numbers takes longer than converting them, and their values do not matter.
    values = torch.randn(1 << 20).bfloat16() * 0.02

    def generate() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            yield name, values.repeat(-(-count // len(values)))[:count].view(shape)

    described = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    write_tensors(directory, described, generate(), SHARD_BYTES)


def copy(source: Path, target: Path) -> None:
    """Copy a directory's files, and flush them."""
    for file in (path for path in source.rglob("*") if path.is_file()):
        copied = target / file.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        block = memoryview(bytearray(BLOCK_BYTES))
        with open(file, "rb", buffering=0) as read, open(copied, "wb", buffering=0) as written:
            while count := read.readinto(block):
                written.write(block[:count])
            os.fsync(written.fileno())


def cost_of(action: Callable[[], object]) -> Cost:
    """Seconds, and bytes beyond those before."""
    reset_peak()
    before, began_at = read_memory("VmRSS"), time.perf_counter()
    action()
    return Cost(time.perf_counter() - began_at, read_memory("VmHWM") - before)


def measure(source: Path, root: Path, rounds: int) -> Iterator[tuple[str, str, list[tuple[Cost, Cost]]]]:
    """For each direction and way: what the copy and the conversion took in each round."""
    checkpoint = root / "checkpoint"
    import_model(open_source(source), checkpoint, verify=False)
    directions: dict[str, tuple[Path, Callable[[Path, bool], object]]] = {
        "Hugging Face to Megatron": (
            source, lambda path, verify: import_model(open_source(source), path, verify=verify)
        ),
        "Megatron to Hugging Face": (
            checkpoint, lambda path, verify: export_model(open_model(checkpoint), path, verify=verify)
        ),
    }  # fmt: skip
    for direction, (files, convert) in directions.items():
        found: dict[str, list[tuple[Cost, Cost]]] = {"convert": [], "verified": []}
        for _ in range(rounds):
            copied = cost_of(lambda: copy(files, root / "copy"))  # noqa: B023
            shutil.rmtree(root / "copy")
            for way, costs in found.items():
                costs.append((copied, cost_of(lambda: convert(root / "result", way == "verified"))))  # noqa: B023
                shutil.rmtree(root / "result")
        for way, costs in found.items():
            yield direction, way, costs


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of weights; at least 1.4, which is one layer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk that is to be measured")
    arguments = parser.parse_args()
    print_conditions()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        root, source = Path(directory), Path(directory) / "llama"
        make_directory(source, arguments.gigabytes)
        size = sum(file.stat().st_size for file in source.iterdir()) / 1e9
        print(f"{size:.2f} GB; wanted: at most 2 times the copy, less than 1 GB of memory")
        print("direction                   way        time / copy   copy (s)   extra memory (MB)")
        for direction, way, costs in measure(source, root, arguments.rounds):
            ratio = statistics.median(converted.seconds / copied.seconds for copied, converted in costs)
            copied = statistics.median(copied.seconds for copied, _ in costs)
            peak = max(converted.peak_bytes for _, converted in costs) / 1e6
            print(f"{direction}    {way:8} {ratio:13.2f} {copied:10.2f} {peak:19.0f}", flush=True)


if __name__ == "__main__":
    main()
