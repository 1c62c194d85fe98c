# SPDX-License-Identifier: Apache-2.0
"""Recomputation in one process: the same gradients to the last bit, and how much is kept until backward."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from benchmarks.memory import KeptForBackward
from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.kept_activations import Recomputed, keep_as
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.execution.activation_policy import divide_layers
from megatron.core.transformer.execution.compilation import compile_regions
from megatron.core.transformer.moe.router import TopKRouter
from tests.support.gpt_models import SEQUENCE_LENGTH, build_model, first_mlp, read_config, token_batch
from tests.support.run_flags import run_config

FULL = "--recompute-granularity full --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
WAYS = [
    "--recompute-activations", f"{SELECTIVE} layernorm", f"{SELECTIVE} core_attn layernorm mlp",
    f"{FULL} uniform --recompute-num-layers 2", f"{FULL} block --recompute-num-layers 2",
]  # fmt: skip
STYLES = [
    "--attention-backend local",
    """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm --bf16
    --fp32-residual-connection --norm-placement both --attention-output-gate --num-query-groups 2""",
    """--parallel-residual --no-gradient-accumulation-fusion --no-persist-layer-norm
    --untie-embeddings-and-output-weights""",
]
LAYERS, BATCH, HIDDEN, HEADS = 3, 2, 32, 4
X = SEQUENCE_LENGTH * BATCH * HIDDEN * 4
"""Bytes of hidden states in float32."""


def two_passes(model: GPTModel) -> list[torch.Tensor]:
    """Losses of two microbatches, each drawing its own dropout, and all gradients: .grad and main_grad."""
    ids, positions, labels = token_batch()
    found = []
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)  # type: ignore[attr-defined]
    torch.manual_seed(5)
    for _ in range(2):
        losses = model(ids, positions, labels=labels)
        losses.mean().backward()
        found.append(losses.detach())
    grads = [grad for param in model.parameters() for grad in (param.grad, param.main_grad)]  # type: ignore[attr-defined]
    return found + [torch.zeros(0) if grad is None else grad for grad in grads]


@pytest.mark.parametrize("style", STYLES, ids=("gpt2", "llama", "parallel"))
def test_gradients_are_the_same_to_the_last_bit(style: str) -> None:
    flags = f"{style} --num-layers {LAYERS} --hidden-dropout 0.2 --attention-dropout 0.2"
    expected = two_passes(build_model(flags))
    assert not torch.equal(expected[0], expected[1]), "dropout draws anew"
    for way in WAYS:
        found = two_passes(build_model(f"{flags} {way}"))
        assert all(map(torch.equal, found, expected)), way


@pytest.mark.flags("--mlp-chunks-for-training")
@pytest.mark.parametrize("style", STYLES, ids=("gpt2", "llama", "parallel"))
def test_an_mlp_in_stretches_of_tokens(style: str) -> None:
    flags = f"{style} --num-layers {LAYERS} --hidden-dropout 0.2"
    tolerance = 2e-2 if "--bf16" in style else 1e-4
    expected = two_passes(build_model(flags))
    for again, times in (("", 1), (f"{SELECTIVE} mlp", 2)):
        model, lengths = build_model(f"{flags} --mlp-chunks-for-training 3 {again}"), []
        mlp = first_mlp(model)
        activate = mlp.activate

        def note(x: torch.Tensor, *rest: Any, into: list[int] = lengths, call: Any = activate) -> torch.Tensor:
            into.append(len(x))
            return call(x, *rest)

        mlp.activate = note
        for found, whole in zip(two_passes(model), expected, strict=True):
            torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance)
        # In forward in their order, in backward from the end, where they are computed again.
        assert lengths == [6, 6, 4, *(reversed([6, 6, 4]) if times == 2 else [])] * 2
        lengths.clear()
        model.eval()(*token_batch()[:2])
        assert lengths == [SEQUENCE_LENGTH], "nothing is kept in evaluation"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num-experts 2 --disable-bias-linear", "has nothing to divide, all layers have experts"),
        ("--fp8-format hybrid", "would give each stretch of tokens scales of its own"),
        (f"{SELECTIVE} layernorm", "does not work with --recompute-modules layernorm"),
    ],
)
def test_where_an_mlp_is_not_divided(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"--mlp-chunks-for-training 2 {sentence}"):
        read_config(f"--mlp-chunks-for-training 2 {flags}")


EXPERTS = f"""--num-layers {LAYERS} --num-experts 4 --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 24
    --hidden-dropout 0.2"""
EXPERT_STYLES = [
    f"""{EXPERTS} --swiglu --disable-bias-linear --moe-shared-expert-gate --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-load-balancing-type global_aux_loss seq_aux_loss
    --moe-aux-loss-coeff 0.1 0.1 --moe-z-loss-coeff 0.01 --moe-input-jitter-eps 0.1 --norm-placement both""",
    f"""{EXPERTS} --moe-layer-freq 2 --moe-expert-capacity-factor 0.8 --moe-permute-fusion
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 --no-gradient-accumulation-fusion""",
    f"""{EXPERTS} --swiglu --disable-bias-linear --moe-router-force-load-balancing --bf16
    --moe-token-dispatcher-type alltoall""",
]
EXPERT_WAYS = [
    f"{SELECTIVE} core_attn layernorm mlp", f"{SELECTIVE} moe", f"{SELECTIVE} moe_act shared_experts",
    f"{SELECTIVE} moe_act layernorm", f"{SELECTIVE} moe moe_act shared_experts layernorm", "--moe-layer-recompute",
    f"{FULL} uniform --recompute-num-layers 2", f"{FULL} block --recompute-num-layers 2",
]  # fmt: skip


def two_microbatches_under_way(model: GPTModel) -> list[torch.Tensor]:
    """As in a pipeline, both go forward before either goes back: losses, gradients, what routers have counted."""
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)  # type: ignore[attr-defined]
    model_parallel_cuda_manual_seed(5)
    ids, positions, labels = token_batch()
    losses = [model(ids.roll(turn, 1), positions, labels=labels).mean() for turn in range(2)]
    for loss in losses:
        loss.backward()
    routers = [part for part in model.modules() if isinstance(part, TopKRouter)]
    counted = [x for router in routers for x in (*router.take_losses().values(), router._tokens_per_expert)]
    grads = [grad for param in model.parameters() for grad in (param.grad, param.main_grad)]  # type: ignore[attr-defined]
    return [torch.zeros(0) if x is None else x.detach() for x in (*losses, *counted, *grads)]


@pytest.mark.flags("--recompute-modules", "--moe-layer-recompute", "--recompute-granularity")
@pytest.mark.parametrize("style", EXPERT_STYLES, ids=("sigmoid", "capacity", "forced"))
def test_experts_that_are_computed_again_get_the_same_tokens(style: str) -> None:
    """Random choices and counts over the step included; no loss and no token counts twice."""
    expected = two_microbatches_under_way(build_model(style))
    for way in EXPERT_WAYS:
        found = two_microbatches_under_way(build_model(f"{style} {way}"))
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), way


def test_what_is_kept_of_experts() -> None:
    flags = "--num-experts 4 --swiglu --disable-bias-linear --moe-ffn-hidden-size 48"
    shared = f"{flags} --moe-shared-expert-intermediate-size 40"
    rows = SEQUENCE_LENGTH * BATCH * 2  # two experts for each token
    everything = kept(flags)[0]
    # What the second product reads, in float32; without the fusion also the activation's result, not yet weighted.
    assert everything - kept(f"{flags} {SELECTIVE} moe_act")[0] == LAYERS * rows * 48 * 4
    plain = f"{flags} --no-bias-swiglu-fusion"
    assert kept(plain)[0] - kept(f"{plain} {SELECTIVE} moe_act")[0] >= LAYERS * 2 * rows * 48 * 4
    # Of the shared expert its input is somebody else's, too; left out are both halves and their product.
    assert kept(shared)[0] - kept(f"{shared} {SELECTIVE} shared_experts")[0] == LAYERS * 3 * rows // 2 * 40 * 4
    whole = kept(f"{shared} {SELECTIVE} moe")[0]
    assert kept(shared)[0] - whole > LAYERS * (rows * (32 + 3 * 48) + rows // 2 * 3 * 40) * 4
    assert kept("")[0] > whole, "less than a dense layer keeps"
    assert kept(f"{shared} {FULL} uniform --recompute-num-layers 1")[0] < whole
    assert kept(f"{shared} --moe-layer-recompute")[0] < whole, "core_attn as well"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (f"{SELECTIVE} moe", "--recompute-modules moe needs --num-experts"),
        (f"{SELECTIVE} shared_experts --num-experts 4", "needs --moe-shared-expert-intermediate-size"),
        (f"--moe-layer-recompute --num-experts 4 {FULL} uniform --recompute-num-layers 1", "contradicts"),
    ],
)
def test_refusals_about_experts(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(f"{flags} --disable-bias-linear")


def kept(flags: str, layers: int = LAYERS) -> tuple[int, int]:
    """Bytes between forward and backward, and the most there are at one time."""
    model = build_model(f"--num-layers {layers} {flags}")
    ids, positions, labels = token_batch()
    count = KeptForBackward()
    with count.counting():
        loss = model(ids, positions, labels=labels).mean()
        after_forward = count.now
        loss.backward()
    assert count.now == 0
    return after_forward, count.peak


@pytest.mark.flags(
    "--recompute-activations", "--recompute-granularity", "--recompute-method", "--recompute-num-layers",
    "--recompute-modules",
)  # fmt: skip
def test_what_is_kept() -> None:
    everything, _ = kept("")
    layer = kept("", LAYERS + 1)[0] - everything
    ends = everything - LAYERS * layer
    probabilities = 4 * BATCH * HEADS * SEQUENCE_LENGTH**2
    less = {"core_attn": probabilities, "layernorm": 2 * X, "mlp": 8 * X}
    assert kept("--recompute-activations")[0] == kept("--recompute-granularity selective")[0]
    assert kept("--recompute-activations")[0] == everything - LAYERS * probabilities
    for parts in ("layernorm", "mlp", "mlp layernorm", "core_attn mlp"):
        expected = everything - LAYERS * sum(less[part] for part in parts.split())
        assert kept(f"{SELECTIVE} {parts}")[0] == expected, parts
    for count, sizes in ((1, [1, 1, 1]), (2, [2, 1]), (3, [3])):
        found, peak = kept(f"{FULL} uniform --recompute-num-layers {count}")
        assert found == ends + len(sizes) * X
        # A unit is whole while backward is in it, and those before it wait; of the ends a few numbers are left then.
        assert peak == pytest.approx(max(before * X + size * layer for before, size in enumerate(sizes)), rel=0.03)
    for count in (1, 3):
        found, _ = kept(f"{FULL} block --recompute-num-layers {count}")
        assert found == ends + count * X + (LAYERS - count) * layer


@pytest.mark.parametrize("hoards", [False, True])
def test_what_a_hook_keeps_to_itself_is_counted(hoards: bool) -> None:
    """A way that lets nothing wait, but whose function still refers to the value, saves no memory."""
    x, count = torch.ones(1000, requires_grad=True), KeptForBackward()
    hoard: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        value = x * 2
        if hoards:
            hoard.append(value)
        with keep_as(value, Recomputed(lambda: x.detach() * 2)):
            return value.sin().sum()

    with count.counting():
        result = forward()
        assert count.now == (4000 if hoards else 0) and count.peak == 4000
        result.backward()
    hoard.clear()
    assert count.now == 0
    torch.testing.assert_close(x.grad, 2 * torch.full((1000,), 2.0).cos())


def test_units_of_a_stage() -> None:
    """The numbers are those of a pipeline stage, or virtual stage: each builds its own units."""

    def units(method: str, count: int, layers: int) -> list[tuple[list[int], bool]]:
        flags = f"{FULL} {method} --recompute-num-layers {count}"
        config = run_config(f"--num-layers 5 {flags}").model
        return [(list(unit.layers), unit.is_recomputed) for unit in divide_layers(config, layers)]

    assert units("uniform", 2, 5) == [([0, 1], True), ([2, 3], True), ([4], True)]
    assert units("block", 2, 5) == [([0], True), ([1], True), ([2, 3, 4], False)]
    assert units("block", 4, 2) == [([0], True), ([1], True), ([], False)]


def test_only_the_value_itself_is_computed_anew() -> None:
    weight = torch.ones(3, requires_grad=True)
    with_other = torch.full((3,), 2.0)
    computed: list[int] = []

    def gradient(change: bool) -> list[float]:
        value = torch.arange(3.0)

        def compute() -> torch.Tensor:
            computed.append(1)
            return torch.arange(3.0)

        with keep_as(value, Recomputed(compute)):
            result = (weight * value.view(3)).sum()
            if change:
                value += 1
            result = result + (weight * value).sum() + (weight * value[:2].sum()).sum() + (weight * with_other).sum()
        (grad,) = torch.autograd.grad(result, weight)
        found: list[float] = grad.tolist()
        return found

    assert gradient(change=False) == [3.0, 5.0, 7.0] and len(computed) == 2
    computed.clear()
    # The product before the change has the first values, the one after it keeps the changed ones.
    assert gradient(change=True) == [0 + 1 + 3 + 2.0, 1 + 2 + 3 + 2.0, 2 + 3 + 3 + 2.0] and len(computed) == 1


def test_another_part_of_the_same_memory_is_kept() -> None:
    """As large, in the same storage, but not the value."""
    weight, storage = torch.ones(3, requires_grad=True), torch.arange(6.0)
    value, other = storage[:3], storage[3:]
    with keep_as(value, Recomputed(lambda: torch.arange(3.0))):
        result = (weight * value).sum() + 10 * (weight * other).sum()
    assert torch.autograd.grad(result, weight)[0].tolist() == [30.0, 41.0, 52.0]


def test_a_context_inside_another_one_leaves_it_in_force() -> None:
    weight, outer, inner = torch.ones(2, requires_grad=True), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    computed: list[str] = []

    def compute(name: str, value: torch.Tensor) -> torch.Tensor:
        computed.append(name)
        return value.clone()

    with keep_as(outer, Recomputed(lambda: compute("outer", outer))):
        with keep_as(inner, Recomputed(lambda: compute("inner", inner))):
            result = (weight * outer).sum() + (weight * inner).sum()
        result = result + (weight * inner).sum()
    result = result + (weight * outer).sum()
    assert torch.autograd.grad(result, weight)[0].tolist() == [8.0, 12.0]
    assert sorted(computed) == ["inner", "outer"], "each once: outside its own context a value is kept"


def test_rewound_streams_go_on_as_if_nothing_had_been_drawn() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("own", 1)
    before = tracker.get_states()
    with tracker.fork("own"):
        first = torch.rand(3)
    with pytest.raises(RuntimeError), tracker.rewound(before):
        with tracker.fork("own"):
            assert torch.equal(torch.rand(3), first)
        raise RuntimeError
    with tracker.fork("own"):
        assert not torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("granularity", [f"{FULL} uniform --recompute-num-layers 2", f"{SELECTIVE} mlp layernorm"])
def test_layers_with_compiled_regions_are_recomputed(granularity: str) -> None:
    flags = f"--num-layers {LAYERS} --compile"
    plain, recomputed = build_model(flags), build_model(f"{flags} {granularity}")
    for model in (plain, recomputed):
        compile_regions(model, backend="aot_eager")
    assert all(map(torch.equal, two_passes(recomputed), two_passes(plain)))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--recompute-granularity full", "full needs --recompute-method uniform or block"),
        (f"{FULL} block", "full needs --recompute-num-layers"),
        (f"{FULL} block --recompute-num-layers 2", "--recompute-num-layers 2 is not from 1 to 1"),
        ("--recompute-activations --recompute-method block", "leave it out with selective"),
        (
            f"{FULL} block --recompute-num-layers 1 --distribute-saved-activations",
            "needs a tensor-parallel size above 1",
        ),
    ],
)
def test_refusals(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(flags)


@pytest.mark.parametrize("flags", ["--recompute-num-layers 1", "--recompute-method block", "--recompute-modules mlp"])
def test_without_a_granularity_nothing_is_recomputed(flags: str) -> None:
    (note,) = (note for note in run_config(flags).notes if "recompute" in note)
    assert note.startswith(f"{flags} has no effect without --recompute-granularity")


def test_what_is_computed_again_is_freed_at_the_end_of_its_block() -> None:
    """torch holds the function that packs until backward: if that held the value, recomputation would save nothing."""
    weight, outer, inner = torch.ones(2, requires_grad=True), torch.rand(2), torch.rand(2)
    freed = [weakref.ref(outer), weakref.ref(inner)]
    with keep_as(outer, Recomputed(lambda: torch.tensor([1.0, 2.0]))):
        with keep_as(inner, Recomputed(lambda: torch.tensor([3.0, 4.0]))):
            result = (weight * outer).sum() + (weight * inner).sum()
        del inner
        assert freed[1]() is None
    del outer
    assert freed[0]() is None
    assert torch.autograd.grad(result, weight)[0].tolist() == [4.0, 6.0]


def test_what_backward_does_not_reach_is_freed() -> None:
    """An operation that keeps its own result for backward does not hold itself, whatever way others are meant for."""
    x = torch.ones(4, requires_grad=True)
    other = torch.ones(3)
    with keep_as(other, Recomputed(lambda: torch.ones(3))):
        result = x.exp()
    freed = weakref.ref(result)
    del result
    assert freed() is None
