# SPDX-License-Identifier: Apache-2.0
"""The fastest of several flash attentions is taken, where it gives the right numbers; packages are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.core_attention import flash, flash_versions
from megatron.core.transformer.core_attention.flash_versions import choose_flash_version
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support import flash_stand_in

CPU, GROUPS = torch.device("cpu"), ProcessGroupCollection.single()


class Handle:
    def remove(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str | None, float]]:
    """Active implementation -> seconds of a call; those that are in it are installed. `FA4` gives wrong numbers where
    it takes no time."""
    takes: dict[str | None, float] = {None: 3.0}

    def register(name: str) -> Handle:
        if name not in takes:
            raise ImportError(f"no {name}")
        return Handle()

    flash_stand_in.install(monkeypatch)
    from torch.nn.attention import _registry

    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    for name in ("FA3", "FA4"):
        register_flash_attention_impl(name, register_fn=lambda name=name: register(name))
    forward = flash.run_forward

    def run(*operands: Any) -> Any:
        result = forward(*operands)
        wrong = takes.get(current_flash_attention_impl()) == 0.0
        return result._replace(out=2 * result.out) if wrong else result

    monkeypatch.setattr(flash, "run_forward", run)
    monkeypatch.setattr(flash_versions, "is_cpu", lambda device: False)
    monkeypatch.setattr(flash_versions, "find_flash_problem", lambda config, device: None)
    monkeypatch.setattr(flash_versions, "measure_seconds_between", lambda a, b: takes[current_flash_attention_impl()])
    yield takes
    flash_versions.activate_flash_attention(2)


def build_config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, **fields
    )


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"FA3": 2.0}, "FA3"), ({"FA3": 4.0}, None), ({"FA3": 2.0, "FA4": 1.0}, "FA4"),
        ({"FA4": 0.0}, None), ({}, None),
    ],
)  # fmt: skip
def test_the_fastest_that_is_right(
    clock: dict[str | None, float], seconds: dict[str, float], chosen: str | None
) -> None:
    clock |= seconds
    note = choose_flash_version(build_config(), 64, CPU, GROUPS)
    assert current_flash_attention_impl() == chosen
    if seconds in ({}, {"FA4": 0.0}):
        assert note is None, "nothing to choose from"
    else:
        version = 2 if chosen is None else int(chosen[2])
        assert note is not None and f"flash attention is version {version}" in note and "3000.00 ms by 2" in note


def test_a_run_that_is_told_what_to_do_measures_nothing(clock: dict[str | None, float]) -> None:
    clock["FA3"] = 1.0
    for fields in ({"flash_attention_version": 2}, {"attention_backend": "local"}, {"deterministic_mode": True}):
        assert choose_flash_version(build_config(**fields), 64, CPU, GROUPS) is None
        assert current_flash_attention_impl() is None
