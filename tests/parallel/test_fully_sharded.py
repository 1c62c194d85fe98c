# SPDX-License-Identifier: Apache-2.0
"""FSDP2: what each process keeps, what is gathered when, and weights that come from elsewhere. That it is the same run
is said by test_layouts.py, that its checkpoints are, by test_layout_checkpoints.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from megatron.core.errors import ConfigError
from megatron.core.placement import get_placement
from megatron.training.step import train_step
from megatron.training.verify.parity import open_local_run
from tests.parallel.checkpoint_contents import saved
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import COMMON, STYLES, own_rank, training
from tests.parallel.test_layout_checkpoints import run_on
from tests.support.run_flags import run_config


def kept(layout: str, flags: str) -> dict[str, Any]:
    """Elements that this process keeps after a step, and in which number format."""
    config, recipe = training(STYLES["llama"] + flags, layout)
    with open_local_run(config, recipe, own_rank(config)) as run:
        train_step(run, run.data.open("train", 0))
        (chunk,) = run.model
        chunk.finish_param_sync()
        params = list(chunk.module.parameters())
        held = [param.to_local() if isinstance(param, DTensor) else param for param in params]
        state = run.optimizer.named_state()
        return {
            "parameters": sum(shard.numel() for shard in held),
            "gradients": sum(param.main_grad.numel() for param in params),  # type: ignore[attr-defined]
            "moments": sum(tensors["exp_avg"].numel() for tensors in state.values()),
            "whole": sum(math.prod(get_placement(param).local_shape) for param in params),
            "main": {shard.dtype for shard in held},
            "names": [name for name, _ in chunk.module.named_parameters()],
        }


@pytest.mark.flags("--use-torch-fsdp2")
def test_each_process_keeps_its_share() -> None:
    alone = kept("1", "")
    ranks = run_distributed(kept, 3, "dp3,fsdp2", " --bf16")
    for what in ("parameters", "gradients", "moments"):
        assert sum(rank[what] for rank in ranks) == alone[what] == alone["whole"], what
        for rank in ranks:
            assert rank[what] < 0.36 * alone[what], what
    for rank in ranks:
        assert rank["main"] == {torch.float32}, "main parameters, of which layers compute with rounded copies"
        assert rank["names"] == alone["names"]


def gathered(strategy_flags: list[str], layout: str) -> list[dict[str, bool]]:
    """For each set of flags: is the first layer whole after its forward, and before the second microbatch's?"""
    found = []
    for flags in strategy_flags:
        config, recipe = training(STYLES["llama"] + flags, layout)
        with open_local_run(config, recipe, own_rank(config)) as run:
            network = run.model[0].module
            layer: nn.Module = network.decoder.layers[0]  # type: ignore[assignment, union-attr, index]
            weight = layer.self_attention.linear_qkv  # type: ignore[union-attr]
            seen: dict[str, list[bool]] = {"before": [], "after": []}

            def look(when: str, seen: Any = seen, weight: Any = weight) -> Any:
                return lambda *_: seen[when].append(not isinstance(weight.weight, DTensor))

            run.model[0].register_forward_pre_hook(look("before"))
            run.model[0].register_forward_hook(look("after"))
            train_step(run, run.data.open("train", 0))
            assert len(seen["before"]) == 3, "microbatches"
            assert not seen["before"][0]
            assert isinstance(weight.weight, DTensor), "divided between the steps"
            found.append({"after forward": all(seen["after"]), "between microbatches": all(seen["before"][1:])})
    return found


@pytest.mark.flags("--data-parallel-sharding-strategy", "--torch-fsdp2-reshard-after-forward")
def test_what_stays_gathered_between_the_passes() -> None:
    flags = ["", " --torch-fsdp2-no-reshard-after-forward", " --data-parallel-sharding-strategy optim_grads"]
    everything, not_after_forward, gradients_only = run_distributed(gathered, 2, flags, "dp2,fsdp2")[0]
    assert everything == {"after forward": False, "between microbatches": False}
    assert not_after_forward == {"after forward": True, "between microbatches": False}
    assert gradients_only == {"after forward": True, "between microbatches": True}


@pytest.mark.flags("--data-parallel-sharding-strategy")
def test_what_stages_of_a_pipeline_gather() -> None:
    """With ZeRO-2 a stage, too, gathers once a step, however many microbatches are in flight."""
    flags = ["", " --data-parallel-sharding-strategy optim_grads"]
    ranks = run_distributed(gathered, 4, flags, "pp2,dp2,fsdp2")
    assert [gradients_only for _, gradients_only in ranks] == [
        {"after forward": True, "between microbatches": True}
    ] * 4
    everything = [everything for everything, _ in ranks]
    assert not any(stage["after forward"] for stage in everything)
    assert not any(stage["between microbatches"] for stage in everything)


@pytest.mark.flags("--data-parallel-sharding-strategy")
@pytest.mark.parametrize(("strategy", "divides_state"), [("optim", True), ("no_shard", False)])
def test_strategies_without_fully_shard(strategy: str, divides_state: bool) -> None:
    config = run_config(f"--use-torch-fsdp2 --data-parallel-sharding-strategy {strategy}", world_size=2)
    assert (config.ddp.use_torch_fsdp2, config.ddp.use_distributed_optimizer) == (False, divides_state)
    assert any("divides no parameters" in note for note in config.notes)
    without = run_config(f"--data-parallel-sharding-strategy {strategy}", world_size=2)
    assert any("has no effect without --use-torch-fsdp2 or --use-megatron-fsdp" in note for note in without.notes)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--overlap-grad-reduce", "leave out --overlap-grad-reduce"),
        ("--pipeline-model-parallel-size 2 --num-layers 2 --pipeline-schedule zb-h1", "use --pipeline-schedule 1f1b"),
        ("--pipeline-model-parallel-size 2 --num-layers 2 --defer-embedding-wgrad-compute", "leave it out"),
        ("--tensor-model-parallel-size 2 --num-query-groups 1", "at most --tensor-model-parallel-size 1"),
    ],
)
def test_refusals(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(f"--use-torch-fsdp2 {flags}", world_size=4)


def test_one_process_has_nothing_to_divide() -> None:
    assert any("--use-torch-fsdp2 has no effect" in note for note in run_config("--use-torch-fsdp2").notes)


def test_bf16_weights_come_and_go(tmp_path: Path) -> None:
    """Weights alone become main parameters; a step of learning rate 0 leaves them what they are."""
    flags = f"{STYLES['llama']} --bf16 --lr-warmup-iters 0 --save-interval 100"
    assert "--lr-warmup-iters 3" in COMMON
    run_on("1", f"{flags} --train-iters 2 --save {tmp_path}/first")
    still = f"{flags} --train-iters 1 --lr 0 --finetune --load {tmp_path}/first --save {tmp_path}/second"
    run_on("dp2,fsdp2", still)
    first, second = saved(tmp_path / "first", 2), saved(tmp_path / "second", 1)
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        if not key.startswith("optimizer."):
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, second[key]), key
            assert torch.equal(tensor.float(), second[f"optimizer.state.fp32_param.{key}"]), key


def built(flags: str) -> tuple[list[int], dict[str, Any]]:
    """Elements with memory whenever a unit is divided, and this process's rows of every parameter."""
    config, recipe = training(STYLES["llama"] + flags, "dp2,fsdp2")
    in_memory: list[int] = []
    prepare = TorchFullyShardedDataParallel._prepare
    network: list[nn.Module] = []
    shard = TorchFullyShardedDataParallel._shard

    def recorded_shard(self: Any, module: nn.Module) -> nn.Module:
        network.append(module)
        return shard(self, module)

    def recorded_prepare(self: Any, part: nn.Module) -> None:
        prepare(self, part)
        whole = [p for p in network[-1].parameters() if not isinstance(p, DTensor) and p.device.type != "meta"]
        in_memory.append(sum(param.numel() for param in whole))

    TorchFullyShardedDataParallel._shard = recorded_shard  # type: ignore[method-assign]
    TorchFullyShardedDataParallel._prepare = recorded_prepare  # type: ignore[method-assign]
    try:
        with open_local_run(config, recipe, own_rank(config)) as run:
            train_step(run, run.data.open("train", 0))
            run.model[0].finish_param_sync()
            named = run.model[0].module.named_parameters()
            return in_memory, {name: param.detach().to_local().clone() for name, param in named}  # type: ignore[operator]
    finally:
        TorchFullyShardedDataParallel._shard = shard  # type: ignore[method-assign]
        TorchFullyShardedDataParallel._prepare = prepare  # type: ignore[method-assign]


def built_both_ways() -> list[tuple[list[int], dict[str, Any]]]:
    return [built(""), built(" --init-model-with-meta-device"), built(" --init-model-with-meta-device --bf16")]


@pytest.mark.flags("--init-model-with-meta-device")
def test_no_process_ever_holds_the_whole_model() -> None:
    for (at_once, expected), (in_turn, found), (in_turn_bf16, _) in run_distributed(built_both_ways, 2):
        assert max(at_once) > 4 * max(in_turn), "of four layers and two ends one at a time"
        assert in_turn == in_turn_bf16
        assert found.keys() == expected.keys()
        for name, rows in expected.items():
            assert torch.equal(found[name], rows), name


@pytest.mark.flags("--init-model-with-meta-device")
def test_without_division_the_flag_is_noted() -> None:
    notes = run_config("--init-model-with-meta-device").notes
    assert any("has no effect without --use-torch-fsdp2 or --use-megatron-fsdp" in note for note in notes)
    assert kept("1", " --init-model-with-meta-device") == kept("1", "")
