# SPDX-License-Identifier: Apache-2.0
"""Parameters that programs see one by one and that are stored as one: the experts of a layer.

    stack    [experts, out, in]   what products, flat buffers, optimizers and checkpoints of ours know
    parts    [out, in] each       what named_parameters(), state_dict() and load_state_dict() show: views of its memory

The engine lists parameters by `list_parameters`, which gives the stack; a module registers only the parts, so that no
caller sees the same numbers twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.placement import get_placement, place


def divide_stack(stack: nn.Parameter) -> list[nn.Parameter]:
    """Make a parameter of each element of a placed stack [n, ...]: views, which the caller registers in its place."""
    parts = [nn.Parameter(values, requires_grad=stack.requires_grad) for values in stack.detach().unbind()]
    tie_parts(stack, parts)
    return parts


def tie_parts(stack: Any, parts: list[nn.Parameter]) -> None:
    """Let the stack know its parts, and them the stack."""
    stack.parts = parts
    for part in parts:
        part.part_of = stack  # type: ignore[attr-defined]
    if hasattr(stack, "placement"):
        place(stack, get_placement(stack))
    bind_parts(stack)


def bind_parts(stack: Any) -> None:
    """Make the parts views of the stack again, and of its main_grad; for callers that have given it other memory. Does
    nothing for a parameter without parts."""
    gradients = getattr(stack, "main_grad", None)
    for index, part in enumerate(getattr(stack, "parts", ())):
        view = stack.detach()[index]
        if part.is_meta and not view.is_meta:
            # No memory of another device can be put into a parameter without any.
            real = nn.Parameter(view, requires_grad=part.requires_grad)
            vars(real).update(vars(part))
            torch.utils.swap_tensors(part, real)
        else:
            part.data = view
        if gradients is not None:
            part.main_grad = gradients[index]


def collect_parts(stack: Any) -> Any:
    """Return the stack with what its users have done to the parts: other memory put into `.data`, `requires_grad`."""
    parts = getattr(stack, "parts", ())
    if not parts:
        return stack
    step, first = stack.stride(0) * stack.element_size(), stack.data_ptr()
    # Asked of every part in every forward pass: only pointers, no kernels.
    if any(part.data_ptr() != first + index * step for index, part in enumerate(parts)) and not stack.is_meta:
        with torch.no_grad():
            for index, part in enumerate(parts):
                stack[index].copy_(part)
        bind_parts(stack)
    is_trained = any(part.requires_grad for part in parts)
    if stack.requires_grad != is_trained:
        stack.requires_grad_(is_trained)
    return stack


def use_parts(stack: Any) -> Tensor:
    """The values for a product: the stack itself where its gradient goes to a flat buffer or is not needed; else
    concatenated from its parts, so that autograd gives each part a gradient."""
    collect_parts(stack)
    if not getattr(stack, "parts", ()) or hasattr(stack, "main_grad") or not torch.is_grad_enabled():
        return stack  # type: ignore[no-any-return]
    return torch.stack(stack.parts) if stack.requires_grad else stack.detach()


def list_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of all that the module stores: named_parameters(), but a stack, by its first part's name, in
    the place of its parts."""
    seen: set[int] = set()
    for name, param in module.named_parameters():
        stack = getattr(param, "part_of", None)
        if stack is None:
            yield name, param
        elif id(stack) not in seen:
            seen.add(id(stack))
            yield name, collect_parts(stack)
