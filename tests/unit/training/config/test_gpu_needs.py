# SPDX-License-Identifier: Apache-2.0
"""Launch scripts for GPUs on a machine without one: what changes no number gives way, with a note."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import device
from megatron.core.config_base import CheckedConfig, flag, get_settings
from megatron.core.errors import ConfigError
from megatron.core.setting import CHANGES_THE_RUN, NeedsGPU
from megatron.training.checkpoint.trained_model import load_trained_model
from megatron.training.config.container import RunConfig
from megatron.training.config.gpu_needs import describe_gpu_needs, replace_gpu_settings
from megatron.training.config.run_groups import group_classes
from megatron.training.flags.read import print_settings
from megatron.training.launch import initialize
from tests.support.run_flags import run_config
from tests.support.tiny_training import finish, prepare

_OFFLOADING = "--fine-grained-activation-offloading --offload-modules"
# Flags, the one that needs a GPU, and which settings change on the CPU.
WISHES: list[tuple[str, str, dict[str, Any]]] = [
    ("--attention-backend fused", "--attention-backend", {"attention_backend": "auto"}),
    ("--attention-backend flash --attention-dropout 0.1", "--attention-backend", {"attention_backend": "auto"}),
    ("--attention-backend flash --window-size 7,0", "--attention-backend", {"attention_backend": "auto"}),
    ("--attention-backend flash --softmax-type learnable", "--attention-backend", {"attention_backend": "auto"}),
    ("--distributed-backend nccl", "--distributed-backend", {"distributed_backend": None}),
    ("--flash-attention-version 3", "--flash-attention-version", {"flash_attention_version": None}),
    ("--profile", "--profile", {"use_pytorch_profiler": True}),
    ("--log-energy", "--log-energy", {"log_energy": False}),
    ("--record-memory-history", "--record-memory-history", {"record_memory_history": False}),
    ("--high-priority-stream-groups tp", "--high-priority-stream-groups", {}),
    ("--flight-recorder-dump-path records/rank", "--flight-recorder-dump-path", {}),
    ("--empty-unused-memory-level 1", "--empty-unused-memory-level", {}),
    ("--use-torch-fsdp2 --use-nccl-ub", "--use-nccl-ub", {}),
    (f"{_OFFLOADING} core_attn", "--fine-grained-activation-offloading", {}),
    ("--cpu-offloading-num-layers 1", "--cpu-offloading-num-layers", {}),
    ("--optimizer-cpu-offload", "--optimizer-cpu-offload", {}),
    ("--cuda-graph-impl local", "--cuda-graph-impl", {"cuda_graph_impl": "none"}),
]


def plain_values(config: RunConfig) -> dict[str, Any]:
    """Every setting by name."""
    content = config.to_dict()
    return {name: value for group in group_classes() for name, value in content[group].items()}


@pytest.mark.parametrize(("flags", "name", "instead"), WISHES)
def test_what_takes_its_place(flags: str, name: str, instead: dict[str, Any]) -> None:
    config = run_config(f"--attention-dropout 0 {flags}", world_size=2)
    before = plain_values(config)
    (sentence,) = describe_gpu_needs(config)
    assert sentence.startswith(name) and "needs a GPU; without one, " in sentence
    out = io.StringIO()
    print_settings(config, out)
    assert f"note: {sentence}\n" in out.getvalue()
    assert replace_gpu_settings(config) == [sentence]
    after = plain_values(config)
    assert {field: after[field] for field in after if after[field] != before[field]} == instead


def test_a_run_without_wishes_has_no_such_notes() -> None:
    assert describe_gpu_needs(run_config("--attention-backend flash --attention-dropout 0", world_size=2)) == []
    assert describe_gpu_needs(run_config("--profile --use-pytorch-profiler")) == []


@pytest.mark.flags("--no-pin-cpu-grads", "--no-pin-cpu-params")
@pytest.mark.parametrize(
    "name",
    ["--no-pin-cpu-grads", "--no-pin-cpu-params", "--fine-grained-offloading-max-inflight-offloads"],
)
def test_details_of_a_wish_are_noted_beside_it(name: str) -> None:
    flags = f"--optimizer-cpu-offload {name}" if "pin" in name else f"{_OFFLOADING} core_attn {name} 2"
    _, sentence = sorted(describe_gpu_needs(run_config(flags)), key=lambda text: text.startswith(name))
    assert sentence.startswith(name) and "needs a GPU; without one, it has no effect" in sentence


def test_every_wish_is_tried_here() -> None:
    declared = {
        setting.name
        for config_class in group_classes().values()
        for setting in get_settings(config_class).values()
        if setting.gpu
    }
    details = {"--pin-cpu-grads", "--pin-cpu-params", "--fine-grained-offloading-max-inflight-offloads"}
    assert declared == {name for _, name, _ in WISHES} | details


@pytest.mark.parametrize("kind", list(CHANGES_THE_RUN))
def test_what_changes_numbers_has_no_substitute(kind: Any) -> None:
    @dataclass(kw_only=True)
    class Fast(CheckedConfig):
        number_format: str = flag("fp32", kind=kind, gpu=NeedsGPU(lambda run: True, "float32 is used"))

    with pytest.raises(AssertionError, match="number_format changes numbers"):
        get_settings(Fast)


@pytest.mark.skipif(device.cuda_is_usable(), reason="about machines without CUDA")
def test_a_script_for_gpus_trains_on_the_cpu(tmp_path: Path) -> None:
    """--profile writes torch.profiler's trace; the losses are those of a run without any of it."""
    wishes = (
        "--attention-backend", "fused", "--distributed-backend", "nccl", "--record-memory-history",
        "--memory-snapshot-path", tmp_path / "snapshot.pickle",
        "--profile", "--profile-dir", tmp_path, "--profile-step-start", "1", "--profile-step-end", "2",
    )  # fmt: skip
    plain, wishful = finish(prepare()), finish(prepare(*wishes))
    assert wishful.config.model.attention_backend == "auto"
    assert (tmp_path / "rank-0.json.gz").exists() and not (tmp_path / "snapshot.pickle").exists()
    ours, theirs = ([parameter for chunk in run.model for parameter in chunk.parameters()] for run in (plain, wishful))
    assert all(bool((one == other).all()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.skipif(device.cuda_is_usable(), reason="about machines without CUDA")
def test_a_checkpoint_from_gpus_is_used_on_the_cpu(tmp_path: Path) -> None:
    saves = ("--train-iters", "1", "--save", tmp_path, "--save-interval", "1")
    run = prepare(*saves, describe_operations=lambda *_: {})
    run.config.model.attention_backend = "fused"  # what the saved settings of a run on GPUs say
    finish(run)
    assert load_trained_model(tmp_path).config.model.attention_backend == "auto"


@pytest.mark.flags("--flash-attention-version")
def test_the_version_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is told once, before the model is built; 2 is its own, and what a package lacks is a sentence."""
    told: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", told.append)
    monkeypatch.setattr(initialize, "replace_gpu_settings", lambda config: [])
    for version in (2, 3, 4):
        prepare("--flash-attention-version", str(version))
    assert told == ["FA3", "FA4"]

    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'flash_attn_interface'")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", missing)
    with pytest.raises(ConfigError, match="--flash-attention-version 3 cannot be used here .*flash_attn_interface"):
        prepare("--flash-attention-version", "3")
