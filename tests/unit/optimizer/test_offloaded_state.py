# SPDX-License-Identifier: Apache-2.0
"""Optimizer state on the host and in files: the same updates to the last bit, the share that is there, its bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.cli.report_theoretical_memory import describe_workload
from megatron.core.errors import ConfigError, MemoryShortageError, StorageError
from megatron.core.optimizer import group_state, offloaded_state
from megatron.core.optimizer.offloaded_state import FileHome, HostHome, OffloadedState
from megatron.planner.step_memory import StepMemory, predict_step_memory
from megatron.training.run import Run
from tests.support.run_flags import run_config
from tests.support.tiny_training import differing, train_tiny
from tests.unit.optimizer.test_megatron_optimizer import tiny_network, train, wrapped

OFFLOAD = "--optimizer-cpu-offload"
PRECISION_AWARE = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --bf16"


def states(optimizer: Any) -> list[Any]:
    return [state for group in optimizer._groups for state in group.states]


@pytest.mark.flags(
    "--optimizer-cpu-offload", "--optimizer-offload-fraction", "--overlap-cpu-optimizer-d2h-h2d",
    "--optimizer-offload-directory",
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adam", "sgd", "lion"])
def test_updates_are_the_same_to_the_last_bit(rule: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In chunks, in part, overlapped and in files; clipped, with a skipped step among them."""
    is_bf16 = dtype == torch.bfloat16
    expected, plain = wrapped(tiny_network(dtype), optimizer=rule, clip_grad=0.5, bf16=is_bf16)
    norms = train(expected, plain, 6)
    for options in (
        {}, {"optimizer_offload_fraction": 0.5}, {"overlap_cpu_optimizer_d2h_h2d": True},
        {"optimizer_offload_directory": str(tmp_path), "overlap_cpu_optimizer_d2h_h2d": True},
    ):  # fmt: skip
        # Chunks of whole vectors of the processor, as the real ones are.
        with mock.patch.object(offloaded_state, "CHUNK", 64):
            model, optimizer = wrapped(
                tiny_network(dtype), optimizer=rule, clip_grad=0.5, bf16=is_bf16, optimizer_cpu_offload=True, **options
            )
            assert any(isinstance(state, OffloadedState) for state in states(optimizer))
            assert train(model, optimizer, 6) == norms, options
        for name, param in model.module.named_parameters():
            assert torch.equal(param, dict(expected.module.named_parameters())[name]), (options, name)
        found, wanted = optimizer.named_state(), plain.named_state()
        assert found.keys() == wanted.keys()
        for name, kinds in wanted.items():
            assert found[name].keys() == kinds.keys(), "a checkpoint has the same tensors"
            assert all(torch.equal(found[name][kind], tensor) for kind, tensor in kinds.items()), (options, name)
        torch.testing.assert_close(optimizer.params_norm(), plain.params_norm())
    assert os.listdir(tmp_path) == [], "files have no name"


@pytest.mark.flags("--optimizer-offload-fraction")
def test_the_named_share_is_on_the_host() -> None:
    """To the nearest whole parameter of a group; at both ends exactly."""
    shares = {}
    for fraction in (0.0, 0.3, 0.5, 1.0):
        _, optimizer = wrapped(tiny_network(), optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
        sizes = {False: 0, True: 0}
        for state in states(optimizer):
            assert not isinstance(state, OffloadedState) or isinstance(state.home, HostHome)
            sizes[isinstance(state, OffloadedState)] += sum(member.slot.numel for member in state.members)
        assert sum(sizes.values()) == sum(param.numel() for param in tiny_network().parameters())
        shares[fraction] = sizes[True] / sum(sizes.values())
    assert shares[0.0] == 0 and shares[1.0] == 1
    # 91 of the 130 elements of matrices are the first one, half of the rest are vectors of 13.
    assert 0 < shares[0.3] <= shares[0.5] < 1


def test_a_changed_share_continues_the_same_run(tmp_path: Path) -> None:
    """Saved by a run with all state on the host, resumed with a part, in files, and with none."""
    shared = [*PRECISION_AWARE.split(), "--save-interval", "100", "--lr-decay-iters", "4", "--clip-grad", "0.5"]
    straight = train_tiny(*shared, "--train-iters", "4")
    save = ["--save", tmp_path / "saved"]
    first = train_tiny(*shared, *save, "--train-iters", "2", OFFLOAD, "--overlap-cpu-optimizer-d2h-h2d")
    assert all(isinstance(state, OffloadedState) for state in states(first.optimizer))
    for flags in (
        [], [OFFLOAD], [OFFLOAD, "--optimizer-offload-fraction", "0.5"],
        [OFFLOAD, "--optimizer-offload-directory", tmp_path / "disk"],
    ):  # fmt: skip
        resumed: Run = train_tiny(*shared, "--load", tmp_path / "saved", "--train-iters", "4", *flags)
        assert differing(resumed, straight) == [], flags
    assert os.listdir(tmp_path / "disk") == []


def test_float32_runs_resume_with_the_weights_that_were_loaded(tmp_path: Path) -> None:
    """There the main parameters on the host are a copy, of which a checkpoint knows nothing."""
    shared = ["--save-interval", "100", "--lr-decay-iters", "4"]
    straight = train_tiny(*shared, "--train-iters", "4")
    train_tiny(*shared, "--save", tmp_path, "--train-iters", "2")
    assert differing(train_tiny(*shared, "--load", tmp_path, "--train-iters", "4", OFFLOAD), straight) == []


def test_rows_that_are_scaled_beside_the_update_reach_the_network() -> None:
    """As QK-clip does, after chunks have been sent already."""
    for overlaps in (False, True):
        model, optimizer = wrapped(
            tiny_network(), optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=overlaps, lr=0.0
        )
        before = model.module[0].weight.detach().clone()  # type: ignore[index, union-attr, operator]
        optimizer.call_after_update(lambda found_inf, to=optimizer: to.scale_rows("0.weight", torch.full((13,), 2.0)))
        train(model, optimizer, 1)
        assert torch.equal(model.module[0].weight, 2 * before)  # type: ignore[index, arg-type]


def test_chunks_travel_while_others_are_updated() -> None:
    """With the overlap the gradients of a chunk are on their way before the one before it is updated, and its
    parameters leave before the next is; without, parameters leave at the end."""
    orders: dict[bool, list[str]] = {}
    for overlaps in (False, True):
        _, optimizer = wrapped(tiny_network(), optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=overlaps)
        (state, _) = states(optimizer)
        events = orders[overlaps] = []
        for name in ("to_host", "to_device"):
            setattr(state.home, name, mock.Mock(copy=lambda *tensors, name=name, to=events: to.append(name)))
        for _ in state.shards(longest=64):
            events.append("update")
        state.copy_main_to_model()
    assert orders[False] == [*["to_host", "update"] * 3, "to_device"]
    start, turn = ["to_host", "to_host"], ["update", "to_device", "to_host"]
    assert orders[True] == [*start, *turn, "update", "to_device", "update", "to_device"]


def test_a_full_disk_and_a_full_host_are_said_in_a_sentence(tmp_path: Path) -> None:
    options = {"overlaps": False, "pins_grads": True, "pins_params": True}
    home = FileHome(torch.device("cpu"), tmp_path, **options)
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with (
        mock.patch.object(os, "posix_fallocate", full),
        pytest.raises(StorageError, match="cannot take 4.1 KB of optimizer state .No space left on device."),
    ):
        home.allocate(1024, torch.float32)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/state cannot be made .Not a directory."):
        FileHome(torch.device("cpu"), tmp_path / "file" / "state", **options)
    with pytest.raises(MemoryShortageError, match="optimizer states on the host .--optimizer-cpu-offload. take"):
        HostHome(torch.device("cpu"), **options).allocate(2**55, torch.float32)
    # Beside a GPU torch rounds pinned memory up to a power of two, here 4100 bytes to 8192.
    refusing = mock.Mock(side_effect=RuntimeError)
    with (
        mock.patch.object(offloaded_state, "is_cuda", return_value=True),
        mock.patch.object(offloaded_state, "allocate_host_memory", refusing),
    ):
        for pins, number in ((True, "8.2 KB"), (False, "4.1 KB")):
            home = HostHome(torch.device("cpu"), overlaps=False, pins_grads=True, pins_params=pins)
            with pytest.raises(MemoryShortageError, match=f"the host has no {number} for optimizer states"):
                home.allocate(1025, torch.float32, travels=True)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--optimizer muon", "--optimizer-cpu-offload works with --optimizer adam, sgd and lion, not with --opt"),
        ("--optimizer-offload-fraction 2", "2 is out of range; give a number from 0 to 1"),
        ("--optimizer-offload-directory=", "is empty, like a shell variable"),
    ],
)
def test_refusals(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(f"{OFFLOAD} {flags}")


@pytest.mark.flags("--use-torch-optimizer-for-cpu-offload", "--pin-cpu-grads", "--pin-cpu-params")
def test_what_says_nothing_is_accepted_or_noted() -> None:
    (note,) = (note for note in run_config("--use-torch-optimizer-for-cpu-offload").notes if "torch-optim" in note)
    assert note.startswith("--use-torch-optimizer-for-cpu-offload has no effect without --optimizer-cpu-offload")
    config = run_config(f"{OFFLOAD} --use-torch-optimizer-for-cpu-offload --no-pin-cpu-grads --no-pin-cpu-params")
    home = offloaded_state.build_home(config.optimizer, torch.device("cpu"))
    assert home is not None and not home.pins_grads and not home.pins_params
    asked: list[bool] = []
    allocate = mock.patch.object(
        offloaded_state, "allocate_host_memory", lambda numel, dtype, pinned: asked.append(pinned) or torch.zeros(numel)
    )
    # As beside a GPU: nothing is pinned beside a CPU.
    with allocate, mock.patch.object(offloaded_state, "is_cuda", lambda device: True):
        for flag in ("", "--no-pin-cpu-params --no-pin-cpu-grads"):
            home = offloaded_state.build_home(run_config(f"{OFFLOAD} {flag}").optimizer, torch.device("cpu"))
            assert home is not None
            home.allocate(4, torch.float32, travels=True)
            home.allocate(4, torch.float32)
            home.stage(0, 4, torch.float32)
    assert asked == [True, False, True, False, False, False]
    assert group_state.CHUNK % 64 == 0


def test_the_plan_of_a_step_leaves_out_what_is_on_the_host() -> None:
    def predict(flags: str, world_size: int = 1) -> StepMemory:
        config = run_config(flags, world_size=world_size)
        (stage,) = predict_step_memory(config.model, config.ddp, config.optimizer, describe_workload(config))
        return stage

    # Half of 12 bytes of each parameter.
    plain, halved = predict("--bf16"), predict(f"--bf16 {OFFLOAD} --optimizer-offload-fraction 0.5")
    assert plain.state - halved.state == pytest.approx(6 * plain.parameters)
    # With FSDP2 the float32 shards, which it gathers from, stay on the device; Adam's two moments go.
    sharded = "--use-torch-fsdp2 --bf16"
    plain, offloaded = predict(sharded, 2), predict(f"{sharded} {OFFLOAD} --optimizer-offload-fraction 0.5", 2)
    assert plain.state - offloaded.state == pytest.approx(0.5 * 8 * plain.parameters / 2)
    # Of layers that are recomputed whole their inputs are all that waits; that of the one in backward is back.
    whole = "--num-layers 4 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    offloading = "--fine-grained-activation-offloading --offload-modules attn_norm --min-offloaded-tensor-size 1"
    config = run_config(whole)
    inputs = config.training.micro_batch_size * config.model.hidden_size * describe_workload(config).seq_length * 4
    saved = predict(whole).activations - predict(f"{whole} {offloading}").activations
    assert saved == 3 * inputs
