# SPDX-License-Identifier: Apache-2.0
"""Continue texts with a trained model.

    python tools/generate.py --load CHECKPOINTS --prompt "def main" --max-new-tokens 100
    python tools/generate.py --load CHECKPOINTS --chat                                     a conversation

The model's shape and its tokenizer come from the checkpoint. Prints each prompt with its continuation.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.cli.chat import History, Messages, Text, read_lines, talk
from megatron.cli.trained import add_model_arguments, open_model, read_world_size, speaks
from megatron.core.errors import ConfigError, command_line
from megatron.training.flags.argument import ProgramParser, path

if TYPE_CHECKING:
    from megatron.core.inference.sampling import Sampling
    from megatron.core.inference.speculation import PredictionDrafter
    from megatron.training.checkpoint.trained_model import TrainedModel

_SEPARATOR = "-" * 60
_UNKNOWN_LENGTH = 2048
"""Tokens of a context, where neither the model nor its training says how many."""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. A mistake in it raises ConfigError."""
    parser = ProgramParser("Continue texts with a trained model.", see="generate.py --help")
    add_model_arguments(parser)
    add = parser.add_argument_group("what to continue").add_argument
    add("--prompt", metavar="TEXT", action="append", default=[], help="text to continue; may be repeated")
    add("--prompts-file", metavar="FILE", type=path, help="file with one prompt on each line")
    add("--chat", action="store_true", help="talk with the model; one that is not tuned for it continues the text")
    add("--system", metavar="TEXT", help="with --chat: what the model is told before the conversation")
    add("--batch-size", metavar="N", type=int, default=8, help="prompts continued together (8)")
    add("--max-new-tokens", metavar="N", type=int, help="tokens to add to each prompt (64; with --chat 512)")
    add = parser.add_argument_group("how to choose tokens").add_argument
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--temperature", metavar="T", type=float, default=1.0, help="below 1: prefer likely tokens more (1)")
    add("--top-k", metavar="K", type=int, default=0, help="draw from the K likeliest tokens; 0: from all (0)")
    add("--top-p", metavar="P", type=float, default=1.0, help="draw from the likeliest that hold the share P (1)")
    add("--seed", metavar="N", type=int, default=1234, help="seed of the draws (1234)")
    add = parser.add_argument_group("other").add_argument
    help = "draft tokens with the model's multi-token prediction: fewer passes, the same greedy text"
    add("--speculate", action="store_true", help=help)
    add("--no-kv-cache", action="store_true", help="compute every position anew for every token: slow, for checks")
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


def read_sampling(arguments: argparse.Namespace) -> Sampling:
    """The choice of tokens that the command line asks for."""
    from megatron.core.inference.sampling import Sampling

    return Sampling(
        greedy=arguments.greedy,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


@contextlib.contextmanager
def load_model(arguments: argparse.Namespace) -> Iterator[tuple[TrainedModel, Sampling]]:
    """The model of the command line, and how its tokens are chosen."""
    sampling = read_sampling(arguments)
    with open_model(arguments) as trained:
        if speaks():
            print(f"model: {trained.path}", file=sys.stderr, flush=True)
        yield trained, sampling


@contextlib.contextmanager
def open_speculation(arguments: argparse.Namespace, trained: TrainedModel) -> Iterator[PredictionDrafter | None]:
    """Open what --speculate asks for; says in the end how many drafts were right."""
    if not arguments.speculate:
        yield None
        return
    from megatron.core.inference.speculation import PredictionDrafter

    speculation = PredictionDrafter(trained.model)
    yield speculation
    if speaks():
        print(speculation.describe(), file=sys.stderr, flush=True)


def generate_continuations(arguments: argparse.Namespace, prompts: Sequence[str]) -> Iterator[str]:
    """Yield each prompt with what the model adds to it."""
    from megatron.core.inference.generate import generate

    with load_model(arguments) as (trained, sampling), open_speculation(arguments, trained) as speculation:
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
                speculation=speculation,
            )
            for prompt_ids, completion in zip(ids, completions, strict=True):
                yield tokenizer.detokenize([*prompt_ids, *completion.tokens])


def hold_conversation(arguments: argparse.Namespace) -> None:
    """Read messages from standard input and answer them, until there are no more."""
    with load_model(arguments) as (trained, sampling), open_speculation(arguments, trained) as speculation:
        _talk(arguments, trained, sampling, speculation)


def _talk(
    arguments: argparse.Namespace, trained: TrainedModel, sampling: Sampling, speculation: PredictionDrafter | None
) -> None:
    from megatron.core.inference.generate import generate

    # Rotary positions end nowhere; beyond the length of training they say little.
    length = trained.max_sequence_length or trained.config.data.seq_length or _UNKNOWN_LENGTH
    # A small context is shared between what was said and the answer.
    new_tokens = min(arguments.max_new_tokens, length // 2)
    history: History
    if trained.tokenizer.chat_template is None:
        if arguments.system is not None:
            raise ConfigError("--system needs a chat template, and the model's tokenizer has none; leave it out")
        history = Text(trained.tokenizer, length - new_tokens)
    else:
        history = Messages(trained.tokenizer, length - new_tokens, arguments.system)
    seeds = itertools.count(arguments.seed)

    def answer(prompt: list[int], ends: list[int], on_tokens: Callable[[int, list[int]], None]) -> bool:
        (completion,) = generate(
            trained.model,
            [prompt],
            max_new_tokens=new_tokens,
            # Otherwise the same question would get the same answer, however often it is asked.
            sampling=dataclasses.replace(sampling, seed=next(seeds)),
            eod=ends,
            vocab_size=trained.vocab_size,
            max_sequence_length=trained.max_sequence_length,
            use_cache=not arguments.no_kv_cache,
            on_tokens=on_tokens,
            speculation=speculation,
        )
        return completion.ended_by == "length"

    talk(history, answer, read_lines())


@command_line
def main() -> int:
    """Read the command line, generate, print."""
    arguments = parse_arguments(sys.argv[1:])
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = 512 if arguments.chat else 64
    if arguments.chat:
        if read_world_size() > 1:
            raise ConfigError("--chat is a conversation with one process; leave out torchrun, or start the server")
        if arguments.prompt or arguments.prompts_file is not None:
            raise ConfigError("--chat reads what is typed, or piped; leave out --prompt and --prompts-file")
        if arguments.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens {arguments.max_new_tokens} must be at least 1")
        hold_conversation(arguments)
        return 0
    if arguments.system is not None:
        raise ConfigError("--system begins a conversation; give --chat, or write it into the prompt")
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size {arguments.batch_size} must be at least 1")
    prompts = read_prompts(arguments.prompt, arguments.prompts_file)
    for number, text in enumerate(generate_continuations(arguments, prompts)):
        if number:
            print(_SEPARATOR)
        print(text, flush=True)
    return 0
