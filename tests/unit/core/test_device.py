# SPDX-License-Identifier: Apache-2.0
"""The device module: what it says about this machine, and that states can be put back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron.core import device
from megatron.core.dense_peaks import DENSE_PEAKS
from megatron.core.errors import ConfigError


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")


@pytest.mark.usefixtures("on_cpu")
def test_environment_keeps_a_process_on_the_cpu() -> None:
    assert device.current_device() == torch.device("cpu")
    assert device.choose_backend(device.current_device()) == "gloo"
    assert device.device_count() == 0
    assert device.get_dense_peak_flops(torch.float32) is None


RESIDENT = """
import torch
from megatron.core import device

before = device.read_memory_stats()
ballast = torch.ones(128 << 20, dtype=torch.uint8)
after = device.read_memory_stats()
assert after["peak_bytes"] >= after["allocated_bytes"] > before["allocated_bytes"] > 0, (before, after)
assert 96 << 20 < after["allocated_bytes"] - before["allocated_bytes"] < 192 << 20, (before, after)
assert device.read_total_memory_bytes() > after["peak_bytes"]
"""


def test_cpu_memory_is_resident_memory() -> None:
    """In a process of its own: one that ran other tests has freed memory to give, and does not grow."""
    environment = {**os.environ, "MEGATRON_DEVICE": "cpu"}
    ended = subprocess.run([sys.executable, "-c", RESIDENT], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.usefixtures("on_cpu")
def test_device_has_a_name() -> None:
    assert len(device.device_name()) > 2


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H200", torch.float32, 67e12),
        ("NVIDIA H200", torch.float8_e4m3fn, 1979e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA GB200", torch.bfloat16, 2500e12),
        ("NVIDIA L40S", torch.float16, 362e12),
        ("NVIDIA A100-SXM4-80GB", torch.float8_e4m3fn, None),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989e12),
        ("NVIDIA H100 NVL", torch.bfloat16, 835e12),
        ("NVIDIA H20", torch.bfloat16, 148e12),
        ("NVIDIA GB300", torch.bfloat16, 2500e12),
        ("NVIDIA B300 SXM6 AC", torch.bfloat16, 2250e12),
        ("NVIDIA L40", torch.bfloat16, 181e12),
        ("NVIDIA A30", torch.bfloat16, 165e12),
        ("NVIDIA RTX A6000", torch.bfloat16, 155e12),
        ("NVIDIA RTX 6000 Ada Generation", torch.bfloat16, 364e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", torch.bfloat16, 504e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 5090 D", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
        ("Some CPU", torch.float32, None),
    ],
)
def test_dense_peaks_by_product(name: str, dtype: torch.dtype, expected: float | None) -> None:
    assert device.get_dense_peak_flops(dtype, name) == expected


def test_every_product_is_found_by_its_own_name() -> None:
    """A row behind one whose name is part of its own would never count."""
    for product, peaks in DENSE_PEAKS.items():
        assert device.get_dense_peak_flops(torch.float16, f"NVIDIA {product} 80GB") == peaks.half * 1e12
        assert (peaks.tf32 or 0) <= peaks.half <= (peaks.fp8 or peaks.half)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that shows two, as far as choosing one goes."""
    monkeypatch.delenv("MEGATRON_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_no_two_processes_share_a_gpu_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device.current_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=2 has no GPU of its own: this process sees 2 .* start 2 proc"):
        device.current_device()
    # One GPU is shown to each process, whatever its number.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device.current_device() == torch.device("cuda", 0)


def test_sums_in_float32_are_tried_where_they_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of CUDA builds, by a stand-in, and releases of torch without it."""
    meta = torch.device("meta")
    assert not device.has_wide_sums(torch.device("cpu"), torch.bfloat16)
    tried: list[torch.dtype] = []

    def addmm(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype, out: object) -> None:
        tried.append(a.dtype)
        if a.dtype == torch.float16:
            raise RuntimeError("self and mat2 must have the same dtype, but got Float and Half")

    monkeypatch.setattr(torch, "addmm", addmm)
    device.has_wide_sums.cache_clear()
    try:
        answers = [device.has_wide_sums(meta, dtype) for dtype in (torch.bfloat16, torch.float16, torch.bfloat16)]
    finally:
        device.has_wide_sums.cache_clear()
    assert answers == [True, False, True] and tried == [torch.bfloat16, torch.float16], "each is tried once"


def test_float32_peak_is_tf32_where_torch_may_use_it() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert device.get_dense_peak_flops(torch.float32, "NVIDIA H200") == 494e12
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("on_cpu")
def test_the_cpu_has_its_own_clock_also_after_a_gpu_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    earlier, later = device.mark(), device.mark()
    assert isinstance(earlier, float) and device.measure_seconds_between(earlier, later) >= 0
    device.synchronize()
    assert not device.allocate_host_memory(4, torch.float32, pinned=True).is_pinned()


def test_random_states_go_back_and_forth() -> None:
    states, dropout = device.get_rng_state(), device.get_device_rng_state()
    first = torch.rand(4)
    device.set_rng_state(states)
    assert torch.equal(torch.rand(4), first)
    device.set_device_rng_state(dropout)
    assert torch.equal(torch.rand(4), first)


@pytest.mark.gpu
def test_gpu_is_used_where_there_is_one() -> None:
    here = device.current_device()
    assert device.is_cuda(here) and device.choose_backend(here) == "nccl" and device.device_count() >= 1
    device.activate(here)
    device.reset_peak_memory()
    before = device.read_memory_stats()
    ballast = torch.ones(16 << 20, dtype=torch.uint8, device=here)
    device.synchronize()
    after = device.read_memory_stats()
    assert after["allocated_bytes"] - before["allocated_bytes"] >= ballast.numel()
    assert after["peak_bytes"] >= after["allocated_bytes"]
    states = device.get_rng_state()
    first = torch.rand(4, device=here)
    device.set_rng_state(states)
    assert torch.equal(torch.rand(4, device=here), first)
