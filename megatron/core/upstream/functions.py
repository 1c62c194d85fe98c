# SPDX-License-Identifier: Apache-2.0
"""Upstream's small tools that know nothing of models: marks on functions, arithmetic."""

from __future__ import annotations

import functools
import logging
import traceback
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class ExperimentalFeatures:
    """Switch for functions that upstream calls experimental. One switch per process, as upstream has it."""

    enabled: ClassVar[bool] = False


def set_experimental_flag(flag: bool) -> None:
    """Allow functions marked with `experimental_api`, or forbid them again."""
    ExperimentalFeatures.enabled = flag


def is_experimental_enabled() -> bool:
    """Return whether they are allowed."""
    return ExperimentalFeatures.enabled


def experimental_api(func: F) -> F:
    """Mark a function or class as one whose interface may change; it works as before."""
    func._is_experimental_api = True  # type: ignore[attr-defined]
    return func


def internal_api(func: F) -> F:
    """Mark a function or class as not meant for others; it works as before."""
    func._is_internal_api = True  # type: ignore[attr-defined]
    return func


def deprecated(
    version: str, removal_version: str | None = None, alternative: str | None = None, reason: str | None = None
) -> Callable[[F], F]:
    """Calls of the decorated function warn that it is deprecated since a version, and what to use instead."""

    def decorate(func: F) -> F:
        parts = [f"{func.__name__} is deprecated since version {version}"]
        parts += [f"it will be removed in version {removal_version}"] if removal_version else []
        parts += [f"use {alternative} instead"] if alternative else []
        parts += [reason] if reason else []

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            warnings.warn("; ".join(parts), DeprecationWarning, stacklevel=2)
            return func(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


def trace_async_exceptions(func: Any = None, *, verbose: bool = False) -> Any:
    """Decorator of a coroutine, or of a plain function: what it raises is logged before it goes on, so that an error in
    a task that nobody awaits is not lost. verbose: calls are logged, too."""
    if func is None:
        return functools.partial(trace_async_exceptions, verbose=verbose)
    log = logging.getLogger(func.__module__)

    @functools.wraps(func)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if verbose:
            log.info("%s begins", func.__name__)
        try:
            return await func(*args, **kwargs)
        except Exception:
            log.error("%s failed:\n%s", func.__name__, traceback.format_exc())
            raise

    return wrapper


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator, which must leave no rest (AssertionError)."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"
    return numerator // denominator
