# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness with the engine as their model: what `evaluate --tasks` runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.optional_deps import require
from megatron.core.tokenizers.base import Tokenizer
from megatron.serving.text_stream import TextStream

_NEEDED_BY = "--tasks"


def run_tasks(engine: Engine, tokenizer: Tokenizer, arguments: argparse.Namespace) -> dict[str, Any]:
    """Results in the harness's form. Raises ConfigError for tasks that it does not have."""
    tasks = require("lm_eval.tasks", needed_by=_NEEDED_BY)
    manager = tasks.TaskManager(include_path=None if arguments.include_path is None else str(arguments.include_path))
    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        raise ConfigError(f"--tasks {', '.join(unknown)}: lm-evaluation-harness has no such task; see --include-path")
    found = require("lm_eval", needed_by=_NEEDED_BY).simple_evaluate(
        model=build_harness_model(engine, tokenizer), tasks=names, task_manager=manager, limit=arguments.limit,
        num_fewshot=arguments.num_fewshot, log_samples=False, bootstrap_iters=0,
    )  # fmt: skip
    for name, row in found["results"].items():
        values = (f"{key} {value:.4f}" for key, value in row.items() if isinstance(value, float))
        print(f"{name}: {', '.join(values)}", flush=True)
    return {key: found[key] for key in ("results", "versions", "n-samples", "higher_is_better") if key in found}


def build_harness_model(engine: Engine, tokenizer: Tokenizer) -> Any:
    """The harness's view of the engine: an object of a class of the harness's own kind."""
    base: Any = require("lm_eval.api.model", needed_by=_NEEDED_BY).TemplateLM
    methods = {
        "eot_token_id": property(lambda _: tokenizer.eod),
        "tok_encode": lambda _, text, **__: tokenizer.tokenize(text),
        "_loglikelihood_tokens": lambda _, requests, **__: measure_continuations(engine, requests),
        "loglikelihood_rolling": lambda _, requests, **__: measure_whole(engine, tokenizer, requests),
        "generate_until": lambda _, requests, **__: [write_until(engine, tokenizer, *each.args) for each in requests],
    }
    return type("EngineModel", (base,), methods)()


def measure_continuations(engine: Engine, requests: Sequence[Any]) -> list[tuple[float, bool]]:
    """For each (texts, tokens before, tokens of a continuation) its log-probability, and whether greedy choice writes
    it; what does not fit is cut off at the beginning."""
    longest = engine.settings.max_sequence_length
    asked, counts = [], []
    for _, context, continuation in requests:
        text = [*context, *continuation][-longest:]
        counts.append(min(len(continuation), len(text) - 1))
        asked.append(Request(text, 0, Sampling(greedy=True), prompt_logprobs=1))
    found = []
    for request, count in zip(engine.run(asked), counts, strict=True):
        entries, tokens = request.read_logprobs[-count:], request.prompt[-count:]
        is_greedy = all(entry.top[0][0] == token for entry, token in zip(entries, tokens, strict=True))
        found.append((sum(entry.logprob for entry in entries), is_greedy))
    return found


def measure_whole(engine: Engine, tokenizer: Tokenizer, requests: Sequence[Any]) -> list[float]:
    """The log-probability of each text, expected from the token that ends texts, in windows without overlap."""
    longest, found = engine.settings.max_sequence_length, []
    for request in requests:
        tokens = [tokenizer.eod or 0, *tokenizer.tokenize(request.args[0])]
        parts = [tokens[first : first + longest] for first in range(0, len(tokens) - 1, longest - 1)]
        done = engine.run([Request(part, 0, Sampling(greedy=True), prompt_logprobs=0) for part in parts])
        found.append(sum(entry.logprob for each in done for entry in each.read_logprobs))
    return found


def write_until(engine: Engine, tokenizer: Tokenizer, context: str, options: dict[str, Any]) -> str:
    """The continuation of a text up to one of the task's ends."""
    stops = options.get("until") or []
    new_tokens = min(options.get("max_gen_toks", 256), engine.settings.max_sequence_length // 2)
    prompt = tokenizer.tokenize(context)[-(engine.settings.max_sequence_length - new_tokens) :]
    temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
    sampling = Sampling(greedy=temperature == 0, temperature=temperature or 1.0)
    ends = frozenset([] if tokenizer.eod is None else [tokenizer.eod])
    stream = TextStream(tokenizer, prompt, [stops] if isinstance(stops, str) else stops)

    def read(_: Request, new: list[int]) -> None:
        stream.add(new)

    request = engine.add(Request(prompt, new_tokens, sampling, ends, on_tokens=read))
    while request.ended_by is None:
        engine.step()
        if stream.is_stopped:
            engine.end(request, "stop")
    stream.finish()
    return stream.text
