# SPDX-License-Identifier: Apache-2.0
"""The regions of a module that torch.compile may make one kernel of; execution/compilation.py lists and compiles them.

A module with regions has a method `compile_regions(compiled)`, which replaces every region that is in its plain form by
`compiled(region)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatron.core.device import current_device, is_cpu
from megatron.core.operation_table import Case, Choice, choose
from megatron.core.transformer.transformer_config import TransformerConfig

Function = TypeVar("Function", bound=Callable[..., Any])
Compile = Callable[[Function], Function]

# Measured by benchmarks/train_step.py: the call of a compiled function costs more than these save there.
FUSED_BY_HAND_ON_CPU = frozenset({"norm", "residual"})


def is_compiled(config: TransformerConfig, region: str) -> bool:
    """Return True where a model of this config has a region, by its name in the table of execution/compilation.py,
    compiled on this process's device: it is then built in its plain form."""
    return config.compile and not (region in FUSED_BY_HAND_ON_CPU and is_cpu(current_device()))


def choose_form(
    config: TransformerConfig, operation: str, *, is_fused: bool, region: str | None = None,
    device: torch.device | None = None, **case: Any,
) -> Choice:  # fmt: skip
    """Choose a way of an operation of megatron/core/operation_table.py that can be fused by hand.

    is_fused: True where the config wants and allows it; a compiler fuses elementary operations itself. region: see
    `is_compiled`; the operation's name when None. device: this process's when None. case: more of Case.
    """
    is_fused = is_fused and not is_compiled(config, region or operation)
    kind = "fused" if is_fused else "compiled" if config.compile else "elementary"
    return choose(operation, Case(kind, current_device() if device is None else device, **case))
