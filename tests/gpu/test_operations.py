# SPDX-License-Identifier: Apache-2.0
"""Operations of a layer and of an update against float64, on the CPU and, with `-m gpu`, on a GPU: the same functions.

Attention has its comparisons in tests/unit/transformer/test_cuda_attention.py and test_attention_rounding.py, Triton
kernels theirs in tests/kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import activations
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.clip_grads import compute_clip_divisor, sum_squares
from megatron.core.optimizer.megatron_optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.products import Matmul, Product, TableLookup, multiply
from megatron.core.transformer import norms, rotary
from megatron.core.transformer.core_attention.local import scaled_masked_softmax, scaled_masked_softmax_reference
from megatron.core.transformer.execution.fp8_layers import multiply_in_fp8
from megatron.core.transformer.moe import permutation
from megatron.core.transformer.moe.grouped_products import BatchedMatmul, ExpertByExpert, choose_expert_product
from megatron.core.transformer.residual_branch import bias_dropout_add, bias_dropout_add_reference
from megatron.core.transformer.transformer_config import TransformerConfig

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Of the largest value: 8 and 24 bits, and sums of some hundred terms."""

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(7)


def draw(dtype: torch.dtype, device: str, *shape: int) -> Tensor:
    """Values that the number format holds, the same on every device."""
    return torch.randn(shape).to(dtype).to(device)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within so much of the largest expected value."""
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance * max(largest, 1e-3))


def grad_of_output(output: Tensor) -> Tensor:
    """Neighbours differ, and sums over rows do not cancel, in which 16 bits would lose their digits."""
    return (0.5 + torch.arange(output.numel()).cos()).view(output.shape).to(output.device)


def compare(fused: Callable[..., Tensor], exact: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Output and gradients of every input; exact computes in float64."""
    own = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    # Not the leaves: fusions work in place.
    found, expected = fused(*(x * 1 for x in own)), exact(*wide)
    tolerance = TOLERANCE[inputs[0].dtype]
    assert_near(found, expected, tolerance)
    weights = grad_of_output(expected)
    grads = torch.autograd.grad((found.float() * weights).sum(), own)
    for grad, wanted in zip(grads, torch.autograd.grad((expected * weights).sum(), wide), strict=True):
        assert_near(grad, wanted, 2 * tolerance)


# ---- linear layers


def make_main_grad(weight: nn.Parameter) -> Tensor:
    """A float32 slice of a flat buffer with other numbers around it; it begins with ones."""
    flat = torch.ones(weight.numel() + 128, device=weight.device)
    weight.main_grad = flat[64:-64].view_as(weight)  # type: ignore[attr-defined]
    return flat


def test_linear_adds_its_weight_gradient_into_a_slice_of_a_flat_buffer(device: str, dtype: torch.dtype) -> None:
    x, bias = draw(dtype, device, 10, 3, 72), draw(dtype, device, 48)
    weight = nn.Parameter(draw(dtype, device, 48, 72))
    flat = make_main_grad(weight)
    product = Matmul()
    compare(
        lambda x, b: multiply(product, x, weight, b), lambda x, b: F.linear(x, weight.detach().double(), b), x, bias
    )
    grad = grad_of_output(torch.empty(30, 48, device=device))
    expected = 1 + grad.to(dtype).double().t() @ x.double().view(30, 72)
    assert_near(weight.main_grad, expected, TOLERANCE[dtype])  # type: ignore[attr-defined]
    torch.testing.assert_close(flat[:64], torch.ones(64, device=device), msg="before the slice")
    torch.testing.assert_close(flat[-64:], torch.ones(64, device=device), msg="behind the slice")


def test_logits_in_float32(device: str, dtype: torch.dtype) -> None:
    x, weight = draw(dtype, device, 7, 2, 64), nn.Parameter(draw(dtype, device, 33, 64))
    found = multiply(Matmul(out_dtype=torch.float32), x, weight)
    assert found.dtype == torch.float32
    assert_near(found, x.double() @ weight.double().t(), 2e-5)


def test_rows_of_a_table(device: str, dtype: torch.dtype) -> None:
    weight = nn.Parameter(draw(dtype, device, 50, 16))
    make_main_grad(weight)
    tokens = torch.arange(24).remainder(11).view(6, 4).to(device)  # some occur several times
    out = multiply(TableLookup(), tokens, weight)
    torch.testing.assert_close(out, F.embedding(tokens, weight), rtol=0, atol=0)
    out.backward(torch.ones_like(out))
    expected = 1 + torch.zeros(50, 16, device=device).index_add_(0, tokens.flatten(), torch.ones(24, 16, device=device))
    torch.testing.assert_close(weight.main_grad, expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["each", "chosen", "batched"])
def test_experts(device: str, dtype: torch.dtype, kind: str) -> None:
    experts, inputs, outputs = 4, 32, 64
    counts = [8, 8, 8, 8] if kind == "batched" else [5, 0, 16, 11]
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_moe_experts=experts, moe_grouped_gemm=True,
        add_bias_linear=False,
    )  # fmt: skip
    chosen = choose_expert_product(config, (inputs, outputs), dtype, torch.device(device))
    product = {"each": ExpertByExpert(), "chosen": chosen, "batched": BatchedMatmul()}[kind]
    weight = nn.Parameter(draw(dtype, device, experts, outputs, inputs))
    make_main_grad(weight)
    ends = torch.tensor(counts).cumsum(0).int().to(device)

    def exactly(x: Tensor) -> Tensor:
        rows = x.split(counts)
        return torch.cat([part @ matrix.double().t() for part, matrix in zip(rows, weight.detach(), strict=True)])

    x = draw(dtype, device, 32, inputs)
    compare(lambda x: multiply(product, x, weight, None, ends), exactly, x)
    grad = grad_of_output(torch.empty(32, outputs, device=device)).to(dtype).double()
    pairs = zip(grad.split(counts), x.double().split(counts), strict=True)
    expected = 1 + torch.stack([g.t() @ rows for g, rows in pairs])
    assert_near(weight.main_grad, expected, TOLERANCE[dtype])  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_fp8(device: str, dtype: torch.dtype, recipe: str) -> None:
    if dtype == torch.float32:
        pytest.skip("FP8 goes with bfloat16")
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, bf16=True, params_dtype=dtype, fp8="hybrid",
        fp8_recipe=recipe, fp8_amax_history_len=2,
    )  # fmt: skip
    layer = nn.Module()
    layer.product = Matmul()  # type: ignore[assignment]
    with torch.device(device):
        multiply_in_fp8(layer, config, ProcessGroupCollection.single(), "layer")
    layer.to(device)
    product = layer.product
    assert isinstance(product, Product)
    x, weight = draw(dtype, device, 32, 64).requires_grad_(), nn.Parameter(draw(dtype, device, 48, 64))
    make_main_grad(weight)
    out = multiply(product, x, weight)
    # Three bits of mantissa in each operand: a sixteenth, and sums of 64 terms of which many cancel.
    assert_near(out, x.double() @ weight.double().t(), 0.08)
    grad = draw(dtype, device, 32, 48)
    out.backward(grad)
    assert x.grad is not None
    assert_near(x.grad, grad.double() @ weight.double(), 0.12)
    assert_near(weight.main_grad, 1 + grad.double().t() @ x.double(), 0.12)  # type: ignore[attr-defined]


# ---- between the products


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_norms(device: str, dtype: torch.dtype, name: str) -> None:
    x, weight, bias = draw(dtype, device, 9, 2, 72), draw(dtype, device, 72), draw(dtype, device, 72)
    if name == "rms":
        compare(lambda *a: norms.rms_norm(*a, 1e-5), lambda *a: norms.rms_norm_reference(*a, 1e-5), x, weight)
    else:
        compare(lambda *a: norms.layer_norm(*a, 1e-5), lambda *a: norms.layer_norm_reference(*a, 1e-5), x, weight, bias)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "quick_gelu", "squared_relu"])
def test_activations(device: str, dtype: torch.dtype, name: str, gated: bool) -> None:
    activation = activations.find_activation(name)
    fused, exact = (
        (activations.bias_gated_activation, activations.gated_activation_reference)
        if gated
        else (activations.bias_activation, activations.activation_reference)
    )
    inputs = draw(dtype, device, 6, 2, 64), draw(dtype, device, 64)
    compare(lambda x, b: fused(x, b, activation), lambda x, b: exact(x, b, activation), *inputs)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_positions(device: str, dtype: torch.dtype, interleaved: bool) -> None:
    groups, per_group, width, rotated = 3, 2, 24, 16
    packed = draw(dtype, device, 7, 2, groups, per_group + 2, width)
    angles = (torch.arange(7)[:, None] * torch.logspace(0, -3, rotated // 2)).to(device)

    def join(parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return torch.cat([part.flatten(2) for part in parts], dim=-1)

    def exactly(packed: Tensor) -> Tensor:
        rotation = rotary.Rotation(angles.double().cos(), angles.double().sin(), interleaved)
        query, key, value = rotary.split_qkv(packed, per_group)
        return join((rotary.apply_rotary(query, rotation), rotary.apply_rotary(key, rotation), value))

    rotation = rotary.Rotation(angles.cos(), angles.sin(), interleaved)
    compare(lambda x: join(rotary.split_and_rotate(x, per_group, rotation)), exactly, packed)


def test_bias_and_residual(device: str, dtype: torch.dtype) -> None:
    inputs = draw(dtype, device, 6, 2, 40), draw(dtype, device, 40), draw(dtype, device, 6, 2, 40)
    compare(
        lambda x, b, r: bias_dropout_add(x, b, r, 0.0, True),
        lambda x, b, r: bias_dropout_add_reference(x, b, r, 0.0, True), *inputs,
    )  # fmt: skip


def test_softmax_of_scores(device: str, dtype: torch.dtype) -> None:
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1).to(device)
    scores = draw(dtype, device, 2, 3, 12, 12)
    compare(
        lambda x: scaled_masked_softmax(x, mask, 0.7, True),
        lambda x: scaled_masked_softmax_reference(x, mask, 0.7, False), scores,
    )  # fmt: skip


def test_loss(device: str, dtype: torch.dtype) -> None:
    vocabulary = 1009
    logits, target = draw(dtype, device, 5, 3, vocabulary), torch.arange(15).view(5, 3).to(device) * 67 % vocabulary
    group = ProcessGroupCollection.single().tp
    compare(
        lambda x: vocab_parallel_cross_entropy(x.float(), target, tp_group=group),
        lambda x: F.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view(5, 3), logits,
    )  # fmt: skip


def test_permutation(device: str, dtype: torch.dtype) -> None:
    tokens, slots = 13, 2
    destinations = (torch.arange(tokens * slots) * 5 % 7 % 3).to(device)
    order, ends = permutation.sort_slots(destinations, 3)
    up_to = destinations[:, None] <= torch.arange(3).to(device)
    torch.testing.assert_close(ends, up_to.sum(0).int())
    x = draw(dtype, device, tokens, 16)
    compare(lambda x: permutation.permute(x, order, slots), lambda x: permutation.permute_reference(x, order, slots), x)
    rows = draw(dtype, device, tokens * slots, 16)
    compare(
        lambda rows: permutation.unpermute(rows, order, tokens, slots),
        lambda rows: permutation.unpermute_reference(rows, order, tokens, slots), rows,
    )  # fmt: skip
    # The same sums in the same order: bit for bit.
    again = [permutation.unpermute(rows, order, tokens, slots) for _ in range(2)]
    torch.testing.assert_close(*again, rtol=0, atol=0)


# ---- updates, whose numbers are float32


@pytest.mark.parametrize("name", ["adam", "sgd", "lion"])
def test_updates(device: str, dtype: torch.dtype, name: str) -> None:
    """Three steps of a whole optimizer over flat buffers; in bfloat16 the weights are rounded main weights."""
    place = {"dtype": dtype, "device": device}
    network = nn.Sequential(nn.Linear(7, 13, **place), nn.LayerNorm(13, **place), nn.Linear(13, 3, **place))
    start = [parameter.detach().double() for parameter in network.parameters()]
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(ModelParallelConfig(), settings, network)
    chosen = OptimizerConfig(
        optimizer=name, lr=0.02, weight_decay=0.1, clip_grad=0.0, bf16=dtype == torch.bfloat16, adam_beta1=0.9,
        adam_beta2=0.95, sgd_momentum=0.9, lion_beta1=0.9, lion_beta2=0.98,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(chosen, [model])
    grads = [[draw(torch.float32, device, *x.shape) for x in start] for _ in range(3)]
    for row in grads:
        model.zero_grad_buffer()
        for parameter, grad in zip(network.parameters(), row, strict=True):
            parameter.main_grad.copy_(grad)
        optimizer.step()
    for index, (parameter, x) in enumerate(zip(network.parameters(), start, strict=True)):
        decay = 0.1 if x.dim() > 1 else 0.0
        expected = update_by_definition(name, x, [row[index].double() for row in grads], decay)
        # Adam and Lion move by the learning rate whatever the gradient: compared with the weights, not with the move.
        assert_near(parameter, expected, 1e-5 if dtype == torch.float32 else 8e-3)


def update_by_definition(name: str, x: Tensor, grads: list[Tensor], decay: float) -> Tensor:
    """Updates with learning rate 0.02, in float64."""
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    for number, grad in enumerate(grads, start=1):
        if name == "adam":
            x = x * (1 - 0.02 * decay)
            first, second = 0.9 * first + 0.1 * grad, 0.95 * second + 0.05 * grad**2
            root = (second / (1 - 0.95**number)).sqrt() + 1e-8
            x = x - 0.02 * first / (1 - 0.9**number) / root
        elif name == "sgd":
            decayed = grad + decay * x
            first = decayed if number == 1 else 0.9 * first + decayed
            x = x - 0.02 * first
        else:
            x = x * (1 - 0.02 * decay) - 0.02 * (0.9 * first + 0.1 * grad).sign()
            first = 0.98 * first + 0.02 * grad
    return x


def test_clipping(device: str, dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        pytest.skip("gradients are summed in float32")
    grad = draw(dtype, device, 70001)
    norm = sum_squares(grad).sqrt().float()
    assert_near(norm, grad.double().norm(), 1e-6)
    divisor = compute_clip_divisor(norm, 1.0)
    assert divisor is not None
    assert_near(grad / divisor, grad.double() / (grad.double().norm() + 1e-6), 1e-5)
