# SPDX-License-Identifier: Apache-2.0
"""The optimizer over flat buffers equals torch's own, clips, and refuses gradients that are not numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError, NonFiniteError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from tests.support.run_flags import run_config


def tiny_network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two linear layers with a norm between them: decayed and undecayed parameters, sizes that need padding."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 3)).to(dtype)


def wrapped(module: nn.Module, **config: Any) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    # AdamW divides by the root of tiny second moments: a larger eps keeps rounding from being amplified.
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, "adam_eps": 1e-5}
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(ModelParallelConfig(), ddp_config, module)
    return model, get_megatron_optimizer(OptimizerConfig(**(settings | config)), [model])


def reference_optimizer(module: nn.Module, **settings: Any) -> torch.optim.AdamW:
    decayed = [param for param in module.parameters() if param.dim() > 1]
    others = [param for param in module.parameters() if param.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **({"lr": 0.01, "eps": 1e-5, "betas": (0.9, 0.999)} | settings))


def loss_of(module: nn.Module, step: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    dtype = next(module.parameters()).dtype
    x, y = torch.randn(5, 7, generator=generator).to(dtype), torch.randn(5, 3, generator=generator).to(dtype)
    loss: Tensor = scale * ((module(x) - y).float() ** 2).mean()
    return loss


def train(model: DistributedDataParallel, optimizer: MegatronOptimizer, steps: int, scale: float = 1.0) -> list[float]:
    norms = []
    for step in range(steps):
        model.zero_grad_buffer()
        loss_of(model, step, scale).backward()
        model.finish_grad_sync()
        norms.append(optimizer.step().grad_norm.item())
    return norms


@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_twenty_steps_equal_torch_adamw_and_its_clipping(max_norm: float) -> None:
    reference = tiny_network()
    theirs = reference_optimizer(reference)
    model, ours = wrapped(copy.deepcopy(reference), clip_grad=max_norm)
    norms = train(model, ours, 20)
    for step in range(20):
        theirs.zero_grad()
        loss_of(reference, step).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm or float("inf"))
        theirs.step()
        assert norms[step] == pytest.approx(norm.item(), rel=1e-5)
    for (name, expected), found in zip(reference.named_parameters(), model.module.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-7, msg=lambda text, name=name: f"{name}: {text}")
    assert ours.step_count == 20


@pytest.mark.flags("--adam-beta1", "--adam-beta2", "--adam-eps", "--weight-decay", "--lr", "--clip-grad")
@pytest.mark.parametrize(
    "flags",
    ["--adam-beta1 0.5", "--adam-beta2 0.9", "--adam-eps 1e-2", "--weight-decay 0.5", "--lr 0.02", "--clip-grad 0.01"],
)
def test_each_flag_changes_the_update(flags: str) -> None:
    weights = []
    for changed in ("", flags):
        config = run_config(changed)
        model = DistributedDataParallel(config.model, config.ddp, tiny_network())
        train(model, get_megatron_optimizer(config.optimizer, [model]), 3)
        weights.append(model.flat_buffers[0].param_data)
    assert not torch.equal(*weights)


def test_clipping_scales_down_large_gradients_and_leaves_small_ones() -> None:
    model, optimizer = wrapped(tiny_network(), clip_grad=1.0)
    (norm,) = train(model, optimizer, 1, scale=100.0)
    assert norm > 10  # reported before clipping
    assert model.flat_buffers[0].grad_data.norm().item() == pytest.approx(1.0, rel=1e-5)
    model, optimizer = wrapped(tiny_network(), clip_grad=1.0)
    (norm,) = train(model, optimizer, 1, scale=0.01)
    assert model.flat_buffers[0].grad_data.norm().item() == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("offload", [False, True])
def test_multi_token_prediction_is_clipped_by_itself(offload: bool) -> None:
    """Where it is detached: each part's gradients come to the norm of --clip-grad."""
    torch.manual_seed(0)
    parts = nn.ModuleDict({name: nn.Linear(7, 3) for name in ("decoder", "mtp")})
    before = {name: param.detach().clone() for name, param in parts.named_parameters()}
    config = {"optimizer": "sgd", "lr": 1.0, "weight_decay": 0.0, "sgd_momentum": 0.0, "clip_grad": 0.25}
    model, optimizer = wrapped(parts, clips_prediction_apart=True, optimizer_cpu_offload=offload, **config)
    model.zero_grad_buffer()
    (100 * loss_of(parts["mtp"], 1) + loss_of(parts["decoder"], 1)).backward()
    model.finish_grad_sync()
    norms = {name: torch.cat([p.main_grad.flatten() for p in parts[name].parameters()]).norm() for name in parts}
    assert min(norms.values()) > 0.25 and norms["mtp"] > 10 * norms["decoder"]
    assert optimizer.step().grad_norm.item() == pytest.approx(norms["decoder"].item(), rel=1e-6)
    for part in parts:
        moved = [(param - before[name]).flatten() for name, param in parts.named_parameters() if name.startswith(part)]
        assert torch.cat(moved).norm().item() == pytest.approx(0.25, rel=1e-4)


def test_norm_over_many_elements_keeps_its_digits() -> None:
    module = nn.Linear(2000, 1501, bias=False)
    model, optimizer = wrapped(module, lr=0.0)
    model.flat_buffers[0].grad_data.normal_()
    expected = module.weight.main_grad.double().norm().item()  # type: ignore[operator, union-attr]
    model.flat_buffers[0].grad_data[module.weight.numel() :] = 0
    assert optimizer.step().grad_norm.item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.flags("--no-check-for-nan-in-loss-and-grad")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gradient_stops_with_its_name_or_is_skipped(value: float) -> None:
    for flags in ("", "--no-check-for-nan-in-loss-and-grad"):
        config = run_config(flags)
        model = DistributedDataParallel(config.model, config.ddp, tiny_network())
        optimizer = get_megatron_optimizer(config.optimizer, [model])
        train(model, optimizer, 2)
        before = [model.flat_buffers[0].param_data.clone()] + [
            kind.clone() for kinds in optimizer.named_state().values() for kind in kinds.values()
        ]
        model.module[1].weight.main_grad[2] = value  # type: ignore[index, union-attr]
        model.module[2].bias.main_grad[0] = value  # type: ignore[index, union-attr]
        if not flags:
            with pytest.raises(
                NonFiniteError, match=r"gradient of 1\.weight is not finite in 1 of 13 .* after 2 updates"
            ):
                optimizer.step()
        else:
            result = optimizer.step()
            assert result.skipped
            assert not result.grad_norm.isfinite()
        after = [model.flat_buffers[0].param_data] + [
            kind for kinds in optimizer.named_state().values() for kind in kinds.values()
        ]
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        assert optimizer.step_count == 2
        train(model, optimizer, 1)  # a clean step goes on from there
        assert optimizer.step_count == 3


def test_gradients_whose_norm_overflows_are_told_apart_from_nan() -> None:
    model, optimizer = wrapped(tiny_network())
    model.module[0].weight.main_grad.fill_(1e30)  # type: ignore[union-attr, operator]
    with pytest.raises(NonFiniteError, match="beyond the range of float32"):
        optimizer.step()


def test_bfloat16_parameters_are_updated_through_float32_main_parameters() -> None:
    model, optimizer = wrapped(tiny_network(torch.bfloat16), lr=1e-5, weight_decay=0.0)
    before = model.flat_buffers[0].param_data.clone()
    mains = {name: kinds["main_param"].clone() for name, kinds in optimizer.named_state().items()}
    train(model, optimizer, 30)
    state = optimizer.named_state()
    # Each update of 1e-5 alone is lost in bfloat16 (8 bits at a magnitude of 0.2); 30 of them in float32 are not.
    weight = state["0.weight"]["main_param"] - mains["0.weight"]
    assert weight.abs().max() > 1e-4
    assert not torch.equal(before, model.flat_buffers[0].param_data)
    for name, param in model.module.named_parameters():
        assert torch.equal(param, state[name]["main_param"].bfloat16())
        assert param.main_grad.dtype == torch.float32  # type: ignore[attr-defined]


def test_bfloat16_equals_a_float32_reference_on_the_same_gradients() -> None:
    model, ours = wrapped(tiny_network(torch.bfloat16))
    reference = tiny_network(torch.bfloat16).float()
    theirs = reference_optimizer(reference)
    for step in range(5):
        model.zero_grad_buffer()
        loss_of(model, step).backward()
        for expected, param in zip(reference.parameters(), model.module.parameters(), strict=True):
            expected.grad = param.main_grad.clone()  # type: ignore[attr-defined]
        ours.step()
        theirs.step()
    state = ours.named_state()
    for name, expected in reference.named_parameters():
        torch.testing.assert_close(state[name]["main_param"], expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_copied_into_another_optimizer_continues_bit_for_bit(dtype: torch.dtype) -> None:
    (straight, optimizer), (resumed, fresh) = wrapped(tiny_network(dtype)), wrapped(tiny_network(dtype))
    train(straight, optimizer, 5)
    resumed.load_state_dict(straight.state_dict())
    for name, kinds in fresh.named_state().items():
        for kind, view in kinds.items():
            view.copy_(optimizer.named_state()[name][kind])
    fresh.step_count = optimizer.step_count
    fresh.after_load()
    train(straight, optimizer, 3)
    train(resumed, fresh, 3)
    assert torch.equal(straight.flat_buffers[0].param_data, resumed.flat_buffers[0].param_data)


def test_loading_only_model_weights_refreshes_main_parameters() -> None:
    model, optimizer = wrapped(tiny_network(torch.bfloat16))
    with torch.no_grad():
        model.module[0].weight.fill_(0.5)  # type: ignore[union-attr, operator]
    optimizer.reload_model_params()
    assert (optimizer.named_state()["0.weight"]["main_param"] == 0.5).all()


def test_groups_carry_what_the_scheduler_needs() -> None:
    model, optimizer = wrapped(tiny_network())
    decayed, others = optimizer.param_groups
    assert (decayed["wd_mult"], decayed["weight_decay"], decayed["lr_mult"], decayed["lr"]) == (1.0, 0.1, 1.0, 0.01)
    assert (others["wd_mult"], others["weight_decay"]) == (0.0, 0.0)
    assert [param.dim() for param in decayed["params"]] == [2, 2]
    assert {id(p) for group in (decayed, others) for p in group["params"]} == {id(p) for p in model.parameters()}


def test_params_norm() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = wrapped(tiny_network(dtype))
        expected = torch.cat([param.detach().double().flatten() for param in model.parameters()]).norm().item()
        assert optimizer.params_norm().item() == pytest.approx(expected, rel=1e-6)


def test_unknown_rules_and_bare_modules_are_refused() -> None:
    model, _ = wrapped(tiny_network())
    with pytest.raises(ConfigError, match="--optimizer adaptive_muon"):
        get_megatron_optimizer(OptimizerConfig(optimizer="adaptive_muon"), [model])
    with pytest.raises(TypeError, match="found Sequential"):
        get_megatron_optimizer(OptimizerConfig(), [tiny_network()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="no parameter of the model is trained"):
        wrapped(tiny_network().requires_grad_(False))


@pytest.mark.flags("--optimizer")
def test_optimizer_flag_takes_the_rule_that_exists_and_refuses_the_others() -> None:
    model, _ = wrapped(tiny_network())
    assert get_megatron_optimizer(run_config("--optimizer adam").optimizer, [model]).step_count == 0
    with pytest.raises(ConfigError, match="--optimizer"):
        run_config("--optimizer adaptive_muon")


def chunk_by_chunk(flag: str) -> tuple[list[bool], Tensor]:
    """Whether the last chunk has its old values yet, each time that a chunk's gather begins, and all values at the
    end of two steps."""
    config = run_config(
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --num-layers 4 "
        f"--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 {flag}",
        world_size=4,
    )
    chunks = [DistributedDataParallel(config.model, config.ddp, tiny_network(torch.bfloat16)) for _ in range(2)]
    last = chunks[-1].flat_buffers[0].param_data
    before = last.clone()
    moments: list[bool] = []
    for chunk in chunks:
        start = chunk.start_param_sync

        def recorded(start: Any = start) -> None:
            moments.append(torch.equal(last, before))
            start()

        chunk.start_param_sync = recorded  # type: ignore[method-assign]
    optimizer = get_megatron_optimizer(config.optimizer, chunks)
    for step in range(2):
        before.copy_(last)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        (loss_of(chunks[0], step) + loss_of(chunks[1], step + 5)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return moments, torch.cat([chunk.flat_buffers[0].param_data for chunk in chunks])


@pytest.mark.flags("--overlap-param-gather-with-optimizer-step")
def test_a_chunk_is_gathered_before_the_next_is_updated() -> None:
    together, expected = chunk_by_chunk("")
    in_turn, found = chunk_by_chunk("--overlap-param-gather-with-optimizer-step")
    assert together == [False, False] * 2
    assert in_turn == [True, False] * 2
    assert torch.equal(found, expected)


def test_one_chunk_has_nobody_to_wait_for() -> None:
    overlaps = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    notes = run_config(f"{overlaps} --overlap-param-gather-with-optimizer-step", world_size=2).notes
    assert any("--overlap-param-gather-with-optimizer-step has no effect without several chunks" in n for n in notes)
    with pytest.raises(ConfigError, match="needs --overlap-param-gather"):
        run_config("--overlap-param-gather-with-optimizer-step", world_size=2)
