# SPDX-License-Identifier: Apache-2.0
"""dist_checkpointing as programs written for upstream use it: strategies, objects, metadata, a used directory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.errors import CheckpointError, ConfigError
from tests.unit.house.test_public_names import resolve


def use(module: str, *names: str) -> Any:
    found = [resolve(f"megatron.core.dist_checkpointing.{module}", name) for name in names]
    return found[0] if len(names) == 1 else found


def random_states() -> list[dict[str, Any]]:
    return [{"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}]


def test_a_training_state_with_strategies(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_strategy, load_strategy, strict = use(
        "serialization", "get_default_save_sharded_strategy", "get_default_load_sharded_strategy", "StrictHandling"
    )
    writer, reader = use(
        "strategies.fully_parallel", "FullyParallelSaveStrategyWrapper", "FullyParallelLoadStrategyWrapper"
    )
    strategy = writer(save_strategy("torch_dist"), None)
    strategy.use_cached_ckpt_structure = True
    weight = torch.arange(6.0).view(2, 3)
    states = random_states()
    state = {
        "model": {"w": ShardedTensor.from_rank_offsets("w", weight, (0, 0, 1))},
        "lr_scheduler": {"num_steps": 7},
        "rng_state": ShardedObject("rng_state", states, (1, 1), (0, 0), replica_id=0),
    }
    path, metadata = tmp_path / "saved", {"distrib_optim_sharding_type": "dp_reshardable"}
    for _ in range(2):  # the second one replaces the first
        dist_checkpointing.save(
            state, str(path), sharded_strategy=strategy, async_sharded_save=False, async_strategy=None,
            validate_access_integrity=True, preprocess_common_before_consistancy_check=None,
            content_metadata=metadata,
            )  # fmt: skip
    assert "holds a checkpoint already, which is overwritten" in capfd.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    assert dist_checkpointing.load_content_metadata(path) == metadata
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    wanted = {
        "model": {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 1))},
        "rng_state": ShardedObject("rng_state", None, (1, 1), (0, 0)),
    }
    found = dist_checkpointing.load(wanted, path, reader(load_strategy(path), None), strict=strict.RAISE_ALL)
    assert torch.equal(found["model"]["w"], weight) and found["lr_scheduler"] == {"num_steps": 7}
    ours, theirs = states[0], found["rng_state"][0]
    assert theirs["random"] == ours["random"] and torch.equal(theirs["torch"], ours["torch"])
    assert np.array_equal(theirs["numpy"][1], ours["numpy"][1]) and theirs["numpy"][2:] == ours["numpy"][2:]
    np.random.set_state(theirs["numpy"])


def test_what_nobody_asked_for_and_what_is_no_object(tmp_path: Path) -> None:
    both = {name: ShardedTensor.whole(name, torch.ones(2)) for name in ("a", "b")}
    dist_checkpointing.save(both, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="also holds b"):
        dist_checkpointing.load({"a": both["a"]}, tmp_path / "saved", strict="raise_all")
    asked = {
        "a": both["a"],
        "c": ShardedTensor.whole("c", torch.zeros(2)),
        "more": {"o": ShardedObject("o", 0, (1,), (0,))},
    }

    def load(strict: str) -> Any:
        return dist_checkpointing.load(asked, tmp_path / "saved", strict=strict)

    for strict in ("assume_ok_unexpected", "raise_unexpected"):
        with pytest.raises(CheckpointError, match="c is missing|lacks the object o"):
            load(strict)
    found, missing, unexpected = load("return_all")
    assert "c" not in found and not found.get("more") and (missing, unexpected) == ({"b"}, {"c", "o"})
    assert load("return_unexpected")[1:] == (set(), {"c", "o"}) and "c" not in load("ignore_all")
    with pytest.warns(UserWarning, match="lacks c, o") as told:
        load("log_unexpected")
    with pytest.warns(UserWarning, match="also holds b") as more:
        load("log_all")
    assert (len(told), len(more)) == (1, 2)
    with pytest.raises(ConfigError, match="no strict='loud'"):
        dist_checkpointing.load({"a": both["a"]}, tmp_path / "saved", strict="loud")
    with pytest.raises(CheckpointError, match="lacks the object rng"):
        dist_checkpointing.load({"rng": ShardedObject("rng", None, (1,), (0,))}, tmp_path / "saved")
    with pytest.raises(ConfigError, match="rng holds a Path|rng holds a PosixPath"):
        dist_checkpointing.save({"rng": ShardedObject("rng", Path("a"), (1,), (0,))}, tmp_path / "other")
    with pytest.raises(ConfigError, match="one format here"):
        use("serialization", "get_default_save_sharded_strategy")("zarr")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="not an empty directory"):
        dist_checkpointing.save(both, tmp_path / "mine")
    stacked = ShardedTensor.from_rank_offsets("s", torch.ones(3), (0, 1, 4), (1, 0, 2), prepend_axis_num=1)
    assert stacked.global_shape == (4, 6) and stacked.blocks[0].box == ((1, 1), (0, 3))


def test_the_state_of_an_optimizer_of_torch(tmp_path: Path) -> None:
    """Its parameters have numbers, which stay numbers."""
    weight = torch.nn.Parameter(torch.arange(6.0))
    optimizers = [torch.optim.AdamW([weight], lr=0.1) for _ in range(2)]
    weight.grad = torch.ones(6)
    optimizers[0].step()
    dist_checkpointing.save({"optimizer": optimizers[0].state_dict(), "seen": {3: "x", "y": {}}}, tmp_path / "saved")
    loaded = dist_checkpointing.load({}, tmp_path / "saved")
    assert loaded["seen"] == {3: "x", "y": {}}
    optimizers[1].load_state_dict(loaded["optimizer"])
    state, expected = (optimizer.state_dict()["state"] for optimizer in reversed(optimizers))
    assert state.keys() == expected.keys() == {0}
    assert all(torch.equal(state[0][name], expected[0][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    for odd in ({(0, 1): 1}, {0: 1, "0": 2}):
        with pytest.raises(ConfigError, match=r"^seen has the keys .*; keys are different texts or whole numbers"):
            dist_checkpointing.save({"seen": odd}, tmp_path / "other")
