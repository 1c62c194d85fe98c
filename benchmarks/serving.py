#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""The inference engine against Hugging Face's `generate`, with the same weights, greedy, in float32 on the CPU.

    OMP_NUM_THREADS=1 python -m benchmarks serving
    OMP_NUM_THREADS=1 python -m benchmarks serving --only one,batch --rounds 9

A Llama of 33.6M parameters; weights go from transformers through the bridge, and the new tokens of both must be equal.
Every round runs each variant once, in turn, and the ratios are taken within rounds; their median is printed, and the
smallest and the largest. One thread: CPU time of the process; several: wall time.

    one       one request: 64 tokens of prompt, 48 new ones
    batch     8 of them at once
    mixed     64 requests with prompts of 16-512 and 8-256 new tokens, by the logarithm evenly spread, against
              `generate` in batches, padded on the left, sorted by length, of the size that is the fastest, and against
              one request at a time, by `generate` and by the engine
    arrival   a short request that comes while a prompt of 2,000 tokens is read: passes and time to its first token
    prefix    16 requests whose prompts share their first 512 tokens, against the same without shared pages
    linear    a token after 4,096 others against one after 128, in gated delta nets (letters G)
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.conditions import print_conditions
from benchmarks.train_step import measure, seconds
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.optional_deps import available
from megatron.core.tensor_parallel.packed_products import pack_weights

VOCABULARY = 8192
CHUNK = 256
"""Tokens of a pass where a long prompt is read beside others."""


class Sizes(NamedTuple):
    """The model, and how much is asked of it."""

    layers: int = 8
    hidden: int = 512
    ffn: int = 1536
    heads: int = 8
    groups: int = 4
    prompt: int = 64
    new: int = 48
    batch: int = 8
    requests: int = 64
    longest_prompt: int = 512
    longest_answer: int = 256
    long_prompt: int = 2000
    context: int = 4096

    @classmethod
    def tiny(cls) -> Sizes:
        """Sizes that show that everything runs."""
        return cls(1, 32, 48, 4, 2, 8, 3, 2, 4, 24, 8, 600, 160)


class Models(NamedTuple):
    """The same weights twice."""

    ours: nn.Module
    theirs: Any
    """None where transformers is not installed."""


def build_models(sizes: Sizes, directory: Path) -> Models:
    """A Llama with random weights of transformers, and ours with the same ones."""
    import transformers

    from megatron.hf.auto_bridge import AutoBridge

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    options: dict[str, Any] = {"attn_implementation": "sdpa", "eos_token_id": None, "bos_token_id": None}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=sizes.hidden, intermediate_size=sizes.ffn, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.groups, max_position_embeddings=4096,
        tie_word_embeddings=False, initializer_range=0.05, pad_token_id=0, **options,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(directory)
    theirs.generation_config.eos_token_id = None
    ours = AutoBridge.from_hf_pretrained(directory).to_megatron().eval()
    pack_weights(ours)  # as `python -m megatron serve` does
    return Models(ours, theirs)


class Asked(NamedTuple):
    """One request."""

    prompt: list[int]
    new: int


def draw_prompt(length: int, seed: int) -> list[int]:
    """Random tokens."""
    chooser = random.Random(seed)
    return [chooser.randrange(1, VOCABULARY) for _ in range(length)]


def draw_mixed(sizes: Sizes) -> list[Asked]:
    """Requests of lengths whose logarithms are evenly spread."""
    chooser = random.Random(7)
    return [
        Asked(draw_prompt(_draw(chooser, 16, sizes.longest_prompt), number), _draw(chooser, 8, sizes.longest_answer))
        for number in range(sizes.requests)
    ]


def _draw(chooser: random.Random, least: int, most: int) -> int:
    return round(math.exp(chooser.uniform(math.log(least), math.log(most))))


def answer(model: nn.Module, asked: Sequence[Asked], at_once: int | None = None, **settings: Any) -> list[list[int]]:
    """Ours: the new tokens of each request, so many requests at work together."""
    engine = open_engine(model, asked, at_once, **settings)
    requests = [Request(each.prompt, each.new, Sampling(greedy=True)) for each in asked]
    return [request.new_tokens for request in engine.run(requests)]


def open_engine(model: nn.Module, asked: Sequence[Asked], at_once: int | None = None, **settings: Any) -> Engine:
    """An engine with room for these requests."""
    longest = max(len(each.prompt) + each.new for each in asked)
    return Engine(model, EngineSettings(longest, max_requests=at_once or len(asked), **settings))


def answer_by_batches(model: Any, asked: Sequence[Asked], size: int) -> list[list[int]]:
    """Hugging Face: batches of so many requests, padded on the left, each until its longest answer is there."""
    order = sorted(range(len(asked)), key=lambda number: len(asked[number].prompt) + asked[number].new)
    answers: dict[int, list[int]] = {}
    for first in range(0, len(order), size):
        members = order[first : first + size]
        longest = max(len(asked[number].prompt) for number in members)
        padding = [longest - len(asked[number].prompt) for number in members]
        ids = [[0] * pad + asked[number].prompt for pad, number in zip(padding, members, strict=True)]
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        new = max(asked[number].new for number in members)
        with torch.inference_mode():
            found = model.generate(
                torch.tensor(ids), attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                use_cache=True, eos_token_id=None,
            )  # fmt: skip
        for number, row in zip(members, found[:, longest:].tolist(), strict=True):
            answers[number] = row[: asked[number].new]
    return [answers[number] for number in range(len(asked))]


# ---- what is compared


def compare_equal_lengths(models: Models, sizes: Sizes, count: int, rounds: int) -> list[float]:
    """Hugging Face's time over ours in each round, for so many requests of one length."""
    asked = [Asked(draw_prompt(sizes.prompt, number), sizes.new) for number in range(count)]
    assert answer(models.ours, asked) == answer_by_batches(models.theirs, asked, count), "other tokens"
    return find_ratios(
        {"ours": lambda: answer(models.ours, asked), "theirs": lambda: answer_by_batches(models.theirs, asked, count)},
        "theirs", "ours", rounds,
    )  # fmt: skip


def compare_mixed(models: Models, sizes: Sizes, rounds: int) -> dict[str, list[float]]:
    """Times of others over ours in each round, by what the others do."""
    asked = draw_mixed(sizes)
    ours = answer(models.ours, asked)

    def batches(size: int) -> None:
        check(ours, answer_by_batches(models.theirs, asked, size))

    tried = {size: seconds(lambda size=size: batches(size)) for size in (16, 32, 64)}  # type: ignore[misc]
    best = min(tried, key=tried.__getitem__)
    others: dict[str, Callable[[], object]] = {
        f"Hugging Face's batches of {best}": lambda: batches(best),
        "Hugging Face's one at a time": lambda: batches(1),
        "one at a time in our engine": lambda: answer(models.ours, asked, at_once=1),
    }
    found: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(rounds):
        own = seconds(lambda: answer(models.ours, asked))
        for name, other in others.items():
            found[name].append(seconds(other) / own)
    return found


def check(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> None:
    """Raise AssertionError where texts differ; of padded batches' sums one in twenty may tip to another token."""
    others = sum(a != b for a, b in zip(ours, theirs, strict=True))
    assert others <= len(ours) / 20, f"{others} of {len(ours)} texts are others"


def measure_arrival(model: nn.Module, sizes: Sizes) -> tuple[int, float]:
    """Passes until the first token of a request that comes while a long prompt is read, and its time over that of a
    pass of the long prompt alone."""
    long, short = Asked(draw_prompt(sizes.long_prompt, 1), 1), Asked(draw_prompt(sizes.prompt, 2), 4)
    engine = open_engine(model, [long, short], max_step_tokens=CHUNK)
    engine.add(Request(long.prompt, long.new, Sampling(greedy=True)))
    chunk = seconds(engine.step)
    request = engine.add(Request(short.prompt, short.new, Sampling(greedy=True)))
    passes, waited = 0, 0.0
    while not request.new_tokens:
        waited += seconds(engine.step)
        passes += 1
    return passes, waited / chunk


def compare_prefix(model: nn.Module, sizes: Sizes, rounds: int) -> list[float]:
    """Time without shared pages over that with them, of requests that begin with the same tokens."""
    shared = draw_prompt(sizes.longest_prompt, 1)
    asked = [Asked(shared + draw_prompt(16, number), 8) for number in range(2, 18)]
    variants: dict[str, Callable[[], object]] = {
        "shared": lambda: answer(model, asked),
        "apart": lambda: answer(model, asked, reuses_prefixes=False),
    }
    assert variants["shared"]() == variants["apart"](), "other tokens"
    return find_ratios(variants, "apart", "shared", rounds)


def measure_linear(sizes: Sizes, rounds: int) -> list[float]:
    """Time of a token after many others over that of one after few, in a model of gated delta nets."""
    from megatron.training.flags.read import read_run_config
    from megatron.training.recipes.gpt import build_gpt_model

    flags = f"""--hybrid-layer-pattern {"G-" * sizes.layers} --hidden-size {sizes.hidden}
        --num-attention-heads {sizes.heads} --ffn-hidden-size {sizes.ffn} --swiglu --disable-bias-linear
        --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 64 --linear-value-head-dim 64
        --normalization RMSNorm --position-embedding-type none --seq-length 64 --micro-batch-size 1 --train-iters 1
        --max-position-embeddings {sizes.context + 512} --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
        --vocab-size {VOCABULARY - 1}"""
    model = build_gpt_model(read_run_config(flags.split(), {}), VOCABULARY).eval()
    variants: dict[str, Callable[[], object]] = {}
    for name, length in (("few", 128), ("many", sizes.context)):
        asked = Asked(draw_prompt(length, 1), 32 * (rounds + 4))
        engine = open_engine(model, [asked])
        engine.add(Request(asked.prompt, asked.new, Sampling(greedy=True)))
        engine.step()
        variants[name] = lambda engine=engine: [engine.step() for _ in range(32)]  # type: ignore[misc]
    return find_ratios(variants, "many", "few", rounds)


def find_ratios(variants: dict[str, Callable[[], object]], over: str, under: str, rounds: int) -> list[float]:
    """The time of one variant over that of another, in each round."""
    times = measure(variants, rounds)
    return [a / b for a, b in zip(times[over], times[under], strict=True)]


# ---- what is printed


def _show(text: str, ratios: Sequence[float], wanted: str) -> None:
    median, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"{text:<72}{median:6.2f} ({least:.2f} to {most:.2f})   wanted: {wanted}", flush=True)


ITEMS = ("one", "batch", "mixed", "arrival", "prefix", "linear")


def run(only: Sequence[str], sizes: Sizes, rounds: int) -> None:
    """Measure and print the named items."""
    with tempfile.TemporaryDirectory() as directory:
        models = build_models(sizes, Path(directory))
    if "one" in only:
        ratios = compare_equal_lengths(models, sizes, 1, rounds)
        _show("one request: Hugging Face's time over ours", ratios, "at least 1.15")
    if "batch" in only:
        ratios = compare_equal_lengths(models, sizes, sizes.batch, rounds)
        _show(f"{sizes.batch} requests of one length: Hugging Face's time over ours", ratios, "at least 1.2")
    if "mixed" in only:
        for name, ratios in compare_mixed(models, sizes, max(1, rounds // 3)).items():
            wanted = "at least 1.5" if "batches" in name else "at least 5"
            _show(f"{sizes.requests} requests of mixed lengths: {name} over ours", ratios, wanted)
    if "arrival" in only:
        passes, chunks = measure_arrival(models.ours, sizes)
        text = f"a request beside a prompt of {sizes.long_prompt} tokens, {CHUNK} a pass: passes to its first token"
        print(f"{text:<72}{passes:6} ({chunks:.2f} of a chunk's time)   wanted: two chunks and its own", flush=True)
    if "prefix" in only:
        ratios = compare_prefix(models.ours, sizes, rounds)
        _show(f"16 prompts that share {sizes.longest_prompt} tokens: pages apart over shared", ratios, "at least 3")
    if "linear" in only:
        ratios = measure_linear(sizes, rounds)
        _show(f"linear layers: a token after {sizes.context} others over one after 128", ratios, "flat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="paired rounds, a third of them for mixed (default: 6)")
    parser.add_argument("--only", default=",".join(ITEMS), help="some of " + ",".join(ITEMS))
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if unknown := set(only) - set(ITEMS):
        parser.error(f"--only {','.join(sorted(unknown))}: known are {', '.join(ITEMS)}")
    print_conditions()
    if not available("transformers"):
        parser.error("transformers is not installed, whose generate is the baseline")
    run(only, Sizes.tiny() if arguments.tiny else Sizes(), arguments.rounds)


if __name__ == "__main__":
    main()
