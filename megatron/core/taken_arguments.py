# SPDX-License-Identifier: Apache-2.0
"""Arguments of upstream's that ours have no parameter for: each without effect, or refused in a sentence."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def take_arguments(names: str, instead: str = "it has no effect here") -> Callable[[F], F]:
    """Let a function, or a constructor, also be called with upstream's arguments, by position in upstream's order.

    names: upstream's signature, such as "config layer_number name=... vp_stage=None * stride=1 width=@hidden_size".
    With a value are those that the function has no parameter for: `...` takes anything, since nothing follows from it;
    others take None and that value, `@` a field of the config. Any other raises ConfigError with the rest of a
    sentence, `instead`. Arguments after `*` are passed only by name.
    """
    by_position, _, by_name = names.partition("*")
    order = [text.partition("=")[0] for text in by_position.split()]
    texts = dict(text.split("=", 1) for text in (by_position + by_name).split() if "=" in text)
    accepted = {name: text if text[:1] == "@" else ast.literal_eval(text) for name, text in texts.items()}

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = list(signature.parameters.values())
        first = int(own[0].name == "self") if own else 0
        alike = next((at for at, name in enumerate(order) if at + first >= len(own) or own[at + first].name != name),
                     len(order)) + first  # fmt: skip

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if order and alike < len(args) <= first + len(order):
                named = dict(zip(order[alike - first :], args[alike:], strict=False))
                if twice := sorted(named.keys() & given.keys()):
                    raise TypeError(f"{function.__qualname__}() got multiple values for argument {twice[0]!r}")
                args, given = args[:alike], given | named
            for name in accepted.keys() & given.keys():
                value, wanted = given.pop(name), accepted[name]
                if isinstance(wanted, str) and wanted[:1] == "@":
                    wanted = getattr(given.get("config") or args[first], wanted[1:])
                if wanted is ... or value is None or (type(value) is type(wanted) and value == wanted):
                    continue
                called = type(args[0]).__name__ if first else function.__name__
                raise ConfigError(f"{called}() has no {name} {value!r:.80}: {instead}; leave it out")
            return function(*args, **given)

        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in accepted]
        end = len(own) - any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own)
        call.upstream_only = accepted  # type: ignore[attr-defined]
        call.__signature__ = signature.replace(parameters=[*own[:end], *added, *own[end:]])  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate
