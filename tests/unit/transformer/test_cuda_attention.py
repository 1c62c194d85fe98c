# SPDX-License-Identifier: Apache-2.0
"""What attention is on a GPU: every kind against the definition, with the flash kernel's definition in its place where
there is no GPU, and with the kernel itself where there is one."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron.core.context_parallel.sharding import list_positions_of_rank
from megatron.core.errors import ConfigError
from megatron.core.operation_table import OPERATIONS
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.transformer.core_attention import flash, flex, query_blocks, sdpa
from megatron.core.transformer.core_attention.block_kernels import MergedBlocks, PlainKernel, Rule, Sequences
from megatron.core.transformer.core_attention.cuda import CUDAAttention
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.core_attention.flash import FlashCall, FlashKernel
from megatron.core.transformer.core_attention.interface import AttentionInputs, AttentionOptions, Visible
from megatron.core.transformer.core_attention.ring import RingBlock, list_blocks_in_bands
from megatron.core.transformer.core_attention.sdpa import SDPAttention
from megatron.core.transformer.core_attention.select import build_attention_backend
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support import flash_stand_in
from tests.support.plain_attention import CASES, Case, draw, plain_attention

CPU = torch.device("cpu")
HEADS, GROUPS, LENGTH = 6, 3, 24
OWN_CASES = [
    *(case for case in CASES if "attention_backend" not in case.config),
    Case("window of one token", {"window_size": (0, 0)}),
    Case("documents that leave tokens", {}, bounds=(0, 1, 2, 9)),
    Case("one document", {"window_size": (4, 0)}, bounds=(0, 24)),
]
WIDTHS = {"width 12": (12, 12), "width 64": (64, 64), "latent": (24, 16), "wider values": (8, 24)}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[FlashCall]:
    """The flash kernel and flex attention are their definitions; every call of the former."""
    monkeypatch.setattr(query_blocks, "_BLOCK", 5)
    monkeypatch.setattr(flex, "BLOCK", 8)
    monkeypatch.setattr(flex, "run_flex", flex_stand_in)
    return flash_stand_in.install(monkeypatch)


def flex_stand_in(
    q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """As flex.run_flex, from what the blocks and the function of query and key let be seen."""
    assert q.shape[-1] >= 16 and v.shape[-1] >= 16
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~find_visible(blocks, q.shape[2], k.shape[2]), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def find_visible(blocks: Any, queries: int, keys: int) -> Tensor:
    """bool [s, t] of a BlockMask, as its kernel reads it: whole blocks, and others by their function."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    by_function = blocks.mask_mod(None, None, torch.arange(queries).unsqueeze(1), torch.arange(keys))
    size = blocks.BLOCK_SIZE[0]
    for counts, order, is_whole in (
        (blocks.kv_num_blocks, blocks.kv_indices, False),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, True),
    ):
        for row, (count, columns) in enumerate(zip(counts[0, 0].tolist(), order[0, 0].tolist(), strict=True)):
            rows = slice(row * size, (row + 1) * size)
            for column in columns[:count]:
                place = (rows, slice(column * size, (column + 1) * size))
                seen[place] = True if is_whole else by_function[place]
    return seen


def core_attention(query_width: int, device: torch.device = CPU, **options: Any) -> DotProductAttention:
    """As on a GPU. Its learned sinks, where it has any, drawn."""
    config = TransformerConfig(
        num_layers=1, hidden_size=48, num_attention_heads=HEADS, num_query_groups=GROUPS,
        kv_channels=query_width, attention_dropout=0.0, **options,
    )  # fmt: skip
    core = DotProductAttention(config, 1, pg_collection=ProcessGroupCollection.single())
    core.backend = CUDAAttention(core.options, "auto", device)
    if core.softmax_offset is not None:
        core.softmax_offset.data = draw([HEADS], 4).to(device)
    return core


def operands(batch: int, widths: tuple[int, int], queries: int = LENGTH, keys: int = LENGTH) -> list[Tensor]:
    """Query, key and value, which lie among others in memory, as those of a packed projection."""
    shapes = [(queries, HEADS, widths[0]), (keys, GROUPS, widths[0]), (keys, GROUPS, widths[1])]
    return [draw((s, batch, n, d + 4), seed)[..., :d] for seed, (s, n, d) in enumerate(shapes)]


def compare(
    core: DotProductAttention, case: Case, own: list[Tensor], device: torch.device = CPU, tolerance: float = 1e-5
) -> None:
    """Output and all gradients are those of the definition."""
    query, key, value = own
    grad = draw([query.shape[0], case.batch, HEADS * value.shape[-1]], 5).to(query.dtype)
    sinks = None if core.softmax_offset is None else core.softmax_offset.detach().cpu()
    expected = plain_attention(case, query, key, value, sinks, grad)
    leaves = {
        name: x.to(device).detach().requires_grad_() for name, x in zip(("query", "key", "value"), own, strict=True)
    }
    mask = case.given_mask(key.shape[0])
    mask = None if mask is None else mask[:, :, -query.shape[0] :].to(device)
    output = core(*leaves.values(), mask, case.mask_type, packed_seq_params=case.packed())
    output.backward(grad.to(device))
    found = {"output": output.detach()} | {name: x.grad for name, x in leaves.items()}
    if core.softmax_offset is not None:
        found["sinks"] = core.softmax_offset.grad
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        largest = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(
            found[name].cpu().double(), theirs, rtol=10 * tolerance, atol=tolerance * largest,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("case", OWN_CASES, ids=lambda case: case.name)
def test_attention_is_the_definition(calls: list[FlashCall], case: Case, widths: str) -> None:
    core = core_attention(WIDTHS[widths][0], **case.config)
    # Flex attention is for training; everything else is the same in both.
    core.backend.blocks = None if not case.mask and "softmax_type" in case.config else core.backend.blocks  # type: ignore
    compare(core, case, operands(case.batch, WIDTHS[widths]))
    bounded, masked = "attn_logit_softcapping" in case.config, case.mask
    special = case.bounds or "window_size" in case.config or "attention_chunk_size" in case.config
    by_flash = (special or "softmax_type" in case.config) and not bounded and not masked
    assert len(calls) == bool(by_flash), "documents and chunks are one call"


@pytest.mark.parametrize("way", [way.name for way in OPERATIONS["attention"] if way.on_trial])
def test_ways_on_trial_are_the_definition(calls: list[FlashCall], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands and two widths, of which nothing is padded."""
    monkeypatch.setitem(sdpa._KERNELS, "fused", SDPBackend.MATH)  # takes two widths as well
    cases = [case for case in OWN_CASES if not case.mask and "attn_logit_softcapping" not in case.config]
    if way.startswith("cuDNN"):  # which is for whole sequences only
        cases = [case for case in cases if not case.bounds and not case.config]
    assert cases
    monkeypatch.setattr(torch.nn.functional, "pad", None)
    for case in cases:
        core = core_attention(24, **case.config)
        core.backend = CUDAAttention(core.options, "auto", CPU, way=way)
        compare(core, case, operands(case.batch, (24, 16)))
        assert core.backend.name.endswith(f"by {way}")
    assert bool(calls) == way.startswith("flash") and all(call.keeps_widths for call in calls)


@pytest.mark.parametrize("kind", ["causal", "full", "window", "documents", "chunks", "documents and window"])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (256, 256), (130, 300), (5, 5)])
def test_blocks_of_flex_attention_are_what_is_visible(kind: str, queries: int, keys: int) -> None:
    documents = (
        TokenLayout.of_documents((0, min(4, keys - 1), keys))
        if keys < 100
        else TokenLayout.of_documents((0, 1, 120, 200, 201, keys))
    )
    visible = Visible(
        causal=kind != "full", window=100 if "window" in kind else None, chunk=90 if kind == "chunks" else None,
        documents=documents if "documents" in kind else None,
    )  # fmt: skip
    blocks = flex.build_block_mask(visible, queries, keys, CPU)
    at = torch.arange(keys - queries, keys).unsqueeze(1)
    expected = torch.ones(queries, keys, dtype=torch.bool)
    if visible.causal:
        expected = (torch.arange(keys) <= at) & (torch.arange(keys) >= visible.find_first_seen(at[:, 0]).unsqueeze(1))
    assert torch.equal(find_visible(blocks, queries, keys), expected)
    rows, columns = (-(-length // flex.BLOCK) for length in (queries, keys))
    padded = torch.zeros(rows * flex.BLOCK, columns * flex.BLOCK, dtype=torch.bool)
    padded[:queries, :keys] = expected
    parts = padded.unflatten(1, (columns, -1)).unflatten(0, (rows, -1))
    assert torch.equal(blocks.to_dense()[0, 0].bool(), parts.any(3).any(1)), "blocks that nobody sees are left out"
    whole = blocks.full_kv_num_blocks.sum()
    assert whole == parts.all(3).all(1).sum(), "no function is asked where everything is seen"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_this_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own form without a compiler, forward, against the stand-in."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "_compile_flex", lambda: flex_attention)
    q, k, v = (x.permute(1, 2, 0, 3) for x in operands(2, (24, 16)))
    blocks = flex.build_block_mask(Visible(window=5), LENGTH, LENGTH, CPU)
    with torch.no_grad():
        found = flex.run_flex(q, k, v, blocks, 0.4, 1.5)
    for ours, theirs in zip(found, flex_stand_in(q, k, v, blocks, 0.4, 1.5), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("queries", [7, 1])
@pytest.mark.parametrize("case", [case for case in OWN_CASES if not case.bounds], ids=lambda case: case.name)
def test_with_keys_of_earlier_calls(calls: list[FlashCall], case: Case, queries: int) -> None:
    compare(core_attention(24, **case.config), case, operands(case.batch, (24, 16), queries))


def test_what_the_flash_kernel_does_not_take() -> None:
    """In float32, without stand-ins: the same results from torch's operator and from blocks."""
    for case in OWN_CASES:
        core = core_attention(24, **case.config)
        core.backend = CUDAAttention(core.options, "auto", CPU, flex_problem="no compiler")
        compare(core, case, operands(case.batch, (24, 16)))
        assert ("not by flex attention: no compiler" in core.backend.name) == (core.options.softcap is not None)


@pytest.mark.parametrize("widths", WIDTHS)
def test_earlier_keys_without_the_flash_kernel(widths: str) -> None:
    core = core_attention(WIDTHS[widths][0])
    core.backend = CUDAAttention(core.options, "auto", torch.device("cuda"), "it is not here")
    case = next(case for case in OWN_CASES if case.name == "causal")
    compare(core, case, operands(2, WIDTHS[widths], 7))
    assert "not by the flash kernel: it is not here" in core.backend.name


@pytest.mark.parametrize("first", [0, 5, 16])
def test_a_ranks_queries_with_gathered_keys(calls: list[FlashCall], first: int) -> None:
    """A piece of a packed sequence, with the keys up to its end."""
    bounds, last = (0, 3, 4, 11, 12, 21, 24), 22
    core = core_attention(24, window_size=(5, 0))
    query, key, value = operands(1, (24, 16))
    whole = Visible(window=5, documents=TokenLayout.of_documents(bounds))
    expected = core.backend(AttentionInputs(query, key, value, whole))
    found = core.backend(AttentionInputs(query[first:last], key[:last], value[:last], whole))
    torch.testing.assert_close(found, expected[first:last])
    assert len(calls) == 2


def test_bounds_are_made_once_for_all_layers(calls: list[FlashCall]) -> None:
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 4, 24]))
    layers = [core_attention(24) for _ in range(3)]
    for layer in layers:
        layer(*operands(1, (24, 24)), packed_seq_params=packed)
    assert len(calls) == 3 and len({id(call.sequences) for call in calls}) == 1
    chunked = core_attention(24, attention_chunk_size=5)
    for _ in range(2):
        chunked(*operands(2, (24, 24)))
    assert calls[-1].sequences is calls[-2].sequences
    assert calls[-1].sequences is not None and calls[-1].sequences.longest_queries == 5


def test_evaluation_leaves_the_bounds_of_training_where_they_are(calls: list[FlashCall]) -> None:
    """A CUDA graph goes on reading them there."""
    chunked = core_attention(24, attention_chunk_size=5)
    for training, length in ((True, 24), (False, 12), (True, 18), (False, 24), (True, 24)):
        chunked.train(training)
        chunked(*operands(2, (24, 24), length, length))
    of_training = [calls[index].sequences for index in (0, 2, 4)]
    assert of_training[0] is of_training[2] is not of_training[1]
    assert calls[3].sequences is not of_training[0], "of evaluation"


def test_dropout_reaches_the_kernel_in_training_only(calls: list[FlashCall]) -> None:
    core = core_attention(24, window_size=(3, 0))
    core.backend.options = dataclasses.replace(core.options, dropout=0.25)  # type: ignore[union-attr]
    core(*operands(2, (24, 24)))
    core.eval()
    core(*operands(2, (24, 24)))
    assert [call.dropout for call in calls] == [0.25, 0.0]


def test_the_order_of_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's only for the one length of training, and never where gradients must be the same in every run."""
    seen: list[tuple[list[SDPBackend], bool]] = []
    monkeypatch.setattr(
        "megatron.core.transformer.core_attention.sdpa.sdpa_kernel",
        lambda order, set_priority: seen.append((list(order), set_priority)) or torch.no_grad(),
    )
    cudnn, flash_kernel, efficient, math = (
        SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    )  # fmt: skip
    options = core_attention(24).options
    q, k, v = operands(1, (24, 24))
    gpu = SDPAttention(options, "auto", torch.device("cuda"))
    training = AttentionInputs(q, k, v, training=True)
    gpu(training)
    gpu(dataclasses.replace(training, training=False))
    gpu(dataclasses.replace(training, query=q[-1:]))
    gpu(dataclasses.replace(training, visible=Visible(documents=TokenLayout.of_documents((0, 5, 24)))))
    without = [flash_kernel, efficient, math]
    assert [order for order, _ in seen] == [[cudnn, *without], without, without, without, without]
    assert all(is_ordered for _, is_ordered in seen)
    seen.clear()
    reproducible = SDPAttention(dataclasses.replace(options, deterministic=True), "auto", torch.device("cuda"))
    reproducible(training)
    SDPAttention(options, "flash", torch.device("cuda"))(training)
    assert [order for order, _ in seen] == [without, [flash_kernel]]
    assert gpu.name.endswith("the first that can of cuDNN, flash, efficient, math")
    assert reproducible.name.endswith("the first that can of flash, efficient, math")


def test_which_backend_a_gpu_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is refused there, in a sentence."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def build(**options: Any) -> str:
        config = dataclasses.replace(
            core_attention(24).config, params_dtype=torch.bfloat16, attention_dropout=0.0, **options
        )
        return build_attention_backend(config, AttentionOptions.from_config(config, 1), device).name

    assert build(attention_backend="flash") == (
        "torch scaled_dot_product_attention, flash kernel; packed documents in one call of the flash kernel"
    )
    both = {"window_size": (7, 0), "softmax_type": "learnable"}
    assert build(attention_backend="flash", **both) == "torch's flash kernel, a window of 8 tokens, sinks"
    assert build(**both) == build(attention_backend="flash", **both)
    assert build(attention_backend="fused") == "torch scaled_dot_product_attention, fused kernel"
    assert build(kv_channels=264, window_size=(7, 0)).endswith(
        "(not by the flash kernel: it takes heads of up to 256 channels there, not 264)"
    )
    with pytest.raises(ConfigError, match="flash cannot compute these layers: it takes heads of up to 256 channels"):
        build(attention_backend="flash", kv_channels=264)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ConfigError, match="up to 192 channels there, not 256; use --attention-backend auto"):
        build(attention_backend="flash", kv_channels=256)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="it needs a GPU of compute capability 8.0; use --attention-backend auto"):
        build(attention_backend="flash")


def test_the_order_of_kernels_stays_in_one_graph() -> None:
    """Of a compiled layer, also for the queries of a rank with gathered keys."""
    core = core_attention(24)
    core.backend = SDPAttention(core.options, "auto", torch.device("cuda"))
    compiled = torch.compile(core, backend="aot_eager", dynamic=False, fullgraph=True)
    for queries in (LENGTH, 7):
        own = [x.clone().requires_grad_() for x in operands(2, (24, 16), queries)]
        output = compiled(*own)
        output.sum().backward()
        torch.testing.assert_close(output, core(*own))
        assert all(x.grad is not None for x in own)


def test_the_operators_signature() -> None:
    """On tensors without memory: the shapes that the operator answers with are those that backward hands back."""
    meta = torch.device("meta")
    packed = Sequences(*(torch.empty(4, dtype=torch.int32, device=meta) for _ in range(2)), 11, 13)
    for sequences, lead in ((None, (2,)), (packed, ())):
        q, k, v = (
            torch.empty(*lead, tokens, heads, 24, dtype=torch.bfloat16, device=meta)
            for tokens, heads in ((16, HEADS), (24, GROUPS), (24, GROUPS))
        )
        for window in (None, 5):
            call = FlashCall(0.3, True, window, sequences)
            result = flash.run_forward(q, k, v, call)
            assert result.out.shape == q.shape
            assert tuple(result.log_sum.shape) == flash_stand_in.find_log_sum_shape(q, call)
            grads = flash.run_backward(result.out, q, k, v, result, call)
            assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.gpu
def test_blocks_of_a_ring_on_a_gpu() -> None:
    """The kernel's L and its gradients from those of a softmax over more keys, merged as in a ring of two."""
    q, k, v, grad = (draw((2, heads, tokens, 24), seed) for seed, (heads, tokens) in enumerate(
        ((HEADS, 40), (GROUPS, 80), (GROUPS, 80), (HEADS, 40))
    ))  # fmt: skip
    results = []
    for kernel, device, dtype in (
        (PlainKernel(0.3), CPU, torch.float32), (FlashKernel(0.3), torch.device("cuda"), torch.bfloat16)
    ):  # fmt: skip
        q_, k_, v_, grad_ = (x.bfloat16().to(device, dtype) for x in (q, k, v, grad))
        halves = [(slice(0, 40), False), (slice(40, 80), True)]
        merged = MergedBlocks(q_, 24)
        for keys, causal in halves:
            merged.add(slice(None), *kernel.forward(q_, k_[:, :, keys], v_[:, :, keys], Rule(causal)))
        whole = (merged.out.to(dtype), merged.log_sum)
        grads = [
            kernel.backward(grad_, (q_, k_[:, :, keys], v_[:, :, keys]), whole, Rule(causal)) for keys, causal in halves
        ]
        results.append([merged.out, merged.log_sum, grads[0][0] + grads[1][0], *grads[0][1:], *grads[1][1:]])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours.float().cpu(), theirs, rtol=0.05, atol=0.05 * float(theirs.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(widths: str, dtype: torch.dtype) -> None:
    """The kernels themselves; bfloat16 has eight bits."""
    device = torch.device("cuda")
    for case in OWN_CASES:
        core = core_attention(WIDTHS[widths][0], device, **case.config).to(device)
        own = [x.to(dtype) for x in operands(case.batch, WIDTHS[widths])]
        compare(core, case, own, device, 2e-2 if dtype == torch.bfloat16 else 1e-4)
        if not case.bounds:
            own = [x.to(dtype) for x in operands(case.batch, WIDTHS[widths], 7)]
            compare(core, case, own, device, 2e-2 if dtype == torch.bfloat16 else 1e-4)


def visible_in_blocks(blocks: list[RingBlock], tokens: int) -> Tensor:
    """bool [tokens, tokens]: what the kernel computes of a rank's queries and a source's keys."""
    seen = torch.zeros(tokens, tokens, dtype=torch.int64)
    for block in blocks:
        window, sequences = block.band or (None, None)
        part = seen[block.queries, block.keys]
        bounds = [(0, part.shape[0], 0, part.shape[1])]
        if sequences is not None:
            rows, columns = (each.tolist() for each in sequences[:2])
            bounds = list(zip(rows, rows[1:], columns, columns[1:], strict=False))
        for first, end, first_key, end_key in bounds:
            own = FlashCall(1.0, block.causal, window)
            one = flash_stand_in.compute_scores(
                torch.zeros(end - first, 1, 8), torch.zeros(end_key - first_key, 1, 8), own
            )
            part[first:end, first_key:end_key] += one[0] == 0
    assert seen.max() <= 1, "counted twice"
    return seen.bool()


@pytest.mark.parametrize("kind", ["documents", "window", "documents and window", "chunks", "chunks in documents"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_blocks_of_a_ring_are_what_is_visible(kind: str, size: int) -> None:
    """Every key that a query sees is in exactly one block, for random bounds."""
    tokens = 12
    whole = tokens * size
    for seed in range(12):
        random = Random(seed)
        bounds = (0, *sorted(random.sample(range(1, whole), random.randint(1, 8))), whole)
        window = random.randint(0, whole - 2) if "window" in kind else None
        chunk = random.randint(1, whole - 1) if "chunks" in kind else None
        visible = Visible(
            window=window, documents=TokenLayout.of_documents(bounds) if "documents" in kind else None, chunk=chunk
        )
        first_seen = visible.find_first_seen(torch.arange(whole))
        for rank in range(size):
            own = list_positions_of_rank(whole, rank, size)
            for source in range(size):
                keys = list_positions_of_rank(whole, source, size)
                expected = (keys <= own.unsqueeze(1)) & (keys >= first_seen[own].unsqueeze(1))
                blocks = list_blocks_in_bands((rank, source), size, torch.zeros(tokens, 1, 1, 1), visible)
                assert all(block.mask is None for block in blocks)
                assert torch.equal(visible_in_blocks(blocks, tokens), expected), (bounds, window, chunk, rank, source)
