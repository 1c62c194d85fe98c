#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""How fast tools/preprocess_data.py tokenizes, against a loop over documents with a Hugging Face tokenizer.

    python benchmarks/tokenization.py                      # 10 MB of the standard library's source, a new 32k BPE
    python benchmarks/tokenization.py --tokenizer-model DIR --megabytes 40

All rates are MB (10^6 bytes of UTF-8 text) per second of one run on one machine. The loops count encoding only, and so
does "our encoder, encoding alone"; the other lines of ours count the whole process from its start to the finished
.bin/.idx. Ratios are the result, rates depend on the machine.
How workers scale is measured on several times the corpus, so that starting a process counts for less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

KNOWN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# One alternative more than any published tokenizer has, so that the table of known patterns cannot have it.
UNKNOWN_PATTERN = "[一-龥぀-ゟ゠-ヿ]+|" + KNOWN_PATTERN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10, help="size of the corpus (default: 10)")
    parser.add_argument("--vocab-size", type=int, default=32000, help="size of the BPE to train (default: 32000)")
    parser.add_argument("--tokenizer-model", help="directory with a tokenizer.json, instead of training one")
    parser.add_argument(
        "--times", type=int, default=6, help="repetitions of the corpus for the scaling of workers (default: 6)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, of which the fastest counts (default: 1)")
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
        unknown = save_unknown_pattern(model, folder / "unknown")
        print_conditions(megabytes, len(texts))

        def measure(name: str, run: Callable[[], float], times: int = 1) -> float:
            """Print and return the rate of the fastest of the repeats."""
            # The fastest: everything that disturbs a run makes it slower.
            seconds = min(run() for _ in range(arguments.repeats))
            rate = megabytes * times / seconds
            print(f"{name:<60} {rate:6.2f} MB/s  {seconds:6.2f} s", flush=True)
            return rate

        def ours(name: str, tokenizer: Path, workers: int, times: int = 1) -> float:
            source = corpus if times == 1 else long_corpus
            size = f", {times} times the corpus" if times > 1 else ""
            title = f"ours, {name} pattern, {workers} worker{'s' * (workers > 1)}{size}"
            return measure(title, lambda: preprocess(source, tokenizer, folder, workers), times)

        loop = measure(
            "Hugging Face, one document per call (transformers)", lambda: time_transformers_loop(model, texts)
        )
        measure("Hugging Face, one document per call (tokenizers)", lambda: time_tokenizers_loop(model, texts))
        alone = measure("our encoder, encoding alone, known pattern", lambda: time_encoder(model, texts))
        known = ours("known", model, 1)
        ours("known", model, 2)
        known_long = ours("known", model, 1, arguments.times)
        known_long_2 = ours("known", model, 2, arguments.times)
        plain_loop = measure(
            "Hugging Face, unknown pattern (transformers)", lambda: time_transformers_loop(unknown, texts)
        )
        plain = ours("unknown", unknown, 1)
        plain_2 = ours("unknown", unknown, 2)
        print(
            f"\nknown pattern:   {alone / loop:.2f}x of the loop, encoding alone (target 5); whole process "
            f"{known / loop:.2f}x, {known_long / loop:.2f}x on {arguments.times} times the corpus"
        )
        print(f"unknown pattern: {plain / plain_loop:.2f}x of the loop (target 1.3)")
        print(
            f"2 workers:       {known_long_2 / known_long:.2f}x of 1 (known), "
            f"{plain_2 / plain:.2f}x (unknown) (target 1.6)"
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


def time_transformers_loop(model: Path, texts: list[str]) -> float:
    """What Megatron-LM's preprocessing does per worker."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(str(model)).encode
    return time_call(lambda: [len(encode(text)) for text in texts])


def time_tokenizers_loop(model: Path, texts: list[str]) -> float:
    """Time encoding document by document with the `tokenizers` library."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(model / "tokenizer.json")).encode
    return time_call(lambda: [len(encode(text).ids) for text in texts])


def time_encoder(model: Path, texts: list[str]) -> float:
    """What the loops do, with the encoder that tools/preprocess_data.py chooses."""
    from megatron.core.tokenizers.encoders import choose_encoder
    from megatron.core.tokenizers.huggingface import huggingface_tokenizer

    encoder = choose_encoder(huggingface_tokenizer(str(model)), texts[:4])
    # One text per call, as in the loops it is compared with.
    return time_call(lambda: [len(ids) for text in texts for ids in encoder.encode_batch([text])])


def time_call(run: Callable[[], object]) -> float:
    """Return the wall seconds of a call."""
    started_at = time.perf_counter()
    run()
    return time.perf_counter() - started_at


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


def preprocess(corpus: Path, model: Path, folder: Path, workers: int) -> float:
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
