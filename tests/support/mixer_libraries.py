# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the packages that compute mixers on a GPU: their published signatures and what they insist on, and the
recurrence, token by token."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ssm.libraries import StateLibrary

CALLS: Counter[str] = Counter()
"""Calls of each function."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """q, k [b, s, H, K], v [b, s, H, V], g and beta [b, s, H]; g [b, s, H, K] of Kimi delta attention. With cu_seqlens
    b is 1, and states are those of documents."""
    CALLS["delta rule" if g.dim() == 3 else "kimi delta"] += 1
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == g.shape[:3] == beta.shape
    assert q.dtype == k.dtype == v.dtype == beta.dtype and g.dtype == torch.float32 and initial_state is None
    assert all(x.is_contiguous() for x in (v, g, beta))
    bounds = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or (cu_seqlens.dtype == torch.int64 and len(v) == 1)
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    outputs, states = [], []
    for start, end in zip(bounds, bounds[1:], strict=False):
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
        for t in range(start, end):
            decay = g[:, t].exp()
            state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
            change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        states.append(state)
    return torch.stack(outputs, 1), torch.cat(states) if output_final_state else None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    return_final_states: bool = False,
) -> tuple[Tensor, Tensor] | Tensor:
    """x [b, s, H, P], dt [b, s, H], A [H], B, C [b, s, G, N]; states [b, H, P, N]. The package's further arguments (D,
    z, dt_bias, initial_states, dt_softplus) are not used."""
    CALLS["scan"] += 1
    assert chunk_size & (chunk_size - 1) == 0
    assert dt.shape == x.shape[:3] and A.shape == x.shape[2:3] and B.shape == C.shape and B.dtype == x.dtype
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == x.shape[:2])
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], dim=2) for y in (B, C))
    state, outputs = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1]), []
    for t in range(x.shape[1]):
        if seq_idx is not None and t and not torch.equal(seq_idx[:, t], seq_idx[:, t - 1]):
            state = torch.zeros_like(state)
        written = torch.einsum("bhp,bhn->bhpn", x[:, t] * dt[:, t, :, None], B[:, t])
        state = state * (dt[:, t] * A).exp()[..., None, None] + written
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    output = torch.stack(outputs, 1)
    return (output, state) if return_final_states else output


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """x [b, c, s], weight [c, width], bias [c], seq_idx [b, s]."""
    CALLS["convolution"] += 1
    assert activation == "silu" and initial_states is None and not return_final_states and final_states_out is None
    assert x.stride(1) == 1 and x.shape[1] % 8 == x.stride(0) % 8 == x.stride(2) % 8 == 0
    assert x.storage_offset() * x.element_size() % 16 == 0
    width = weight.shape[1]
    assert 2 <= width <= 4 and weight.shape[0] == x.shape[1]
    padded, total = F.pad(x, (width - 1, 0)), torch.zeros_like(x)
    for tap in range(width):
        read = padded[:, :, tap : tap + x.shape[2]]
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32 and seq_idx.shape == (x.shape[0], x.shape[2])
            earlier = F.pad(seq_idx, (width - 1, 0), value=-1)[:, tap : tap + x.shape[2]]
            read = read * (earlier == seq_idx)[:, None]
        total = total + read * weight[:, tap, None]
    return F.silu(total if bias is None else total + bias[:, None])


FUNCTIONS: dict[str, dict[str, Any]] = {
    "fla": {}, "fla.ops": {}, "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    "fla.ops.kda": {"chunk_kda": chunk_gated_delta_rule}, "mamba_ssm": {}, "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": mamba_chunk_scan_combined},
    "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
}  # fmt: skip


@contextlib.contextmanager
def installed(*packages: str, on_cpu: bool = False) -> Iterator[Counter[str]]:
    """The stand-ins of these packages (import names) can be imported, and of no others; yields the calls.

    on_cpu: mixers that are built inside choose on the CPU as on a GPU, and take float32, too.
    """
    modules: dict[str, Any] = dict.fromkeys(FUNCTIONS)
    for name, functions in FUNCTIONS.items():
        if name.partition(".")[0] in packages:
            module = ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__path__ = []
            vars(module).update(functions)
            modules[name] = module
    CALLS.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        if on_cpu:
            stack.enter_context(mock.patch("megatron.core.ssm.libraries.is_cuda", lambda device: True))
            stack.enter_context(mock.patch.object(StateLibrary, "number_formats", (torch.float32,)))
        yield CALLS
