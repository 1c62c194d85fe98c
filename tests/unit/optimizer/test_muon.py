# SPDX-License-Identifier: Apache-2.0
"""Muon equals torch's own, its scales and coefficients are those of the papers, and it takes the right matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.errors import ConfigError
from megatron.core.optimizer import orthogonalization
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.orthogonalization import COEFFICIENTS, NewtonSchulz
from megatron.core.optimizer.param_groups import choose_rule
from megatron.core.placement import Part, Placement, Split
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.support.run_flags import run_config
from tests.support.tiny_training import differing, finish, prepare, train_tiny
from tests.unit.optimizer.test_megatron_optimizer import loss_of, tiny_network, train
from tests.unit.optimizer.test_update_rules import assert_equal_weights, of_flags

EXACT = "--optimizer muon --muon-coefficient-type polar_express --muon-num-ns-steps 12 --clip-grad 0 --weight-decay 0"


@pytest.mark.flags(
    "--optimizer", "--muon-momentum", "--muon-nesterov", "--muon-coefficient-type", "--muon-num-ns-steps",
    "--muon-fp32-matmul-prec", "--muon-scale-mode", "--muon-extra-scale-factor",
)  # fmt: skip
@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--muon-scale-mode shape_scaling --muon-nesterov", {"adjust_lr_fn": "original", "nesterov": True}),
        ("--muon-extra-scale-factor 0.2", {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}),
        ("--muon-scale-mode shape_scaling --muon-momentum 0.5", {"momentum": 0.5, "nesterov": False}),
        ("--muon-scale-mode shape_scaling --muon-num-ns-steps 3", {"ns_steps": 3, "nesterov": False}),
    ],
)
def test_matrices_as_with_torch_and_the_rest_with_adam(flags: str, settings: dict[str, object]) -> None:
    """torch's Muon works in bfloat16, with one set of coefficients."""
    base = "--muon-coefficient-type simple --muon-fp32-matmul-prec low --weight-decay 0.1 --clip-grad 0 --adam-eps 1e-5"
    model, ours = of_flags(f"--optimizer muon {base} {flags}")
    train(model, ours, 5)
    reference = tiny_network()
    matrices = [param for param in reference.parameters() if param.dim() == 2]
    others = [param for param in reference.parameters() if param.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, **({"momentum": 0.9} | settings))  # type: ignore[arg-type]
    adam = torch.optim.AdamW(others, lr=0.01, weight_decay=0.0, eps=1e-5)
    for step in range(5):
        reference.zero_grad()
        loss_of(reference, step).backward()
        muon.step()
        adam.step()
    assert_equal_weights(model, reference)


def step_once(flags: str) -> tuple[dict[str, Tensor], dict[str, Tensor], MegatronOptimizer]:
    """Changes and gradients of the tiny network's parameters in one step with learning rate 0.01; gradients are random,
    since those of a small batch have a low rank."""
    model, optimizer = of_flags(flags)
    before = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    for param in model.module.parameters():
        param.main_grad.normal_(generator=torch.Generator().manual_seed(param.numel()))  # type: ignore[operator]
    optimizer.step()
    changes = {name: before[name] - param.detach() for name, param in model.module.named_parameters()}
    return changes, {name: p.main_grad.clone() for name, p in model.module.named_parameters()}, optimizer  # type: ignore[attr-defined]


@pytest.mark.flags("--muon-scale-mode", "--muon-coefficient-type", "--muon-num-ns-steps")
@pytest.mark.parametrize(
    ("mode", "scales"),
    [
        ("spectral", (13**0.5, 13**0.5)),
        ("unit_rms_norm", ((13 / 7) ** 0.5, (3 / 13) ** 0.5)),
        ("shape_scaling", ((13 / 7) ** 0.5, 1.0)),
    ],
)
def test_enough_steps_give_the_orthogonal_factor(mode: str, scales: tuple[float, float]) -> None:
    changes, grads, _ = step_once(f"{EXACT} --muon-scale-mode {mode}")
    for name, scale in zip(("0.weight", "2.weight"), scales, strict=True):
        left, sizes, right = torch.linalg.svd(grads[name], full_matrices=False)
        assert sizes[-1] > 1e-3 * sizes[0]
        torch.testing.assert_close(changes[name], 0.01 * scale * left @ right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "steps", "error"), [("simple", 5, 0.4), ("quintic", 5, 0.04), ("polar_express", 8, 1e-5)]
)
def test_coefficients_bring_singular_values_near_one(kind: str, steps: int, error: float) -> None:
    matrix = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    for shape in (matrix, matrix.t()):
        sizes = torch.linalg.svdvals(NewtonSchulz(COEFFICIENTS[kind], steps, "high").orthogonalize(shape))
        assert (sizes - 1).abs().max() < error


@pytest.mark.flags("--muon-fp32-matmul-prec")
@pytest.mark.parametrize(
    ("flag", "on_gpu", "expected"),
    [
        ("", True, ("medium", torch.float32)),
        ("--muon-fp32-matmul-prec high", True, ("high", torch.float32)),
        # CPUs with matrix units would make "medium" of bfloat16, the others of float32.
        ("", False, ("highest", torch.float32)),
        ("--muon-fp32-matmul-prec low", True, ("highest", torch.bfloat16)),
    ],
)
def test_products_have_the_precision_asked_for(
    flag: str, on_gpu: bool, expected: tuple[str, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    multiply = torch.addmm

    def watched(*args: Tensor, **kwargs: float) -> Tensor:
        seen.add((torch.get_float32_matmul_precision(), args[0].dtype))
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "addmm", watched)
    monkeypatch.setattr(orthogonalization, "is_cuda", lambda _: on_gpu)
    before = torch.get_float32_matmul_precision()
    model, optimizer = of_flags(f"--optimizer muon {flag}")
    for buffer in model.flat_buffers:
        buffer.grad_data.normal_()
    optimizer.step()
    assert seen == {expected}
    assert torch.get_float32_matmul_precision() == before == "highest"


@pytest.mark.flags("--muon-use-syrk")
@pytest.mark.parametrize("precision", ["low", "high"])
def test_symmetric_products_are_half_computed(precision: str) -> None:
    flops, results = [], []
    for flag in ("", "--muon-use-syrk"):
        _, optimizer = of_flags(f"--optimizer muon --muon-fp32-matmul-prec {precision} {flag}")
        (rule,) = (group.rule for group in optimizer._groups if isinstance(group.rule, Muon))
        matrix = torch.randn(34, 50, generator=torch.Generator().manual_seed(0))
        with FlopCounterMode(display=False) as counter:
            results.append(rule.newton_schulz.orthogonalize(matrix))
        flops.append(counter.get_total_flops())
    m, n, steps = 34, 50, 5
    assert flops[0] == steps * 2 * (2 * m * m * n + m**3)
    half = sum(rows * end for rows, end in ((9, 9), (9, 18), (9, 27), (7, 34)))
    assert flops[1] == steps * 2 * (m * m * n + half * (n + m))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5 if precision == "high" else 0.03)


@pytest.mark.flags("--muon-scalar-optimizer")
def test_the_rest_may_take_lion() -> None:
    changes, _, optimizer = step_once("--optimizer muon --muon-scalar-optimizer lion")
    for name, change in changes.items():
        kinds = set(optimizer.named_state()[name])
        assert kinds == ({"momentum_buffer"} if "weight" in name and "1." not in name else {"exp_avg"})
        if kinds == {"exp_avg"}:
            torch.testing.assert_close(change.abs(), torch.full_like(change, 0.01))


def gpt_step(*flags: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """First changes of a GPT model's weights, by name, and its gradients."""
    run = prepare(*EXACT.split(), "--lr", "1e-2", "--group-query-attention", "--num-query-groups", "1", *flags)
    module = run.model[0].module
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    for buffer in run.model[0].flat_buffers:
        buffer.grad_data.copy_(torch.randn(buffer.layout.numel, generator=generator))
    grads = {name: param.main_grad.clone() for name, param in module.named_parameters()}
    for group in run.optimizer.param_groups:
        group["lr"] = 0.01
    run.optimizer.step()
    finish_without_training(run)
    return {name: (before[name] - p.detach()) / 0.01 for name, p in module.named_parameters()}, grads


def finish_without_training(run) -> None:  # type: ignore[no-untyped-def]
    run.progress.iteration = run.progress.target_iterations
    finish(run)


@pytest.mark.flags("--muon-no-split-qkv")
def test_queries_keys_and_values_are_three_matrices() -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    for flags, blocks in (((), [16, 8, 8]), (("--muon-no-split-qkv",), [32])):
        changes, grads = gpt_step(*flags)
        for change, grad in zip(changes[name].split(blocks), grads[name].split(blocks), strict=True):
            left, _, right = torch.linalg.svd(grad, full_matrices=False)
            expected = max(grad.shape) ** 0.5 * left @ right
            torch.testing.assert_close(change, expected, rtol=2e-2, atol=2e-2)


def test_tables_the_output_layer_and_vectors_are_no_matrices() -> None:
    run = prepare("--optimizer", "muon", "--untie-embeddings-and-output-weights")
    for name, kinds in run.optimizer.named_state().items():
        is_matrix = name.endswith("weight") and "linear" in name
        assert set(kinds) == ({"momentum_buffer"} if is_matrix else {"exp_avg", "exp_avg_sq"}), name
    finish_without_training(run)


@pytest.mark.usefixtures("no_yardstick")
@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --initial-loss-scale 1024"])
def test_resume_is_the_uninterrupted_run(flags: str, tmp_path: Path) -> None:
    flags = f"{flags} --optimizer muon --muon-extra-scale-factor 0.2"
    straight = train_tiny(*flags.split(), "--train-iters", "4")
    assert straight.progress.skipped_iterations == 0
    save = ["--save", tmp_path, "--load", tmp_path, "--save-interval", "100", "--lr-decay-iters", "4"]
    train_tiny(*flags.split(), *save, "--train-iters", "2")
    assert differing(train_tiny(*flags.split(), *save, "--train-iters", "4"), straight) == []


def test_what_muon_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--use-torch-fsdp2 divides; use --use-distributed-optimizer"):
        run_config("--optimizer muon --use-torch-fsdp2 --untie-embeddings-and-output-weights", world_size=2)
    kv = "--group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2"
    with pytest.raises(ConfigError, match=r"use --muon-tp-mode duplicated"):
        run_config(f"--optimizer muon --muon-tp-mode blockwise --muon-no-split-qkv {kv}", world_size=2)
    config = run_config("--optimizer dist_muon", world_size=2)
    assert config.optimizer.optimizer == "muon" and config.ddp.use_distributed_optimizer
    assert any("--optimizer dist_muon is" in note for note in config.notes)
    overlapping = run_config("--optimizer muon --overlap-grad-reduce --overlap-param-gather", world_size=2)
    assert overlapping.ddp.use_distributed_optimizer


@pytest.mark.parametrize("mode", ["duplicated", "distributed", "blockwise"])
def test_each_matrix_of_a_stack_is_orthogonalised_alone(mode: str) -> None:
    """The weights of experts; cut inside an expert, the shards come together as those of one matrix do."""
    config = run_config(f"--optimizer muon --muon-tp-mode {mode}").optimizer
    muon = Muon(config, ProcessGroupCollection.single())
    stack = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))
    splits = (Split(0, "ep", 2, 1), Split(1, "etp", 1, 0, (Part(4, name="gate"), Part(4, name="up"))))
    placement = Placement("decoder.layers.0.mlp.experts.linear_fc1.weight", (6, 8, 6), splits)
    assert choose_rule(placement, config) == "muon"
    assert choose_rule(placement, run_config("--optimizer soap").optimizer) == "soap"
    found = muon.orthogonal(stack, placement)
    alone = [muon.orthogonal(matrix, Placement("one", (8, 6))) for matrix in stack]
    assert torch.equal(found, torch.stack(alone))
