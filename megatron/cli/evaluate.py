# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a trained model on texts, and lm-evaluation-harness's tasks.

    python -m megatron evaluate --load CHECKPOINTS --data texts.jsonl --output results.json
    python -m megatron evaluate --load CHECKPOINTS --tasks arc_easy,hellaswag --limit 100 --output results.json

Perplexity is exp of the mean of -log p over all tokens but each document's first. A document that is longer than the
model's context is read in windows: without overlap, or one every --stride tokens, whose first tokens then only are
context of the others. Documents of all lengths are computed together, without padding.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.cli.trained import add_model_arguments, open_model, speaks
from megatron.core.errors import ConfigError, DataError, command_line, say
from megatron.training.flags.argument import ProgramParser, path

if TYPE_CHECKING:
    from megatron.core.inference.engine import Engine
    from megatron.training.checkpoint.trained_model import TrainedModel

_UNKNOWN_LENGTH = 2048
_FIRST_BIN = 16


class Window(NamedTuple):
    """Tokens [first, end) of a document, of which those from `scored` on count."""

    first: int
    scored: int
    end: int


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. A mistake in it raises ConfigError."""
    parser = ProgramParser(__doc__, see="evaluate --help")
    add_model_arguments(parser)
    add = parser.add_argument_group("what to measure").add_argument
    add("--data", metavar="FILE", type=path, nargs="+", default=[], help="JSON lines, a document in each")
    add("--json-key", metavar="NAME", default="text", help="the key of a line's text (text)")
    add("--seq-length", metavar="N", type=int, help="tokens of a window (the model's context)")
    add("--stride", metavar="N", type=int, help="a window every N tokens (those of a window: no overlap)")
    add("--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness, with commas between them")
    add("--include-path", metavar="DIR", type=path, help="further tasks, as YAML files")
    add("--limit", metavar="N", type=int, help="documents of each task, or of each file")
    add("--num-fewshot", metavar="N", type=int, help="examples before each question (the task's own number)")
    add("--batch-tokens", metavar="N", type=int, default=4096, help="tokens that a pass reads (4096)")
    add("--output", metavar="FILE", type=path, help="results as JSON")
    arguments = parser.parse_args(argv)
    if not arguments.data and arguments.tasks is None:
        raise ConfigError("there is nothing to evaluate; give --data FILE.jsonl or --tasks NAMES")
    for name in ("seq_length", "stride", "limit", "batch_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < (2 if name == "seq_length" else 1):
            raise ConfigError(f"--{name.replace('_', '-')} {value} is too small")
    return arguments


def read_documents(file: Path, key: str, limit: int | None) -> Iterator[str]:
    """The texts of a file's lines, blank ones left out. Raises DataError for a line that holds none."""
    given = 0
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                if given == limit:
                    return
                try:
                    content = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{file}: line {number} is not JSON: {error}") from error
                text = content.get(key) if isinstance(content, dict) else None
                if not isinstance(text, str):
                    raise DataError(f"{file}: line {number} has no text {key!r}; give another --json-key")
                yield text
                given += 1
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--data {file} cannot be read: {error}") from error
    if given == 0:
        raise DataError(f"--data {file} has no documents")


def list_windows(length: int, context: int, stride: int | None) -> list[Window]:
    """Windows in which every token of a document but the first counts once.

    Without overlap a window has one token more than count in it: the one before them, from which they are expected.
    """
    step = context - 1 if stride is None else min(stride, context - 1)
    found, first, scored = [], 0, 1
    while scored < length:
        end = min(first + context, length)
        found.append(Window(first, scored, end))
        first, scored = first + step, end
    return found


def measure_documents(engine: Engine, documents: Sequence[list[int]], stride: int | None) -> Iterator[list[float]]:
    """Losses of each document's tokens but the first, in the order of the documents."""
    from megatron.core.inference.request import Request
    from megatron.core.inference.sampling import Sampling

    context, together, shown = engine.settings.max_sequence_length, engine.settings.max_requests, time.monotonic()
    for start in range(0, len(documents), together):
        some = documents[start : start + together]
        windows = [(index, each) for index, one in enumerate(some) for each in list_windows(len(one), context, stride)]
        requests = [
            Request(some[index][each.first : each.end], 0, Sampling(greedy=True), prompt_logprobs=0)
            for index, each in windows
        ]
        losses: list[list[float]] = [[] for _ in some]
        for (index, each), request in zip(windows, engine.run(requests), strict=True):
            losses[index] += [-entry.logprob for entry in request.read_logprobs[each.scored - each.first - 1 :]]
        yield from losses
        if time.monotonic() - shown > 2 and speaks():
            shown = time.monotonic()
            say(f"{start + len(some)} of {len(documents)} documents", sys.stderr)


def summarise(losses: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The row of one file; positions in bins that double, counted from 1, the first token that is expected."""
    tokens = sum(map(len, losses))
    if tokens == 0:
        raise DataError("no document has two tokens, so that there is nothing to expect")
    total = math.fsum(loss for each in losses for loss in each)
    positions, first = [], 1
    while any(len(each) >= first for each in losses):
        end = _FIRST_BIN if first == 1 else 2 * first - 1
        inside = [loss for each in losses for loss in each[first - 1 : end]]
        positions.append({"first": first, "last": end, "tokens": len(inside), "loss": math.fsum(inside) / len(inside)})
        first = end + 1
    return {
        "perplexity": math.exp(min(total / tokens, 700.0)),
        "loss": total / tokens,
        "tokens": tokens,
        "documents": [
            {"index": index, "tokens": len(each), "loss": math.fsum(each) / len(each) if each else None}
            for index, each in enumerate(losses)
        ],
        "positions": positions,
    }


def build_engine(trained: TrainedModel, arguments: argparse.Namespace) -> Engine:
    """An engine for texts as long as the model's context, or as --seq-length says."""
    from megatron.core.inference.engine import Engine, EngineSettings

    longest, asked = trained.max_sequence_length, arguments.seq_length
    if asked is not None and longest is not None and asked > longest:
        raise ConfigError(f"--seq-length {asked}: the model has {longest} positions; give at most that")
    context = asked or longest or trained.config.data.seq_length or _UNKNOWN_LENGTH
    room = max(context, arguments.batch_tokens)
    settings = EngineSettings(context, capacity_tokens=2 * room, max_step_tokens=arguments.batch_tokens)
    return Engine(trained.model, settings, vocab_size=trained.vocab_size)


def run_tasks(engine: Engine, tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Results of --tasks in the harness's form, which are printed, too."""
    from megatron.core.inference.harness_tasks import HarnessTasks, list_scores

    path, limit = arguments.include_path, arguments.limit
    tasks = HarnessTasks(arguments.tasks, path, limit=limit, flag="--tasks", path_flag="--include-path")
    found = tasks.run(engine, tokenizer, arguments.num_fewshot)
    for name, value in list_scores(found["results"]).items():
        print(f"{name}: {value:.4f}", flush=True)
    return found


def evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of a command line, as --output has them."""
    texts = {str(file): [*read_documents(file, arguments.json_key, arguments.limit)] for file in arguments.data}
    with open_model(arguments) as trained:
        engine, found = build_engine(trained, arguments), dict[str, Any]()
        for name, documents in texts.items():
            ids = trained.tokenizer.tokenize_batch(documents)
            row = summarise([*measure_documents(engine, ids, arguments.stride)])
            found.setdefault("files", {})[name] = row
            print(
                f"{name}: perplexity {row['perplexity']:.4f}, loss {row['loss']:.6f}, {row['tokens']} tokens",
                flush=True,
            )
        if arguments.tasks is not None:
            found |= run_tasks(engine, trained.tokenizer, arguments)
    return found


@command_line
def main() -> int:
    """Read the command line, evaluate, print and write."""
    arguments = parse_arguments(sys.argv[1:])
    found = evaluate(arguments)
    if arguments.output is not None and speaks():
        from megatron.core.dist_checkpointing.durable import replace_file

        replace_file(arguments.output, json.dumps(found, indent=1, default=str).encode())
    return 0
