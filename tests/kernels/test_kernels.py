# SPDX-License-Identifier: Apache-2.0
"""GPU kernels without a GPU: their numbers by Triton's interpreter, their machine code for an H200 by its compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from megatron.core.activations import bias_gated_activation, find_activation  # noqa: E402
from megatron.core.kernels import fp8_cast, fp8_weight_grad, launching  # noqa: E402
from megatron.core.kernels.adam import update_adam  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.ssm.chunks import Inputs  # noqa: E402
from megatron.core.ssm.linear_attention import attend  # noqa: E402
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy  # noqa: E402
from megatron.core.transformer.execution import operations  # noqa: E402
from megatron.core.transformer.execution.operations import describe_operations  # noqa: E402
from megatron.core.transformer.moe.grouped_products import GroupedMatmul  # noqa: E402
from megatron.core.transformer.moe.permutation import unpermute  # noqa: E402
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import Rotation, rotate_and_join_latent_heads, split_and_rotate  # noqa: E402
from tests.kernels.compiling import capture, capture_variants, compile_for_h200  # noqa: E402
from tests.kernels.training_comparisons import ALL_COMPARISONS  # noqa: E402
from tests.support.gpt_models import read_config  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """What every comparison says, all in one process: Triton asks for its interpreter when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.stdout, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    assert done.returncode == any(found.values()), done.stderr[-3000:]
    return found


@pytest.mark.parametrize("name", ALL_COMPARISONS)
def test_a_kernel_equals_its_reference(answers: dict[str, str], name: str) -> None:
    assert answers[name] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL_COMPARISONS)
def test_a_kernel_equals_its_reference_on_a_gpu(name: str) -> None:
    assert launching.find_obstacle(torch.device("cuda", 0)) is None
    ALL_COMPARISONS[name]("cuda")


def weighted_gate() -> None:
    x = torch.randn(8, 2 * 2816).bfloat16().requires_grad_()
    weights = torch.randn(8, 1, requires_grad=True)
    bias_gated_activation(x * 1, None, find_activation("silu"), weights).sum().backward()


def loss() -> None:
    logits = torch.randn(4, 2, 32000).bfloat16().requires_grad_()
    target = torch.zeros(4, 2, dtype=torch.int64)
    group = ProcessGroupCollection.single().tp
    vocab_parallel_cross_entropy(logits * 1, target, tp_group=group).sum().backward()


def adam() -> None:
    """With states of 16 bits, and the network's weights beside the main parameters."""
    param, scalar = torch.zeros(4096), torch.zeros(())
    half = param.bfloat16()
    options = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-8}
    state = {"exp_avg": half, "exp_avg_sq": half}
    update_adam(param, half, state, half, options, (0.9, 0.95), torch.ones(2), scalar, scalar)


def rotation(interleaved: bool = False) -> None:
    angles = Rotation(torch.zeros(16, 64), torch.zeros(16, 64), interleaved)
    packed = torch.randn(16, 2, 2, 6, 128).bfloat16().requires_grad_()
    sum(part.sum() for part in split_and_rotate(packed * 1, 4, angles)).backward()  # type: ignore[union-attr]


def interleaved_rotation() -> None:
    rotation(interleaved=True)


def latent_heads() -> None:
    """Of DeepSeek V3."""
    angles = Rotation(torch.zeros(8, 32), torch.zeros(8, 32), False)
    shapes = ((8, 2, 16, 192), (8, 2, 16, 256), (8, 2, 1, 64))
    parts = (torch.randn(shape).bfloat16().requires_grad_() * 1 for shape in shapes)
    sum(part.sum() for part in rotate_and_join_latent_heads(*parts, angles)).backward()  # type: ignore[union-attr]


def stream_and_norm() -> None:
    norm = build_norm(read_config("--normalization LayerNorm --bf16").model, 4096)
    output, residual = (torch.randn(8, 2, 4096).bfloat16().requires_grad_() for _ in range(2))
    normed, stream = norm(output * 1, bias=None, residual=residual, returns_sum=True)
    (normed.sum() + stream.sum()).backward()


def norm_into_buffer() -> None:
    """RMSNorm, whose weight's gradient is added where gradients of the run lie."""
    norm = build_norm(read_config("--normalization RMSNorm --bf16").model, 4096)
    norm.weight.main_grad = torch.zeros(4096)
    x, residual = (torch.randn(8, 2, 4096).bfloat16().requires_grad_() for _ in range(2))
    normed, stream = norm(x * 1, bias=None, residual=residual, returns_sum=True)
    (normed.sum() + stream.sum()).backward()


def combination() -> None:
    rows = torch.randn(32, 2048).bfloat16().requires_grad_()
    unpermute(rows, torch.arange(32), 16, 2).sum().backward()


def expert_weight_gradient() -> None:
    grad, x, ends = torch.zeros(16, 5632).bfloat16(), torch.zeros(16, 2048).bfloat16(), torch.zeros(2).int()
    main_grad = torch.zeros(2, 5632, 2048)
    GroupedMatmul().weight_grad(grad, x, main_grad, main_grad, ends)


def eight_bits() -> None:
    x = torch.randn(256, 512).bfloat16()
    values, _, _ = fp8_cast.quantise_matrix(x, torch.float8_e4m3fn, fp8_cast.LaunchStates().take(x.device), turns=True)
    fp8_cast.turn(values)


def cast_in_a_way(way: int) -> None:
    """With an amax of earlier steps, of several replicas, noted or not; in either format, with a transpose or not."""
    dtype = torch.float8_e5m2 if way % 2 else torch.float8_e4m3fn
    noted = torch.zeros((), dtype=torch.int32) if way < 2 else None
    x, state = torch.randn(256, 512).bfloat16(), torch.zeros(2).int()
    fp8_cast.quantise_matrix(x, dtype, state, torch.ones(()), factor=way + 1.0, margin=way, noted=noted, turns=way > 1)


def eight_bit_weight_gradient() -> None:
    grad, x, scalar = torch.zeros(512, 256), torch.zeros(384, 256), torch.ones(())
    operands = grad.to(torch.float8_e5m2), x.to(torch.float8_e4m3fn)
    fp8_weight_grad.add_product(*operands, (scalar, scalar), torch.zeros(512, 384))


def states() -> None:
    """Of Kimi Linear: the delta rule with decay by channel."""
    query, key, value = (torch.randn(1, 128, 2, 128).bfloat16().requires_grad_() for _ in range(3))
    decay, strength = -torch.rand(1, 128, 2, 128), torch.rand(1, 128, 2)
    attend(Inputs(query, key, value, decay, strength, strength))[0].sum().backward()


OPERATIONS: list[Callable[[], None]] = [
    weighted_gate, loss, stream_and_norm, adam, rotation, interleaved_rotation, combination, expert_weight_gradient,
    eight_bits, eight_bit_weight_gradient, latent_heads, states, norm_into_buffer,
]  # fmt: skip
VARIANTS: list[Callable[[], None]] = [*(functools.partial(cast_in_a_way, way) for way in range(4))]
"""Of kernels that the operations start in one form, which differ little in their machine code on an H200."""


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_machine_code_reads_16_bytes_at_a_time_and_spills_nothing(
    operation: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with capture() as launches:
        operation()
    codes = {launch.kernel.__name__: compile_for_h200(launch) for launch in launches}
    # A kernel may write no more than a number for each row, but not all of them do.
    assert any(code.count_wide("st") for code in codes.values())
    for name, code in codes.items():
        if name == "invert_order":
            continue  # what it writes lies anywhere
        assert code.count_wide("ld"), f"{name}:\n{code.ptx}"
        assert code.stack_bytes == 0 and code.registers < 255, (name, code.registers)
        # As much as a block may have on an H200.
        assert code.shared_bytes <= 227 * 1024
        # Tensors may have more elements than 32 bits count: places are multiplied out in 64. Tiles of one matrix are
        # fewer.
        narrow = re.findall(r"arith\.muli .* : (?:tensor<[\dx]*xi32>|i32)\b", code.ttir)
        assert not narrow or name in ("add_expert_weight_grads", "add_weight_grad"), (name, narrow)


def test_blackwell_has_the_same_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers suffice, but for 8 bytes of one kernel; so does shared memory. Tensor cores multiply states."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with capture() as launches:
        for operation in (*OPERATIONS, *VARIANTS):
            operation()
    for launch in launches:
        code = compile_for_h200(launch, 100)
        name = launch.kernel.__name__
        assert code.stack_bytes <= (8 if name == "norm_backward" else 0) and code.shared_bytes <= 227 * 1024, name
        assert "mma" in code.ptx or "states" not in name


@pytest.mark.skipif("MEGATRON_ALL_LAYOUTS" not in os.environ, reason="takes minutes; MEGATRON_ALL_LAYOUTS=1 runs it")
@pytest.mark.parametrize("capability", [90, 100])
def test_every_variant_compiles(capability: int) -> None:
    """Each that the comparisons start; shared memory suffices for all of them."""
    variants = capture_variants(ALL_COMPARISONS.values())
    assert len(variants) >= 158
    for launch in variants:
        assert compile_for_h200(launch, capability).shared_bytes <= 227 * 1024, launch


@pytest.mark.parametrize("operation", [expert_weight_gradient, eight_bit_weight_gradient])
def test_products_use_the_tensor_cores(operation: Callable[[], None]) -> None:
    with capture() as launches:
        operation()
    assert "wgmma" in compile_for_h200(launches[0]).ptx
    assert "mma" in compile_for_h200(launches[0], 100).ptx


def test_eight_bits_are_rounded_by_one_instruction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nearest, to even between two; the scale is divided as the emulation divides it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.zeros(64, 64).bfloat16()
    for kind, name in ((torch.float8_e4m3fn, "e4m3x2"), (torch.float8_e5m2, "e5m2x2")):
        with capture() as launches:
            state, noted = torch.zeros(2).int(), torch.zeros(()).int()
            fp8_cast.quantise_matrix(x, kind, state, torch.ones(()), noted=noted, turns=True)
        (launch,) = launches
        code = compile_for_h200(launch)
        # All programs run at once, for which the 65536 registers of a processor must suffice.
        threads = 32 * launch.num_warps * fp8_cast.PROGRAMS_OF_A_PROCESSOR
        assert code.registers * threads <= 65536
        assert code.shared_bytes * fp8_cast.PROGRAMS_OF_A_PROCESSOR <= 227 * 1024
        ptx = code.ptx
        assert f"cvt.rn.satfinite.{name}.f32" in ptx and "div.rn.f32" in ptx and "div.full.f32" not in ptx


@pytest.mark.parametrize(("name", "clamp"), [("squared_relu", None), ("silu", 7.0)])
def test_bounds_of_an_activation_keep_nan(
    name: str, clamp: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's plain minimum and maximum would return the bound, and hide that a run has diverged."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    activation = dataclasses.replace(find_activation(name), clamp_value=clamp)
    with capture() as launches:
        x = torch.randn(8, 2048).bfloat16().requires_grad_()
        bias_gated_activation(x * 1, None, activation).sum().backward()
    assert len(launches) == 2
    for launch in launches:
        # Of 16-bit numbers in pairs where the bound is one, too.
        bounds = re.findall(r"\b(?:min|max)[.\w]*\.b?f(?:32|16x2)", compile_for_h200(launch).ptx)
        assert bounds and all(".NaN" in bound for bound in bounds), bounds


def test_no_kernel_is_chosen_on_a_cpu() -> None:
    assert not launching.uses_kernels(torch.zeros(4))
    assert launching.find_obstacle(torch.device("cpu")) == "no GPU"


def test_kernels_take_contiguous_memory_in_their_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "is_cpu", lambda tensor: False)
    monkeypatch.setattr(launching, "find_obstacle", lambda device: None)
    x = torch.zeros(4, 6)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        assert launching.uses_kernels(x.to(kind), None, x)
    for unfit in (x.t(), x[:, :2], x.double(), x.int()):
        assert not launching.uses_kernels(unfit) and not launching.uses_kernels(x, unfit)
    monkeypatch.setattr(launching, "find_obstacle", lambda device: "no C compiler")
    assert not launching.uses_kernels(x)


def test_a_kernel_starts_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may hold a model on another GPU than the current one."""
    current, seen = [0], []

    @contextlib.contextmanager
    def make_current(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    module = SimpleNamespace(current_device=lambda: current[0], device=make_current)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: seen.append(current[0])

    with FakeTensorMode():
        for place in ("cuda:1", "cuda:0"):
            launching.launch(Kernel(), (1,), None, torch.empty(1, device=place), 3)
    launching.launch(Kernel(), (1,), torch.empty(1))
    launching.launch(Kernel(), (0,), torch.empty(1))
    assert seen == [1, 0, 0] and current == [0]


def test_the_log_names_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config("--swiglu --num-experts 4 --moe-grouped-gemm --position-embedding-type rope").model
    without = describe_operations(config, torch.device("cpu"))
    monkeypatch.setattr(launching, "kernels_work", lambda device: True)
    found = describe_operations(config, torch.device("cpu"))
    changed = {name for name, text in found.items() if without[name] != text}
    assert changed == {"norm", "activation", "rotary positions", "cross entropy"}
    assert all("one kernel each way" in found[name] for name in changed)
    plain = describe_operations(read_config("--no-bias-swiglu-fusion --swiglu").model, torch.device("cpu"))
    assert plain["activation"] == "gated silu, elementary operations"


def test_the_log_says_why_a_gpu_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "find_obstacle", lambda device: "the Python package triton is not installed")
    said = operations.describe_kernels(torch.device("cuda", 0))
    assert said == {"kernels": "PyTorch's own alone: the Python package triton is not installed"}
