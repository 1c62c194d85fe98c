# SPDX-License-Identifier: Apache-2.0
"""SOAP equals its algorithm, takes the matrices, and comes back from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.errors import ConfigError
from megatron.core.optimizer import soap
from megatron.core.optimizer.megatron_optimizer import get_megatron_optimizer
from megatron.core.placement import Placement, Split, place
from megatron.training.verify.parity import trace_rank
from tests.parallel.small_training import training
from tests.support.run_flags import run_config
from tests.support.tiny_training import differing, finish, prepare, train_tiny
from tests.unit.optimizer.test_update_rules import of_flags

BETAS, EPSILON, LR, DECAY = (0.9, 0.95), 1e-6, 0.01, 0.1
FLAGS = f"--optimizer soap --adam-beta2 {BETAS[1]} --adam-eps {EPSILON} --weight-decay {DECAY} --clip-grad 0"


class OneMatrix:
    """Vyas et al. (2024), algorithms 3 and 4, with Adam's bias correction and the shift; for a vector and for sides
    without basis: Adam. In double precision, v as a number for each pair of columns of the bases."""

    def __init__(self, weight: Tensor, interval: int, has_bases: tuple[bool, bool], decay: float) -> None:
        self.w, self.interval, self.decay = weight.double(), interval, decay
        self.sides = has_bases
        self.m, self.v = torch.zeros_like(self.w), torch.zeros_like(self.w)
        sizes = (weight.shape[0], weight.shape[-1])
        self.gram = [torch.zeros(n, n).double() for n in sizes]
        self.q = [torch.eye(n).double() for n in sizes]
        self.t = 0

    def project(self, x: Tensor, back: bool = False) -> Tensor:
        left, right = (q.t() if back else q for q in self.q)
        x = left.t() @ x if self.sides[0] else x
        return x @ right if self.sides[1] else x

    def step(self, g: Tensor) -> None:
        self.t += 1
        projected = self.project(g)
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * projected**2
        m, v = self.project(self.m) / (1 - BETAS[0] ** self.t), self.v / (1 - BETAS[1] ** self.t)
        change = self.project(m / (v.sqrt() + EPSILON), back=True)
        self.w = self.w * (1 - LR * self.decay) - LR * change
        for i, product in enumerate((lambda: g @ g.t(), lambda: g.t() @ g)):
            if self.sides[i]:
                self.gram[i] = BETAS[1] * self.gram[i] + (1 - BETAS[1]) * product()
                if self.t % self.interval == 0:
                    self.turn(i)

    def turn(self, i: int) -> None:
        n = len(self.gram[i])
        shifted = self.gram[i] + soap.SHIFT * self.gram[i].trace() / n * torch.eye(n)
        order = (self.q[i].t() @ shifted @ self.q[i]).diagonal().argsort(descending=True)
        self.q[i] = torch.linalg.qr(shifted @ self.q[i][:, order]).Q
        self.v = self.v[order] if i == 0 else self.v[:, order]


@pytest.mark.flags("--optimizer", "--soap-precondition-frequency")
@pytest.mark.parametrize(("interval", "longest"), [(6, 100), (10, 100), (6, 10), (6, 2)])
def test_soap_equals_its_algorithm(interval: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soap, "LONGEST", longest)
    flags = FLAGS if interval == 10 else f"{FLAGS} --soap-precondition-frequency {interval}"
    model, optimizer = of_flags(flags)
    reference = {}
    for name, param in model.module.named_parameters():
        is_matrix = param.dim() == 2
        sides = (is_matrix and param.shape[0] <= longest, is_matrix and param.shape[-1] <= longest)
        reference[name] = OneMatrix(param.detach().clone(), interval, sides, DECAY if is_matrix else 0.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        for name, param in model.module.named_parameters():
            grad = torch.randn(param.shape, generator=generator)
            param.main_grad.copy_(grad)  # type: ignore[operator]
            reference[name].step(grad.double())
        optimizer.step()
    for name, param in model.module.named_parameters():
        torch.testing.assert_close(param.detach().double(), reference[name].w, rtol=1e-4, atol=2e-6)


def test_each_matrix_of_experts_has_bases_of_its_own() -> None:
    """A stack [experts, out, in]; the second expert never gets a token."""
    network, experts = nn.Module(), torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(2))
    network.weight = nn.Parameter(experts.clone())
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    place(network.weight, Placement(name, (3, 8, 6), (Split(0, "ep", 1, 0),)))
    config = run_config(f"{FLAGS} --soap-precondition-frequency 6")
    model = DistributedDataParallel(config.model, config.ddp, network)
    optimizer = get_megatron_optimizer(config.optimizer, [model])
    reference = [OneMatrix(matrix, 6, (True, True), DECAY) for matrix in experts]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        grad = torch.randn(3, 8, 6, generator=generator)
        grad[1] = 0.0
        network.weight.main_grad.copy_(grad)  # type: ignore[operator]
        for one, of_one in zip(reference, grad, strict=True):
            one.step(of_one.double())
        optimizer.step()
    expected = torch.stack([one.w for one in reference])
    torch.testing.assert_close(network.weight.detach().double(), expected, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(network.weight.detach()[1], experts[1] * (1 - LR * DECAY) ** 20)
    shapes = {kind: tuple(tensor.shape) for kind, tensor in optimizer.whole_state()[name].items()}
    assert set(shapes.values()) == {(3, 8, 8), (3, 6, 6)}


def test_bases_become_eigenvectors_of_the_preconditioners() -> None:
    """In falling order, from any beginning; and v stays with its column."""
    bases = soap._Bases(6, 4, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    bases.update_grams(torch.randn(6, 4, generator=generator) * torch.tensor([0.1, 3.0, 1.0, 0.3]), beta=0.0)
    square = torch.arange(24.0).view(6, 4)
    for _ in range(400):
        bases.update_bases(square)
    right = bases.tensors["soap_right_gram"]
    expected = torch.linalg.eigvalsh(right).flip(0)
    turned = bases.tensors["soap_right_basis"].double()
    torch.testing.assert_close(turned.t() @ right @ turned, expected.diag(), rtol=1e-5, atol=1e-5 * float(expected[0]))
    # Columns 1 and 2 have the largest gradients by far.
    assert square[:, :2].sort(dim=1).values.remainder(4).unique(dim=0).tolist() == [[1, 2]]


def test_directions_without_gradient_stay_and_rounding_stays_rounding() -> None:
    """Gradients of rank 2 leave most of both bases open; a change in the seventh digit must not choose them."""
    generator = torch.Generator().manual_seed(5)
    factors = [(torch.randn(40, 2, generator=generator), torch.randn(2, 24, generator=generator)) for _ in range(6)]
    noise = [torch.randn(40, 24, generator=generator) for _ in factors]
    found = []
    for size in (0.0, 1e-7):
        bases, square = soap._Bases(40, 24, torch.device("cpu")), torch.ones(40, 24)
        for (left, right), disturbance in zip(factors, noise, strict=True):
            bases.update_grams(left @ right + size * disturbance, beta=0.95)
            bases.update_bases(square)
        found.append(bases.tensors)
    for kind, tensor in found[0].items():
        torch.testing.assert_close(found[1][kind], tensor, rtol=0, atol=2e-5, msg=lambda text, kind=kind: kind + text)


def test_micro_batch_size_is_no_part_of_the_run() -> None:
    """Odd sizes, gradients of low rank, a basis that changes in every step."""
    flags = (
        "--hidden-size 42 --num-attention-heads 3 --kv-channels 10 --ffn-hidden-size 62 --seq-length 7 "
        "--max-position-embeddings 16 --global-batch-size 3 --lr 1e-3 --lr-warmup-iters 0 --adam-eps 1e-8 "
        "--calculate-per-token-loss --optimizer soap --soap-precondition-frequency 1 --micro-batch-size"
    )
    one, all_at_once = (trace_rank(*training(f"{flags} {size}", "1"), rank=0, iterations=10) for size in (1, 3))
    for kind in ("losses", "grad_norms"):
        of_one, of_all = (
            [loss["lm loss"] if isinstance(loss, dict) else loss for loss in getattr(trace, kind)]
            for trace in (one, all_at_once)
        )
        assert of_one == pytest.approx(of_all, rel=1e-5), kind


def test_tables_the_output_layer_and_vectors_take_adam() -> None:
    run = prepare("--optimizer", "soap", "--untie-embeddings-and-output-weights")
    whole = run.optimizer.whole_state()
    for name, param in run.model[0].module.named_parameters():
        assert (name in whole) == (name.endswith("weight") and "linear" in name), name
        if name in whole:
            assert {kind: list(tensor.shape) for kind, tensor in whole[name].items()} == {
                f"soap_{side}_{kind}": [size, size]
                for side, size in zip(("left", "right"), param.shape, strict=True)
                for kind in ("gram", "basis")
            }
    run.progress.iteration = run.progress.target_iterations
    finish(run)


@pytest.mark.usefixtures("no_yardstick")
def test_resume_is_the_uninterrupted_run(tmp_path: Path) -> None:
    flags = f"--bf16 {FLAGS} --soap-precondition-frequency 2".split()
    straight = train_tiny(*flags, "--train-iters", "6")
    save = ["--save", tmp_path, "--load", tmp_path, "--save-interval", "100", "--lr-decay-iters", "6"]
    train_tiny(*flags, *save, "--train-iters", "3")
    resumed = train_tiny(*flags, *save, "--train-iters", "6")
    assert differing(resumed, straight) == []
    assert all(kinds["soap_left_basis"].diagonal().ne(1).any() for kinds in resumed.optimizer.whole_state().values())


@pytest.mark.usefixtures("no_yardstick")
def test_float32_preconditioners_of_older_checkpoints_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*f"{FLAGS} --soap-precondition-frequency 2 --lr-decay-iters 6".split(), "--save", tmp_path]
    flags += ["--save-interval", "100"]
    with monkeypatch.context() as earlier:
        whole_state = soap.Soap.whole_state

        def narrow(rule: soap.Soap) -> dict[str, dict[str, Tensor]]:
            return {name: {k: t.float() for k, t in kinds.items()} for name, kinds in whole_state(rule).items()}

        earlier.setattr(soap.Soap, "whole_state", narrow)
        saved = train_tiny(*flags, "--train-iters", "3").optimizer.whole_state()
    loaded = prepare(*flags, "--load", tmp_path, "--train-iters", "6")
    for name, kinds in loaded.optimizer.whole_state().items():
        assert kinds["soap_left_gram"].dtype is torch.float64
        for kind, tensor in kinds.items():
            torch.testing.assert_close(tensor.float(), saved[name][kind].float(), rtol=0, atol=0)
    finish(loaded)


def test_what_soap_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--optimizer soap needs whole matrices, which --use-torch-fsdp2 divides"):
        run_config("--optimizer soap --use-torch-fsdp2 --untie-embeddings-and-output-weights", world_size=2)
    notes = run_config("--soap-precondition-frequency 3").notes
    assert any("--soap-precondition-frequency 3 has no effect without --optimizer soap" in note for note in notes)
