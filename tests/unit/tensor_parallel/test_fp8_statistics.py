# SPDX-License-Identifier: Apache-2.0
"""What --log-fp8-stats says of a layer does not depend on the number of replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.tensor_parallel.fp8_products import FP8Matmul, FP8Recipe


def measure(recipe: str, replicas: int) -> Tensor:
    """The statistics of one product on a replica, whose output gradients are so many times those of one process."""
    product = FP8Matmul(FP8Recipe(name=recipe, measures=True, replicas=replicas), accumulates=False)
    generator = torch.Generator().manual_seed(1)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((8, 32), (16, 32), (8, 16)))
    product.forward(x, weight)
    product.input_grad(grad * replicas, weight)
    product.weight_grad(grad * replicas, x, weight, None)
    return product.take_statistics(x.device)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_statistics_are_those_of_one_process(recipe: str) -> None:
    expected = measure(recipe, 1)
    assert (expected[:, :3] > 0).all()
    torch.testing.assert_close(measure(recipe, 4), expected, rtol=1e-12, atol=0.0)
