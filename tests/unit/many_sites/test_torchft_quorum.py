# SPDX-License-Identifier: Apache-2.0
"""Outer steps by torchft, with a stand-in for the package that has another site in it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.many_sites.pending import Position
from megatron.training.launch.initialize import shut_down
from megatron.training.run import Run
from tests.support.run_flags import run_config
from tests.support.tiny_training import prepare

FLAGS = (
    "--diloco-replicas 2 --datacenter-id 1 --diloco-address 127.0.0.1:9 --diloco-backend torchft "
    "--diloco-inner-steps 2 --diloco-outer-lr 1 --diloco-outer-momentum 0"
)


class Manager:
    """As torchft's: the other site has learnt nothing, and is further on where `theirs` is set."""

    def __init__(self, **given: Any) -> None:
        self.given, self.theirs, self.commits, self.is_reachable = given, None, True, True

    def start_quorum(self) -> None:
        if not self.is_reachable:
            raise TimeoutError("no quorum")
        if self.theirs is not None:
            self.given["load_state_dict"](self.theirs)
            self.theirs = None

    def allreduce(self, delta: torch.Tensor) -> Any:
        delta /= 2
        return types.SimpleNamespace(wait=lambda: True)

    def should_commit(self) -> bool:
        return self.commits

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given |= state

    def shutdown(self, wait: bool) -> None:
        self.given["is_closed"] = True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    package = types.SimpleNamespace(Manager=Manager, ProcessGroupGloo=lambda timeout: None)
    monkeypatch.setitem(sys.modules, "torchft", package)
    run = prepare(*FLAGS.split())
    yield run
    run.data.close()
    shut_down()


@pytest.mark.flags("--diloco-backend")
def test_a_quorum_makes_the_outer_step(run: Run) -> None:
    outer: Any = run.outer
    manager = outer._manager
    assert manager.given["lighthouse_addr"] == "http://127.0.0.1:9" and manager.given["replica_id"] == "site_1"
    weight = next(run.model[0].parameters())
    before = weight.detach().clone()

    def exchange(at: int) -> Position | None:
        with torch.no_grad():
            weight.add_(1.0)
        moved: Position | None = outer.after_step(Position(at, 4 * at))
        return moved

    assert exchange(2) is None and outer.version == 1
    torch.testing.assert_close(weight.detach(), before + 0.5)
    for name in ("commits", "is_reachable"):  # others have failed, or are not there: this site goes on with its own
        setattr(manager, name, False)
        assert exchange(4) is None and outer.version == 1
        setattr(manager, name, True)
    torch.testing.assert_close(weight.detach(), before + 2.5)
    # This site is behind: it takes the others' state, and their place.
    manager.theirs = {**manager.given["state_dict"](), "version": 7, "place": [10, 40]}
    assert exchange(6) == Position(10, 40) and outer.version == 8
    torch.testing.assert_close(weight.detach(), before + 0.5)
    outer.load_state_dict({"version": 3, "pending": []})
    assert manager.given["step"] == 3
    outer.close()
    assert manager.given["is_closed"]


def test_what_torchft_cannot_do_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--diloco-backend torchft sums in float32; leave --diloco-exchange-dtype"):
        run_config(f"{FLAGS} --diloco-exchange-dtype bf16")
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ConfigError, match="--diloco-backend torchft needs the package torchft"):
        prepare(*FLAGS.split())
    shut_down()
