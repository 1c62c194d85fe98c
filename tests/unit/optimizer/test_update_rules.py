# SPDX-License-Identifier: Apache-2.0
"""SGD and Lion equal plain references; learning rates, weight decay and number formats of groups of parameters."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import megatron_optimizer, param_groups, rule_table, update_rules
from megatron.core.optimizer.group_state import GroupState
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rules import UpdatedGroup, UpdateRule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.config.container import RunConfig
from tests.support.run_flags import run_config
from tests.support.tiny_training import differing, finish, prepare, train_tiny
from tests.unit.optimizer.test_megatron_optimizer import loss_of, tiny_network, train, wrapped


def of_flags(flags: str, dtype: torch.dtype = torch.float32) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    config = run_config(flags)
    model = DistributedDataParallel(config.model, config.ddp, tiny_network(dtype))
    return model, get_megatron_optimizer(config.optimizer, [model])


def assert_equal_weights(model: DistributedDataParallel, reference: nn.Module) -> None:
    for (name, expected), found in zip(reference.named_parameters(), model.module.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-7, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.flags("--optimizer", "--sgd-momentum")
@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
def test_sgd_equals_torch(momentum: float) -> None:
    model, ours = of_flags(f"--optimizer sgd --sgd-momentum {momentum} --weight-decay 0.1 --clip-grad 0.2")
    assert {kind for kinds in ours.named_state().values() for kind in kinds} == (
        {"momentum_buffer"} if momentum else set()
    )
    reference = tiny_network()
    groups = [
        {"params": [param for param in reference.parameters() if (param.dim() > 1) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    theirs = torch.optim.SGD(groups, lr=0.01, momentum=momentum)
    train(model, ours, 10)
    for step in range(10):
        theirs.zero_grad()
        loss_of(reference, step).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
        theirs.step()
    assert_equal_weights(model, reference)


@pytest.mark.flags("--optimizer", "--lion-beta1", "--lion-beta2")
@pytest.mark.parametrize("betas", [(0.95, 0.98), (0.5, 0.98), (0.95, 0.3)])
def test_lion_equals_its_algorithm(betas: tuple[float, float]) -> None:
    flags = f"--lion-beta1 {betas[0]} --lion-beta2 {betas[1]} --lr 0.001 --weight-decay 0.1 --clip-grad 0.2"
    model, ours = of_flags(f"--optimizer lion {flags}")
    reference = tiny_network()
    means = [torch.zeros_like(param) for param in reference.parameters()]
    train(model, ours, 10)
    for step in range(10):
        reference.zero_grad()
        loss_of(reference, step).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
        with torch.no_grad():
            for param, mean in zip(reference.parameters(), means, strict=True):
                assert param.grad is not None
                direction = (betas[0] * mean + (1 - betas[0]) * param.grad).sign()
                param -= 0.001 * (direction + (0.1 if param.dim() > 1 else 0.0) * param)
                mean.copy_(betas[1] * mean + (1 - betas[1]) * param.grad)
    assert_equal_weights(model, reference)


@pytest.mark.parametrize("rule", ["adam", "sgd", "lion"])
def test_a_gradient_that_is_no_number_changes_nothing(rule: str) -> None:
    model, optimizer = of_flags(f"--optimizer {rule} --no-check-for-nan-in-loss-and-grad")
    train(model, optimizer, 2)
    tensors = [buffer.param_data for buffer in model.flat_buffers]
    tensors += [tensor for kinds in optimizer.named_state().values() for tensor in kinds.values()]
    before = [tensor.clone() for tensor in tensors]
    model.flat_buffers[0].grad_data[1] = float("nan")
    assert optimizer.step().skipped
    assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True))


class SignDescent(UpdateRule):
    """A rule of one's own: no state, a constant step."""

    def update(self, group, step, divisor, found_inf) -> None:  # type: ignore[no-untyped-def]
        for state in group.states:
            for param, grad, _ in state.shards():
                param.add_(grad.sign(), alpha=-group.options["lr"])


def test_a_rule_of_ones_own() -> None:
    model, _ = wrapped(tiny_network())
    before = copy.deepcopy(model.module.state_dict())
    optimizer = get_megatron_optimizer(run_config().optimizer, [model], update_rule=SignDescent())
    train(model, optimizer, 1)
    for name, param in model.module.named_parameters():
        torch.testing.assert_close(param, before[name] - 0.01 * param.main_grad.sign())  # type: ignore[attr-defined]
    assert not any(optimizer.named_state().values())


def code_of_the_page() -> dict[str, Any]:
    """What the Python example of docs/optimizers.md defines."""
    page = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    return names


class Halving:
    """A scheduler of one's own: a rate that halves at every step."""

    def __init__(self, config: RunConfig, optimizer: MegatronOptimizer) -> None:
        self.optimizer, self.lr = optimizer, config.optimizer.lr or 0.0
        self.step(0)

    def step(self, increment: int) -> None:
        self.lr /= 2 if increment else 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

    def get_lr(self, group: Mapping[str, Any]) -> float:
        return self.lr

    def state_dict(self) -> dict[str, float]:
        return {"lr": self.lr}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.lr = state["lr"]
        self.step(0)


def test_optimizer_and_scheduler_of_ones_own_in_a_run(tmp_path: Path) -> None:
    providers = {"build_optimizer": code_of_the_page()["optimizer_provider"], "build_scheduler": Halving}
    straight = finish(prepare("--train-iters", "4", **providers))
    assert straight.scheduler.get_lr({}) == 1e-2 / 2**4
    assert {kind for kinds in straight.optimizer.named_state().values() for kind in kinds} == {"mean"}
    save = ["--save", tmp_path, "--load", tmp_path, "--save-interval", "2"]
    finish(prepare(*save, "--train-iters", "2", **providers))
    resumed = finish(prepare(*save, "--train-iters", "4", **providers))
    assert differing(resumed, straight) == []


# ---- learning rates and weight decay of groups


@pytest.mark.flags("--decoupled-lr", "--decoupled-min-lr")
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_output_layer_have_a_rate_of_their_own(tied: bool) -> None:
    flags = ["--decoupled-lr", "0.5", "--lr", "1e-2", "--min-lr", "1e-3", "--lr-warmup-iters", "2"]
    run = prepare(*flags, *([] if tied else ["--untie-embeddings-and-output-weights"]))
    (own,) = (group for group in run.optimizer.param_groups if group["is_decoupled_lr"])
    names = {name for name, p in run.model[0].module.named_parameters() for q in own["params"] if p is q}
    assert names == {"embedding.word_embeddings.weight"} | (set() if tied else {"output_layer.weight"})
    run.scheduler.step(4)
    assert [group["lr"] for group in run.optimizer.param_groups if group is not own] == [5e-3, 5e-3]
    assert own["lr"] == 0.25
    run.scheduler.step(1000)
    assert own["lr"] == 1e-3, "--min-lr"
    finish(run)
    lowest = prepare(*flags, "--decoupled-min-lr", "0.1")
    lowest.scheduler.step(1000)
    rates = {group["is_decoupled_lr"]: group["lr"] for group in lowest.optimizer.param_groups}
    assert rates == {True: 0.1, False: 1e-3}
    finish(lowest)


def test_a_decoupled_rate_of_zero_leaves_the_embedding_as_it_is() -> None:
    run = prepare("--decoupled-lr", "0", "--train-iters", "2", "--lr", "1e-2")
    before = {name: param.detach().clone() for name, param in run.model[0].module.named_parameters()}
    finish(run)
    unchanged = {name for name, param in run.model[0].module.named_parameters() if torch.equal(param, before[name])}
    assert unchanged == {"embedding.word_embeddings.weight"}


def test_contradicting_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--decoupled-min-lr 0.1 needs --decoupled-lr"):
        run_config("--decoupled-min-lr 0.1")
    with pytest.raises(ConfigError, match=r"--decoupled-min-lr 0.1 is above --decoupled-lr 0.01"):
        run_config("--decoupled-min-lr 0.1 --decoupled-lr 0.01")
    with pytest.raises(ConfigError, match=r"--min-lr 0.005 is above --decoupled-lr 0.001; use a --decoupled-min-lr"):
        run_config("--min-lr 0.005 --decoupled-lr 0.001")


@pytest.mark.flags("--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type", "--dump-param-to-param-group-map")
@pytest.mark.parametrize(
    "flags", ["", "--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type apply_wd_to_qk_layernorm"]
)
def test_which_parameters_decay(flags: str, tmp_path: Path) -> None:
    run = prepare("--qk-layernorm", *flags.split(), "--dump-param-to-param-group-map", tmp_path / "map.json")
    written = json.loads((tmp_path / "map.json").read_text())
    shapes = {name: param.dim() for name, param in run.model[0].module.named_parameters()}
    assert written.keys() == shapes.keys()
    decay = [group["weight_decay"] for group in run.optimizer.param_groups]
    for name, dims in shapes.items():
        of_qk_norm = "q_layernorm" in name or "k_layernorm" in name
        assert (decay[written[name]] > 0) == (dims == 2 or (bool(flags) and of_qk_norm)), name
    assert any("q_layernorm" in name for name in shapes)
    finish(run)


def test_a_map_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dump-param-to-param-group-map .*No such file"):
        prepare("--dump-param-to-param-group-map", tmp_path / "missing" / "map.json")


def test_usual_groups_are_one_slice_each() -> None:
    """What the speed of the fused kernel rests on: one call for each group, whatever lies between parameters."""
    model, optimizer = wrapped(tiny_network())
    lengths = [[shard.param.numel() for shard in state.shards()] for state in optimizer._states]
    assert lengths == [[192], [256]] and model.flat_buffers[0].layout.numel == 448


# ---- number formats


def state_dtypes(optimizer: MegatronOptimizer) -> dict[str, torch.dtype]:
    return {kind: tensor.dtype for kinds in optimizer.named_state().values() for kind, tensor in kinds.items()}


@pytest.mark.flags(
    "--use-precision-aware-optimizer", "--exp-avg-dtype", "--exp-avg-sq-dtype", "--main-params-dtype",
    "--main-grads-dtype",
)  # fmt: skip
def test_smaller_state_is_kept_and_updates_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.optimizer.group_state.CHUNK", 100)  # several chunks for each group
    plain, reference = of_flags("--bf16", torch.bfloat16)
    train(plain, reference, 10)
    wanted = reference.named_state()
    start = {name: p.float() for name, p in tiny_network(torch.bfloat16).named_parameters()}
    for flag, kind, dtype in (
        ("--exp-avg-dtype bf16", "exp_avg", torch.bfloat16),
        ("--exp-avg-sq-dtype bf16", "exp_avg_sq", torch.bfloat16),
        ("--main-params-dtype fp16", "main_param", torch.float16),
        ("--main-grads-dtype bf16", "", torch.bfloat16),
    ):
        model, optimizer = of_flags(f"--bf16 --use-precision-aware-optimizer {flag}", torch.bfloat16)
        expected = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "main_param": torch.float32}
        assert state_dtypes(optimizer) == (expected | {kind: dtype} if kind else expected)
        assert model.flat_buffers[0].grad_data.dtype == (torch.float32 if kind else dtype)
        train(model, optimizer, 10)
        for name, kinds in optimizer.named_state().items():
            moved = wanted[name]["main_param"] - start[name]
            error = kinds["main_param"].float() - wanted[name]["main_param"]
            assert error.norm() < 0.05 * moved.norm(), f"{flag}: {name}"
        with pytest.raises(ConfigError, match="needs --use-precision-aware-optimizer"):
            run_config(f"--bf16 {flag}")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--optimizer lion", "works with --optimizer adam"),
        ("--main-grads-dtype bf16", "--main-grads-dtype bf16 needs --bf16"),
        ("--main-params-dtype fp16", "needs --bf16 or --fp16"),
        ("--bf16 --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32", "contradicts"),
        ("--exp-avg-dtype fp8", "--exp-avg-dtype"),
    ],
)
def test_formats_that_cannot_be_are_refused(flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_config(f"--use-precision-aware-optimizer {flags}")


SMALL_STATE = (
    "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-params-dtype fp16"
)


@pytest.mark.usefixtures("no_yardstick")
@pytest.mark.parametrize("flags", [SMALL_STATE, "--optimizer lion", "--optimizer sgd --decoupled-lr 0.1"])
def test_resume_is_the_uninterrupted_run(flags: str, tmp_path: Path) -> None:
    straight = train_tiny(*flags.split(), "--train-iters", "4")
    save = ["--save", tmp_path, "--load", tmp_path, "--save-interval", "100", "--lr-decay-iters", "4"]
    train_tiny(*flags.split(), *save, "--train-iters", "2")
    assert differing(train_tiny(*flags.split(), *save, "--train-iters", "4"), straight) == []


def test_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    train_tiny("--save", tmp_path, "--save-interval", "1", "--optimizer", "sgd", "--train-iters", "1")
    with pytest.raises(CheckpointError, match="state of --optimizer sgd, this run has --optimizer adam.*--no-load-opt"):
        prepare("--load", tmp_path)
    finish(prepare("--load", tmp_path, "--no-load-optim", "--train-iters", "1"))


def test_pieces_in_a_small_format_are_written_back() -> None:
    model, optimizer = of_flags("--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16", torch.bfloat16)
    state: GroupState = optimizer._states[0]
    seen: list[Tensor] = []
    for param, _, kept in state.shards(longest=50):
        assert param.dtype == kept["exp_avg"].dtype == torch.float32
        kept["exp_avg"].fill_(1.5)
        seen.append(param)
    assert (state.tensors["exp_avg"] == 1.5).all() and sum(part.numel() for part in seen) == len(
        state.tensors["exp_avg"]
    )


def test_the_table_of_rules_is_the_only_list() -> None:
    """A rule for matrices with a row of its own: the optimizer builds it for them, and another rule for the rest."""

    class Halving(UpdateRule):
        @classmethod
        def from_config(cls, config: OptimizerConfig, groups: ProcessGroupCollection) -> Halving:
            return cls()

        def update(self, group: UpdatedGroup, step: Tensor, divisor: Tensor | None, found_inf: Tensor) -> None:
            for state in group.states:
                for shard in state.shards():
                    shard.param.mul_(0.5)

    rows = {**rule_table.RULES, "halving": rule_table.RuleEntry("update_rules.Halving", (), rest=lambda config: "sgd")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_rules, "Halving", Halving, raising=False)
        for module in (rule_table, param_groups, megatron_optimizer, update_rules):
            patch.setattr(module, "RULES", rows)
        network = nn.Linear(2, 2)
        before = network.weight.detach().clone(), network.bias.detach().clone()
        model = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(), network)
        config = OptimizerConfig(lr=0.1, weight_decay=0.0, clip_grad=0.0)
        config.optimizer = "halving"
        optimizer = get_megatron_optimizer(config, [model])
        network.weight.main_grad.fill_(1.0)  # type: ignore[attr-defined]
        network.bias.main_grad.fill_(1.0)  # type: ignore[attr-defined]
        optimizer.step()
        assert torch.equal(network.weight, before[0] / 2)
        torch.testing.assert_close(network.bias.detach(), before[1] - 0.1)
        assert rule_table.needs_whole_matrices("halving") and rule_table.reads_constants(config, "sgd")
    assert all(issubclass(update_rules.load_rule(name), UpdateRule) for name in rule_table.RULES)
    constants = {name.partition("_")[0] for entry in rule_table.RULES.values() for name in entry.constants}
    assert constants == set(rule_table.RULES)


def test_a_rule_without_a_row_cannot_be_made_from_flags() -> None:
    class Own(UpdateRule):
        def update(self, group: UpdatedGroup, step: Tensor, divisor: Tensor | None, found_inf: Tensor) -> None: ...

    with pytest.raises(NotImplementedError, match="Own is no rule of --optimizer"):
        Own.from_config(OptimizerConfig(), ProcessGroupCollection.single())
