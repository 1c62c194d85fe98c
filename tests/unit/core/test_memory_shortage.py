# SPDX-License-Identifier: Apache-2.0
"""More memory than there is: seen before it is taken where that can be proven, and a sentence where it happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core import host_memory
from megatron.core.errors import (
    MemoryShortageError,
    TemporaryError,
    command_line,
    count_refused_bytes,
    explain_refused_memory,
    format_bytes,
)
from megatron.core.host_memory import HostMemory, read_host_memory
from megatron.training.flags.read import read_run_config
from megatron.training.launch import memory_limits
from megatron.training.launch.memory_limits import suggest_levers
from megatron.training.recipes.gpt import build_gpt_recipe, describe_gpt_workload
from megatron.training.run import Run
from megatron.training.training import run_recipe
from tests.support.tiny_training import FLAGS, prepare

Limit = Callable[[float], None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Pretend that the machine has so many bytes."""

    def set_limit(number: float) -> None:
        monkeypatch.setattr(host_memory, "_list_limits", lambda: [HostMemory(int(number), "this machine has")])

    return set_limit


def refuse_by_torch() -> object:
    return torch.empty(2**60, dtype=torch.uint8)


def refuse_by_numpy() -> object:
    return np.empty(2**60, dtype=np.uint8)


@pytest.mark.parametrize("ask", [refuse_by_torch, refuse_by_numpy])
def test_what_an_allocator_refuses_is_one_line(ask: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> None:
    @command_line
    def main() -> None:
        ask()

    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: 1") and "could not be had" in line


def test_errors_of_memory_are_told_from_others() -> None:
    cuda = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
    assert explain_refused_memory(RuntimeError(cuda)) == "20.00 GiB"
    assert count_refused_bytes(RuntimeError(cuda)) == 20 * 2**30
    assert explain_refused_memory(MemoryError()) == "more memory" and count_refused_bytes(MemoryError()) is None
    for error in (RuntimeError("shapes cannot be multiplied"), ValueError("Tried to allocate 20.00 GiB"), OSError(12)):
        assert explain_refused_memory(error) is None

    @command_line
    def main() -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        main()
    assert [format_bytes(n) for n in (999, 1500, 274.9e9, 2e21)] == ["999 bytes", "1.5 KB", "274.9 GB", "2000.0 EB"]


def test_R18_shortage_in_a_step_names_what_there_is_and_what_needs_less() -> None:
    config = read_run_config([*FLAGS.split(), "--micro-batch-size", "4"], {})

    def forward_step(*_: object) -> object:
        raise RuntimeError(
            "[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 5000000000 bytes."
        )

    recipe = dataclasses.replace(build_gpt_recipe(config), forward_step=forward_step)
    with pytest.raises(MemoryShortageError) as found:
        run_recipe(config, recipe)
    assert found.value.exit_code == 2
    text = str(found.value)
    host = read_host_memory()
    assert f"5.0 GB could not be had at once, {host.source} {format_bytes(host.total_bytes)}" in text
    assert "cheapest first: --micro-batch-size 2 instead of 4 (" in text


GPU_SHORTAGE = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 3.50 GiB is "
    "free. Including non-PyTorch memory, this process has 136.30 GiB memory in use. Of the allocated memory 110.00 GiB "
    "is allocated by PyTorch, and 24.75 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_shortage_of_a_gpu_names_what_is_free_and_what_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's allocator says it, and as NCCL and cuBLAS do."""
    config = read_run_config([*FLAGS.split(), "--micro-batch-size", "4"], {})
    monkeypatch.setattr(memory_limits, "read_total_memory", lambda: (139 << 30, "this GPU has"))
    nccl = "NCCL error: unhandled cuda error\nncclUnhandledCudaError: Last error:\nCuda failure 2 'out of memory'"
    for error, what in (
        (torch.OutOfMemoryError(GPU_SHORTAGE), "20.00 GiB could not be had at once, this GPU has 149.3 GB, of which "
         "3.50 GiB are free and 24.75 GiB lie in gaps between tensors; estimated for each process: "),
        (dist.DistBackendError(nccl), "more memory could not be had at once, this GPU has 149.3 GB; estimated"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "more memory"),
    ):  # fmt: skip

        def forward_step(*_: object, error: Exception = error) -> object:
            raise error

        recipe = dataclasses.replace(build_gpt_recipe(config), forward_step=forward_step)
        with pytest.raises(MemoryShortageError) as found:
            run_recipe(config, recipe)
        text = str(found.value)
        assert text.startswith(f"out of memory: {what}") and found.value.exit_code == 2
        assert "of weights, gradients and optimizer state, " in text and text.count("less)") <= 3
        assert "cheapest first: --micro-batch-size 2 instead of 4 (" in text


def test_a_failure_of_nccl_in_a_step_is_one_that_may_pass() -> None:
    config = read_run_config(FLAGS.split(), {})

    def forward_step(*_: object) -> object:
        raise dist.DistBackendError(
            "NCCL communicator was aborted on rank 1. Original reason for failure was: Watchdog caught collective "
            "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000)"
        )

    recipe = dataclasses.replace(build_gpt_recipe(config), forward_step=forward_step)
    with pytest.raises(TemporaryError, match=r"did not answer in time \(.*WorkNCCL.*then start again") as found:
        run_recipe(config, recipe)
    assert found.value.exit_code == 75


def levers(flags: str, world_size: int = 1, *, is_one_tensor: bool = False, vocab: int = 64) -> str:
    config = read_run_config([*FLAGS.split(), *flags.split()], {"WORLD_SIZE": str(world_size)})
    return suggest_levers(config, describe_gpt_workload(config, vocab), is_one_tensor=is_one_tensor).partition("; ")[2]


def test_levers_are_those_not_in_use_and_possible() -> None:
    tp = "--tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 16 --seq-length 1024 "
    tp += "--max-position-embeddings 1024"
    found = levers(tp, 4)
    assert found.startswith("cheapest first: --micro-batch-size 2 instead of 4 (")
    assert "--sequence-parallel" in found and "--use-distributed-optimizer" not in found, "too little to be saved"
    assert found.count("less)") == 3
    assert "--sequence-parallel" not in levers(tp + " --sequence-parallel", 4)
    assert "--micro-batch-size" not in levers(tp.replace("size 4", "size 1"), 4)
    wide = "--hidden-size 512 --micro-batch-size 1 --global-batch-size 16"
    assert levers(wide, 4).startswith("cheapest first: --use-distributed-optimizer (")
    assert "--use-distributed-optimizer" not in levers(wide + " --use-distributed-optimizer", 4)
    # Nothing of one process can be divided, and a single sample is the smallest microbatch.
    full = "--micro-batch-size 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert levers(full) == "no setting makes it less for the same model: use more processes, or a smaller model"
    # What keeps fewer tensors does not make a single one smaller.
    assert "--sequence-parallel" not in levers(tp, 4, is_one_tensor=True)
    assert "--micro-batch-size 2" in levers(tp, 4, is_one_tensor=True)
    experts = "--micro-batch-size 1 --num-experts 4 --seq-length 1024 --max-position-embeddings 1024"
    assert "--recompute-granularity full" in levers(experts)
    # Of logits that are more than what a layer's backward holds; one sequence has a single chunk.
    long = "--micro-batch-size 1 --seq-length 4096 --max-position-embeddings 4096"
    assert levers(long, vocab=8192).startswith("cheapest first: --loss-chunk-size 1024 (")
    assert "--loss-chunk-size" not in levers(long), "layers hold more"
    assert "--loss-chunk-size" not in levers(experts, vocab=8192), "a single chunk"
    assert "--loss" not in levers(f"{long} --loss-chunk-size 2048", vocab=8192)


def test_no_lever_on_activations_where_the_weights_are_too_many(limit: Limit) -> None:
    assert "--micro-batch-size" in levers("--seq-length 256 --max-position-embeddings 256")
    limit(1000)
    assert "--micro-batch-size" not in levers("--seq-length 256 --max-position-embeddings 256")


def count_weights(run: Run) -> int:
    return sum(parameter.numel() for chunk in run.model for parameter in chunk.module.parameters())


def test_a_model_is_refused_only_where_it_cannot_fit(limit: Limit) -> None:
    """Float32 with Adam: 4 bytes of weight, 4 of gradient, 8 of moments; SGD has 4 of momentum."""
    number = count_weights(prepare())
    limit(4 * number - 1)
    with pytest.raises(MemoryShortageError, match=r"the parameters of this process take .* this machine has"):
        prepare()
    for flags, needed in (((), 16), (("--optimizer", "sgd"), 12), (("--bf16",), 2 + 4 + 4 + 8)):
        limit(needed * number - 1)
        with pytest.raises(MemoryShortageError, match="weights, gradients and optimizer state of rank 0 take"):
            prepare(*flags)
        limit(needed * number)
        prepare(*flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # Beyond any machine.
        (
            "--vocab-size 2147483648 --hidden-size 1048576",
            r"the 2147483648 x 1048576 elements of one parameter take .* PB, and .* [GT]B; divide the model",
        ),
        ("--global-batch-size 200000000000000", "the indices of .* samples .* take .* PB"),
    ],
)
def test_absurd_sizes_are_refused_in_a_sentence(flags: str, words: str, tmp_path: Path) -> None:
    config = read_run_config([*FLAGS.split(), *flags.split(), "--data-cache-path", str(tmp_path)], {})
    with pytest.raises(MemoryShortageError, match=words):
        run_recipe(config, build_gpt_recipe(config))


def test_limits_of_containers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "list_control_groups", lambda: iter([tmp_path]))
    machine = read_host_memory().total_bytes
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.swap.max").write_text("500\n")
    assert read_host_memory() == HostMemory(1_000_500, "this container may have")
    (tmp_path / "memory.max").write_text("max\n")
    assert read_host_memory().total_bytes == machine
    # Version 1 writes a number that no machine has for "no limit".
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_host_memory().total_bytes == machine
