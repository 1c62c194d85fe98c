# SPDX-License-Identifier: Apache-2.0
"""Mistakes in parallel code, put into a process that is about to train: what a tool that looks for them must find.

Each changes the recipe or a class of this process, which a test forks for one run, so that nothing is put back.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.distributed.bucket import Bucket, GradSync, ParamGather
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.pipeline_parallel.p2p_communication import P2PTransfers
from megatron.core.pipeline_parallel.weight_grad_queue import WeightGradQueue
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.communication_plans import OutsideProduct
from megatron.core.tensor_parallel.products import Matmul
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.rotary import Rotation
from megatron.training import step
from megatron.training.recipes.recipe import Recipe

Sabotage = Callable[[Recipe], Recipe]


def change_model(change: Callable[[Any], None]) -> Sabotage:
    """The sabotage that does something to each chunk of the model."""

    def sabotage(recipe: Recipe) -> Recipe:
        def build(*args: Any, **kwargs: Any) -> nn.Module:
            model = recipe.build_model(*args, **kwargs)
            change(model)
            return model

        return dataclasses.replace(recipe, build_model=build)

    return sabotage


def layer_of(model: Any, index: int) -> Any:
    """A layer of the whole model, by its index, on the stage that holds it; None elsewhere."""
    layers = model.decoder.layers
    return next((layer for layer in layers if layer.layer_number == index + 1), None)


def drop_plan(index: int, linear: str) -> Sabotage:
    """A linear layer of the MLP multiplies and sends nothing: no sum of its outputs, or of its input gradients."""

    def change(model: Any) -> None:
        layer = layer_of(model, index)
        if layer is not None:
            part = getattr(layer.mlp, linear)
            part.plan = OutsideProduct(part.tp_group, leave=lambda output, group: output)

    return change_model(change)


class OwnTokens(Matmul):
    """Its weight gradient sees the tokens of this rank only."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def weight_grad(
        self, grad: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, ends: Tensor | None = None
    ) -> Tensor | None:
        rank, size = self.group.rank(), self.group.size()
        own = grad.chunk(size)[rank], x.flatten(0, 1).chunk(size)[rank]
        return super().weight_grad(*own, weight, main_grad, ends)


def take_own_tokens(model: Any) -> None:
    """A column layer forgets the tokens that it gathered when it makes its weight gradient."""
    layer = layer_of(model, 2)
    if layer is not None:
        layer.mlp.linear_fc1.product = OwnTokens(layer.mlp.linear_fc1.tp_group)


def change_partial_sums(change: Callable[[str, Tensor, Group], None]) -> Sabotage:
    """After gradients were summed over an axis, something else is done to them."""

    def sabotage(recipe: Recipe) -> Recipe:
        original = step.finalize_model_grads

        def finalised(model: Sequence[Any], *args: Any, pg_collection: ProcessGroupCollection, **more: Any) -> None:
            original(model, *args, pg_collection=pg_collection, **more)
            for chunk in model:
                for axis, params in chunk.partial_params.items():
                    for param in params:
                        if (group := getattr(pg_collection, axis)) is not None:
                            change(param.placement.name, param.main_grad, group)

        step.finalize_model_grads = finalised  # type: ignore[assignment]
        return recipe

    return sabotage


def skip_sum(wanted: Callable[[str], bool]) -> Sabotage:
    """The gradients of some partial parameters are not summed."""

    def sabotage(recipe: Recipe) -> Recipe:
        original = step.finalize_model_grads

        def finalised(model: Sequence[Any], *args: Any, **more: Any) -> None:
            for chunk in model:
                for axis, params in list(chunk.partial_params.items()):
                    chunk.partial_params[axis] = [p for p in params if not wanted(p.placement.name)]
                    if not chunk.partial_params[axis]:
                        del chunk.partial_params[axis]
            original(model, *args, **more)

        step.finalize_model_grads = finalised  # type: ignore[assignment]
        return recipe

    return sabotage


def skip_shared_parts(recipe: Recipe) -> Recipe:
    """Keys and values that several ranks hold are not summed over them."""
    # The package hands on a function of the module's name.
    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
    finalize.sum_replicated_grads = lambda grads, groups: None  # type: ignore[attr-defined]
    return recipe


def average_norms(name: str, grad: Tensor, group: Group) -> None:
    if "norm" in name:
        grad.div_(group.size())


def skip_bucket(number: int) -> Sabotage:
    """The bucket that backward completes as this one is not reduced."""

    def sabotage(recipe: Recipe) -> Recipe:
        original = GradSync.__init__

        def init(self: GradSync, buckets: Sequence[tuple[Bucket, Sequence[nn.Parameter]]]) -> None:
            original(self, buckets)
            if len(buckets) > number:
                self.buckets[number].start_reduce = lambda: None  # type: ignore[method-assign]

        GradSync.__init__ = init  # type: ignore[method-assign]
        return recipe

    return sabotage


def skip_gather(recipe: Recipe) -> Recipe:
    """The parameters of the first bucket are not gathered after the update."""
    original = ParamGather.__init__

    def init(self: ParamGather, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.buckets[0].start_gather = lambda: None  # type: ignore[method-assign]

    ParamGather.__init__ = init  # type: ignore[method-assign]
    return recipe


def shift_angles(recipe: Recipe) -> Recipe:
    """The second context-parallel rank takes the angles of the next position."""
    original = RotaryEmbedding.build_rotation

    def build(self: RotaryEmbedding, *args: Any) -> Rotation:
        rotation = original(self, *args)
        group = args[2]
        if group.size() > 1 and group.rank() == 1:
            rotation = rotation._replace(cos=rotation.cos.roll(-1, 0), sin=rotation.sin.roll(-1, 0))
        return rotation

    RotaryEmbedding.build_rotation = build  # type: ignore[method-assign]
    return recipe


def count_over(field: str) -> Sabotage:
    """Expert biases move by the tokens of the ranks of one group (or `none`) instead of all that hold the layer."""

    def sabotage(recipe: Recipe) -> Recipe:
        original = TopKRouter.finish_step

        def finish(self: TopKRouter, groups: ProcessGroupCollection) -> None:
            alone = ProcessGroupCollection.single().tp
            group = alone if field == "none" else getattr(groups, field)
            original(self, dataclasses.replace(groups, tp_dp_cp=group))

        TopKRouter.finish_step = finish  # type: ignore[method-assign]
        return recipe

    return sabotage


def drop_weight_gradient(model: Any) -> None:
    """A zero-bubble schedule forgets one weight's products."""
    layer = layer_of(model, 2)
    if layer is None:
        return
    weight, original = layer.self_attention.linear_proj.weight, WeightGradQueue.defer

    def defer(self: WeightGradQueue, compute: Any) -> bool:
        # finish_weight_grad binds the arguments: the product, the weight, ...
        return original(self, (lambda: None) if compute.args[1] is weight else compute)

    WeightGradQueue.defer = defer  # type: ignore[method-assign]


def send_halves(recipe: Recipe) -> Recipe:
    """What a stage sends is half of what it computed."""
    original = P2PTransfers.post

    def post(self: P2PTransfers, transfers: Any, outgoing: dict[Any, Tensor]) -> None:
        for key in outgoing:
            if key[0] == "F":
                outgoing[key] = outgoing[key] * 0.5
        original(self, transfers, outgoing)

    P2PTransfers.post = post  # type: ignore[method-assign]
    return recipe
