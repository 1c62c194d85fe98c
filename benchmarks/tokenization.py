#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""How fast tools/preprocess_data.py tokenizes, against a loop over documents with a Hugging Face tokenizer.

    python benchmarks/tokenization.py                      # 10 MB of the standard library's source, a new 32k BPE
    python benchmarks/tokenization.py --tokenizer-model DIR --megabytes 40

All rates are MB (10^6 bytes of UTF-8 text) per second of one run on one machine. The loops count encoding only, and so
does "our encoder, encoding alone"; the other lines of ours count the whole process from its start to the finished
.bin/.idx. Ratios are the result, rates depend on the machine. Each round runs every variant once, in turn; a figure is
the best of its rounds.
How workers scale is measured on several times the corpus, so that starting a process counts for less.
"""

# ruff: noqa: E402 - the path comes before the imports
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

KNOWN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# One alternative more than any published tokenizer has, so that the table of known patterns cannot have it.
UNKNOWN_PATTERN = "[一-龥぀-ゟ゠-ヿ]+|" + KNOWN_PATTERN


LOOP = "Hugging Face, one document per call (transformers)"
ENCODER = "our encoder, encoding alone, known pattern"
KNOWN = "ours, known pattern, 1 worker"
LONG, LONG_2 = "ours, known pattern, 1 worker, long", "ours, known pattern, 2 workers, long"
PLAIN_LOOP = "Hugging Face, unknown pattern (transformers)"
PLAIN, PLAIN_2 = "ours, unknown pattern, 1 worker", "ours, unknown pattern, 2 workers"


class Seconds(NamedTuple):
    """Of a call."""

    wall: float
    cpu: float
    """Of this process, or of the processes that it started."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10, help="size of the corpus (default: 10)")
    parser.add_argument("--vocab-size", type=int, default=32000, help="size of the BPE to train (default: 32000)")
    parser.add_argument("--tokenizer-model", help="directory with a tokenizer.json, instead of training one")
    parser.add_argument(
        "--times", type=int, default=6, help="repetitions of the corpus for the scaling of workers (default: 6)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="rounds that run each once, in turn (default: 1)")
    arguments = parser.parse_args()
    # The loops are one process with one thread, as a worker is.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = read_standard_library(arguments.megabytes)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        corpus = folder / "corpus.jsonl"
        corpus.write_text(lines)
        long_corpus = folder / "long.jsonl"
        # Long enough that starting the workers is a small part of the time.
        long_corpus.write_text(lines * arguments.times)
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        model = (
            Path(arguments.tokenizer_model)
            if arguments.tokenizer_model
            else train(texts, arguments.vocab_size, folder / "bpe")
        )
        # In a folder of its own: the checkout stays as it is.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        unknown = save_unknown_pattern(model, folder / "unknown")
        print_conditions(megabytes, len(texts))

        def ours(tokenizer: Path, workers: int, times: int = 1) -> Callable[[], Seconds]:
            source = corpus if times == 1 else long_corpus
            return lambda: preprocess(source, tokenizer, folder, workers)

        many = arguments.times
        variants: dict[str, tuple[int, Callable[[], Seconds]]] = {
            LOOP: (1, lambda: time_transformers_loop(model, texts)),
            "Hugging Face, one document per call (tokenizers)": (1, lambda: time_tokenizers_loop(model, texts)),
            ENCODER: (1, lambda: time_encoder(model, texts)),
            KNOWN: (1, ours(model, 1)),
            "ours, known pattern, 2 workers": (1, ours(model, 2)),
            LONG: (many, ours(model, 1, many)),
            LONG_2: (many, ours(model, 2, many)),
            PLAIN_LOOP: (1, lambda: time_transformers_loop(unknown, texts)),
            PLAIN: (1, ours(unknown, 1)),
            PLAIN_2: (1, ours(unknown, 2)),
        }
        # Python writes the modules that it has compiled at the first start; users start this program more than once.
        preprocess(corpus, model, folder, 1)
        best = run_rounds({name: run for name, (_, run) in variants.items()}, arguments.repeats)
        for name, (times, _) in variants.items():
            wall, cpu = best[name]
            size = f", {times} times the corpus" if times > 1 else ""
            print(f"{name + size:<60} {megabytes * times / wall:6.2f} MB/s  {wall:6.2f} s  {cpu:6.2f} s of CPU")

        def ratio(name: str, slower: str, times: int = 1) -> str:
            """How many times as fast: by the clock, and by CPU time."""
            clock, cpu = (times * b / a for a, b in zip(best[name], best[slower], strict=True))
            return f"{clock:.2f}x ({cpu:.2f}x)"

        print(
            "\nby the clock (by CPU time, which other programs of the machine disturb less):\n"
            f"known pattern:   {ratio(ENCODER, LOOP)} of the loop, encoding alone (target 5); whole process "
            f"{ratio(KNOWN, LOOP)} (target 5), {ratio(LONG, LOOP, many)} on {many} times the corpus\n"
            f"unknown pattern: {ratio(PLAIN, PLAIN_LOOP)} of the loop (target 1.3)\n"
            f"2 workers:       {best[LONG][0] / best[LONG_2][0]:.2f}x of 1 (known), "
            f"{best[PLAIN][0] / best[PLAIN_2][0]:.2f}x (unknown) (target 1.7)"
        )
        print(f"start to first output: {time_first_output(corpus, model, folder):.2f} s (target 2)")


def read_standard_library(megabytes: float) -> list[str]:
    """Python sources of this machine's standard library, repeated if they are not enough."""
    texts: list[str] = []
    size = 0
    while size < megabytes * 1e6:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
            # What is installed differs between machines; the library itself does not.
            if "site-packages" in path.parts:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            texts.append(text)
            # Bytes of UTF-8, as rates are given in.
            size += len(text.encode())
            if size >= megabytes * 1e6:
                break
    return texts


def train(texts: list[str], vocab_size: int, folder: Path) -> Path:
    """A byte-level BPE with the pre-tokenizer of Llama 3."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KNOWN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return save(tokenizer.to_str(), folder)


def save_unknown_pattern(model: Path, folder: Path) -> Path:
    """The same tokenizer with a pre-tokenizer that is not in the table of known ones."""
    content = json.loads((model / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": UNKNOWN_PATTERN}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    return save(json.dumps(content), folder)


def save(tokenizer_json: str, folder: Path) -> Path:
    """Write a tokenizer as the directory that the tools read."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer_json)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def time_transformers_loop(model: Path, texts: list[str]) -> Seconds:
    """What Megatron-LM's preprocessing does per worker."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(str(model)).encode
    return time_call(lambda: [len(encode(text)) for text in texts])


def time_tokenizers_loop(model: Path, texts: list[str]) -> Seconds:
    """Time encoding document by document with the `tokenizers` library."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(model / "tokenizer.json")).encode
    return time_call(lambda: [len(encode(text).ids) for text in texts])


def time_encoder(model: Path, texts: list[str]) -> Seconds:
    """What the loops do, with the encoder that tools/preprocess_data.py chooses."""
    from megatron.core.tokenizers.encoders import choose_encoder
    from megatron.core.tokenizers.huggingface import huggingface_tokenizer

    encoder = choose_encoder(huggingface_tokenizer(str(model)), texts[:4])
    # One text per call, as in the loops it is compared with.
    return time_call(lambda: [len(ids) for text in texts for ids in encoder.encode_batch([text])])


def time_call(run: Callable[[], object]) -> Seconds:
    """Return the seconds of a call, those of processes that it waits for included."""
    started_at, cpu_started_at = time.perf_counter(), read_cpu_seconds()
    run()
    return Seconds(time.perf_counter() - started_at, read_cpu_seconds() - cpu_started_at)


def read_cpu_seconds() -> float:
    """Of this process so far, and of those that it has waited for."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def run_rounds(variants: dict[str, Callable[[], Seconds]], rounds: int) -> dict[str, Seconds]:
    """Return the fewest seconds of each variant, by the clock and of CPU time."""
    found: dict[str, list[Seconds]] = {name: [] for name in variants}
    for _ in range(rounds):
        # In turn within a round, so that a machine that slows down slows all variants down.
        for name, run in variants.items():
            found[name].append(run())
    # The fewest: everything that disturbs a run makes it slower.
    return {name: Seconds(*map(min, zip(*times, strict=True))) for name, times in found.items()}


def command(corpus: Path, model: Path, folder: Path, workers: int) -> list[str]:
    """Return the command line of tools/preprocess_data.py."""
    flags = (
        f"--input {corpus} --output-prefix {folder}/out --tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}"
    )
    return [
        sys.executable,
        str(Path(__file__).resolve().parent.parent / "tools" / "preprocess_data.py"),
        *flags.split(),
        "--append-eod",
        # Every run writes the same files.
        "--overwrite",
        "--workers",
        str(workers),
    ]


def preprocess(corpus: Path, model: Path, folder: Path, workers: int) -> Seconds:
    """Return the seconds of the whole process."""
    return time_call(lambda: subprocess.run(command(corpus, model, folder, workers), check=True, capture_output=True))


def time_first_output(corpus: Path, model: Path, folder: Path) -> float:
    """Return the seconds until the first progress line."""
    started_at = time.perf_counter()
    process = subprocess.Popen(command(corpus, model, folder, 1), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    # Progress goes to standard error; the first line says that tokens are flowing.
    process.stderr.readline()
    elapsed_seconds = time.perf_counter() - started_at
    process.communicate()
    return elapsed_seconds


def print_conditions(megabytes: float, documents: int) -> None:
    """Print machine, versions, command and corpus."""
    cpu_info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpu_info.read_text()) if cpu_info.exists() else []
    name = names[0] if names else platform.processor()
    print(f"machine:  {name}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("tokenizers", "tiktoken", "transformers", "numpy")
    )
    print(f"versions: python {platform.python_version()}, {versions}")
    print(f"command:  {' '.join([Path(sys.executable).name, *sys.argv])}")
    print(f"corpus:   {megabytes:.2f} MB in {documents} documents\n")


if __name__ == "__main__":
    main()
