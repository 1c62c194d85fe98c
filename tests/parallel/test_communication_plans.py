# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel linear layers: what runs beside what, what is kept, and what --tp-comm-overlap adds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.mesh import RankGrid
from megatron.core.pipeline_parallel.weight_grad_queue import WeightGradQueue, attach_queue
from megatron.core.process_groups_config import PretendGroup, ProcessGroupCollection, SingleRankGroup
from megatron.core.tensor_parallel import communication_plans, fused_collectives
from megatron.core.tensor_parallel.fused_collectives import (
    FusedCollectives,
    can_fuse_collectives,
    choose_fused_collectives,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.parameters import initialise_parameters, normal
from megatron.core.tensor_parallel.products import Matmul
from megatron.training.config.container import RunConfig
from tests.parallel.harness import run_distributed
from tests.support.rounded_product import round_products
from tests.support.run_flags import run_config

SWITCHES = {
    "": "",
    "ag": "--disable-tp-comm-overlap-ag",
    "rs": "--disable-tp-comm-overlap-rs",
    "dgrad": "--disable-tp-comm-bulk-dgrad",
    "wgrad": "--disable-tp-comm-bulk-wgrad",
    "chunked": "--tp-comm-overlap-rs-dgrad",
}


def settings(flags: str, size: int) -> RunConfig:
    base = f"--tensor-model-parallel-size {size} --sequence-parallel --num-attention-heads 4"
    return run_config(f"{base} {flags}", world_size=size)


def two_layers(flags: str, rounded: bool = False) -> dict[str, Tensor]:
    """Column and row layer on this rank's tokens: output and gradients. rounded: with products of 8-bit operands."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = ProcessGroupCollection.build(RankGrid(size, tp=size), rank).tp
    config = settings(flags, size).model
    first = ColumnParallelLinear(8, 16, config=config, init_method=normal(0.5), tp_group=group)
    second = RowParallelLinear(16, 8, config=config, init_method=normal(0.5), tp_group=group)
    both = torch.nn.ModuleList([first, second])
    initialise_parameters(both, seed=1)
    if rounded:
        round_products(both)
    tokens = torch.randn(size, 12, 3, 8, generator=torch.Generator().manual_seed(2))[rank]
    tokens.requires_grad_()
    output, _ = second(torch.tanh(first(tokens)[0]))
    (output * torch.arange(8.0)).square().sum().backward()
    grads = {name: param.grad for name, param in both.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return {"output": output.detach(), "input": tokens.grad} | grads  # type: ignore[dict-item, operator]


def pairs(flags: list[str]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    plain = two_layers("")
    return [(plain, two_layers(f"--tp-comm-overlap {more}")) for more in flags]


def assert_same_sums(found: Tensor, expected: Tensor, where: str) -> None:
    """Equal but for the order of sums, whose terms are as large as the largest value; some sums almost cancel."""
    tolerance = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance, msg=lambda text: f"{where}: {text}")


@pytest.mark.flags("--tp-comm-overlap")
@pytest.mark.parametrize("size", [2, 4])
def test_overlapped_layers_are_the_same_layers(size: int) -> None:
    flags = [*SWITCHES.values(), "--no-gradient-accumulation-fusion"]
    for by_flags in run_distributed(pairs, size, flags):
        for flag, (plain, overlapped) in zip(flags, by_flags, strict=True):
            for name, value in plain.items():
                assert_same_sums(overlapped[name], value, flag)


def rounded_pairs(flags: list[str]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    plain = two_layers("", rounded=True)
    assert not torch.equal(plain["output"], two_layers("")["output"])
    return [(plain, two_layers(f"--tp-comm-overlap {more}", rounded=True)) for more in flags]


def test_every_plan_runs_any_product() -> None:
    """In chunks or at once, a product that rounds its operands does so for each of them."""
    flags = [*SWITCHES.values(), "--no-gradient-accumulation-fusion"]
    for by_flags in run_distributed(rounded_pairs, 2, flags):
        for flag, (plain, overlapped) in zip(flags, by_flags, strict=True):
            for name, value in plain.items():
                assert_same_sums(overlapped[name], value, flag)


SCHEMAS = {
    "fused_all_gather_matmul": "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True) "
    "-> (Tensor?, Tensor[])",
    "fused_matmul_reduce_scatter": "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor",
}


def test_operations_of_symmetric_memory_are_those_that_we_call() -> None:
    """The stand-ins below have the same schemas, because torch's dispatcher calls them by these."""
    import torch.distributed._symmetric_memory

    for name, schema in SCHEMAS.items():
        assert str(getattr(torch.ops.symm_mem, name).default._schema) == f"symm_mem::{name}{schema}"


def stand_in_for_kernels(calls: list[str], error: float = 0.0) -> torch.library.Library:
    """The operations that only GPUs have, in two steps each; lives as long as what is returned. error: added to what
    they scatter."""
    import torch.distributed._symmetric_memory

    group, size = dist.group.WORLD, dist.get_world_size()

    def gather(A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, return_A: bool = True) -> Any:
        assert gather_dim == 0 and group_name == group.group_name and A.is_contiguous()
        calls.append("gather and multiply")
        full = A.new_empty(size * len(A), *A.shape[1:])
        dist.all_gather_into_tensor(full, A)
        return full if return_A else None, [(full.flatten(0, -2) @ B).view(*full.shape[:-1], -1) for B in Bs]

    def scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
        assert scatter_dim == 0 and reduce_op == "sum" and group_name == group.group_name and A.is_contiguous()
        calls.append("multiply and scatter")
        result = A.new_empty(len(A) // size, A.shape[1], B.shape[1])
        dist.reduce_scatter_tensor(result, A @ B)
        return result + error

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", gather, "CPU")
    library.impl("fused_matmul_reduce_scatter", scatter, "CPU")
    return library


def fused_pairs(flags: list[str]) -> list[tuple[dict[str, Tensor], dict[str, Tensor], list[str]]]:
    """Layers as they are; with the collectives inside of products, by stand-ins for kernels that only GPUs have; and
    the operations and collectives that the latter called. The last row is without --tp-comm-overlap."""
    calls: list[str] = []
    plain = two_layers("")
    library = stand_in_for_kernels(calls)
    communication_plans.choose_fused_collectives = lambda group: FusedCollectives(group.group_name)

    def count(name: str) -> None:
        own = getattr(communication_plans, name)

        def counted(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return own(*args, **options)

        setattr(communication_plans, name, counted)

    count("all_gather_into_tensor")
    count("reduce_scatter_tensor")
    found = []
    for more in flags:
        calls.clear()
        found.append((plain, two_layers(f"--tp-comm-overlap {more}"), list(calls)))
    calls.clear()
    two_layers("--tp-comm-overlap", rounded=True)
    two_layers("--tp-comm-overlap --deterministic-mode")
    fused = {"gather and multiply", "multiply and scatter"} & set(calls)
    assert not fused, "it would not round the operands; and promises no order of sums"
    communication_plans.is_cpu = lambda device: False  # where nobody would be asked
    calls.clear()
    found.append((plain, two_layers(""), list(calls)))
    calls.clear()
    two_layers("", rounded=True)
    assert calls.count("all_gather_into_tensor") == 3, "in one piece: chunks are not asked for"
    del library
    return found


def test_collectives_inside_of_products_are_the_same_layers() -> None:
    flags = ["", "--tp-comm-overlap-rs-dgrad", SWITCHES["ag"], SWITCHES["rs"], "--no-gradient-accumulation-fusion"]
    bulk = ["all_gather_into_tensor", "reduce_scatter_tensor"]  # beside the column layer's gradients
    forward = ["gather and multiply", "multiply and scatter"]
    for by_flags in run_distributed(fused_pairs, 2, flags):
        names = [*flags, "without a flag"]
        calls = dict(zip(names, (calls for *_, calls in by_flags), strict=True))
        assert calls["without a flag"] == calls[""]
        assert calls[""] == [*forward, "gather and multiply", *bulk]
        assert calls["--tp-comm-overlap-rs-dgrad"] == [*forward, "gather and multiply", bulk[0], forward[1]]
        assert calls[SWITCHES["ag"]].count("gather and multiply") == 0
        assert calls[SWITCHES["rs"]].count("multiply and scatter") == 0
        for flag, (plain, fused, _) in zip(names, by_flags, strict=True):
            for name, value in plain.items():
                assert_same_sums(fused[name], value, flag)


def choose_where(possible: list[int], error: float | None = 0.0) -> bool:
    fused_collectives.can_fuse_collectives = lambda group: dist.get_rank() in possible
    # Without the stand-ins the operations are there, and have nothing for the CPU.
    library = None if error is None else stand_in_for_kernels([], error * dist.get_rank())
    chosen = choose_fused_collectives(dist.group.WORLD)
    del library
    assert chosen is None or chosen.group_name == dist.group.WORLD.group_name
    return chosen is not None


def test_ranks_that_see_other_links_choose_alike() -> None:
    assert run_distributed(choose_where, 2, [0, 1]) == [True, True]
    assert run_distributed(choose_where, 2, [1]) == [False, False]


def test_what_gives_other_numbers_is_not_used() -> None:
    """Also where only one rank sees it."""
    assert run_distributed(choose_where, 2, [0, 1], 10.0) == [False, False]
    assert run_distributed(choose_where, 2, [0, 1], None) == [False, False]


def test_symmetric_memory_is_for_linked_gpus_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs, of which the first four and the last four are linked; sixteen ranks on two such machines."""

    class Connectivity:
        matrix = [[int(a != b and a // 4 == b // 4) for b in range(8)] for a in range(8)]

    monkeypatch.delenv("MEGATRON_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    detector = "_detect_dma_connectivity"
    monkeypatch.setattr(torch._C._distributed_c10d, detector, lambda device, kind: Connectivity, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")

    def can(*ranks: int, local_rank: int | None = None) -> bool:
        monkeypatch.setenv("LOCAL_RANK", str(ranks[0] % 8 if local_rank is None else local_rank))
        return can_fuse_collectives(PretendGroup(ranks, ranks[0]))

    assert can(0, 1, 2, 3) and can(12, 13, 14, 15)
    assert choose_fused_collectives(PretendGroup((0, 1, 2, 3), 0)) is None, "nobody is there"
    assert not can(2, 3, 4, 5), "not linked"
    assert not can(6, 7, 8, 9), "on two machines"
    assert not can(0, 1, local_rank=5), "ranks are not numbered by machines"
    assert choose_fused_collectives(SingleRankGroup()) is None
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert not can(0, 1, 2, 3), "one queue"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert can(0, 1, 2, 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not can(0, 1, 2, 3), "each process is shown one"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delattr(torch._C._distributed_c10d, detector)
    assert not can(0, 1, 2, 3), "nobody can tell"
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    assert not can(0, 1, 2, 3)


class Logged:
    """A collective under way that tells when somebody waits for it."""

    def __init__(self, work: Any, what: str, log: list[str]) -> None:
        self.work, self.what, self.log = work, what, log

    def wait(self) -> None:
        self.work.wait()
        self.log.append(f"{self.what} done")


def logs(flags: list[str]) -> list[list[str]]:
    """What the layers do, in order, under each set of flags; `*` marks a collective that is not waited for at once."""
    found: list[list[str]] = []

    def record(name: str, word: str) -> None:
        collective = getattr(communication_plans, name)

        def recorded(*args: Any, async_op: bool = False) -> Any:
            work = collective(*args, async_op=async_op)
            found[-1].append(word + "*" if async_op else word)
            return None if work is None else Logged(work, word, found[-1])

        setattr(communication_plans, name, recorded)

    record("all_gather_into_tensor", "gather")
    record("reduce_scatter_tensor", "scatter")
    product = communication_plans.finish_weight_grad

    def recorded_product(*args: Any) -> Any:
        found[-1].append("dW")
        return product(*args)

    communication_plans.finish_weight_grad = recorded_product
    for more in flags:
        found.append([])
        two_layers(more)
    return found


@pytest.mark.flags(
    "--tp-comm-overlap", "--tp-comm-overlap-ag", "--tp-comm-overlap-rs", "--tp-comm-bulk-dgrad", "--tp-comm-bulk-wgrad",
    "--tp-comm-overlap-rs-dgrad",
)  # fmt: skip
def test_each_switch_has_its_effect() -> None:
    flags = ["", *(f"--tp-comm-overlap {switch}" for switch in SWITCHES.values())]
    log = dict(zip(["plain", *SWITCHES], run_distributed(logs, 2, flags)[0], strict=True))
    assert log["plain"] == [
        *("gather", "scatter*", "scatter done"),  # forward; a scatter that ends with its pass, begun and waited for
        *("gather", "dW"),  # row layer: its gradient is gathered
        *("gather*", "scatter*", "gather done", "dW", "scatter done"),  # column layer: its input is gathered again
    ]
    scatters = ["scatter*"] * 4
    # Two under way at a time: the next one begins behind the product of the one that has come.
    pipeline = ["gather*", "gather*", *["gather done", "gather*"] * 2, "gather done", "gather done"]
    assert log[""][:8] == pipeline and log["ag"][:1] == ["gather"] and "gather" not in log["ag"][1:2]
    assert log[""][8:16] == ["scatter*", "scatter*", *["scatter done", "scatter*"] * 2, "scatter done", "scatter done"]
    assert [step for step in log[""] if step == "scatter*"][:4] == scatters
    assert log[""].count("scatter*") == 4 + 1 and log["rs"].count("scatter*") == 1 + 1
    assert log["chunked"].count("scatter*") == 4 + 4
    assert log[""].count("gather*") == 4 + 4 + 1 and log["dgrad"].count("gather*") == 4 + 4
    assert log[""][-2:] == ["dW", "scatter done"], "the input gradient travels while the weight gradient is made"
    assert log["wgrad"][-1] == "dW"
    assert log["dgrad"][-4:-2] == ["gather", "scatter*"]


def deferred_and_wide() -> tuple[list[int], int, bool, Tensor, Tensor]:
    """Gathers of a layer's forward, backward and late weight gradient; elements kept in between; whether the gradient
    is the usual one; and a float32 result of bfloat16 operands, gathered outside and inside the layer."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = ProcessGroupCollection.build(RankGrid(size, tp=size), rank).tp
    layer = ColumnParallelLinear(8, 16, config=settings("", size).model, init_method=normal(0.5), tp_group=group)
    initialise_parameters(layer, seed=1)
    tokens = torch.randn(size, 12, 3, 8, generator=torch.Generator().manual_seed(2))[rank].requires_grad_()
    counts, gather = [0], communication_plans.all_gather_into_tensor

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return gather(*args, **kwargs)

    communication_plans.all_gather_into_tensor = counted
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * (not isinstance(tensor, torch.nn.Parameter))
        return tensor

    queue = WeightGradQueue()
    for is_late in (False, True):
        attach_queue(layer.parameters(), queue)
        counts[:] = [0]
        kept = 0
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output, _ = layer(tokens)
        with queue.collect("backward") if is_late else nullcontext():
            counts.append(0)
            output.backward(torch.ones_like(output))
        if is_late:
            usual, layer.weight.grad = layer.weight.grad, None
            counts.append(0)
            queue.run("backward")
    communication_plans.all_gather_into_tensor = gather
    config = settings("--bf16 --tp-comm-overlap", size).model
    wide = ColumnParallelLinear(8, 16, config=config, init_method=normal(0.5), bias=False, tp_group=group)
    initialise_parameters(wide, seed=1)
    wide.product = Matmul(out_dtype=torch.float32)
    outside = wide.product.forward(gather_from_sequence_parallel_region(tokens.bfloat16(), group=group), wide.weight)
    inside, _ = wide(tokens.bfloat16())
    return counts, kept, torch.equal(usual, layer.weight.grad), outside.detach(), inside.detach()


def test_a_late_weight_gradient_gathers_late_and_a_float32_result_is_not_rounded() -> None:
    for counts, kept, is_equal, outside, inside in run_distributed(deferred_and_wide, 2):
        assert counts == [1, 0, 1] and kept == 12 * 3 * 8 and is_equal
        assert inside.dtype == torch.float32
        torch.testing.assert_close(inside, outside, rtol=1e-6, atol=1e-6)


def column_alone() -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Without sequence parallelism: what backward does, in order; its gradients, and those of the whole product."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = ProcessGroupCollection.build(RankGrid(size, tp=size), rank).tp
    config = run_config(f"--tensor-model-parallel-size {size} --num-attention-heads 4", world_size=size).model
    layer = ColumnParallelLinear(8, 16, config=config, init_method=normal(0.5), gather_output=True, tp_group=group)
    initialise_parameters(layer, seed=1)
    tokens = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    output, _ = layer(tokens)
    log: list[str] = []
    sum_up, product = communication_plans.all_reduce, communication_plans.finish_weight_grad

    def recorded_sum(*args: Any, async_op: bool = False) -> Any:
        log.append("sum*" if async_op else "sum")
        return Logged(sum_up(*args, async_op=async_op), "sum", log)

    def recorded_product(*args: Any) -> Any:
        log.append("dW")
        return product(*args)

    communication_plans.all_reduce, communication_plans.finish_weight_grad = recorded_sum, recorded_product
    output.square().sum().backward()
    communication_plans.all_reduce, communication_plans.finish_weight_grad = sum_up, product
    shards = [torch.empty_like(layer.weight) for _ in range(size)]
    dist.all_gather(shards, layer.weight.detach())
    weight, x = torch.cat(shards).requires_grad_(), tokens.detach().requires_grad_()
    (x @ weight.t()).square().sum().backward()
    assert weight.grad is not None and x.grad is not None and tokens.grad is not None and layer.weight.grad is not None
    found = {"input": tokens.grad, "weight": layer.weight.grad}
    return log, found, {"input": x.grad, "weight": weight.grad.chunk(size)[rank]}


def test_the_input_gradient_is_summed_beside_the_weight_gradient() -> None:
    for log, found, expected in run_distributed(column_alone, 2):
        assert log == ["sum*", "dW", "sum done"]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_refusals_and_notes() -> None:
    with pytest.raises(ConfigError, match="--tp-comm-overlap needs --sequence-parallel"):
        run_config("--tensor-model-parallel-size 2 --tp-comm-overlap", world_size=2)
    assert any("has no effect without --tp-comm-overlap" in note for note in settings(SWITCHES["ag"], 2).notes)
