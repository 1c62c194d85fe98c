# SPDX-License-Identifier: Apache-2.0
"""Choice of torch's flash attention where a machine has several: 2, which torch includes, and 3 or 4 where a package
brings them.

Which one is the fastest depends on the GPU, on the package's release and on the heads, so that two packed documents of
the run's shape are computed forward and backward by each. One that gives other numbers than version 2 is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.collectives import broadcast_object
from megatron.core.device import is_cpu, mark, measure_seconds_between, synchronize
from megatron.core.device_kernels import activate_flash_attention
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.parameters import parameter_dtype
from megatron.core.transformer.core_attention.block_kernels import Sequences
from megatron.core.transformer.core_attention.flash import FlashCall, flash_attention
from megatron.core.transformer.core_attention.select import find_flash_problem
from megatron.core.transformer.transformer_config import TransformerConfig

_OWN = 2
_VERSIONS = (_OWN, 3, 4)
_MOST_TOKENS, _ROUNDS = 8192, 3
_TOLERANCE = 2.0**-5
"""Of the greatest value: several roundings to bfloat16."""


def choose_flash_version(
    config: TransformerConfig, seq_length: int, device: torch.device, groups: ProcessGroupCollection
) -> str | None:
    """Activate the fastest version here, the same on all ranks, and return a note on it; None where there is nothing to
    choose. Every rank calls this.

    Not with --deterministic-mode, whose runs must not depend on a clock, nor with dropout, which 3 and 4 do not have.
    """
    by_flag = config.flash_attention_version is not None or config.attention_backend not in ("auto", "flash")
    is_fixed = by_flag or config.deterministic_mode or config.attention_dropout > 0
    if is_fixed or is_cpu(device) or find_flash_problem(config, device) is not None:
        return None
    # The first rank decides: a clock says something else on each.
    found = broadcast_object(
        measure_versions(config, seq_length, device) if groups.world.rank() == 0 else None, groups.world
    )
    chosen = min(found, key=found.__getitem__)
    activate_flash_attention(chosen)
    if len(found) == 1:
        return None
    said = ", ".join(f"{1e3 * seconds:.2f} ms by {version}" for version, seconds in found.items())
    return (
        f"flash attention is version {chosen}, the fastest here ({said}); --flash-attention-version {chosen} keeps it "
        "where a run must give the same bits again"
    )


def measure_versions(config: TransformerConfig, seq_length: int, device: torch.device) -> dict[int, float]:
    """Version -> seconds of one call forward and backward, of those that are there and agree with version 2. Leaves
    version 2 in place."""
    versions = [version for version in _VERSIONS if _is_there(version)]
    if versions == [_OWN]:
        return {_OWN: 0.0}
    tokens = max(2, min(seq_length, _MOST_TOKENS) // 2 * 2)
    heads, per_group = (
        config.num_attention_heads,
        config.num_attention_heads // (config.num_query_groups or config.num_attention_heads),
    )
    heads = max(per_group, heads // config.tensor_model_parallel_size)
    generator = torch.Generator("cpu").manual_seed(1)
    width, kv_heads = config.query_width, heads // per_group
    shapes = ((heads, width), (kv_heads, width), (kv_heads, config.value_width))
    q, k, v = (
        torch.randn(tokens, n, channels, generator=generator, device="cpu").to(device, parameter_dtype(config))
        for n, channels in shapes
    )
    halves = [tokens // 2] * 2
    call = FlashCall(width**-0.5, True, None, Sequences.build(halves, halves, device))
    seconds: dict[int, float] = {}
    expected: list[Tensor] = []
    try:
        for version in versions:
            try:
                activate_flash_attention(version)
                found = _run(q, k, v, call)
                if version == _OWN:
                    expected = found
                elif not all(map(_agree, found, expected)):
                    continue
                seconds[version] = min(_time(q, k, v, call) for _ in range(_ROUNDS))
            # Not for this GPU, or not for such heads.
            except RuntimeError:
                if version == _OWN:
                    raise
    finally:
        activate_flash_attention(_OWN)
    return seconds


def _is_there(version: int) -> bool:
    try:
        activate_flash_attention(version)
    except ConfigError:
        return False
    activate_flash_attention(_OWN)
    return True


def _run(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> list[Tensor]:
    """The output, and the gradients of all operands."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v, None, call)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]


def _time(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> float:
    before = mark()
    _run(q, k, v, call)
    after = mark()
    synchronize()
    return measure_seconds_between(before, after)


def _agree(found: Tensor, expected: Tensor) -> bool:
    error = (found.float() - expected.float()).abs().max()
    return bool((error <= _TOLERANCE * expected.float().abs().max()).item())
