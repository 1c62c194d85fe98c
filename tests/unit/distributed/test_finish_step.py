# SPDX-License-Identifier: Apache-2.0
"""Modules that act once per step do so in finalize_model_grads, whoever trains them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.megatron_optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel.forward_backward import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.recipes.gpt import build_gpt_model
from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from tests.parallel.small_training import EXPERTS, training

STEPS = 3  # an odd number: a bias that went up and down is not where it began
MICROBATCHES = 6


def biases(model: nn.Module) -> list[Tensor]:
    """Of all routers, in the order of layers."""
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    return [router.expert_bias.detach().clone() for router in routers if router.expert_bias is not None]


def test_a_library_user_moves_expert_biases_as_training_does() -> None:
    """No hook, nothing of megatron.training around the step: upstream's own way to write a training loop."""
    flags = f"{EXPERTS['picky']} --lr-warmup-iters 0 --lr-decay-style constant"
    config, recipe = training(flags, "1")
    seen: list[Any] = []

    def recorded(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            seen.append({name: tensor.clone() for name, tensor in batch.items()})
            yield batch

    with open_local_run(config, recipe, 0) as run:
        batches = recorded(run.data.open("train", 0))
        for _ in range(STEPS):
            run.hooks.on_step_start(run)
            run.hooks.on_step_end(run, train_step(run, batches))
        trained = biases(run.model[0].module)
        weights = {name: param.detach().clone() for name, param in run.model[0].module.named_parameters()}

    config.model.finalize_model_grads_func = finalize_model_grads  # type: ignore[attr-defined]
    model = DistributedDataParallel(config.model, config.ddp, build_gpt_model(config, 128))
    optimizer = get_megatron_optimizer(config.optimizer, [model])
    again = iter(seen)
    for _ in range(STEPS):
        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=pretrain_gpt.forward_step, data_iterator=again, model=[model],
            num_microbatches=MICROBATCHES, seq_length=16, micro_batch_size=2,
        )  # fmt: skip
        optimizer.step()
    assert all(bias.abs().max() > 0 for bias in trained)
    assert len(trained) == 2
    for own, expected in zip(biases(model.module), trained, strict=True):
        assert torch.equal(own, expected)
    for name, param in model.module.named_parameters():
        assert torch.equal(param, weights[name]), name


class Counting(nn.Module):
    """Any module may act once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.told: list[ProcessGroupCollection] = []

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def finish_step(self, groups: ProcessGroupCollection) -> None:
        """Its gradients are complete by now."""
        torch.testing.assert_close(self.weight.main_grad, torch.full((2, 2), 2.0))  # type: ignore[attr-defined]
        self.told.append(groups)


@pytest.mark.parametrize("num_tokens", [None, 3])
def test_each_module_is_told_once_when_gradients_are_complete(num_tokens: int | None) -> None:
    part = Counting()
    config = ModelParallelConfig()
    config.calculate_per_token_loss = num_tokens is not None
    network = nn.Sequential(part, nn.ReLU(), part)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), network)
    x = torch.full((2, 2), 1.0 if num_tokens is None else 3.0)
    part(x).sum().backward()
    finalize_model_grads([model], num_tokens)
    assert part.told == [model.groups]
