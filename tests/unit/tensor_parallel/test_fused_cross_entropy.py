# SPDX-License-Identifier: Apache-2.0
"""The cross entropy that makes no float32 copy of the logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import fused_vocab_parallel_cross_entropy, vocab_parallel_cross_entropy
from tests.support.gpt_models import assert_same_function, build_model, losses_and_grads, token_batch
from tests.support.run_flags import run_config

ROOT = Path(__file__).parents[3]
GROUP = ProcessGroupCollection.single().tp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 100, 2**22])
def test_same_loss_and_gradient(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "BLOCK_ELEMENTS", block)
    logits = (30 * torch.randn(6, 2, 40)).to(dtype)
    target = torch.randint(40, (6, 2))
    weights = torch.rand(6, 2)

    def result(fused: bool) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        x = leaf * 1.0
        loss = (
            fused_vocab_parallel_cross_entropy(x, target, tp_group=GROUP)
            if fused
            else vocab_parallel_cross_entropy(x.float(), target, tp_group=GROUP)
        )
        (gradient,) = torch.autograd.grad((loss * weights).sum(), leaf)
        return loss, gradient

    loss, gradient = result(True)
    expected_loss, expected_gradient = result(False)
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradient, expected_gradient)


def test_a_gpu_takes_larger_blocks() -> None:
    """Each of them costs some kernels."""
    assert len(list(cross_entropy._blocks(torch.empty(8192, 128256, device="meta")))) <= 4
    assert len(list(cross_entropy._blocks(torch.empty(8192, 1024)))) == 2


def stored_bytes(flags: str) -> tuple[int, Tensor]:
    """Bytes that the loss keeps for backward beside the model's own, as a multiple of the logits' elements."""
    model = build_model(flags)
    ids, positions, labels = token_batch()
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.shape[-1] == 64 and x.dim() == 3:  # [s, b, v]
            kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        losses = model(ids, positions, labels=labels)
    return sum(kept.values()), losses.detach()


@pytest.mark.flags("--cross-entropy-loss-fusion")
def test_the_flag_halves_what_the_loss_keeps() -> None:
    plain, losses = stored_bytes("--bf16")
    fused, same = stored_bytes("--bf16 --cross-entropy-loss-fusion")
    elements = 16 * 2 * 64
    assert (plain, fused) == (4 * elements, 2 * elements)
    torch.testing.assert_close(losses, same)
    grads, expected = (losses_and_grads(build_model(f))[1] for f in ("--cross-entropy-loss-fusion", ""))
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad)


def test_it_is_deterministic() -> None:
    """Of its operators torch has deterministic ones, and its kernel adds nothing atomically."""
    assert run_config("--cross-entropy-loss-fusion --deterministic-mode").model.deterministic_mode
    torch.use_deterministic_algorithms(True)
    try:
        once, again = (losses_and_grads(build_model("--bf16 --cross-entropy-loss-fusion")) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(once[0], again[0]) and all(torch.equal(grad, again[1][name]) for name, grad in once[1].items())
    assert "atomic" not in (ROOT / "megatron" / "core" / "kernels" / "cross_entropy.py").read_text()


@pytest.mark.flags("--cross-entropy-fusion-impl")
def test_transformer_engines_fusion_is_refused_as_upstream_does() -> None:
    run_config("--cross-entropy-loss-fusion --cross-entropy-fusion-impl native")
    assert any("--cross-entropy-fusion-impl" in note for note in run_config("--cross-entropy-fusion-impl te").notes)
    with pytest.raises(ConfigError, match="use --cross-entropy-fusion-impl native, which computes the same loss"):
        run_config("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    with pytest.raises(ConfigError, match="--cross-entropy-fusion-impl apex is not one of its values"):
        run_config("--cross-entropy-loss-fusion --cross-entropy-fusion-impl apex")


# ---- in chunks


@pytest.mark.flags("--loss-chunk-size")
@pytest.mark.parametrize(
    "flags",
    ["", "--untie-embeddings-and-output-weights --cross-entropy-loss-fusion", "--final-logit-softcapping 2",
     "--mtp-num-layers 1 --position-embedding-type rope"],
)  # fmt: skip
def test_chunks_of_positions_give_the_same_loss(flags: str) -> None:
    """16 positions in chunks of 5; never are the logits of more of them there."""
    whole, divided = build_model(flags), build_model(f"{flags} --loss-chunk-size 5")
    assert_same_function(whole, divided)
    shapes: list[tuple[int, ...]] = []
    divided.output_layer.register_forward_hook(lambda module, args, output: shapes.append(tuple(output[0].shape)))
    losses_and_grads(divided)
    # Forward, and again in backward.
    depths = 2 if "mtp" in flags else 1
    assert sorted(shapes) == 2 * depths * [(1, 2, 64)] + 6 * depths * [(5, 2, 64)]


def test_a_chunk_has_a_position() -> None:
    with pytest.raises(ConfigError, match="--loss-chunk-size 0"):
        run_config("--loss-chunk-size 0")
