# SPDX-License-Identifier: Apache-2.0
"""Upstream's names of generation, imported and called as programs do."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from megatron.core.errors import ConfigError
from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState
from megatron.core.inference.generate import generate
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.recipes.gpt import build_gpt_model
from tests.support.gpt_models import read_config
from tests.support.served_model import FLAGS, LONGEST, ByteTokenizer


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return build_gpt_model(read_config(FLAGS), 256).eval()


def write(model: GPTModel, prompt: str, new: int) -> list[int]:
    """The likeliest tokens by our own interface."""
    sampling = Sampling(greedy=True)
    return generate(model, [list(prompt.encode())], max_new_tokens=new, sampling=sampling, eod=0)[0].tokens


def test_a_static_engine_continues_prompts(model: GPTModel) -> None:
    wrapped = GPTInferenceWrapper(model, StaticInferenceContext(4, LONGEST))
    controller = TextGenerationController(inference_wrapped_model=wrapped, tokenizer=ByteTokenizer())
    engine = StaticInferenceEngine(text_generation_controller=controller, max_batch_size=2, random_seed=3)
    params = SamplingParams(top_k=1, num_tokens_to_generate=6, return_log_probs=True, top_n_logprobs=2)
    found = engine.generate(prompts=["one", "another", "third"], sampling_params=params)
    for request, prompt in zip(found, ("one", "another", "third"), strict=True):
        assert request.generated_tokens == write(model, prompt, 6) and request.prompt == prompt
        assert request.generated_text == ByteTokenizer().detokenize(request.generated_tokens)
        assert request.generated_log_probs is not None and len(request.generated_log_probs) == request.generated_length
        assert request.prompt_log_probs is not None and len(request.prompt_log_probs) == len(prompt) - 1
    drawn = SamplingParams(temperature=2.0, num_tokens_to_generate=6)
    texts = [[each.generated_tokens for each in engine.generate(["one", "one"], drawn)] for _ in range(2)]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1], "seeds count up from the engine's"


def test_a_dynamic_engine_takes_requests_at_any_time(model: GPTModel) -> None:
    context = DynamicInferenceContext(model.config, InferenceConfig(max_sequence_length=LONGEST, max_tokens=8))
    engine = DynamicInferenceEngine(
        TextGenerationController(GPTInferenceWrapper(model, context), ByteTokenizer()), context
    )
    params = SamplingParams.deserialize(SamplingParams(top_k=1, num_tokens_to_generate=5).serialize())
    wanted = write(model, "a longer prompt", 5)
    stopping = SamplingParams(top_k=1, num_tokens_to_generate=5, stop_words=[bytes(wanted[:2]).decode("ascii")])

    async def ask() -> None:
        first = engine.add_request(7, "a longer prompt", params)
        steps = [await engine.async_step()]
        assert steps[0]["active_request_ids"] == [7] and not steps[0]["finished_request_records"]
        second = engine.add_request(8, list(b"two"), params)
        while engine.has_unfinished_requests():
            steps.append(await engine.async_step())
        finished = [record.merge().request_id for step in steps for record in step["finished_request_records"]]
        assert sorted(finished) == [7, 8] and steps[-1]["active_request_ids"] == []
        assert (await first).merge().generated_tokens == wanted
        assert (await second).merge().generated_tokens == write(model, "two", 5)

    asyncio.run(ask())
    assert engine.generate(["a longer prompt"], stopping)[0].merge().generated_tokens == wanted[:2]
    kept = dataclasses.replace(stopping, detokenize_stop_sequence=True, return_segments=True, top_n_logprobs=2)
    plain, whole = (engine.generate(["a longer prompt"], params)[0].merge() for params in (stopping, kept))
    assert (plain.generated_text, whole.generated_text) == ("", bytes(wanted[:2]).decode())
    assert whole.segments == [*"a longer prompt", *map(chr, wanted[:2])]
    assert whole.prompt_top_n_logprobs is not None and len(whole.prompt_top_n_logprobs) == 14
    assert max(map(len, whole.prompt_top_n_logprobs)) == 2
    # A phase of training takes the memory, in the middle of a text.
    assert engine.state is EngineState.RUNNING and context.is_dynamic_batching()
    future = engine.add_request(11, "a longer prompt", params)
    for _ in range(4):
        engine.step_modern()
    engine.suspend()
    assert engine.engine.state.token_bytes == 0 and engine.state is EngineState.SUSPENDED
    with pytest.raises(ConfigError, match="the engine is suspended"):
        engine.step_modern()
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert future.result().merge().generated_tokens == wanted and engine.state is EngineState.RESUMED
    for fields, words in (
        ({"streaming": True}, "SamplingParams.streaming is not done"),
        ({"do_kv_handoff": True}, "SamplingParams.do_kv_handoff is not done"),
        ({"return_prompt_top_n_logprobs": True, "skip_prompt_log_probs": True}, "are opposites"),
        ({"add_BOS": True}, "the tokenizer has no beginning token"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine.add_request(9, "a", SamplingParams(**fields))
    mode = KVCacheManagementMode("persist")
    small = InferenceConfig(LONGEST, buffer_size_gb=1e-6, kv_cache_management_mode=mode, block_size_tokens=256)
    cramped = DynamicInferenceEngine(engine.controller, DynamicInferenceContext(model.config, small))
    assert cramped.engine.capacity_tokens == LONGEST < engine.engine.capacity_tokens
    for limits in ({"logprobs_mode": "processed_logprobs"}, {"logging_step_interval": 5}):
        with pytest.raises(ConfigError, match="InferenceConfig.log"):
            InferenceConfig(**limits)
    with pytest.raises(ConfigError, match="the prompt has 200 tokens"):
        engine.add_request(9, [1] * 200, params)
    with pytest.raises(ConfigError, match="top_k 4 and top_p"):
        engine.add_request(9, [1], SamplingParams(top_k=4, top_p=0.5))
