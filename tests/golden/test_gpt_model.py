# SPDX-License-Identifier: Apache-2.0
"""GPTModel against the reference's first iteration: loss of every token, gradient of every parameter.

train_a: GPT-2 style (learned positions, LayerNorm, gelu, biases, tied). train_b: Llama style (RoPE, RMSNorm, SwiGLU,
two query groups, no biases, untied). Four layers of width 64, vocabulary 1000; four microbatches of 2 x 128 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_model

COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 999 "
    "--attention-dropout 0 --hidden-dropout 0 "
)
STYLES = {
    "a": "--position-embedding-type learned_absolute --normalization LayerNorm",
    "b": "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention --num-query-groups 2 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --ffn-hidden-size 176",
}
PLAIN = (
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --attention-backend unfused"
)
VARIANTS = {
    "fused": "",
    "plain": PLAIN,
    "local": "--attention-backend local",
    "flash": "--attention-backend flash",
}


def reference_model(style: str, flags: str, data: Path) -> GPTModel:
    """The reference's model, with its initial weights."""
    config = read_run_config((COMMON + STYLES[style] + " " + flags).split(), {})
    model = build_gpt_model(config, 1000)
    weights = torch.load(data / f"train_{style}" / "init_rank0.pt", weights_only=True)
    model.load_state_dict({name: value for name, value in weights.items() if not name.startswith("buffer:")})
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("style", STYLES)
def test_first_iteration(style: str, variant: str, golden_data: Path) -> None:
    model = reference_model(style, VARIANTS[variant], golden_data)
    folder = golden_data / f"train_{style}"
    expected_grads = json.loads((folder / "grads_iter1_rank0.json").read_text())
    batches = torch.load(folder / "batches_rank0.pt", weights_only=True)
    for batch in batches:
        losses = model(batch["input_ids"], batch["position_ids"], labels=batch["labels"])
        torch.testing.assert_close(losses, batch["output"], rtol=0, atol=1e-5)
        mean = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        (mean / len(batches)).backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    assert found.keys() == expected_grads.keys()
    for name, (norm, total) in expected_grads.items():
        grad = found[name]
        assert grad is not None
        assert grad.double().norm().item() == pytest.approx(norm, rel=1e-4), name
        assert grad.double().sum().item() == pytest.approx(total, rel=1e-4, abs=1e-4 * norm), name


@pytest.mark.flags("--multi-latent-attention", "--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--v-head-dim")
def test_losses_of_latent_attention_beside_experts(golden_data: Path) -> None:
    """train_d: as DeepSeek-V3, but for multi-token prediction, which does not concern the main head's losses."""
    folder = golden_data / "train_d"
    words = (folder / "args.txt").read_text().split()
    # Of the run only the model; its data and multi-token prediction have no part in this.
    first = words.index("--use-cpu-initialization")
    last = words.index("--mtp-num-layers")
    config = read_run_config([*COMMON.split(), *words[first:last]], {})
    model = build_gpt_model(config, 1000)
    weights = torch.load(folder / "init_rank0.pt", weights_only=True)
    found = model.state_dict()
    for name, value in found.items():
        if ".mlp.experts." in name:  # ours in one tensor
            layer, matrix = name.split(".experts.")
            value.copy_(torch.stack([weights[f"{layer}.experts.local_experts.{i}.{matrix}"] for i in range(8)]))
        elif not name.endswith("expert_bias"):
            value.copy_(weights[name])
    for batch in torch.load(folder / "batches_rank0.pt", weights_only=True):
        losses = model(batch["input_ids"], batch["position_ids"], labels=batch["labels"])
        torch.testing.assert_close(losses, batch["output"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_weight_gradients_in_the_buffer(style: str, golden_data: Path) -> None:
    """With main_grad on every parameter the same gradients are found there, accumulated over the microbatches."""
    model = reference_model(style, "", golden_data)
    folder = golden_data / f"train_{style}"
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param)
    batches = torch.load(folder / "batches_rank0.pt", weights_only=True)
    for batch in batches:
        losses = model(batch["input_ids"], batch["position_ids"], labels=batch["labels"])
        ((losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum() / len(batches)).backward()
    for name, (norm, _) in json.loads((folder / "grads_iter1_rank0.json").read_text()).items():
        param = model.get_parameter(name)
        total = param.main_grad if param.grad is None else param.main_grad + param.grad
        assert total.norm().item() == pytest.approx(norm, rel=1e-4), name
        if param.dim() == 2:
            assert param.grad is None, f"{name}: its gradient belongs in main_grad"


@pytest.mark.flags("--bf16")
@pytest.mark.parametrize("style", STYLES)
def test_bfloat16_stays_near(style: str, golden_data: Path) -> None:
    model = reference_model(style, "--bf16", golden_data)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    batch = torch.load(golden_data / f"train_{style}" / "batches_rank0.pt", weights_only=True)[0]
    losses = model(batch["input_ids"], batch["position_ids"], labels=batch["labels"])
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, batch["output"], rtol=0, atol=0.05)
    losses.mean().backward()
    assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters())
