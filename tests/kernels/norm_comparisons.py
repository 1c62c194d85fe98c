# SPDX-License-Identifier: Apache-2.0
"""Comparisons, as in comparisons.py, of norms and the sums of the residual stream that their kernel takes over."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from megatron.core.kernels import norm as norm_kernels
from megatron.core.transformer.norms import build_norm
from tests.kernels.harness import (
    TOLERANCES,
    assert_close,
    assert_overwriting_is_told,
    compared,
    kernels_chosen,
    randn,
    run,
)
from tests.support.gpt_models import read_config


def _compare_norm(
    flags: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], device: str, extras: str = ""
) -> None:
    """dtypes: of x and weights, and of the residual. extras: of "bias residual sum", what there is."""
    config = read_config(f"--norm-epsilon 0.1 {flags}").model
    width, centered = shape[-1], config.layernorm_zero_centered_gamma
    norm = build_norm(config, width).to(device, dtypes[0])
    x = randn(*shape, dtype=dtypes[0], device=device)
    inputs = [x, None, None, randn(width, dtype=dtypes[0], device=device), None]
    if "bias" in extras:
        inputs[1] = randn(1 + width, dtype=dtypes[0], device=device)[1:].contiguous()
    if "residual" in extras:
        inputs[2] = randn(1, *shape, dtype=dtypes[1], device=device)[0] + 0.5
    if "LayerNorm" in flags:
        inputs[4] = randn(2, width, dtype=dtypes[0], device=device)[0].contiguous()

    def reference(
        x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, offset: Tensor | None
    ) -> tuple[Tensor, ...]:
        total = x if bias is None else x + bias
        # As the stream has it, in which nothing else is rounded.
        total = total if residual is None else _round_values(total + residual, dtypes[1])
        scale = weight + 1.0 if centered else weight
        if offset is not None:
            return torch.nn.functional.layer_norm(total, (width,), scale, offset, 0.1), total
        return torch.nn.functional.rms_norm(total, (width,), scale, 0.1), total

    def fused(
        x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor, offset: Tensor | None
    ) -> tuple[Tensor, ...]:
        own = {"weight": weight} | ({} if offset is None else {"bias": offset})
        given = {"bias": bias, "residual": residual, "returns_sum": True}
        result: tuple[Tensor, ...] = torch.func.functional_call(norm, own, (x,), given)
        return result

    pick = (lambda found: found) if "sum" in extras else (lambda found: found[0])
    expected = run(lambda *given: pick(reference(*given)), [t if t is None else t.double() for t in inputs])
    # Few programs, so that each has several tiles.
    with kernels_chosen() as launched, mock.patch.object(norm_kernels, "_PROGRAMS", 2):
        found = run(lambda *given: pick(fused(*given)), inputs, with_gaps=True)
    assert len(launched) >= 2, launched
    assert found[0].dtype == dtypes[0] and ("sum" not in extras or found[1].dtype == dtypes[1])
    if "residual" in extras and dtypes[0] == dtypes[1]:
        with kernels_chosen(), torch.no_grad():
            normed, total = fused(*(t if t is None else t.clone() for t in inputs))
            # What is normalised is what backward, and recomputation, find in the stream.
            assert torch.equal(normed, fused(total, None, None, *inputs[3:])[0])
    # Gradients [h] are sums over all tokens, small beside what they are summed of.
    for value, exact in zip(found, expected, strict=True):
        assert_close([value], [exact], (2 if value.dim() > 1 else 10) * TOLERANCES[dtypes[0]])


def _round_values(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In values alone: the gradient is as if nothing were rounded."""
    return x + (x.to(dtype).double() - x).detach()


@compared
def norms(device: str) -> None:
    full, half = torch.float32, torch.bfloat16
    kinds = [
        f"--normalization {kind} {centered}"
        for kind in ("RMSNorm", "LayerNorm") for centered in ("", "--apply-layernorm-1p")
    ]  # fmt: skip
    for flags in kinds:
        _compare_norm(flags, (5, 3, 72), (full, full), device, "bias residual sum")
        _compare_norm(flags, (5, 3, 72), (full, full), device)
        _compare_norm(flags, (300, 1, 16), (full, full), device, "sum")
        _compare_norm(flags, (3, 2, 2050), (full, full), device, "residual sum")
    for flags in kinds[::3]:
        _compare_norm(flags, (3, 2, 1030), (half, half), device, "bias residual sum")
        _compare_norm(flags, (3, 2, 72), (half, full), device, "bias residual sum")
        _compare_norm(flags, (1, 1, 3), (full, full), device, "residual")
        _compare_norm(flags, (0, 1, 72), (full, full), device, "residual sum")
        _compare_norm(flags, (3, 1, 40), (torch.float16, torch.float16), device, "residual sum")


@compared
def gradients_of_norms_are_added(device: str) -> None:
    """Where there is a buffer in float32."""
    norm = build_norm(read_config("--normalization RMSNorm").model, 16).to(device)
    x = randn(3, 2, 16, dtype=torch.float32, device=device)
    with kernels_chosen():
        norm(x).square().sum().backward()
        norm.weight.main_grad = torch.ones(16, device=device)
        expected, norm.weight.grad = norm.weight.grad + 1, None
        norm(x).square().sum().backward()
    assert norm.weight.grad is None
    assert_close([norm.weight.main_grad], [expected], TOLERANCES[torch.float32])


@compared
def norms_tell_what_they_overwrite(device: str) -> None:
    norm = build_norm(read_config("--normalization RMSNorm").model, 16).to(device)
    x, residual = (randn(3, 2, 16, dtype=torch.float32, device=device) for _ in range(2))
    assert_overwriting_is_told(lambda x: norm(x, residual=residual, returns_sum=True), x)
