# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: what may be in them, and what is wrong with one, in a sentence that names the field."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from megatron.core.optional_deps import require

_types = require("annotated_types", needed_by="the server")
Ge, Le, Len = _types.Ge, _types.Le, _types.Len

MAX_STOPS = 64
MAX_BATCH = 128
_STRICT = {"strict": True, "allow_inf_nan": False}
_REFUSED = {
    "best_of", "use_beam_search", "length_penalty", "early_stopping", "suffix", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "structured_outputs", "response_format", "tools", "tool_choice", "functions",
    "function_call", "parallel_tool_calls", "logits_processors", "truncate_prompt_tokens", "bad_words",
    "allowed_token_ids", "reasoning_effort", "modalities", "audio", "prediction", "add_special_tokens",
    "spaces_between_special_tokens", "lora_request", "mm_processor_kwargs", "documents", "continue_final_message",
    "chat_template", "echo", "include_stop_str_in_output", "skip_special_tokens", "structural_tag", "prompt_embeds",
    "verbosity", "web_search_options",
}  # fmt: skip
"""Fields of OpenAI's and vLLM's interfaces that would change the text, and that this server does not have."""

_HARMLESS: tuple[Any, ...] = (None, False, [], {}, "none", {"type": "text"})
"""Values of such fields that change nothing."""
_USUAL = {"best_of": 1, "length_penalty": 1, "spaces_between_special_tokens": True, "parallel_tool_calls": True}
"""Accepted in addition: what they do anyway."""

T = TypeVar("T")


class BadRequest(Exception):
    """Something is wrong with a request: a sentence, the field, and the status to answer with."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


@dataclass
class _Sampled:
    """Fields that completions and chats have in common."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    model: str | None = None
    max_tokens: Annotated[int, Ge(0)] | None = None
    temperature: Annotated[float, Ge(0), Le(100)] | None = None
    top_p: Annotated[float, Ge(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(-1)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    n: Annotated[int, Ge(1), Le(MAX_BATCH)] | None = None
    stop: str | Annotated[list[str], Len(0, MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Ge(0)]], Len(0, MAX_STOPS)] | None = None
    min_tokens: Annotated[int, Ge(0)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Ge(-(2**63)), Le(2**63 - 1)] | None = None
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] | None = None
    presence_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Ge(-100), Le(100)]], Len(0, 1024)] | None = None
    stream: bool | None = None
    stream_options: dict[str, bool | None] | None = None
    streaming_interval: Annotated[int, Ge(1), Le(10000)] | None = None

    @property
    def stops(self) -> list[str]:
        """Stop words."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


@dataclass
class CompletionBody(_Sampled):
    """Body of /v1/completions."""

    prompt: str | Annotated[list[str | int | list[int]], Len(1, 2**20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Ge(0), Le(20)] | None = None
    prompt_logprobs: Annotated[int, Ge(0), Le(20)] | None = None


@dataclass
class ChatBody(_Sampled):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Len(1, 4096)] | None = None
    max_completion_tokens: Annotated[int, Ge(0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass
class GenerateBody:
    """Body of upstream's PUT /api."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    prompts: Annotated[list[str], Len(1, MAX_BATCH)]
    tokens_to_generate: Annotated[int, Ge(0)] = 64
    logprobs: bool = False
    temperature: Annotated[float, Ge(0), Le(100)] = 1.0
    top_k: Annotated[int, Ge(0), Le(1000)] = 0
    top_p: Annotated[float, Ge(0), Le(1)] = 0.0
    random_seed: Annotated[int, Ge(-1), Le(2**63 - 1)] = -1
    add_BOS: bool = False
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    stop_token: Annotated[int, Ge(0)] | None = None


def parse_json(content: bytes) -> dict[str, Any]:
    """The object of a body. Raises BadRequest for anything else."""
    try:
        found = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start} cannot be read") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise BadRequest(f"the body is {type(found).__name__}, and must be a JSON object")
    return found


def read_body(kind: type[T], content: dict[str, Any], *, refuses_unknown: bool = False) -> T:
    """A body of this kind. Raises BadRequest that names the first field that is wrong. refuses_unknown: fields that
    nobody knows are no harmless extensions."""
    pydantic = require("pydantic", needed_by="the server")
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in content.keys() - known:
        is_harmless = content[name] in _HARMLESS or content[name] == _USUAL.get(name)
        if refuses_unknown or (name in _REFUSED and not is_harmless):
            raise BadRequest(f"{name[:64]} is not supported here; leave it out", name[:64])
    try:
        # As JSON: its strict rules know that an object is what makes a body.
        given = json.dumps({name: content[name] for name in content.keys() & known})
        result: T = pydantic.TypeAdapter(kind).validate_json(given)
        return result
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        if not found[0]["loc"]:  # the text of all fields
            field = next((name for name in sorted(content.keys() & known) if _is_broken(content[name])), None)
            raise BadRequest(f"{field} has half of a surrogate pair, which is no character", field) from error
        # Of a field that may be of several kinds, what is wrong with the kind that it comes the closest to.
        of_field = [each for each in found if each["loc"][0] == found[0]["loc"][0]]
        first = max(of_field, key=lambda each: (not each["type"].endswith("_type"), len(each["loc"])))
        field = str(first["loc"][0])
        place = "".join(f"[{part}]" if isinstance(part, int) else "" for part in first["loc"][1:])
        raise BadRequest(f"{field}{place}: {first['msg'][0].lower()}{first['msg'][1:]}", field) from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error


def _is_broken(value: Any) -> bool:
    """Return whether a text within has what UTF-8 cannot say."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
