# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules as data, one executor. Names load when first used (PEP 562)."""

from __future__ import annotations

from typing import Any

__all__ = ["get_forward_backward_func"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name == "get_forward_backward_func":
        from megatron.core.pipeline_parallel.forward_backward import get_forward_backward_func

        return get_forward_backward_func
    raise AttributeError(f"megatron.core.pipeline_parallel has no attribute {name!r}")
