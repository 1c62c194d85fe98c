# SPDX-License-Identifier: Apache-2.0
"""Flat buffers: layout, views, hooks, tied parameters; and which elements a process counts in a norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import ALIGNMENT, lay_out
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.clip_grads import view_counted
from megatron.core.placement import Part, Placement, Split, place
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.support.pretend_groups import pretend
from tests.support.run_flags import run_config


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 5)
        self.norm = nn.LayerNorm(5)
        self.output = nn.Linear(5, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(self.norm(self.embedding(tokens)))
        return logits


def wrap(module: nn.Module, **settings: bool) -> DistributedDataParallel:
    return DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**settings), module)


some_parameters = st.lists(st.tuples(st.integers(1, 64000), st.booleans()), min_size=1, max_size=20)
"""(elements, whether it is a vector)."""


@given(some_parameters)
def test_layout_places_every_parameter_once_and_vectors_behind_the_others(params: list[tuple[int, bool]]) -> None:
    layout = lay_out(*zip(*params, strict=True))
    taken = torch.zeros(layout.numel, dtype=torch.int)
    for (numel, is_vector), slot in zip(params, layout.slots, strict=True):
        assert slot.start % ALIGNMENT == 0
        assert slot.numel == numel
        assert slot.start >= layout.vectors_start if is_vector else slot.padded_end <= layout.vectors_start
        taken[slot.start : slot.start + slot.numel] += 1
    assert taken.max() == 1
    assert max(slot.padded_end for slot in layout.slots) == layout.numel


def test_parameters_and_gradients_become_views_and_keep_their_values() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    values = [param.detach().clone() for param in module.parameters()]
    model = wrap(module)
    (buffer,) = model.flat_buffers
    for param, value in zip(module.parameters(), values, strict=True):
        assert torch.equal(param, value)
        assert param.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()
        assert param.main_grad.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr()  # type: ignore[attr-defined]
    buffer.param_data.fill_(7.0)
    assert all((param == 7.0).all() for param in module.parameters())


def test_gradients_accumulate_over_microbatches_and_are_cleared() -> None:
    module = nn.Linear(3, 2)
    model = wrap(module)
    x = torch.ones(4, 3)
    for _ in range(2):
        model(x).sum().backward()
    assert (module.weight.main_grad == 8).all()  # type: ignore[operator]
    assert module.weight.grad is None
    model.zero_grad_buffer()
    assert (module.weight.main_grad == 0).all()  # type: ignore[operator]


def test_tied_parameter_is_held_once_and_gets_both_gradients() -> None:
    reference, module = Tied(), Tied()
    model = wrap(module)
    tokens = torch.tensor([[1, 4, 4, 9]])
    reference(tokens).square().sum().backward()
    model(tokens).square().sum().backward()
    assert model.flat_buffers[0].names == ["embedding.weight", "norm.weight", "norm.bias"]
    assert torch.equal(module.embedding.weight.main_grad, reference.embedding.weight.grad)  # type: ignore[arg-type]


def test_frozen_parameters_stay_outside() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    model = wrap(module)
    assert model.flat_buffers[0].names == ["1.weight", "1.bias"]
    model(torch.ones(1, 2)).sum().backward()
    finalize_model_grads([model])


def test_gradients_of_bfloat16_parameters_accumulate_in_float32_when_asked() -> None:
    small = {}
    for in_float32 in (False, True):
        module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        model = wrap(module, grad_reduce_in_fp32=in_float32)
        for value in (256.0, *[1.0] * 8):  # bfloat16 counts in twos from 256 on
            (module.weight * value).sum().backward()
        small[in_float32] = module.weight.main_grad.item()  # type: ignore[operator]
        assert model.flat_buffers[0].grad_data.dtype == (torch.float32 if in_float32 else torch.bfloat16)
    assert small == {False: 256.0, True: 264.0}


@pytest.mark.flags("--accumulate-allreduce-grads-in-fp32")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [("", torch.bfloat16), ("--accumulate-allreduce-grads-in-fp32", torch.float32), ("--bf16", torch.float32)],
)
def test_flag_chooses_the_gradients_number_format(flags: str, expected: torch.dtype) -> None:
    config = run_config(flags)
    model = DistributedDataParallel(config.model, config.ddp, nn.Linear(2, 2, dtype=torch.bfloat16))
    assert model.flat_buffers[0].grad_data.dtype == expected


def test_number_formats_get_buffers_of_their_own() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, dtype=torch.bfloat16), "b": nn.Linear(2, 2)})
    assert [buffer.param_data.dtype for buffer in wrap(module).flat_buffers] == [torch.bfloat16, torch.float32]


def test_names_come_from_placements() -> None:
    module = nn.Linear(2, 2)
    place(module.weight, Placement("decoder.layers.7.weight", (2, 2)))
    assert wrap(module).flat_buffers[0].names == ["decoder.layers.7.weight", "bias"]


def test_state_dict_is_the_modules() -> None:
    module = nn.Linear(2, 2)
    model = wrap(module)
    assert list(model.state_dict()) == ["weight", "bias"]
    model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    assert model.flat_buffers[0].param_data.sum() == 4


@pytest.mark.parametrize(
    ("switches", "sentence"),
    [
        ({"overlap_param_gather": True}, "--overlap-param-gather needs --use-distributed-optimizer"),
        ({"bucket_size": 5, "num_buckets": 2}, "keep one"),
        ({"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True}, "were made for 1"),
    ],
)
def test_switches_that_contradict_each_other_are_refused(switches: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        wrap(nn.Linear(1, 1), **switches)


@given(
    some_parameters,
    st.one_of(st.none(), st.integers(1, 500)),
    st.integers(1, 7),
    st.sets(st.integers(0, 19)),
)
def test_buckets_divide_the_buffer(
    params: list[tuple[int, bool]], size: int | None, shards: int, alone: set[int]
) -> None:
    layout = lay_out(*zip(*params, strict=True), bucket_size=size, padding=ALIGNMENT * shards, alone=alone)
    assert [bucket.start for bucket in layout.buckets] == [0, *(bucket.stop for bucket in layout.buckets[:-1])]
    assert layout.buckets[-1].stop == layout.numel
    assert sorted(index for bucket in layout.buckets for index in bucket.params) == list(range(len(params)))
    for bucket in layout.buckets:
        assert (bucket.stop - bucket.start) % (ALIGNMENT * shards) == 0
        for index in bucket.params:
            slot = layout.slots[index]
            assert bucket.start <= slot.start and slot.start + slot.numel <= bucket.stop
        assert len(bucket.params) == 1 or not alone & set(bucket.params)
        assert bucket.stop <= layout.vectors_start or bucket.start >= layout.vectors_start
        if size is not None:  # without its first parameter it was not full yet
            assert sum(layout.slots[index].numel for index in bucket.params[1:]) < size


@pytest.mark.flags("--ddp-bucket-size", "--ddp-num-buckets", "--ddp-pad-buckets-for-high-nccl-busbw")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [1024 * 6]),
        ("--overlap-grad-reduce", [1024 * 6]),
        ("--ddp-bucket-size 2048", [1024 * 6]),
        ("--overlap-grad-reduce --ddp-bucket-size 2048", [2048] * 3),
        ("--overlap-grad-reduce --ddp-num-buckets 2", [3072] * 2),
        ("--ddp-pad-buckets-for-high-nccl-busbw", [65536]),
    ],
)
def test_flags_divide_gradients_into_buckets(flags: str, expected: list[int]) -> None:
    config = run_config(flags)
    module = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
    (buffer,) = DistributedDataParallel(config.model, config.ddp, module).flat_buffers
    assert [bucket.grads.numel() for bucket in buffer.buckets] == expected


@pytest.mark.flags("--grad-reduce-in-bf16")
def test_flag_keeps_gradients_of_a_bfloat16_run_in_bfloat16() -> None:
    for flags, expected in (("--bf16", torch.float32), ("--bf16 --grad-reduce-in-bf16", torch.bfloat16)):
        config = run_config(flags)
        model = DistributedDataParallel(config.model, config.ddp, nn.Linear(2, 2, dtype=torch.bfloat16))
        assert model.flat_buffers[0].grad_data.dtype == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_every_element_of_the_model_is_counted_once(rank: int) -> None:
    parts = (Part(2, name="query"), Part(1, replicated=True, name="key"))
    placements = {
        "column": Placement("column", (4, 3), (Split(0, "tp", 2, rank),)),
        "replicated": Placement("replicated", (2, 3)),
        "tied_copy": Placement("tied_copy", (4, 3), (Split(0, "tp", 2, rank),), is_copy=True),
        "partly": Placement("partly", (3, 3), (Split(0, "tp", 2, rank, parts),)),
    }
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(p.local_shape)) for name, p in placements.items()})
    for name, placement in placements.items():
        place(module[name], placement)
    (buffer,) = wrap(module).flat_buffers
    views = view_counted(buffer, buffer.param_data, pretend(rank, tp=2))
    sizes = {"column": 6, "partly": 6, "replicated": 6} if rank == 0 else {"column": 6, "partly": 3}
    assert sum(view.sum().item() for view in views) == sum(sizes.values())


def test_neighbours_that_are_counted_whole_are_one_view() -> None:
    model = wrap(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))
    (buffer,) = model.flat_buffers
    (view,) = view_counted(buffer, buffer.grad_data, ProcessGroupCollection.single())
    assert view.numel() == buffer.layout.numel


def test_two_wrappers_implement_what_the_step_needs_side_by_side() -> None:
    from megatron.core import distributed

    wrappers = (distributed.DistributedDataParallel, distributed.TorchFullyShardedDataParallel)
    assert not issubclass(*wrappers)
    assert not issubclass(*wrappers[::-1])
    for wrapper in wrappers:
        assert issubclass(wrapper, distributed.ModelChunk)
        assert not wrapper.__abstractmethods__
