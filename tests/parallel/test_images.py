# SPDX-License-Identifier: Apache-2.0
"""A model of images and text on two processes, divided in each way, against one process."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.mesh import RankGrid
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.parallel.harness import distributed
from tests.support.image_models import LONGEST, QWEN_SIZES, TILES, build_image_model, make_batch, make_patches

LONGER = {False: 18, True: 12}
"""Places of the longer of the two sequences: 6 tokens of text, 3 tiles of 4 features, or 6 features."""


def compute(
    groups: ProcessGroupCollection, *, is_qwen: bool, sequence_parallel: bool = False
) -> dict[str, torch.Tensor]:
    """The weighted losses under "loss", and the whole gradient of every parameter of this stage by name."""
    model = build_image_model(groups, sequence_parallel=sequence_parallel, is_qwen=is_qwen)
    images, ids, labels = make_batch()
    inputs: tuple[Any, ...] = (images, ids, None, None, labels, None, None, TILES)
    if is_qwen:
        inputs = (make_patches(), ids, None, None, labels, *[None] * 6, QWEN_SIZES)
    found = {}
    if groups.pp.size() == 1 or groups.pp.rank() == 0:
        output, weights = model(*inputs)
        if weights is None:
            dist.send(output.detach(), 1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, 1)
            output.backward(gradient)
    else:
        states = torch.empty(LONGEST, 2, 32)
        dist.recv(states, 0)
        model.set_input_tensor(states.requires_grad_())
        output, weights = model(*inputs)
    if weights is not None:
        found["loss"] = (output * weights).detach()[:, : LONGER[is_qwen]]  # what fills up differs
        (output * weights).sum().backward()
        if groups.pp.rank():
            assert states.grad is not None
            dist.send(states.grad, 0)
    for name, param in model.named_parameters():
        grad, placement = param.grad, get_placement(param)
        assert grad is not None, name
        if "tp" in placement.partial_grad_axes:
            all_reduce(grad, groups.tp)
        found[placement.name] = placement.join(all_gather_object(grad, groups.tp)) if placement.splits else grad
    return found


@distributed(2)
def test_two_processes_compute_what_one_does() -> None:
    for is_qwen in (False, True):
        check_layouts(is_qwen=is_qwen)


def check_layouts(*, is_qwen: bool) -> None:
    expected = compute(ProcessGroupCollection.single(), is_qwen=is_qwen)
    rank = dist.get_rank()
    tensor = ProcessGroupCollection.build(RankGrid(2, tp=2), rank)
    pipeline = ProcessGroupCollection.build(RankGrid(2, pp=2), rank)
    for groups, sequence_parallel in ((tensor, False), (tensor, True), (pipeline, False)):
        found = compute(groups, is_qwen=is_qwen, sequence_parallel=sequence_parallel)
        assert {*itertools.chain(*all_gather_object(sorted(found), groups.world))} == expected.keys()
        for name, value in found.items():
            told = functools.partial("{}: {}".format, name)
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=told)
