# SPDX-License-Identifier: Apache-2.0
"""The fastest of several ways of attention is taken, where it gives the right numbers; packages are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, current_flash_attention_impl, register_flash_attention_impl

from megatron.core import operation_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.core_attention import attention_trial, flash, flex, sdpa, select
from megatron.core.transformer.core_attention.attention_trial import choose_attention_way
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support import flash_stand_in
from tests.unit.transformer.test_cuda_attention import flex_stand_in

CPU, GROUPS = torch.device("cpu"), ProcessGroupCollection.single()
FLASH3, FLASH4, FLEX, CUDNN = "flash attention 3", "flash attention 4", "flex attention", "cuDNN with two widths"


class Handle:
    def remove(self) -> None:
        pass


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str | None, float]]:
    """Way -> seconds of a call, None for the usual one; those that are in it are there. One that takes no time gives
    wrong numbers."""
    takes: dict[str | None, float] = {None: 3.0}

    def register(name: str) -> Handle:
        if f"flash attention {name[2]}" not in takes:
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
        version = (current_flash_attention_impl() or "FA2")[2]
        is_wrong = takes.get(f"flash attention {version}") == 0.0
        return result._replace(out=2 * result.out) if is_wrong else result

    monkeypatch.setattr(flash, "run_forward", run)
    monkeypatch.setattr(flex, "run_flex", flex_stand_in)
    monkeypatch.setitem(sdpa._KERNELS, "fused", SDPBackend.MATH)
    monkeypatch.setattr(attention_trial, "is_cpu", lambda device: False)
    for module in (operation_table, select):
        monkeypatch.setattr(module, "find_widest_flash_heads", lambda device: 256)
        monkeypatch.setattr(module, "find_kernel_obstacle", lambda device: None if FLEX in takes else "no compiler")
    monkeypatch.setattr(
        operation_table, "find_product_obstacle", lambda device, *limits: None if CUDNN in takes else "no GPU"
    )
    monkeypatch.setattr(attention_trial, "_time", lambda attention, inputs: takes[attention.way])
    yield takes
    attention_trial.activate_flash_attention(2)


def build_config(**fields: Any) -> TransformerConfig:
    usual = {"num_query_groups": None if fields.get("multi_latent_attention") else 2, "attention_dropout": 0.0}
    return TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, **(usual | fields))


LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16
}  # fmt: skip
WINDOW = {"window_size": (7, 0)}


@pytest.mark.parametrize(
    ("fields", "seconds", "chosen"),
    [
        ({}, {FLASH3: 2.0}, FLASH3), ({}, {FLASH3: 4.0}, None), ({}, {FLASH3: 2.0, FLASH4: 1.0}, FLASH4),
        ({}, {FLASH4: 0.0}, None), ({}, {}, None), ({}, {FLEX: 1.0}, None),
        (WINDOW, {FLEX: 1.0, FLASH3: 2.0}, FLEX), (WINDOW, {FLEX: 4.0, FLASH3: 2.0}, FLASH3),
        (WINDOW, {FLEX: 4.0}, None),
        (LATENT, {CUDNN: 1.0, FLASH3: 2.0, FLEX: 2.5}, CUDNN), (LATENT, {CUDNN: 4.0, FLASH3: 2.0}, FLASH3),
        (LATENT, {FLEX: 1.0}, FLEX), (LATENT, {CUDNN: 4.0, FLEX: 5.0}, None),
        (LATENT | WINDOW, {CUDNN: 1.0, FLASH3: 2.0}, FLASH3),
        ({"attention_dropout": 0.1} | WINDOW, {FLEX: 1.0, FLASH3: 2.0}, None),
    ],
)  # fmt: skip
def test_the_fastest_that_is_right(
    takes: dict[str | None, float], fields: dict[str, Any], seconds: dict[str, float], chosen: str | None
) -> None:
    takes |= seconds
    config = build_config(**fields)
    note = choose_attention_way(config, 64, CPU, GROUPS)
    assert config.attention_way == chosen
    version = None if chosen is None or not chosen.startswith("flash") else f"FA{chosen[-1]}"
    assert current_flash_attention_impl() == version
    attention = select.build_gpu_attention(config, select_options(config), CPU, config.attention_way)
    if chosen is not None:
        assert note is not None and f"computed by {chosen}" in note and "3000.00 ms by" in note
        assert attention.name.endswith(f"by {chosen}")


def select_options(config: TransformerConfig) -> Any:
    return select.AttentionOptions.from_config(config, 1)


def test_documents_and_exchanges_decide_what_is_tried(takes: dict[str | None, float]) -> None:
    takes |= {FLEX: 1.0}
    config = build_config()
    assert choose_attention_way(config, 64, CPU, GROUPS, has_documents=True) and config.attention_way == FLEX
    for kind, expected in (("all_gather", FLEX), ("p2p", None), ("a2a", None)):
        config = build_config(context_parallel_size=2, cp_comm_type=[kind])
        choose_attention_way(config, 64, CPU, GROUPS)
        assert config.attention_way == expected, kind


def test_a_way_that_is_left_out_is_named(takes: dict[str | None, float], monkeypatch: pytest.MonkeyPatch) -> None:
    takes |= {FLASH3: 1.0, FLASH4: 0.0}
    run = attention_trial._run

    def fail(attention: Any, inputs: Any) -> list[torch.Tensor]:
        if attention.way == FLASH3:
            raise RuntimeError("no kernel image\nfor this device")
        return run(attention, inputs)

    monkeypatch.setattr(attention_trial, "_run", fail)
    note = choose_attention_way(config := build_config(), 64, CPU, GROUPS)
    assert config.attention_way is None and note is not None
    assert f"; not {FLASH3}: no kernel image; not {FLASH4}: it gives other numbers than" in note


def test_a_run_that_is_told_what_to_do_measures_nothing(takes: dict[str | None, float]) -> None:
    takes[FLASH3] = 1.0
    for fields in ({"flash_attention_version": 2}, {"attention_backend": "local"}, {"deterministic_mode": True}):
        assert choose_attention_way(build_config(**fields), 64, CPU, GROUPS) is None
        assert current_flash_attention_impl() is None
