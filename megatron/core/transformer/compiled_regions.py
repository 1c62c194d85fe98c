# SPDX-License-Identifier: Apache-2.0
"""The regions of a module that torch.compile may make one kernel of; execution/compilation.py lists and compiles them.

A module with regions has a method `compile_regions(compiled)`, which replaces every region that is in its plain form by
`compiled(region)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core.device import current_device, is_cpu
from megatron.core.transformer.transformer_config import TransformerConfig

Function = TypeVar("Function", bound=Callable[..., Any])
Compile = Callable[[Function], Function]

# Measured by benchmarks/train_step.py: the call of a compiled function costs more than these save there.
FUSED_BY_HAND_ON_CPU = frozenset({"norm", "residual"})


def is_compiled(config: TransformerConfig, region: str) -> bool:
    """Return True where a model of this config has a region, by its name in the table of execution/compilation.py,
    compiled on this process's device: it is then built in its plain form."""
    return config.compile and not (region in FUSED_BY_HAND_ON_CPU and is_cpu(current_device()))
