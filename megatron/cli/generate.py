# SPDX-License-Identifier: Apache-2.0
"""Continue texts with a trained model.

    python tools/generate.py --load CHECKPOINTS --prompt "def main" --max-new-tokens 100

The model's shape and its tokenizer come from the checkpoint. Prints each prompt with its continuation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from megatron.core.errors import ConfigError, command_line
from megatron.training.flags.parser import path

_SEPARATOR = "-" * 60


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. A mistake in it raises ConfigError."""
    parser = _Parser(description="Continue texts with a trained model.", allow_abbrev=False)
    add = parser.add_argument_group("what to continue").add_argument
    add("--load", metavar="DIR", required=True, type=path, help="directory of checkpoints, or one iter_ directory")
    add("--ckpt-step", metavar="N", type=int, help="iteration to load (the latest)")
    add("--prompt", metavar="TEXT", action="append", default=[], help="text to continue; may be repeated")
    add("--prompts-file", metavar="FILE", type=path, help="file with one prompt on each line")
    add("--batch-size", metavar="N", type=int, default=8, help="prompts continued together (8)")
    add("--max-new-tokens", metavar="N", type=int, default=64, help="tokens to add to each prompt (64)")
    add = parser.add_argument_group("how to choose tokens").add_argument
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--temperature", metavar="T", type=float, default=1.0, help="below 1: prefer likely tokens more (1)")
    add("--top-k", metavar="K", type=int, default=0, help="draw from the K likeliest tokens; 0: from all (0)")
    add("--top-p", metavar="P", type=float, default=1.0, help="draw from the likeliest that hold the share P (1)")
    add("--seed", metavar="N", type=int, default=1234, help="seed of the draws (1234)")
    add = parser.add_argument_group("other").add_argument
    add("--bf16", action="store_true", help="compute in bfloat16: half the memory; rounding may decide between tokens")
    add("--no-kv-cache", action="store_true", help="compute every position anew for every token: slow, for checks")
    add("--traceback", action="store_true", help="show where in the program an error was found")
    return parser.parse_args(argv)


def read_prompts(texts: Sequence[str], file: Path | None) -> list[str]:
    """The prompts of the command line, then the file's non-empty lines. Raises ConfigError when there is none."""
    prompts = list(texts)
    if file is not None:
        try:
            # Blank lines separate prompts in files that people write; an empty prompt is no prompt.
            prompts += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts-file {file} cannot be read: {error}") from error
    if not prompts:
        raise ConfigError("there is nothing to continue; give --prompt TEXT or --prompts-file FILE")
    return prompts


def generate_continuations(arguments: argparse.Namespace, prompts: Sequence[str]) -> Iterator[str]:
    """Yield each prompt with what the model adds to it."""
    # torch takes seconds to import: mistakes in the command line are found before that.
    from megatron.core.inference.generate import generate
    from megatron.core.inference.sampling import Sampling
    from megatron.training.checkpoint.trained_model import load_trained_model

    sampling = Sampling(
        greedy=arguments.greedy,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    trained = load_trained_model(arguments.load, arguments.ckpt_step, bf16=arguments.bf16)
    print(f"model: {trained.path}", file=sys.stderr, flush=True)
    tokenizer = trained.tokenizer
    for start in range(0, len(prompts), arguments.batch_size):
        ids = tokenizer.tokenize_batch(prompts[start : start + arguments.batch_size])
        completions = generate(
            trained.model,
            ids,
            max_new_tokens=arguments.max_new_tokens,
            sampling=sampling,
            eod=tokenizer.eod,
            # Rows of the embedding beyond it are padding, which must never be drawn.
            vocab_size=trained.vocab_size,
            max_sequence_length=trained.max_sequence_length,
            use_cache=not arguments.no_kv_cache,
        )
        for prompt_ids, completion in zip(ids, completions, strict=True):
            yield tokenizer.detokenize([*prompt_ids, *completion.tokens])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see generate.py --help")


@command_line
def main() -> int:
    """Read the command line, generate, print."""
    arguments = parse_arguments(sys.argv[1:])
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size {arguments.batch_size} must be at least 1")
    prompts = read_prompts(arguments.prompt, arguments.prompts_file)
    for number, text in enumerate(generate_continuations(arguments, prompts)):
        if number:
            print(_SEPARATOR)
        print(text, flush=True)
    return 0
