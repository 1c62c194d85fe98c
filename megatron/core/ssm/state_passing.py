# SPDX-License-Identifier: Apache-2.0
"""The state from chunk to chunk: the only part of linear attention that goes over a sequence in its order.

With T [C, C], the chunk's solved triangular system, where there is a delta rule, X its causes [C, K], L the keys that
leave it [C, K] and f the decay over it:

    U_n = V_n, or T_n (V_n - X_n S_n)            S_{n+1} = f_n S_n + L_n^T U_n

Tensors are [n, ..., rows, columns], with the chunks first, in float32 or float64. On a GPU one kernel goes over all
chunks, one each way (core/kernels/states.py); here a loop starts some products for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.kernels.launching import by_kernel

_KERNELS = "megatron.core.kernels.states"


def _fits(*tensors: Tensor | None) -> bool:
    """Return whether kernels take keys of so many channels, of the last tensor: a state has to stay in registers."""
    state = tensors[-1]
    return state is not None and state.shape[-2] <= 128


@by_kernel(f"{_KERNELS}:pass_states", "values", "causes", "solved", "leaving", "keep", "state", fits=_fits)
def pass_states(
    values: Tensor, causes: Tensor | None, solved: Tensor | None, leaving: Tensor, keep: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before the chunks [n, ..., K, V], what is written, U [n, ..., C, V], and the last state.

    values [n, ..., C, V]; causes, leaving [n, ..., C, K]; solved [n, ..., C, C]; keep [n, ..., K or 1, 1]; state
    [..., K, V].
    """
    states = values.new_empty(len(values), *state.shape)
    written = values if causes is None else torch.empty_like(values)
    changes = leaving.mT @ values if causes is None else None
    for chunk in range(len(values)):
        states[chunk] = state
        if causes is None or solved is None:
            assert changes is not None
            state = torch.addcmul(changes[chunk], keep[chunk], state)
        else:
            of_chunk = solved[chunk] @ (values[chunk] - causes[chunk] @ state)
            written[chunk] = of_chunk
            state = torch.addcmul(leaving[chunk].mT @ of_chunk, keep[chunk], state)
    return states, written, state


@by_kernel(
    f"{_KERNELS}:pass_states_backward",
    "causes", "solved", "leaving", "keep", "of_states", "of_written", "of_last",
    fits=_fits,
)  # fmt: skip
def pass_states_backward(
    causes: Tensor | None,
    solved: Tensor | None,
    leaving: Tensor,
    keep: Tensor,
    of_states: Tensor,
    of_written: Tensor,
    of_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the values [n, ..., C, V], of the states after the chunks [n, ..., K, V], and of the
    first state [..., K, V]; of_states, of_written, of_last are the gradients of `pass_states`' results from
    elsewhere."""
    after = torch.empty_like(of_states)
    of_values = of_written if causes is None else torch.empty_like(of_written)
    for chunk in reversed(range(len(of_written))):
        after[chunk] = of_last
        of_first = torch.addcmul(of_states[chunk], keep[chunk], of_last)
        if causes is not None and solved is not None:
            of_chunk = solved[chunk].mT @ (of_written[chunk] + leaving[chunk] @ of_last)
            of_values[chunk] = of_chunk
            of_first -= causes[chunk].mT @ of_chunk
        of_last = of_first
    if causes is None:
        of_values = of_written + leaving @ after
    return of_values, after, of_last
