# SPDX-License-Identifier: Apache-2.0
"""Upstream's names of generation, as programs call them, in front of the engine of megatron/core/inference.

controller = TextGenerationController(GPTInferenceWrapper(model, StaticInferenceContext(8, 2048)), tokenizer)
StaticInferenceEngine(controller).generate(prompts=["one"], sampling_params=SamplingParams(top_k=1))
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.taken_arguments import take_arguments
from megatron.core.tokenizers.base import Tokenizer


@dataclass
class SamplingParams:
    """Choices with which a text is continued, with upstream's fields and defaults."""

    temperature: float = 1.0
    """0: the likeliest token, as top_k 1."""
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    num_tokens_to_generate: int | None = None
    """New tokens; None: as many as fit."""
    num_tokens_total: int | None = None
    """Tokens of prompt and answer together, in place of num_tokens_to_generate."""
    termination_id: int | None = None
    """Token that ends a text; the tokenizer's when None, none when -1."""
    top_n_logprobs: int = 0
    stop_words: list[str] | None = None

    def add_attributes(self, attributes: dict[str, Any]) -> None:
        """Set further attributes."""
        for name, value in attributes.items():
            setattr(self, name, value)

    def serialize(self) -> dict[str, Any]:
        """All fields as a mapping."""
        return dict(vars(self))

    @classmethod
    def deserialize(cls, fields: dict[str, Any]) -> SamplingParams:
        """The inverse of `serialize`."""
        params = cls()
        params.add_attributes(fields)
        return params

    def make_sampling(self, seed: int) -> Sampling:
        """The engine's settings. Raises ConfigError for values out of range."""
        greedy = self.top_k == 1 or self.temperature == 0
        if self.top_k > 0 and self.top_p > 0:
            raise ConfigError(f"SamplingParams has top_k {self.top_k} and top_p {self.top_p}; give one of them")
        return Sampling(greedy, self.temperature or 1.0, self.top_k, self.top_p or 1.0, seed=seed)


@dataclass
class InferenceRequest:
    """A prompt and what was written behind it."""

    request_id: int
    prompt: str | None
    prompt_tokens: list[int]
    sampling_params: SamplingParams
    generated_text: str | None = None
    generated_tokens: list[int] = field(default_factory=list)
    prompt_log_probs: list[float] | None = None
    generated_log_probs: list[float] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None

    @property
    def generated_length(self) -> int:
        """Number of new tokens."""
        return len(self.generated_tokens)


class DynamicInferenceRequest(InferenceRequest):
    """The dynamic engine's, which has the same fields."""


@dataclass
class DynamicInferenceRequestRecord:
    """A finished request; upstream's has one entry for each time that it was begun anew, ours has one."""

    requests: list[DynamicInferenceRequest]

    def merge(self) -> DynamicInferenceRequest:
        """The request."""
        return self.requests[-1]


@dataclass
class InferenceConfig:
    """Limits of a dynamic context, those of upstream's fields that this engine has a use for."""

    max_sequence_length: int = 2560
    max_requests: int | None = None
    """At work together; 64 when None."""
    max_tokens: int | None = None
    """Of a pass; any number when None."""
    enable_prefix_caching: bool = True


class StaticInferenceContext:
    """Limits of a static engine."""

    @take_arguments("max_batch_size max_sequence_length use_flashinfer_fused_rope=False", "angles are torch's")
    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length


class DynamicInferenceContext:
    """Limits of a dynamic engine, which makes its memory itself."""

    def __init__(self, model_config: Any, inference_config: InferenceConfig) -> None:
        """model_config: the model's, of which nothing more is needed."""
        self.config, self.inference_config = model_config, inference_config


@dataclass
class GPTInferenceWrapper:
    """A model and the limits of its engine."""

    model: nn.Module
    inference_context: StaticInferenceContext | DynamicInferenceContext


@dataclass
class TextGenerationController:
    """A wrapped model and its tokenizer."""

    inference_wrapped_model: GPTInferenceWrapper
    tokenizer: Tokenizer


class DynamicInferenceEngine:
    """Continues requests that may come at any time; `step_modern` makes one pass for all of them."""

    def __init__(self, controller: TextGenerationController, context: DynamicInferenceContext) -> None:
        limits = context.inference_config
        settings = EngineSettings(
            limits.max_sequence_length, max_requests=limits.max_requests or 64, max_step_tokens=limits.max_tokens,
            reuses_prefixes=limits.enable_prefix_caching,
        )  # fmt: skip
        self.controller = controller
        self.tokenizer = controller.tokenizer
        self.engine = Engine(controller.inference_wrapped_model.model, settings, vocab_size=self.tokenizer.vocab_size)
        self._open: dict[Request, tuple[DynamicInferenceRequest, asyncio.Future[DynamicInferenceRequestRecord]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def has_unfinished_requests(self) -> bool:
        """Return True where a request is not finished."""
        return self.engine.has_work

    def add_request(
        self,
        request_id: int,
        prompt: str | Sequence[int] | Tensor,
        sampling_params: SamplingParams | None = None,
    ) -> asyncio.Future[DynamicInferenceRequestRecord]:
        """Queue a prompt, as a text or ids; the future has the record when it is finished. Raises ConfigError for a
        prompt that does not fit."""
        params = sampling_params or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.tokenize(prompt) if isinstance(prompt, str) else torch.as_tensor(prompt).tolist()
        request = self.engine.add(self._make_request(request_id, ids, params))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = self._loop = self._loop or asyncio.new_event_loop()
        future: asyncio.Future[DynamicInferenceRequestRecord] = loop.create_future()
        self._open[request] = DynamicInferenceRequest(request_id, text, ids, params), future
        return future

    def _make_request(self, request_id: int, ids: list[int], params: SamplingParams) -> Request:
        end = self.tokenizer.eod if params.termination_id is None else params.termination_id
        new = params.num_tokens_to_generate
        if params.num_tokens_total is not None:
            new = max(0, params.num_tokens_total - len(ids))
        request = Request(
            ids, self.engine.settings.max_sequence_length if new is None else new,
            params.make_sampling(seed=request_id), frozenset([] if end is None or end < 0 else [end]),
        )  # fmt: skip
        if params.return_log_probs or params.top_n_logprobs:
            request.logprobs = params.top_n_logprobs
            request.prompt_logprobs = None if params.skip_prompt_log_probs else params.top_n_logprobs
        stops = [self.tokenizer.tokenize(word) for word in params.stop_words or ()]
        if stops:
            request.on_tokens = lambda which, _: self._stop(which, stops)
        return request

    def _stop(self, request: Request, stops: list[list[int]]) -> None:
        new = request.new_tokens
        if any(new[-len(stop) :] == stop for stop in stops if stop):
            self.engine.end(request, "stop")

    def step_modern(self) -> dict[str, Any]:
        """Make one pass: {"active_request_ids", "finished_request_records", "step_time" in seconds}."""
        start = time.perf_counter()
        records = [self._finish(request) for request in self.engine.step()]
        active = [asked.request_id for asked, _ in self._open.values()]
        return {
            "active_request_ids": active,
            "finished_request_records": records,
            "step_time": time.perf_counter() - start,
        }

    async def async_step(self) -> dict[str, Any]:
        """`step_modern`, after which others of the loop have their turn."""
        found = self.step_modern()
        await asyncio.sleep(0)
        return found

    def _finish(self, request: Request) -> DynamicInferenceRequestRecord:
        asked, future = self._open.pop(request)
        asked.generated_tokens = request.new_tokens
        asked.generated_text = self.tokenizer.detokenize(request.new_tokens)
        if request.logprobs is not None:
            asked.generated_log_probs = [each.logprob for each in request.token_logprobs]
            asked.generated_top_n_logprobs = [
                {self.tokenizer.detokenize([token]): value for token, value in each.top}
                for each in request.token_logprobs
            ]
        if request.prompt_logprobs is not None:
            asked.prompt_log_probs = [each.logprob for each in request.read_logprobs]
        record = DynamicInferenceRequestRecord([asked])
        if not future.done():
            future.set_result(record)
        return record

    def generate(
        self, prompts: Sequence[str], sampling_params: SamplingParams | None = None
    ) -> list[DynamicInferenceRequestRecord]:
        """Continue all prompts, in their order."""
        futures = [self.add_request(number, prompt, sampling_params) for number, prompt in enumerate(prompts)]
        while self.has_unfinished_requests():
            self.step_modern()
        return [future.result() for future in futures]


class StaticInferenceEngine:
    """Continues a list of prompts."""

    @take_arguments(
        "text_generation_controller max_batch_size random_seed legacy=... buffer_size_gb=40.0",
        "its cache has as many pages as max_batch_size texts fill",
    )
    def __init__(
        self,
        text_generation_controller: TextGenerationController,
        max_batch_size: int | None = None,
        random_seed: int = 0,
    ) -> None:
        """max_batch_size: at work together; the context's when None."""
        self.controller, self.random_seed = text_generation_controller, random_seed
        limits = text_generation_controller.inference_wrapped_model.inference_context
        if not isinstance(limits, StaticInferenceContext):
            raise ConfigError("StaticInferenceEngine needs a model wrapped with StaticInferenceContext")
        config = InferenceConfig(limits.max_sequence_length, max_batch_size or limits.max_batch_size)
        self.dynamic = DynamicInferenceEngine(text_generation_controller, DynamicInferenceContext(None, config))

    def generate(self, prompts: Sequence[str], sampling_params: SamplingParams | None = None) -> list[InferenceRequest]:
        """Continue all prompts, in their order."""
        params = dataclasses.replace(sampling_params or SamplingParams())
        first = self.random_seed
        futures = [self.dynamic.add_request(first + row, prompt, params) for row, prompt in enumerate(prompts)]
        while self.dynamic.has_unfinished_requests():
            self.dynamic.step_modern()
        return [future.result().merge() for future in futures]
