# SPDX-License-Identifier: Apache-2.0
"""Compiling a model's regions with torch.compile: what lies between its matrix products and its communication.

| region             | compiled together                                          | on a CPU                         |
|--------------------|------------------------------------------------------------|----------------------------------|
| norm               | statistics, scale, casts                                   | stays fused by hand: as fast     |
| activation         | bias, gate, activation; of experts the row's weight        | compiled                         |
| rotary positions   | split of the packed projection, rotation                   | compiled                         |
| attention gate     | sigmoid, product                                           | compiled                         |
| residual           | bias, dropout, sum                                         | stays in place: less memory      |
| router             | scores, choice, weights, auxiliary losses                  | compiled                         |

Products, core attention, the loss and every collective are the same as without the compiler. So weight gradients are
added into the gradient buffer inside the product, or wait in the queue of a zero-bubble schedule; collectives overlap
products; hooks see every module; activations are recomputed in parts. None of these can be inside a compiled graph: a
compiler cannot move what it does not see.

A region is a function of tensors that a module holds as an attribute in its plain form, built from elementary
operations; its `compile_regions` replaces it. All layers share a region's code, so compiling takes as long for 80
layers as for one. A second shape is compiled for any shape, so that experts, whose rows are another number in every
micro-batch, are compiled twice and not for ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.core.transformer.compiled_regions import Function

MOST_VARIANTS = 64
"""Of a region's code: for numbers of dimensions, dtypes, with and without gradients, one token or sequence and several.
Unless told otherwise the compiler gives up on a function with more than 8; all norms of a model are one."""

BACKEND = "inductor"
"""Of torch.compile; "aot_eager" traces the same graphs without generating code, for tests."""


def compile_regions(model: nn.Module, backend: str | None = None) -> int:
    """Compile all regions of `model` in place; returns how many different functions these are. Parameters and names
    stay as they are, and code is generated when a region first runs.

    backend: of torch.compile; BACKEND when None. Build the model from a config with `compile` set: regions that are
    fused by hand are left as they are.
    """
    backend = BACKEND if backend is None else backend
    # Dropout draws what it draws without the compiler, so that a run does not depend on it, nor recomputation.
    options: dict[str, Any] | None = {"fallback_random": True} if backend == "inductor" else None
    made: dict[Any, Any] = {}
    limits: Any = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_VARIANTS)

    def compiled(function: Function) -> Function:
        if function not in made:
            made[function] = torch.compile(function, backend=backend, options=options)
        result: Function = made[function]
        return result

    for module in model.modules():
        # Asked of the class: a miss on the instance goes through nn.Module.__getattr__, which is slow.
        if hasattr(type(module), "compile_regions"):
            module.compile_regions(compiled)  # type: ignore[operator]
    return len(made)


def find_obstacle(device: torch.device) -> str | None:
    """Return why torch.compile generates no code for the device here, in words; None where it does. Takes some
    seconds."""
    if BACKEND != "inductor":
        return None
    try:
        # The C++ compiler for a CPU, Triton for a GPU: only compiling something shows whether they work.
        torch.compile(lambda x: torch.sin(x) + 1)(torch.ones(8, device=device))
    except Exception as error:
        said = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {said[0] if said else 'no message'}"
    return None
