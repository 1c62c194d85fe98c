# SPDX-License-Identifier: Apache-2.0
"""Marks for what torch.compile is to leave alone, set without loading it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def outside_of_graphs(function: Callable[..., Result]) -> Callable[..., Result]:
    """`torch.compiler.disable`: the function runs as it is where a model is compiled as a whole.

    That decorator loads the compiler, which takes as long as half of torch; this one leaves it to runs that compile.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        # A constant for the compiler, so that it stops at the decorator of torch.
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call
