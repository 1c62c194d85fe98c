# SPDX-License-Identifier: Apache-2.0
"""The server's addresses: OpenAI's interface, upstream's PUT /api, health, metrics, and a page to try the model.

| address                                       | what                                                              |
|-----------------------------------------------|-------------------------------------------------------------------|
| POST /v1/completions, /v1/chat/completions    | texts, whole or as a stream of events                             |
| GET /v1/models, POST /tokenize, /detokenize   | the model; tokens of a text and back                              |
| PUT /api                                      | upstream's first interface                                        |
| GET /live, /ready, /health, /metrics, /version| the port is open; requests are answered; Prometheus               |
| GET /                                         | the page                                                          |

Errors are OpenAI's objects, with the field that is wrong in `param`. Without a key and a name beyond this machine, only
requests to this machine's names are answered, so that no page of another site reaches the model.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from megatron.core import __version__
from megatron.core.errors import MegatronError, say
from megatron.core.optional_deps import require
from megatron.core.tokenizers.chat import limit_template_time
from megatron.serving.answers import AnswerDelta, Batch, ServedModel, list_asked
from megatron.serving.bodies import (
    MAX_BATCH,
    BadRequest,
    ChatBody,
    CompletionBody,
    GenerateBody,
    parse_json,
    read_body,
)
from megatron.serving.logprobs import list_chat_logprobs, list_completion_logprobs
from megatron.serving.metrics import ServerMetrics
from megatron.serving.page import PAGE
from megatron.serving.service import Service

_responses = require("starlette.responses", needed_by="the server")
JSONResponse, StreamingResponse = _responses.JSONResponse, _responses.StreamingResponse
Request: TypeAlias = Any  # of starlette, as is Response
Response: TypeAlias = Any

Handler = Callable[[Request], Awaitable[Response]]

LOCAL_NAMES = {"localhost", "127.0.0.1", "::1", "testserver"}
_OPEN = {"/", "/live", "/ready", "/health", "/v1/health"}
"""Addresses that need no key."""
_TEMPLATE_SECONDS = 5.0


@dataclass(frozen=True)
class Limits:
    """Limits on what a request may ask of the server."""

    body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    api_keys: tuple[str, ...] = ()
    is_local: bool = True
    """True if the server listens only on this machine."""


class Application:
    """The routes, around a service and a model that comes later."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self.service, self.limits, self.metrics = service, limits, ServerMetrics()
        self.served: ServedModel | None = None
        self.started_at = int(time.time())

    def build(self) -> Any:
        """The ASGI application."""
        routing = require("starlette.routing", needed_by="the server")

        def route(path: str, handler: Handler, methods: Sequence[str] = ("GET",)) -> Any:
            return routing.Route(path, self._guard(handler), methods=list(methods))

        routes = [
            route("/", self._show_page),
            route("/live", self._say_live),
            *(route(path, self._say_ready) for path in ("/health", "/ready", "/v1/health")),
            route("/metrics", self._show_metrics),
            route("/version", self._show_version),
            route("/v1/models", self._list_models),
            route("/v1/models/{name:path}", self._show_model),
            *(route(path, self._complete, methods=["POST"]) for path in ("/v1/completions", "/completions")),
            *(route(path, self._chat, methods=["POST"]) for path in ("/v1/chat/completions", "/chat/completions")),
            route("/tokenize", self._tokenize, methods=["POST"]),
            route("/detokenize", self._detokenize, methods=["POST"]),
            route("/api", self._generate, methods=["PUT"]),
        ]
        http = require("starlette.exceptions", needed_by="the server").HTTPException
        return require("starlette.applications", needed_by="the server").Starlette(
            routes=routes,
            exception_handlers={http: self._explain_http, BadRequest: self._explain},
        )

    # ---- before and after

    def _guard(self, handler: Handler) -> Handler:
        """The handler behind the checks of names and keys; what goes wrong becomes an answer."""

        async def handle(request: Request) -> Response:
            try:
                self._check_origin(request)
                if self.limits.api_keys and request.url.path not in _OPEN:
                    self._check_key(request)
                return await handler(request)
            except BadRequest as error:
                return await self._explain(request, error)
            except MegatronError as error:
                return await self._explain(request, BadRequest(str(error)))
            except Exception as error:  # a bug of ours: told to the log, and to nobody else
                say(f"error: {request.url.path}: {type(error).__name__}: {error}", sys.stderr)
                return await self._explain(request, BadRequest("the server failed; its log says how", status=500))

        return handle

    def _check_origin(self, request: Request) -> None:
        host = request.headers.get("host", "")
        name = urlsplit(f"//{host}").hostname if host else None
        if self.limits.is_local and name not in LOCAL_NAMES:
            raise BadRequest(f"Host {host[:100]!r} is not this machine", status=403, code="wrong_host")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise BadRequest(f"Origin {origin[:100]!r} is another site", status=403, code="wrong_origin")

    def _check_key(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode()
        # All are compared, whichever is right, in a time that tells nothing.
        found = [hmac.compare_digest(given, known.encode()) for known in self.limits.api_keys]
        if scheme.lower() != "bearer" or not any(found):
            raise BadRequest("the API key is missing or wrong", status=401, code="invalid_api_key")

    async def _explain(self, request: Request, error: BadRequest) -> Response:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        if request.url.path == "/api":
            return JSONResponse({"message": error.message}, error.status, headers)
        return JSONResponse({"error": describe_error(error)}, error.status, headers)

    async def _explain_http(self, request: Request, error: Any) -> Response:
        found = "there is nothing at this address" if error.status_code == 404 else str(error.detail)
        return await self._explain(request, BadRequest(found, status=error.status_code))

    async def _read(self, request: Request) -> dict[str, Any]:
        """The object of a request's body."""

        async def read() -> bytes:
            content = bytearray()
            async for chunk in request.stream():
                content += chunk
                if len(content) > self.limits.body_bytes:
                    raise BadRequest(f"the body is larger than {self.limits.body_bytes} bytes", status=413)
            return bytes(content)

        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind not in ("application/json", "text/json", ""):
            raise BadRequest(f"Content-Type {kind[:50]!r} must be application/json", status=415)
        try:
            return parse_json(await asyncio.wait_for(read(), self.limits.body_seconds))
        except TimeoutError as error:
            raise BadRequest("the body did not come in time", status=408) from error
        except require("starlette.requests", needed_by="the server").ClientDisconnect as error:
            raise BadRequest("the client went away", status=400) from error

    def _find_model(self, name: str | None = None) -> ServedModel:
        """The model, if it answers. Raises BadRequest where it does not, or has another name."""
        if self.served is None or self.service.state != "ready":
            raise BadRequest(f"the model is {self.service.state}", status=503, code=self.service.state)
        found = self.served.choose(name)
        if found is None:
            names = " or ".join(map(repr, (self.served.name, *self.served.adapters)))
            raise BadRequest(
                f"model {str(name)[:100]!r} is not here; the model is {names}", "model", 404, "model_not_found"
            )
        return found

    # ---- small ones

    async def _show_page(self, request: Request) -> Response:
        return _responses.HTMLResponse(PAGE, headers={"Content-Security-Policy": "frame-ancestors 'none'"})

    async def _say_live(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _say_ready(self, request: Request) -> Response:
        is_ready = self.service.state == "ready"
        status = "ok" if is_ready else self.service.state
        return JSONResponse({"status": status, "service": "megatron", "ready": is_ready}, 200 if is_ready else 503)

    async def _show_version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _show_metrics(self, request: Request) -> Response:
        engine = self.service.engine
        gauges: dict[str, float] = {"num_requests": self.service.num_jobs}
        counters: dict[str, float] = {}
        if engine is not None:
            pool, scheduler = engine.state.pools[0], engine.scheduler
            gauges |= {
                "num_requests_running": len(scheduler.running),
                "num_requests_waiting": len(scheduler.waiting),
                "kv_cache_usage_perc": pool.num_used / pool.pages,
            }
            counters = {
                "prompt_tokens": engine.counters.prompt_tokens,
                "generation_tokens": engine.counters.new_tokens,
                "prefix_cache_hit_tokens": engine.counters.reused_tokens,
                "num_preemptions": scheduler.preemptions,
                "passes": engine.counters.passes,
            }
        return _responses.PlainTextResponse(self.metrics.format(gauges, counters))

    async def _list_models(self, request: Request) -> Response:
        served = self._find_model()
        models = [served, *map(self._find_model, served.adapters)]
        return JSONResponse({"object": "list", "data": [self._describe(model) for model in models]})

    async def _show_model(self, request: Request) -> Response:
        return JSONResponse(self._describe(self._find_model(request.path_params["name"])))

    def _describe(self, served: ServedModel) -> dict[str, Any]:
        about = {"id": served.name, "object": "model", "created": self.started_at, "owned_by": "megatron"}
        return about | {"max_model_len": served.max_sequence_length}

    async def _tokenize(self, request: Request) -> Response:
        body, served = await self._read(request), self._find_model()
        if not isinstance(body.get("prompt"), str):
            raise BadRequest("prompt must be a text", "prompt")
        ids = await asyncio.to_thread(served.tokenizer.tokenize, body["prompt"])
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": served.max_sequence_length})

    async def _detokenize(self, request: Request) -> Response:
        body, served = await self._read(request), self._find_model()
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise BadRequest("tokens must be a list of token ids", "tokens")
        served.check_ids(ids, "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(served.tokenizer.detokenize, ids)})

    # ---- texts

    async def _complete(self, request: Request) -> Response:
        body = read_body(CompletionBody, await self._read(request))
        served = self._find_model(body.model)
        prompts = await asyncio.to_thread(_read_prompts, served, body.prompt)
        if (texts := len(prompts) * (body.n or 1)) > MAX_BATCH:
            raise BadRequest(f"n: {texts} texts are asked for together, and at most {MAX_BATCH} may be", "n")
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        wants_prompt = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
        batch = self._open(served)
        for prompt in prompts:
            for index in range(body.n or 1):
                asked = list_asked(served, body, prompt, index, max_tokens, served.ends, body.logprobs, wants_prompt)
                batch.add(asked, body.stops)

        def describe(piece: AnswerDelta, is_whole: bool) -> dict[str, Any]:
            answer, text = piece.answer, piece.text
            if body.echo and (is_whole or len(answer.new) == len(piece.tokens)):
                text = served.tokenizer.detokenize(answer.prompt) + text
            found = None
            if body.logprobs is not None:
                first = 0 if is_whole else len(answer.new) - len(piece.tokens)
                found = list_completion_logprobs(served.tokenizer, answer, first, echo=bool(body.echo))
            entry = {"index": answer.index, "text": text, "logprobs": found, "finish_reason": answer.finish_reason}
            if is_whole:
                entry |= {"prompt_token_ids": answer.prompt, "generation_token_ids": answer.new}
            return entry

        return await self._answer(request, batch, body, ("cmpl", "text_completion", "text_completion"), describe)

    async def _chat(self, request: Request) -> Response:
        body = read_body(ChatBody, await self._read(request))
        served = self._find_model(body.model)
        prompt = await self._render(served, body)
        asked_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        max_tokens = max(1, served.max_sequence_length - len(prompt)) if asked_tokens is None else asked_tokens
        top = (body.top_logprobs or 0) if body.logprobs else None
        batch = self._open(served)
        for index in range(body.n or 1):
            batch.add(list_asked(served, body, prompt, index, max_tokens, served.chat_ends, top, None), body.stops)

        def describe(piece: AnswerDelta, is_whole: bool) -> dict[str, Any]:
            answer = piece.answer
            first = 0 if is_whole else len(answer.new) - len(piece.tokens)
            entry: dict[str, Any] = {"index": answer.index, "finish_reason": answer.finish_reason, "logprobs": None}
            if body.logprobs:
                entry["logprobs"] = list_chat_logprobs(served.tokenizer, answer, first)
            if is_whole:
                return entry | {"message": {"role": "assistant", "content": piece.text}}
            is_first = first == 0 and len(answer.stream.text) == len(piece.text)
            return entry | {"delta": ({"role": "assistant"} if is_first else {}) | {"content": piece.text}}

        kinds = ("chatcmpl", "chat.completion", "chat.completion.chunk")
        return await self._answer(request, batch, body, kinds, describe)

    async def _render(self, served: ServedModel, body: ChatBody) -> list[int]:
        """Token ids of a conversation; a template has so long for it."""
        messages = []
        if body.messages is None:
            raise BadRequest("messages is missing", "messages")
        for index, message in enumerate(body.messages):
            content = message.get("content")
            if isinstance(content, list):
                parts = [
                    part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
                    for part in content
                ]
                content = None if None in parts else "".join(map(str, parts))
            if not isinstance(message.get("role"), str) or not isinstance(content, str):
                raise BadRequest(f"messages[{index}] needs a role and a content, both texts", "messages")
            messages.append({"role": message["role"], "content": content})
        names = body.chat_template_kwargs or {}
        if {"messages", "add_generation_prompt", "self"} & names.keys():
            raise BadRequest("chat_template_kwargs has a name that is the server's own", "chat_template_kwargs")
        begins = body.add_generation_prompt is not False

        def render() -> list[int]:
            with limit_template_time(_TEMPLATE_SECONDS):
                text = served.tokenizer.render_chat(messages, add_generation_prompt=begins, **names)
            return served.tokenize(text, "messages", as_is=True)

        try:
            return await asyncio.to_thread(render)
        except MegatronError as error:
            raise BadRequest(str(error), "messages") from error

    async def _generate(self, request: Request) -> Response:
        """Upstream's PUT /api."""
        body = read_body(GenerateBody, await self._read(request), refuses_unknown=True)
        served = self._find_model()
        if body.tokens_to_generate == 0 and not body.logprobs:
            raise BadRequest("tokens_to_generate 0 needs logprobs", "tokens_to_generate")
        if body.top_k and body.top_p:
            raise BadRequest("top_k and top_p cannot be given together", "top_k")
        stops = [*(["\n\n"] if body.stop_on_double_eol else []), *(["\n"] if body.stop_on_eol else [])]
        common = CompletionBody(
            temperature=body.temperature, top_k=body.top_k, top_p=body.top_p or 1.0,
            seed=None if body.random_seed < 0 else body.random_seed,
            stop_token_ids=None if body.stop_token is None else [body.stop_token],
        )  # fmt: skip
        batch, tokenizer, top = self._open(served), served.tokenizer, 0 if body.logprobs else None
        for index, text in enumerate(body.prompts):
            prompt = await asyncio.to_thread(served.tokenize, text)
            if body.add_BOS and tokenizer.bos is not None:
                prompt = [tokenizer.bos, *prompt]
            asked = list_asked(served, common, prompt, index, body.tokens_to_generate, served.ends, top, top)
            batch.add(asked, stops)
        await self._collect(request, batch)
        every = [[*answer.prompt, *answer.new] for answer in batch.answers]
        found: dict[str, Any] = {
            "text": [text + each.stream.text for text, each in zip(body.prompts, batch.answers, strict=True)],
            "tokens": every,
            "segments": [[tokenizer.detokenize([token]) for token in tokens] for tokens in every],
        }
        if body.logprobs:
            made = [each.job.request for each in batch.answers if each.job is not None]
            found["logprobs"] = [
                [entry.logprob for entry in (*each.read_logprobs, *each.token_logprobs)] for each in made if each
            ]
        return JSONResponse(found)

    # ---- answering

    def _open(self, served: ServedModel) -> Batch:
        return Batch(self.service, served, self.metrics, self.limits.request_seconds)

    async def _collect(self, request: Request, batch: Batch) -> None:
        """Wait for all texts, as long as the client does."""

        async def collect() -> None:
            async for _ in batch.pieces():
                pass

        task = asyncio.ensure_future(collect())
        try:
            while not (await asyncio.wait({task}, timeout=0.25))[0]:
                if await request.is_disconnected():
                    raise BadRequest("the client went away")
            task.result()
        finally:
            task.cancel()

    async def _answer(
        self, request: Request, batch: Batch, body: CompletionBody | ChatBody, kinds: tuple[str, str, str],
        describe: Callable[[AnswerDelta, bool], dict[str, Any]],
    ) -> Response:  # fmt: skip
        """kinds: prefix of the id, name of a whole answer and of a part of one."""
        prefix, whole, part = kinds
        common = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": batch.served.name}
        if not body.stream:
            await self._collect(request, batch)
            choices = [describe(AnswerDelta(each, each.stream.text, each.new), True) for each in batch.answers]
            return JSONResponse(common | {"object": whole, "choices": choices, "usage": batch.usage})
        if self.service.is_full:
            raise BadRequest("too many requests are waiting; try again later", status=429, code="queue_full")
        wants_usage = bool((body.stream_options or {}).get("include_usage"))

        async def stream() -> AsyncIterator[str]:
            pieces = batch.pieces()
            try:
                async for piece in join_pieces(pieces, body.streaming_interval or 1):
                    yield _event(common | {"object": part, "choices": [describe(piece, False)]})
                if wants_usage:
                    yield _event(common | {"object": part, "choices": [], "usage": batch.usage})
                yield "data: [DONE]\n\n"
            except BadRequest as error:
                yield _event({"error": describe_error(error)})
            finally:
                await pieces.aclose()  # type: ignore[attr-defined]

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def describe_error(error: BadRequest) -> dict[str, Any]:
    """OpenAI's object."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}


async def join_pieces(pieces: AsyncIterator[AnswerDelta], interval: int) -> AsyncIterator[AnswerDelta]:
    """Join pieces of an answer until they have so many tokens, or it ends."""
    held: dict[int, AnswerDelta] = {}
    async for piece in pieces:
        index = piece.answer.index
        if index in held:
            piece = AnswerDelta(piece.answer, held[index].text + piece.text, held[index].tokens + piece.tokens)
        if len(piece.tokens) < interval and piece.answer.finish_reason is None:
            held[index] = piece
            continue
        held.pop(index, None)
        yield piece


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _read_prompts(served: ServedModel, prompt: Any) -> list[list[int]]:
    """Token ids of a prompt in any of its four forms: a text, texts, ids, lists of ids."""
    if prompt is None:
        raise BadRequest("prompt is missing", "prompt")
    if isinstance(prompt, str):
        return [served.tokenize(prompt)]
    if all(type(part) is int for part in prompt):
        served.check_ids(prompt, "prompt")
        return [list(prompt)]
    if len(prompt) > MAX_BATCH:
        raise BadRequest(f"prompt has {len(prompt)} texts, and at most {MAX_BATCH} may be asked for together", "prompt")
    found = []
    for index, part in enumerate(prompt):
        if isinstance(part, str):
            found.append(served.tokenize(part))
        elif isinstance(part, list):
            served.check_ids(part, f"prompt[{index}]")
            found.append(list(part))
        else:
            raise BadRequest(f"prompt[{index}] is a number among texts or lists", "prompt")
    return found
