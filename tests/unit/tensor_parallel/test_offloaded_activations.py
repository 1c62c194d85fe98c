# SPDX-License-Identifier: Apache-2.0
"""Activations that wait for backward on the host: the same gradients to the last bit, the bytes that leave the device,
and the order of the copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError, MemoryShortageError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import offloaded_activations
from megatron.core.tensor_parallel.offloaded_activations import OffloadChoice, Offloader, hold, offload
from tests.support.gpt_models import SEQUENCE_LENGTH, build_model, token_batch
from tests.support.run_flags import run_config
from tests.unit.tensor_parallel.test_recomputation import (
    BATCH,
    EXPERT_STYLES,
    FULL,
    HEADS,
    LAYERS,
    SELECTIVE,
    STYLES,
    X,
    kept,
    two_microbatches_under_way,
    two_passes,
)

PARTS = "--fine-grained-activation-offloading --min-offloaded-tensor-size 0 --offload-modules"
OF_ATTENTION = "attn_norm qkv_linear core_attn attn_proj"
WAYS = [
    f"{PARTS} {OF_ATTENTION} mlp_norm mlp_fc1 mlp_act", f"{PARTS} core_attn --activation-offload-fraction 0.5",
    "--cpu-offloading-num-layers 2",
    f"{PARTS} {OF_ATTENTION} mlp_norm mlp_fc1 mlp_act {SELECTIVE} core_attn layernorm mlp_act",
    f"{PARTS} {OF_ATTENTION} mlp_norm mlp_fc1 {SELECTIVE} mlp", f"{SELECTIVE} mlp_act",
    f"{PARTS} attn_norm {FULL} uniform --recompute-num-layers 2",
    f"{PARTS} {OF_ATTENTION} mlp_act {FULL} block --recompute-num-layers 1",
    f"--cpu-offloading-num-layers 3 --cpu-offloading-retain-pinned-cpu-buffers {SELECTIVE} layernorm mlp",
]  # fmt: skip
OF_EXPERTS = f"{OF_ATTENTION} mlp_norm mlp_fc1 mlp_act expert_fc1 moe_act"
EXPERT_WAYS = [
    f"{PARTS} {OF_EXPERTS}", f"{PARTS} {OF_EXPERTS} {SELECTIVE} moe_act layernorm mlp_act",
    f"{PARTS} {OF_EXPERTS} {SELECTIVE} moe shared_experts", "--cpu-offloading-num-layers 3",
]  # fmt: skip


@pytest.mark.flags(
    "--fine-grained-activation-offloading", "--offload-modules", "--min-offloaded-tensor-size",
    "--cpu-offloading-num-layers", "--activation-offload-fraction", "--recompute-modules",
)  # fmt: skip
@pytest.mark.parametrize("style", STYLES, ids=("gpt2", "llama", "parallel"))
def test_gradients_are_the_same_to_the_last_bit(style: str) -> None:
    flags = f"{style} --num-layers {LAYERS} --hidden-dropout 0.2 --attention-dropout 0.2"
    expected = two_passes(build_model(flags))
    for way in WAYS:
        model = build_model(f"{flags} {way}")
        assert all(map(torch.equal, two_passes(model), expected)), way
        assert is_empty(model), way


@pytest.mark.parametrize("style", EXPERT_STYLES, ids=("sigmoid", "capacity", "forced"))
def test_gradients_with_experts_are_the_same(style: str) -> None:
    expected = two_microbatches_under_way(build_model(style))
    for way in EXPERT_WAYS:
        model = build_model(f"{style} {way}")
        assert all(map(torch.equal, two_microbatches_under_way(model), expected)), way
        assert is_empty(model), way


def test_gradients_of_latent_attention_are_the_same() -> None:
    flags = f"""--num-layers {LAYERS} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8
        --qk-pos-emb-head-dim 4 --v-head-dim 8 --position-embedding-type rope"""
    expected = two_passes(build_model(flags))
    for way in (f"{PARTS} {OF_ATTENTION}", f"{PARTS} {OF_ATTENTION} {SELECTIVE} mla_up_proj core_attn"):
        assert all(map(torch.equal, two_passes(build_model(f"{flags} {way}")), expected)), way


def is_empty(model: GPTModel) -> bool:
    """Whether nothing is left on the host after backward."""
    offloader = model.decoder.offloader
    return offloader is None or offloader.offloaded_bytes == 0


def sent(flags: str, passes: int = 1) -> tuple[int, int]:
    """Bytes on the host after a forward pass, and after backward the bytes of its memory that stay allocated."""
    model = build_model(f"--num-layers {LAYERS} {flags}")
    ids, positions, labels = token_batch()
    for _ in range(passes):
        loss = model(ids, positions, labels=labels).mean()
        on_host = model.decoder.offloader.offloaded_bytes
        loss.backward()
    return on_host, model.decoder.offloader.buffer_bytes


@pytest.mark.flags(
    "--offload-modules", "--min-offloaded-tensor-size", "--activation-offload-fraction",
    "--cpu-offloading-retain-pinned-cpu-buffers",
)  # fmt: skip
def test_bytes_that_leave_the_device() -> None:
    """By the formula: x of each norm and product, 3 x of queries, keys and values, 4 x of each side of the MLP."""
    everything, _ = kept("")
    sizes = {"attn_norm": X, "qkv_linear": X, "core_attn": 3 * X, "attn_proj": X, "mlp_fc1": X, "mlp_act": 8 * X}
    for part, size in sizes.items():
        left, _ = kept(f"{PARTS} {part} --min-offloaded-tensor-size {X // 4}")
        assert sent(f"{PARTS} {part} --min-offloaded-tensor-size {X // 4}")[0] == LAYERS * size, part
        # Attention keeps its output, too, and the first layer's input is the embedding's output.
        held = everything - LAYERS * (size - X * (part == "attn_norm")) if part != "attn_proj" else everything
        assert left <= everything and (left == held or part in ("attn_norm", "attn_proj")), part
    together = " ".join(sizes)
    assert sent(f"{PARTS} {together} --min-offloaded-tensor-size {X // 4}")[0] == LAYERS * 15 * X
    assert sent(f"{PARTS} {together} --min-offloaded-tensor-size {X // 4 + 1}")[0] == LAYERS * 11 * X
    # From the second pass on, when the bytes of a pass are known.
    assert sent(f"{PARTS} qkv_linear --min-offloaded-tensor-size 1 --activation-offload-fraction 0.34", 2)[0] == X
    whole, buffers = sent("--cpu-offloading-num-layers 3")
    assert buffers == 0 and whole == everything - kept("--cpu-offloading-num-layers 3")[0]
    assert sent("--cpu-offloading-num-layers 1")[0] * 3 == pytest.approx(whole, rel=0.02)
    assert sent("--cpu-offloading-num-layers 3 --cpu-offloading-retain-pinned-cpu-buffers", 3)[1] == whole
    assert sent(f"{PARTS} {together}", 3)[1] == sent(f"{PARTS} {together}")[1], "memory of the host is used again"


@pytest.mark.flags("--recompute-modules")
def test_swiglu_is_computed_again_from_the_first_product() -> None:
    style = "--swiglu --disable-bias-linear --ffn-hidden-size 48"
    inner = BATCH * SEQUENCE_LENGTH * 48 * 4
    assert kept(style)[0] - kept(f"{style} {SELECTIVE} mlp_act")[0] == LAYERS * inner
    offloaded = f"{style} {SELECTIVE} mlp_act {PARTS} mlp_act"
    assert sent(offloaded)[0] == LAYERS * 2 * inner
    assert kept(style)[0] - kept(offloaded)[0] == LAYERS * 3 * inner, "neither gate and up nor their product"


@pytest.mark.flags("--delta-offload-bytes-across-pp-ranks")
def test_later_stages_offload_less() -> None:
    from megatron.core.transformer.execution.activation_policy import ActivationPolicy

    config = run_config(f"{PARTS} core_attn --delta-offload-bytes-across-pp-ranks 1000").model
    choices = [ActivationPolicy(config).choose_offload(stage) for stage in range(3)]
    assert [choice and choice.kept_bytes for choice in choices] == [0, 1000, 2000]
    offloader = Offloader(OffloadChoice(frozenset({"part"}), kept_bytes=1000))
    for expected in (4 * 512, 2 * 512):  # all of the first pass, then what leaves at least 1000 bytes
        with offloader.open_pass():
            held = [hold("part", torch.zeros(128)) for _ in range(4)]
        assert offloader.offloaded_bytes == expected
        del held


class Queue:
    """A CopyQueue that does its copies at once and writes down when they begin."""

    events: list[str]

    def __init__(self, device: torch.device) -> None:
        self.name = "to device" if self.events.count("queue") % 2 else "to host"
        self.events.append("queue")

    def copy(self, target: Tensor, source: Tensor, *after: Any) -> str:
        target.copy_(source)
        self.events.append(f"{self.name} {int(source[0])}")
        return self.events[-1]


@pytest.fixture
def events() -> Iterator[list[str]]:
    """What is copied, waited for and computed, in order."""
    Queue.events = events = []
    with (
        mock.patch.object(offloaded_activations, "CopyQueue", Queue),
        mock.patch.object(offloaded_activations, "hold_computation_until", lambda m: m and events.append(f"wait {m}")),
    ):
        yield events


def run_layers(offloader: Offloader, events: list[str], layers: int = 5) -> Tensor:
    """Layers whose computation is written down; layer i keeps a tensor of i."""
    weight = torch.ones(4, requires_grad=True)
    x = weight
    with offloader.open_pass():
        for layer in range(1, layers + 1):
            value = torch.full((4,), float(layer))
            with offloader.layer(layer - 1), offload("part"):
                x = x * value
            events.append(f"forward {layer}")
            x.register_hook(lambda grad, layer=layer: events.append(f"backward {layer}"))
    x.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [120.0] * 4
    return weight


def test_copies_run_beside_the_computation(events: list[str]) -> None:
    """A copy to the host has the time of a layer, and one to the device begins two groups before it is waited for."""
    offloader = Offloader(OffloadChoice(frozenset({"part"})))
    run_layers(offloader, events)
    for layer in (1, 2, 3, 4):
        begun, freed = events.index(f"to host {layer}"), events.index(f"wait to host {layer}")
        assert events.index(f"forward {layer}") in range(begun, freed), "while the next layer sends, or when it ends"
    # What has not left the device needs no way back, and is free when the next group is read.
    assert "to device 5" not in events
    assert events.index("wait to host 5") < events.index("wait to device 4")
    for layer in (1, 2, 3):
        begun, needed = events.index(f"to device {layer}"), events.index(f"wait to device {layer}")
        computed = [event for event in events[begun:needed] if event.startswith("backward")]
        assert computed, f"no computation hides the copy of layer {layer}: {events}"
    assert offloader.offloaded_bytes == 0


def test_what_a_pass_sent_last_leaves_in_the_next_pass(events: list[str]) -> None:
    """Passes of a pipeline have their backward later; then all of them but the last one's last layer is away."""
    offloader = Offloader(OffloadChoice(frozenset({"part"})))
    held = []
    for number in range(3):
        with offloader.open_pass():
            for layer in range(2):
                with offloader.layer(layer):
                    held.append(hold("part", torch.full((4,), 10.0 * number + layer)))
    assert [event for event in events if event.startswith("wait")] == [f"wait to host {n}" for n in (0, 1, 10, 11, 20)]
    assert [int(get()[0]) for get in held] == [0, 1, 10, 11, 20, 21] and "to device 21" not in events


def test_layers_that_send_nothing_free_what_was_sent_before(events: list[str]) -> None:
    """As with --cpu-offloading-num-layers."""
    offloader = Offloader(OffloadChoice(frozenset({"part"})))
    with offloader.open_pass():
        with offloader.layer(0):
            get = hold("part", torch.zeros(4))
        assert "wait to host 0" not in events
        with offloader.layer(1):
            pass
        assert "wait to host 0" in events
    assert get().tolist() == [0.0] * 4


def test_what_is_on_its_way_to_the_host_is_read_on_the_device(events: list[str]) -> None:
    """Two projections that keep a norm's output have it computed again twice, from one input."""
    offloader = Offloader(OffloadChoice(frozenset({"part"})))
    with offloader.open_pass():
        first, get = hold("part", torch.full((4,), 7.0)), hold("part", torch.arange(4.0))
    # Freed, its memory would be given to others while the copy reads it, and the copy would not be the value.
    assert get().tolist() == [0.0, 1.0, 2.0, 3.0] and "to device 0" not in events and "wait to host 0" not in events
    assert first().tolist() == [7.0] * 4 and "wait to host 0" in events
    assert get().tolist() == [0.0, 1.0, 2.0, 3.0], "as often as anybody asks"


@pytest.mark.flags("--fine-grained-offloading-max-inflight-offloads")
def test_the_computation_waits_for_the_oldest_of_too_many_copies(events: list[str]) -> None:
    config = run_config(f"{PARTS} core_attn --fine-grained-offloading-max-inflight-offloads 2").model
    from megatron.core.transformer.execution.activation_policy import ActivationPolicy

    choice = ActivationPolicy(config).choose_offload(0)
    assert choice is not None and choice.most_groups_in_flight == 2
    offloader = Offloader(choice)
    with offloader.open_pass(), offloader.layer(0):
        held = [hold("core_attn", torch.full((4,), float(number))) for number in range(4)]
    assert events[3:] == ["to host 1", "to host 2", "wait to host 0", "to host 3", "wait to host 1"]
    assert [get().tolist()[0] for get in held] == [0.0, 1.0, 2.0, 3.0]


def test_memory_that_is_taken_again_is_another_value() -> None:
    """A storage that was freed may come back at the same place for other values."""
    offloader = Offloader(OffloadChoice(frozenset({"part"})))
    weight = torch.ones(1000, requires_grad=True)
    with offloader.open_pass():
        results = []
        for number in range(20):
            with offload("part"):
                results.append((weight * torch.full((1000,), float(number))).sum())
    grads = [torch.autograd.grad(result, weight)[0][0].item() for result in results]
    assert grads == [float(number) for number in range(20)]


def test_memory_of_the_host_is_used_again_for_other_sizes() -> None:
    """What experts keep differs from pass to pass; memory of up to twice the size is taken for it."""
    offloader = Offloader(OffloadChoice(frozenset({"part"})))
    for numel in (100, 60, 99, 51, 100):
        with offloader.open_pass():
            get = hold("part", torch.full((numel,), float(numel)))
        assert torch.equal(get(), torch.full((numel,), float(numel)))
        assert offloader.offloaded_bytes == 4 * numel and offloader.buffer_bytes == 400
        del get
    with offloader.open_pass():
        held = hold("part", torch.zeros(10))
    assert offloader.buffer_bytes == 440, "more than twice as large is left for others"
    del held


def test_pinned_memory_is_counted_as_torch_hands_it_out() -> None:
    """In powers of two: 4100 bytes take 8192."""
    offloader, refusing = Offloader(OffloadChoice(frozenset({"part"}))), mock.Mock(side_effect=RuntimeError)
    with mock.patch.object(offloaded_activations, "is_cuda", return_value=True), offloader.open_pass():
        held = hold("part", torch.zeros(1025))
        assert (offloader.offloaded_bytes, offloader.buffer_bytes) == (4100, 8192)
        with (
            mock.patch.object(offloaded_activations, "allocate_host_memory", refusing),
            pytest.raises(MemoryShortageError, match="no further 16.4 KB for offloaded activations, beside 8.2 KB of"),
        ):
            hold("part", torch.zeros(2049))
    assert not held().any()


def test_views_go_as_one_and_come_back_with_their_strides() -> None:
    offloader = Offloader(OffloadChoice(frozenset({"part"})))
    packed = torch.arange(24.0).view(2, 3, 4)
    weight = torch.ones(3, 2, requires_grad=True)
    with offloader.open_pass(), offload("part"):
        result = (packed[:, :, 1].t() * weight).sum() + (packed[:, :, 2].t() * weight).sum()
    assert offloader.offloaded_bytes == packed.nbytes
    (grad,) = torch.autograd.grad(result, weight)
    assert torch.equal(grad, (packed[:, :, 1] + packed[:, :, 2]).t())


def test_large_memory_stays_where_little_of_it_is_kept() -> None:
    """Most of it may be somebody else's."""
    offloader, memory = Offloader(OffloadChoice(frozenset({"part"}))), torch.zeros(640)
    for numel, goes in ((9, False), (10, True)):
        with offloader.open_pass():
            get = hold("part", memory[:numel])
        assert offloader.offloaded_bytes == (memory.nbytes if goes else 0)
        del get


def test_a_host_without_memory_is_said_in_a_sentence() -> None:
    offloader = Offloader(OffloadChoice(frozenset({"part"})))
    weight = torch.ones(4, requires_grad=True)
    failing = mock.Mock(side_effect=RuntimeError("out of memory"))
    with (
        mock.patch.object(offloaded_activations, "allocate_host_memory", failing),
        pytest.raises(MemoryShortageError, match="the host has no further 16 bytes for offloaded activations"),
        offloader.open_pass(),
        offload("part"),
    ):
        weight * torch.ones(4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--fine-grained-activation-offloading", "needs --offload-modules, for example core_attn"),
        (f"{PARTS} mlp", "--offload-modules mlp is not one of its values; give one of attn_norm, qkv_linear"),
        (f"{PARTS} moe_act", "--offload-modules moe_act needs --num-experts; a dense MLP has mlp_fc1"),
        (f"{PARTS} core_attn --activation-offload-fraction 1.5", "1.5 is out of range; give a number from 0 to 1"),
        (f"{PARTS} core_attn --cpu-offloading-num-layers 1", "keep one"),
        ("--cpu-offloading-num-layers 2", "--cpu-offloading-num-layers 2 is not from 0 to 1, the layers of a"),
        (f"{PARTS} core_attn attn_norm {FULL} uniform --recompute-num-layers 1", "core_attn lie inside of layers"),
        (f"--cpu-offloading-num-layers 1 {FULL} uniform --recompute-num-layers 1", "every layer is recomputed"),
    ],
)
def test_refusals(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(flags)


def test_attention_probabilities_stay() -> None:
    """core_attn are queries, keys and values: what grows with the square of the sequence is for recomputation."""
    flags = f"--attention-backend local {PARTS} core_attn"
    assert sent(flags)[0] == LAYERS * 3 * X
    assert kept(flags)[0] >= LAYERS * 4 * BATCH * HEADS * SEQUENCE_LENGTH**2
