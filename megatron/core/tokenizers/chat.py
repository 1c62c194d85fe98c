# SPDX-License-Identifier: Apache-2.0
"""Conversations to text through a tokenizer's Jinja chat template, in jinja2's sandbox."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from megatron.core import optional_deps
from megatron.core.errors import DataError

Message = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`, and what else a template reads."""

_MOST_CHARACTERS = 2**25
"""Of a conversation's text, and of what a template multiplies."""


def is_file_name(value: str) -> bool:
    """Return whether a --chat-template names a file: without template marks it does."""
    return "{%" not in value and "{{" not in value


def render_template(
    template: str, messages: Sequence[Message], /, *, add_generation_prompt: bool = False, **variables: Any
) -> str:
    """The text of a conversation. Templates see what transformers offers them: messages, bos_token, raise_exception...

    variables   further names: special tokens, tools, documents
    Raises DataError for a template that is broken or refuses the messages, ConfigError without jinja2.
    """
    jinja2 = optional_deps.require("jinja2", needed_by="a chat template")
    names = {"messages": messages, "add_generation_prompt": add_generation_prompt, **variables}
    pieces, length = [], 0
    try:
        for piece in _compiled(template).generate(names):
            length += len(piece)
            if length > _MOST_CHARACTERS:
                raise ValueError(f"the text has more than {_MOST_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)
    except jinja2.exceptions.TemplateError as error:
        raise DataError(f"the chat template cannot be used: {type(error).__name__}: {str(error)[:300]}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise DataError(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def limit_template_time(seconds: float) -> Iterator[None]:
    """Let a template that this thread renders fail with DataError after so long, whatever it loops over."""
    deadline, before = time.monotonic() + seconds, sys.gettrace()

    def check(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise DataError(f"the chat template takes longer than {seconds:g} s on these messages")
        return check if frame.f_code.co_filename == "<template>" else None

    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    sandbox = optional_deps.require("jinja2.sandbox", needed_by="a chat template")
    # Templates come with downloaded tokenizers: the sandbox keeps them from Python's internals, and messages from being
    # changed. The trimming of blocks is what transformers uses, and templates rely on it.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # One product of a text could take all memory.
    environment.intercepted_binops = frozenset("*")
    environment.call_binop = _multiply
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    # Llama 3's template writes today's date.
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """jinja2's filter writes HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _multiply(context: Any, operator: str, left: Any, right: Any) -> Any:
    for whole, times in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(whole, "__len__") and len(whole) * times > _MOST_CHARACTERS:
            raise ValueError(f"{len(whole)} characters {times} times are too many")
    return left * right


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
