# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules as data, one executor. Names load when first used (PEP 562)."""

from __future__ import annotations

from megatron.core.lazy_names import load_when_used

_NAMES = {"get_forward_backward_func": "forward_backward"}

__all__ = list(_NAMES)  # noqa: PLE0605
__getattr__ = load_when_used(__name__, _NAMES)
