"""SOAP equals its algorithm, takes the matrices, and comes back from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.optimizer import soap
from tests.unit.run_flags import run_config
from tests.unit.test_update_rules import of_flags
from tests.unit.tiny_training import differing, finish, prepare, train_tiny

BETAS, EPSILON, LR, DECAY = (0.9, 0.95), 1e-6, 0.01, 0.1
FLAGS = f"--optimizer soap --adam-beta2 {BETAS[1]} --adam-eps {EPSILON} --weight-decay {DECAY} --clip-grad 0"


class OneMatrix:
    """Vyas et al. (2024), algorithm 3, with Adam's bias correction; for a vector and for sides without basis: Adam."""

    def __init__(self, weight: Tensor, interval: int, has_bases: tuple[bool, bool], decay: float) -> None:
        self.w, self.interval, self.decay = weight, interval, decay
        self.sides = has_bases
        self.m, self.v = torch.zeros_like(weight), torch.zeros_like(weight)
        sizes = (weight.shape[0], weight.shape[-1])
        self.gram = [torch.zeros(n, n) for n in sizes]
        self.q = [torch.eye(n) for n in sizes]
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
                if self.t == self.interval:
                    self.q[i] = torch.linalg.eigh(self.gram[i]).eigenvectors
                elif self.t % self.interval == 0:
                    self.q[i] = torch.linalg.qr(self.gram[i] @ self.q[i]).Q


@pytest.mark.flags("--optimizer", "--soap-precondition-frequency")
@pytest.mark.parametrize(("interval", "longest"), [(6, 100), (10, 100), (6, 10), (6, 2)])
def test_soap_equals_its_algorithm(interval: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random gradients, so many before the first basis that the grams have full rank: otherwise part of it is open,
    and left to rounding."""
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
            reference[name].step(grad)
        optimizer.step()
    for name, param in model.module.named_parameters():
        torch.testing.assert_close(param.detach(), reference[name].w, rtol=1e-3, atol=1e-4)


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


def test_what_soap_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--optimizer soap needs whole matrices, which --use-torch-fsdp2 divides"):
        run_config("--optimizer soap --use-torch-fsdp2 --untie-embeddings-and-output-weights", world_size=2)
    notes = run_config("--soap-precondition-frequency 3").notes
    assert any("--soap-precondition-frequency 3 has no effect without --optimizer soap" in note for note in notes)
