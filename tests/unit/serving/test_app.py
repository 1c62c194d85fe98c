# SPDX-License-Identifier: Apache-2.0
"""What the server answers: OpenAI's interface, upstream's, errors that name the field, and nothing lost or leaked."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from megatron.serving import app
from megatron.serving.app import Application, Limits
from tests.support.served_model import LONGEST, ByteTokenizer, open_server
from tests.unit.serving.bad_bodies import draw_body

Server = tuple[TestClient, Application]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with open_server() as opened:
        yield opened


def complete(server: Server, **body: Any) -> dict[str, Any]:
    answer = server[0].post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def logprobs_of(server: Server, text: list[int]) -> torch.Tensor:
    engine = server[1].service.engine
    assert engine is not None
    with torch.no_grad():
        logits = engine.runner.model(torch.tensor([text]), torch.arange(len(text))[None], None)
    return logits[0].log_softmax(-1)


def assert_nothing_is_held(server: Server) -> None:
    engine = server[1].service.engine
    assert engine is not None
    for _ in range(200):
        if not engine.has_work and not server[1].service.num_jobs:
            break
        time.sleep(0.05)
    assert [pool.num_used for pool in engine.state.pools] == [0]
    assert server[1].service.num_jobs == 0


def test_the_four_forms_of_a_prompt(server: Server) -> None:
    ids = [list(b"abc"), list(b"xy")]
    one, ones = complete(server, prompt="abc", temperature=0), complete(server, prompt=ids[0], temperature=0)
    assert one["choices"] == ones["choices"] and one["object"] == "text_completion" and one["model"] == "tiny"
    for prompt in (["abc", "xy"], ids):
        found = complete(server, prompt=prompt, temperature=0, n=2, max_tokens=5)
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
        assert found["usage"]["prompt_tokens"] == 2 * 5
        assert found["choices"][0]["text"] == found["choices"][1]["text"]
    (choice,) = one["choices"]
    assert len(choice["generation_token_ids"]) == 16 and choice["finish_reason"] == "length"


def test_echo_gives_the_log_probabilities_of_the_prompt(server: Server) -> None:
    """What lm-evaluation-harness asks for."""
    text = list(b"hello world")
    expected = logprobs_of(server, text)
    for max_tokens in (0, 1):
        (choice,) = complete(server, prompt=text, echo=True, max_tokens=max_tokens, logprobs=2, temperature=0)[
            "choices"
        ]
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["tokens"][: len(text)] == list("hello world")
        assert found["text_offset"][: len(text)] == list(range(len(text)))
        assert len(found["tokens"]) == len(text) + max_tokens
        for place in range(1, len(text)):
            assert found["token_logprobs"][place] == pytest.approx(float(expected[place - 1, text[place]]), abs=1e-5)
        assert choice["text"].startswith("hello world")


def test_a_stream_is_the_whole_text(server: Server) -> None:
    for body in (
        {"prompt": "abc", "max_tokens": 12, "temperature": 0, "logprobs": 1},
        {"prompt": "abc", "max_tokens": 12, "temperature": 0.9, "seed": 5, "n": 2, "streaming_interval": 4},
    ):
        whole = complete(server, **body)
        request = body | {"stream": True, "stream_options": {"include_usage": True}}
        with server[0].stream("POST", "/v1/completions", json=request) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12 * body.get("n", 1)
        for choice in whole["choices"]:
            parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert parts[-1]["finish_reason"] == "length"
            if "logprobs" in body:
                found = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
                assert found == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)


def test_chat_reads_the_template(server: Server) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2}
    answer = server[0].post("/v1/chat/completions", json=body).json()
    (choice,) = answer["choices"]
    plain = complete(server, prompt="<system>be brief\n<user>hi\n<bot>", temperature=0, max_tokens=9)
    assert choice["message"] == {"role": "assistant", "content": plain["choices"][0]["text"]}
    assert len(choice["logprobs"]["content"]) == 9 and len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    with server[0].stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as streamed:
        lines = [line.removeprefix("data: ") for line in streamed.iter_lines() if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]


LOOPS = "{% set r = range(9999) %}" + "{% for a in r %}" * 3 + "{% endfor %}" * 3


def test_a_template_has_bounds(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that would loop for years ends, and so its thread; what it writes is not longer than memory allows."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 1000}], "max_tokens": 1}
    for template, words in (
        (LOOPS, "takes longer than 0.2 s"),
        ("{{ 'ab' * 10**9 }}", "2 characters 1000000000 times are too many"),
        ("{% for a in range(90000) %}{{ messages[0].content }}{% endfor %}", "more than 33554432 characters"),
        ("{{ messages.append(3) }}", "SecurityError"),
    ):
        monkeypatch.setattr(ByteTokenizer, "chat_template", template)
        monkeypatch.setattr(app, "_TEMPLATE_SECONDS", 0.2 if template == LOOPS else 60.0)
        answer = server[0].post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages") and words in error["message"]
    monkeypatch.setattr(ByteTokenizer, "chat_template", "{{ template }}{{ 'ab' * 2 }}")
    names = {"chat_template_kwargs": {"template": "a name"}}
    assert server[0].post("/v1/chat/completions", json=body | names).json()["usage"]["prompt_tokens"] == 10


def test_stop_words_end_a_text_before_them(server: Server) -> None:
    free = complete(server, prompt="abc", temperature=0, max_tokens=24)["choices"][0]
    place = next(i for i in range(3, 20) if free["text"][i : i + 2] not in free["text"][:i])
    stop = free["text"][place : place + 2]
    for body in ({"stop": stop}, {"stop": ["\x07never", stop]}):
        found = complete(server, prompt="abc", temperature=0, max_tokens=24, **body)["choices"][0]
        assert (found["text"], found["finish_reason"]) == (free["text"][:place], "stop")
    token = free["generation_token_ids"][4]
    ended = complete(
        server, prompt="abc", temperature=0, max_tokens=24, stop_token_ids=[token], best_of=1, length_penalty=1.0
    )["choices"][0]  # the last two change nothing
    assert ended["generation_token_ids"] == free["generation_token_ids"][: free["generation_token_ids"].index(token)]
    assert ended["finish_reason"] == "stop"


def test_upstreams_interface(server: Server) -> None:
    answer = server[0].put(
        "/api", json={"prompts": ["abc", "x"], "tokens_to_generate": 4, "top_k": 1, "logprobs": True}
    )
    found = answer.json()
    assert [len(tokens) for tokens in found["tokens"]] == [7, 5] and found["text"][0].startswith("abc")
    assert [len(values) for values in found["logprobs"]] == [6, 4] and found["segments"][1][0] == "x"
    for body, word in (({"prompts": []}, "prompts"), ({"prompts": ["a"], "beam_width": 2}, "beam_width"),
                       ({"prompts": ["a"], "top_k": 2, "top_p": 0.5}, "top_k")):  # fmt: skip
        refused = server[0].put("/api", json=body)
        assert refused.status_code == 400 and word in refused.json()["message"]


def test_models_tokens_and_metrics(server: Server) -> None:
    client, _ = server
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == LONGEST
    assert client.get("/v1/models/tiny").json()["id"] == "tiny" and client.get("/v1/models/x").status_code == 404
    tokens = client.post("/tokenize", json={"prompt": "é"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "é"}
    text = client.get("/metrics").text
    assert "# TYPE megatron:time_to_first_token_seconds histogram" in text
    assert "megatron:generation_tokens_total" in text and 'le="+Inf"' in text
    assert "Try the model" in client.get("/").text
    assert client.get("/health").json()["ready"] and client.get("/live").status_code == 200


BAD = [
    ({}, "prompt", 400),
    ({"prompt": 3}, "prompt", 400),
    ({"prompt": []}, "prompt", 400),
    ({"prompt": ""}, "prompt", 400),
    ({"prompt": [1, "a"]}, "prompt", 400),
    ({"prompt": [1, 256]}, "prompt", 400),
    ({"prompt": [[1], [-1]]}, "prompt[1]", 400),
    ({"prompt": "a" * LONGEST}, "prompt", 400),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", 400),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", 400),
    ({"prompt": "a", "max_tokens": True}, "max_tokens", 400),
    ({"prompt": "a", "temperature": "hot"}, "temperature", 400),
    ({"prompt": "a", "temperature": -0.1}, "temperature", 400),
    ({"prompt": "a", "stop": ["x"] * 10000}, "stop", 400),
    ({"prompt": "a", "logprobs": 10**30}, "logprobs", 400),
    ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", 400),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", 400),
    ({"prompt": "a", "suffix": "end"}, "suffix", 400),
    ({"prompt": "a", "guided_regex": "a+"}, "guided_regex", 400),
    ({"prompt": "a", "best_of": 2}, "best_of", 400),
    ({"prompt": "a", "skip_special_tokens": True}, "skip_special_tokens", 400),
    ({"prompt": "a", "model": "other"}, "model", 404),
    ({"prompt": "a\ud800"}, "prompt", 400),
    ({"prompt": ["a"] * 65, "n": 2}, "n", 400),
]


@pytest.mark.parametrize(("body", "param", "status"), BAD)
def test_a_wrong_field_is_named(server: Server, body: dict[str, Any], param: str, status: int) -> None:
    answer = server[0].post("/v1/completions", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert "stop" not in body or "at most 64 items" in error["message"]
    assert error["message"] and error["type"]


def test_what_is_no_body(server: Server) -> None:
    post = server[0].post
    for content, words in ((b"{", "not JSON"), (b"\xff", "not UTF-8"), (b"[" * 100_000, "nested"), (b"[1]", "object"),
                           (b'{"prompt": "a", "temperature": NaN}', "temperature"),
                           (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "")):  # fmt: skip
        answer = post("/v1/completions", content=content)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    assert post("/v1/completions", content=b"x" * (9 * 2**20)).status_code == 413
    assert post("/v1/completions", content=b"{}", headers={"Content-Type": "text/xml"}).status_code == 415
    assert server[0].get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert server[0].get("/v1/completions").status_code == 405
    harmless = complete(
        server,
        prompt="a",
        user="me",
        response_format={"type": "text"},
        an_extension_of_somebody={"a": [1]},
        max_tokens=1,
    )
    assert harmless["choices"][0]["finish_reason"]


def test_of_a_prompt_that_is_too_long_by_far_only_the_beginning_is_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server[1].served is not None
    read: list[int] = []
    tokenize = ByteTokenizer.tokenize
    monkeypatch.setattr(ByteTokenizer, "tokenize", lambda self, text: read.append(len(text)) or tokenize(self, text))
    for path, body in (
        ("v1/completions", {"prompt": "a" * 7_000_000}),
        ("v1/completions", {"prompt": ["b", "a" * 7_000_000]}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 7_000_000}]}),
    ):
        answer = server[0].post(f"/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, next(iter(body))), error
        assert error["message"].startswith("This model's maximum context length was exceeded")
    answer = server[0].put("/api", json={"prompts": ["a" * 7_000_000], "tokens_to_generate": 1})
    assert answer.status_code == 400 and "maximum context length" in answer.json()["message"]
    assert max(read) <= 64 * LONGEST and len(read) == 5
    # A long text of few tokens is whole.
    monkeypatch.setattr(ByteTokenizer, "tokenize", lambda self, text: tokenize(self, text.rstrip()))
    assert server[0].post("/v1/completions", json={"prompt": "a" + " " * 70_000, "max_tokens": 1}).status_code == 200


def test_other_sites_and_names_are_refused(server: Server) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert server[0].get("/v1/models", headers=headers).status_code == 403
    assert server[0].get("/v1/models", headers={"Origin": "http://testserver"}).status_code == 200


def test_keys_and_full_queues() -> None:
    with open_server(Limits(api_keys=("secret", "other"))) as (client, application):
        assert client.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Basic secret"}):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"Authorization": "Bearer other"}).status_code == 200
        application.service.max_waiting = -64
        body = {"prompt": "a", "max_tokens": 1}
        answer = client.post("/v1/completions", json=body, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        application.service.drain(5)
        assert client.get("/health").status_code == 503 and client.get("/live").status_code == 200


def test_a_client_that_goes_away_frees_its_pages(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 150, "stream": True, "ignore_eos": True}
    with server[0].stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    assert_nothing_is_held(server)


def test_200_random_bodies_harm_nobody(server: Server) -> None:
    """Each gets an answer: its text, or a sentence with a status of 4xx. Those before and after get theirs."""
    expected = complete(server, prompt="abc", temperature=0)["choices"]
    statuses = set()
    for seed in range(200):
        address, content = draw_body(random.Random(seed))
        answer = server[0].post(address, content=content)
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, (seed, answer.text)
        assert answer.status_code == 200 or answer.json()["error"]["message"], seed
        statuses.add(answer.status_code)
    assert {200, 400} <= statuses
    assert complete(server, prompt="abc", temperature=0)["choices"] == expected
    assert_nothing_is_held(server)


def test_sampled_texts_follow_their_seed(server: Server) -> None:
    texts = [complete(server, prompt="abc", seed=seed)["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert math.isfinite(float(complete(server, prompt="q", logprobs=0)["choices"][0]["logprobs"]["token_logprobs"][0]))
    assert ByteTokenizer().detokenize([0xC3]) == "\ufffd"
