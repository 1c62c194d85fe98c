# SPDX-License-Identifier: Apache-2.0
"""Upstream's names of generation, as programs call them, in front of the engine of megatron/core/inference.

controller = TextGenerationController(GPTInferenceWrapper(model, StaticInferenceContext(8, 2048)), tokenizer)
StaticInferenceEngine(controller).generate(prompts=["one"], sampling_params=SamplingParams(top_k=1))
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.errors import ConfigError
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.model_runner import ModelRunner
from megatron.core.inference.request import Request, TokenLogprobs
from megatron.core.inference.sampling import Sampling
from megatron.core.sequences.state import PAGE_TOKENS
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
    return_segments: bool = False
    """The text of each token, prompt included, as `segments`."""
    return_prompt_top_n_logprobs: bool = False
    """The prompt's likeliest tokens, too; they are there unless skip_prompt_log_probs leaves them out."""
    add_BOS: bool = False
    """The tokenizer's beginning token comes before a prompt that is text."""
    detokenize_stop_sequence: bool = False
    """The generated text keeps the stop word that ended it; the tokens keep it in any case."""
    return_prompt_tokens: bool = False
    """Without effect: the prompt's tokens are always there."""
    streaming: bool = False
    streaming_interval: int = 1
    do_kv_handoff: bool = False

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
        if self.streaming or self.do_kv_handoff:
            name = "streaming" if self.streaming else "do_kv_handoff"
            raise ConfigError(
                f"SamplingParams.{name} is not done by this engine; leave it out: tokens as they come are given by "
                "Request.on_tokens of megatron.core.inference.engine.Engine and by `python -m megatron serve`"
            )
        if self.return_prompt_top_n_logprobs and self.skip_prompt_log_probs:
            raise ConfigError("return_prompt_top_n_logprobs and skip_prompt_log_probs are opposites; give one of them")
        greedy = self.top_k == 1 or self.temperature == 0
        if self.top_k > 0 and self.top_p > 0:
            raise ConfigError(f"SamplingParams has top_k {self.top_k} and top_p {self.top_p}; give one of them")
        return Sampling(greedy, self.temperature or 1.0, self.top_k, self.top_p or 1.0, seed=seed)


@dataclass
class InferenceRequest:
    """A prompt and what was written after it."""

    request_id: int
    prompt: str | None
    prompt_tokens: list[int]
    sampling_params: SamplingParams
    generated_text: str | None = None
    generated_tokens: list[int] = field(default_factory=list)
    prompt_log_probs: list[float] | None = None
    generated_log_probs: list[float] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    segments: list[str] | None = None

    @property
    def generated_length(self) -> int:
        """Number of new tokens."""
        return len(self.generated_tokens)


class DynamicInferenceRequest(InferenceRequest):
    """The dynamic engine's, which has the same fields."""


@dataclass
class DynamicInferenceRequestRecord:
    """A finished request; upstream's has one entry for each time that it was restarted, ours has one."""

    requests: list[DynamicInferenceRequest]

    def merge(self) -> DynamicInferenceRequest:
        """The request."""
        return self.requests[-1]


class EngineState(enum.Enum):
    """Phases of a DynamicInferenceEngine."""

    RUNNING = "running"
    PAUSED = "paused"
    RESUMED = "resumed"
    SUSPENDED = "suspended"
    STOPPED = "stopped"


class KVCacheManagementMode(enum.Enum):
    """Upstream's choices of what becomes of the cache while an engine is suspended."""

    PERSIST = "persist"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class MambaInferenceStateConfig:
    """Shapes of recurrent states, which this engine takes from what layers write."""

    @staticmethod
    def from_model(model: Any) -> None:
        """None: nothing is to be said about any model."""


@dataclass
class InferenceConfig:
    """Limits of a dynamic context. What says how upstream's kernels and memory work changes no text, and is taken
    without effect; raises ConfigError for what would change something else."""

    max_sequence_length: int = 2560
    max_requests: int | None = None
    """At work together; 64 when None."""
    max_tokens: int | None = None
    """Of a pass, so that long prompts are read in parts; any number when None."""
    enable_prefix_caching: bool = True
    buffer_size_gb: float | None = None
    """Memory of keys and values on the rank that needs the most; as much as max_requests texts need when None."""
    logprobs_mode: str = "raw_logprobs"
    logging_step_interval: int = 0
    block_size_tokens: int = 256
    enable_chunked_prefill: bool = True
    kv_cache_management_mode: KVCacheManagementMode | str = KVCacheManagementMode.RECOMPUTE
    mamba_inference_state_config: Any = None
    mamba_memory_ratio: float | None = None
    materialize_only_last_token_logits: bool = True
    num_cuda_graphs: int | None = None

    def __post_init__(self) -> None:
        if self.logprobs_mode != "raw_logprobs":
            raise ConfigError(f"InferenceConfig.logprobs_mode {self.logprobs_mode!r}: there is 'raw_logprobs' only")
        if self.logging_step_interval:
            raise ConfigError(
                f"InferenceConfig.logging_step_interval {self.logging_step_interval}: nothing is logged; leave it out "
                "and read engine.engine.counters"
            )


class BaseInferenceContext:
    """Base of both contexts, which hold the limits of an engine."""

    def __init__(self, inference_config: InferenceConfig) -> None:
        self.inference_config = inference_config

    def is_static_batching(self) -> bool:
        """Return True for a context of a static engine."""
        return isinstance(self, StaticInferenceContext)

    def is_dynamic_batching(self) -> bool:
        """Return True for a context of a dynamic engine."""
        return not self.is_static_batching()


class StaticInferenceContext(BaseInferenceContext):
    """Limits of a static engine."""

    @take_arguments("max_batch_size max_sequence_length use_flashinfer_fused_rope=False", "angles are torch's")
    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        super().__init__(InferenceConfig(max_sequence_length, max_batch_size))
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length


class DynamicInferenceContext(BaseInferenceContext):
    """Limits of a dynamic engine, which makes its memory itself."""

    def __init__(self, model_config: Any, inference_config: InferenceConfig) -> None:
        """model_config: the model's, of which nothing more is needed."""
        super().__init__(inference_config)
        self.config = model_config
        self.max_sequence_length = inference_config.max_sequence_length


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
        limits, model = context.inference_config, controller.inference_wrapped_model.model
        capacity = None
        if limits.buffer_size_gb is not None:
            room = int(limits.buffer_size_gb * 2**30 / max(1, ModelRunner(model).measure_token_bytes()))
            capacity = min(room, (limits.max_requests or 64) * (limits.max_sequence_length + PAGE_TOKENS))
        settings = EngineSettings(
            limits.max_sequence_length, capacity, limits.max_requests or 64, limits.max_tokens,
            reuses_prefixes=limits.enable_prefix_caching,
        )  # fmt: skip
        self.controller, self.state = controller, EngineState.RUNNING
        self.tokenizer = controller.tokenizer
        self.engine = Engine(model, settings, vocab_size=self.tokenizer.vocab_size)
        self._open: dict[Request, tuple[DynamicInferenceRequest, asyncio.Future[DynamicInferenceRequestRecord]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def has_unfinished_requests(self) -> bool:
        """Return True where a request is not finished."""
        return self.engine.has_work

    def suspend(self) -> None:
        """Give back the memory of keys and values, for a phase of training."""
        self.engine.free_memory()
        self.state = EngineState.SUSPENDED

    def resume(self) -> None:
        """Go on, with the weights as they are now: what unfinished requests have written is read again."""
        self.state = EngineState.RESUMED

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
        if params.add_BOS and text is not None:
            if self.tokenizer.bos is None:
                raise ConfigError("SamplingParams.add_BOS: the tokenizer has no beginning token; leave it out")
            ids = [self.tokenizer.bos, *ids]
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
        if self.state is EngineState.SUSPENDED:
            raise ConfigError("the engine is suspended; call resume() before step_modern()")
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
        params, written = asked.sampling_params, request.new_tokens
        if request.ended_by == "stop" and not params.detokenize_stop_sequence:
            stops = (self.tokenizer.tokenize(word) for word in params.stop_words or ())
            written = written[: -max(len(stop) for stop in stops if stop and written[-len(stop) :] == stop)]
        asked.generated_text = self.tokenizer.detokenize(written)
        if params.return_segments:
            asked.segments = [self.tokenizer.detokenize([token]) for token in request.text]
        if request.logprobs is not None:
            asked.generated_log_probs = [each.logprob for each in request.token_logprobs]
            asked.generated_top_n_logprobs = self._name(request.token_logprobs)
        if request.prompt_logprobs is not None:
            asked.prompt_log_probs = [each.logprob for each in request.read_logprobs]
            asked.prompt_top_n_logprobs = self._name(request.read_logprobs)
        record = DynamicInferenceRequestRecord([asked])
        if not future.done():
            future.set_result(record)
        return record

    def _name(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, float]]:
        """The likeliest tokens of each place, by their texts."""
        return [{self.tokenizer.detokenize([token]): value for token, value in each.top} for each in entries]

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
