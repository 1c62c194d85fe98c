# SPDX-License-Identifier: Apache-2.0
"""Step 2 of the quickstart: train a small byte-level BPE on the corpus with the `tokenizers` library.

Writes a folder that `--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER` reads. Bytes are the base
alphabet, so every text can be encoded and decodes back to itself. `<|endoftext|>` has id 0 and ends a document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"


def texts(corpus: Path) -> Iterator[str]:
    """Yield the texts of the corpus."""
    with corpus.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["text"]


def train(corpus: Path, vocab_size: int) -> Tokenizer:
    """Byte-pair encoding with GPT-2's way of cutting text into words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(corpus), trainer=trainer)
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True, help="the .jsonl corpus")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens, the end-of-text token included")
    arguments = parser.parse_args()
    if not arguments.input.is_file():
        print(f"error: --input {arguments.input} does not exist; build it with build_corpus.py", file=sys.stderr)
        return 2

    tokenizer = train(arguments.input, arguments.vocab_size)
    arguments.output.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": END_OF_TEXT,
        "model_max_length": 1_000_000,
    }
    (arguments.output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    # Written last and renamed: the quickstart takes its presence as "this step is done".
    unfinished = arguments.output / "tokenizer.json.tmp"
    tokenizer.save(str(unfinished))
    unfinished.replace(arguments.output / "tokenizer.json")
    print(f"{arguments.output}: {tokenizer.get_vocab_size()} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
