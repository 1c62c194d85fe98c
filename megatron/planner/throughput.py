# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of a step, and its share of the machine's speed.

Floating-point operations are counted as multiplications and additions of the matrix products that the model needs, once
forward and twice backward (Narayanan et al., 2021, appendix; attention counted causally, so half of the full square).
Recomputation does not count: it is work, but not progress.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.core import device as device_module
from megatron.core.plan.branch_kind import work_on_streams
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.read import read_plan
from megatron.core.tensor_parallel.products import multiply_by_onednn, takes_onednn
from megatron.planner.memory import count_layers

if TYPE_CHECKING:
    import torch

    from megatron.core.transformer.transformer_config import TransformerConfig

# Backward has two products for each of forward: for the gradients of the input and of the weight.
_FORWARD_AND_BACKWARD = 3
_MULTIPLY_AND_ADD = 2
_PRODUCTS_PER_SIZE = 4
_SIZES_ON_CPU = (128, 256, 512, 1024)
_SIZES_ON_GPU = (2048, 4096, 8192)
"""A GPU needs large products to be busy; the largest is some milliseconds."""
_ATTEMPTS = 5


def count_training_flops_per_token(
    model: TransformerConfig, *, seq_length: int, padded_vocab_size: int, sees_all: bool = False
) -> int:
    """Floating-point operations of forward and backward for one token of a sequence of `seq_length` tokens.

    padded_vocab_size: rows of the output layer over all ranks. Of a layer's experts those count that work on a token,
    and the shared one; routers do not. Multi-token prediction has for each further token a layer, its projection with
    three norms, and the output layer once more. sees_all: windows and chunks do not count, as in Megatron-LM's figure.
    """
    products = count_products(model, padded_vocab_size=padded_vocab_size, seq_length=seq_length, sees_all=sees_all)
    return _FORWARD_AND_BACKWARD * _MULTIPLY_AND_ADD * sum(products)


def count_products(
    model: TransformerConfig, *, padded_vocab_size: int, seq_length: int = 2, sees_all: bool = False
) -> tuple[int, int]:
    """Multiplications in forward for an average token of a sequence: those with matrices, and those beyond, which for
    two tokens is what one costs that sees another. Arguments as in `count_training_flops_per_token`."""
    plan, depths, hidden = read_plan(model), model.mtp_num_layers or 0, model.hidden_size
    # One layer of multi-token prediction may serve several depths.
    used = [*plan.decoder, *itertools.islice(itertools.cycle(plan.prediction), depths)]
    counts = count_layers(model, used)
    per_token = counts.matrices + counts.active_expert_matrices + counts.projections
    per_token += (1 + depths) * padded_vocab_size * hidden  # the output layer
    per_token += depths * (2 * hidden * hidden + 3 * hidden)
    branches = [branch for layer in used for branch in layer.branches]
    per_token += len(branches) * work_on_streams(model)
    if sees_all:
        branches = [branch._replace(options=branch.options._replace(window=None, chunk=None)) for branch in branches]
    return per_token, sum(find_kind(branch.kind).work(model, branch, seq_length) for branch in branches)


def measure_peak_flops(device: torch.device, dtype: torch.dtype, *, seconds: float | None = None) -> float:
    """FLOP/s of the fastest of several square matrix products: the yardstick where no data sheet is known.

    Products grow from 128 x 128 to 1024 x 1024, on a GPU from 2048 x 2048 to 8192 x 8192, as far as memory and the
    seconds allow (0.1, on a GPU 5, of which most go into starting its libraries): a processor without 16-bit arithmetic
    would spend seconds on one large product. Each size is measured several times, however long it takes, because other
    programs may have the processor at any one moment. Raises ZeroDivisionError where the clock sees no time pass.
    """
    import torch

    started_at = time.perf_counter()
    on_host = device_module.is_cpu(device)
    seconds = (0.1 if on_host else 5.0) if seconds is None else seconds
    fastest = 0.0
    # Random numbers, as in training: on equal ones a GPU takes less power, and is faster than it will ever be. From a
    # separate generator: the run's must be left as they are.
    generator = torch.Generator(device)
    for size in _SIZES_ON_CPU if on_host else _SIZES_ON_GPU:
        try:
            a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            multiply = multiply_by_onednn if takes_onednn(a, b) else functools.partial(torch.mm, out=out)
            multiply(a, b)
        except torch.OutOfMemoryError:
            break
        device_module.synchronize()
        shortest = math.inf
        for _ in range(_PRODUCTS_PER_SIZE):
            began_at = time.perf_counter()
            multiply(a, b)
            device_module.synchronize()
            # The shortest, not the mean: whatever interrupts a product can only make it longer.
            shortest = min(shortest, time.perf_counter() - began_at)
        fastest = max(fastest, _MULTIPLY_AND_ADD * size**3 / shortest)
        remaining = seconds - (time.perf_counter() - started_at)
        if 8 * shortest * (_PRODUCTS_PER_SIZE + 1) > remaining:  # twice as wide: 8 times the work, and once to warm up
            break
    return fastest


class Yardstick:
    """The FLOP/s that count as 100 % of a device for MFU (model FLOPs utilisation).

    flops: from a data sheet, or as `measure` finds them at once. A measurement during which other programs had
    the processor is too low; that shows when a step of the training is faster than it, and then it is taken again. The
    best one counts.
    """

    def __init__(self, source: str, flops: float | None = None, measure: Callable[[], float] | None = None) -> None:
        self.source = source
        """Origin of the number, for the log."""
        self.flops = flops
        """FLOP/s; None where nothing is known."""
        self._measure = measure
        self._attempts_left = _ATTEMPTS
        if measure is not None:
            self._try()

    def utilisation(self, achieved: float | None) -> float | None:
        """Share of the yardstick that `achieved` FLOP/s are, 0 to 1; None where either is unknown.

        Not clipped: a value above 1 says that the yardstick is too short, also when measured again.
        """
        if achieved is None:
            return None
        # So many times at most: where steps are faster for good, every log line would measure again.
        while self._measure is not None and self._attempts_left and achieved > (self.flops or 0.0):
            self._try()
        return achieved / self.flops if self.flops else None

    def _try(self) -> None:
        assert self._measure is not None
        self._attempts_left -= 1
        with contextlib.suppress(ZeroDivisionError):
            self.flops = max(self.flops or 0.0, self._measure())


def build_yardstick(device: torch.device, dtype: torch.dtype) -> Yardstick:
    """Dense peak FLOP/s of the device for `dtype`, from its data sheet where that is known, else measured now."""
    named = device_module.get_dense_peak_flops(dtype)
    if named is not None:
        return Yardstick(f"dense peak of {device_module.device_name()}", named)
    source = "matrix product measured at start"
    if not device_module.is_cpu(device):
        source += f", because no data sheet of {device_module.device_name()} is known here"
    return Yardstick(source, measure=lambda: measure_peak_flops(device, dtype))
