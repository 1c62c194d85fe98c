# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness with the engine as their model: what `evaluate --tasks` and --eval-tasks run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.errors import ConfigError
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.text_stream import TextStream
from megatron.core.optional_deps import require
from megatron.core.tokenizers.base import Tokenizer


class HarnessTasks:
    """Some tasks, by name."""

    def __init__(
        self, names: str, path: str | Path | None, *, limit: int | None = None, flag: str, path_flag: str
    ) -> None:
        """names: with commas between them. path: of further tasks. limit: documents of each task. The flags are those
        that the user gave. Raises ConfigError for tasks that the harness does not have, and without the harness."""
        self.names, self.limit, self.flag = [name.strip() for name in names.split(",") if name.strip()], limit, flag
        # The kind of model first, which fails where only a part of the harness is installed.
        self._base: Any = require("lm_eval.api.model", needed_by=flag).TemplateLM
        if path is not None and not Path(path).is_dir():
            raise ConfigError(f"{path_flag} {path} is no directory; give one with YAML files of tasks")
        self._manager = require("lm_eval.tasks", needed_by=flag).TaskManager(
            include_path=None if path is None else str(path)
        )
        unknown = [name for name in self.names if not self._manager.match_tasks([name])]
        if unknown or not self.names:
            raise ConfigError(
                f"{flag} {', '.join(unknown) or repr(names)}: lm-evaluation-harness has no such task; see {path_flag}"
            )

    def run(self, engine: Engine, tokenizer: Tokenizer, num_fewshot: int | None = None) -> dict[str, Any]:
        """Results in the harness's form. The generators of random numbers are afterwards as before."""
        states = random.getstate(), np.random.get_state()
        try:
            found = require("lm_eval", needed_by=self.flag).simple_evaluate(
                model=self._build_model(engine, tokenizer), tasks=self.names, task_manager=self._manager,
                limit=self.limit, num_fewshot=num_fewshot, log_samples=False, bootstrap_iters=0, torch_random_seed=None,
            )  # fmt: skip
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        return {key: found[key] for key in ("results", "versions", "n-samples", "higher_is_better") if key in found}

    def _build_model(self, engine: Engine, tokenizer: Tokenizer) -> Any:
        """The harness's view of the engine: an object of a subclass of the harness's class."""
        methods = {
            "eot_token_id": property(lambda _: tokenizer.eod),
            "tok_encode": lambda _, text, **__: tokenizer.tokenize(text),
            "_loglikelihood_tokens": lambda _, requests, **__: measure_continuations(engine, requests),
            "loglikelihood_rolling": lambda _, requests, **__: measure_whole(engine, tokenizer, requests),
            "generate_until": lambda _, requests, **__: write_all_until(engine, tokenizer, requests),
        }
        return type("EngineModel", (self._base,), methods)()


def list_scores(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The harness's results as one number for each task and measure, such as `arc_easy acc`; without standard
    errors."""
    return {
        f"{task} {name.removesuffix(',none')}": float(value)
        for task, row in results.items()
        for name, value in row.items()
        if isinstance(value, int | float) and "," in name and "_stderr" not in name
    }


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


def write_all_until(engine: Engine, tokenizer: Tokenizer, requests: Sequence[Any]) -> list[str]:
    """Continuations of texts, each up to one of its task's ends; all of them are written together."""
    streams = [_begin(engine, tokenizer, *each.args) for each in requests]
    while engine.has_work:
        engine.step()
    for stream in streams:
        stream.finish()
    return [stream.text for stream in streams]


def _begin(engine: Engine, tokenizer: Tokenizer, context: str, options: dict[str, Any]) -> TextStream:
    """Queue one text; its stream ends the request where the task's end comes."""
    stops = options.get("until") or []
    new_tokens = min(options.get("max_gen_toks", 256), engine.settings.max_sequence_length // 2)
    prompt = tokenizer.tokenize(context)[-(engine.settings.max_sequence_length - new_tokens) :]
    temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
    sampling = Sampling(greedy=temperature == 0, temperature=temperature or 1.0)
    ends = frozenset([] if tokenizer.eod is None else [tokenizer.eod])
    stream = TextStream(tokenizer, prompt, [stops] if isinstance(stops, str) else stops)

    def read(request: Request, new: list[int]) -> None:
        stream.add(new)
        if stream.is_stopped:
            engine.end(request, "stop")

    engine.add(Request(prompt, new_tokens, sampling, ends, on_tokens=read))
    return stream
