# SPDX-License-Identifier: Apache-2.0
"""FP8 in a model: which layers multiply in it, what waits for backward, what each flag does, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.fp8 import E4M3, E5M2
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.fp8_products import GRAD, INPUT, WEIGHT, FP8Matmul
from megatron.core.tensor_parallel.kept_activations import Recomputed, keep_as
from megatron.core.tensor_parallel.products import Matmul, Product, multiply
from megatron.core.transformer.execution.activation_policy import ActivationPolicy
from megatron.core.transformer.moe.grouped_products import ExpertByExpert, FP8Experts
from megatron.training.flags.read import read_run_config
from tests.support.gpt_models import build_model, read_config, token_batch
from tests.unit.core.test_fp8 import RECIPES, recipe

WIDE = "--hidden-size 128 --num-attention-heads 2 --vocab-size 127 --make-vocab-size-divisible-by 128"
"""Widths that every recipe takes."""


def list_products(flags: str) -> dict[str, Product]:
    found = {name: getattr(module, "product", None) for name, module in build_model(flags).named_modules()}
    return {name: product for name, product in found.items() if isinstance(product, Matmul | FP8Matmul)}


def list_fp8(flags: str) -> list[str]:
    return [name for name, product in list_products(flags).items() if isinstance(product, FP8Matmul)]


@pytest.mark.flags("--fp8-format", "--fp8-output-proj")
def test_linear_layers_of_transformer_layers_multiply_in_fp8() -> None:
    inside = [
        f"decoder.layers.{layer}.{linear}"
        for layer in range(2)
        for linear in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    ]
    assert list_fp8("") == []
    assert sorted(list_fp8("--fp8-format e4m3")) == sorted(inside)
    assert sorted(list_fp8("--fp8-format e4m3 --fp8-output-proj")) == sorted([*inside, "output_layer"])
    further = "--mtp-num-layers 1 --position-embedding-type rope --fp8-format hybrid"
    names = [name for name in list_fp8(further) if "mtp" in name]
    assert any(name.endswith("eh_proj") for name in names) and len(names) == 5
    latent = (
        "--multi-latent-attention --position-embedding-type rope --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 "
        "--qk-pos-emb-head-dim 16 --v-head-dim 16 --fp8-format hybrid --num-experts 4 --moe-ffn-hidden-size 32 "
        "--disable-bias-linear"
    )
    kinds = {name.split(".", 3)[-1]: type(product) for name, product in list_products(latent).items()}
    assert kinds["self_attention.linear_kv_down_proj"] is FP8Matmul and kinds["output_layer"] is Matmul
    assert kinds["mlp.experts.linear_fc1"] is FP8Experts


@pytest.mark.flags("--fp8-format")
def test_only_hybrid_has_gradients_in_e5m2() -> None:
    for name, expected in (("hybrid", E5M2), ("e4m3", E4M3)):
        product = next(p for p in list_products(f"--fp8-format {name}").values() if isinstance(p, FP8Matmul))
        assert [product.recipe.format_of(operand) for operand in (INPUT, WEIGHT, GRAD)] == [E4M3, E4M3, expected]


@pytest.mark.flags("--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
def test_first_and_last_layers_may_stay_in_bf16() -> None:
    def layers(flags: str) -> set[int]:
        return {
            int(n.split(".")[2]) for n in list_fp8(f"--num-layers 6 --fp8-format e4m3 --fp8-recipe tensorwise {flags}")
        }

    assert layers("") == {0, 1, 2, 3, 4, 5}
    assert layers("--first-last-layers-bf16") == {1, 2, 3, 4}
    assert layers("--first-last-layers-bf16 --num-layers-at-start-in-bf16 0") == {0, 1, 2, 3, 4}
    assert layers("--first-last-layers-bf16 --num-layers-at-end-in-bf16 3") == {1, 2}
    assert layers("--num-layers-at-end-in-bf16 3") == {0, 1, 2, 3, 4, 5}, "a count alone says nothing"
    further = "--mtp-num-layers 1 --position-embedding-type rope --fp8-format e4m3 --fp8-recipe tensorwise"
    names = list_fp8(f"{further} --first-last-layers-bf16")
    assert len(names) == 5 and all(name.startswith("mtp") for name in names), "they come behind the last layer"


def losses_and_grads(flags: str) -> list[Tensor]:
    model = build_model(flags)
    ids, positions, labels = token_batch()
    losses = model(ids, positions, labels=labels)
    losses.mean().backward()
    return [losses.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.flags("--fp8-recipe", "--no-fp8-wgrad")
def test_every_recipe_computes_other_numbers_close_to_those_without() -> None:
    exact = losses_and_grads(WIDE)
    found = {name: losses_and_grads(f"{WIDE} --fp8-format hybrid --fp8-recipe {name}") for name in RECIPES}
    found["no wgrad"] = losses_and_grads(f"{WIDE} --fp8-format hybrid --fp8-recipe tensorwise --no-fp8-wgrad")
    for numbers in found.values():
        torch.testing.assert_close(numbers[0], exact[0], rtol=0.02, atol=0.0)
        assert not torch.equal(numbers[0], exact[0])
        for grad, plain in zip(numbers[1:], exact[1:], strict=True):
            assert (grad - plain).norm() <= 0.2 * plain.norm() + 1e-7
    # Before any step delayed scaling has nothing but the operand's own amax.
    assert all(map(torch.equal, found["delayed"], found["tensorwise"]))
    grads = {name: torch.cat([grad.flatten() for grad in numbers[1:]]) for name, numbers in found.items()}
    distinct = [grad for name, grad in grads.items() if name != "delayed"]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(distinct, 2))
    assert torch.equal(found["no wgrad"][0], found["tensorwise"][0])


@pytest.mark.flags("--fp8-recipe")
def test_the_last_block_of_blockwise_may_be_a_part_of_one() -> None:
    """As in DeepSeek-V3, whose latent vector with its positions has 576 columns."""
    narrow = "--hidden-size 144 --num-attention-heads 2 --ffn-hidden-size 208 --swiglu"
    latent = (
        "--hidden-size 144 --num-attention-heads 8 --position-embedding-type rope --multi-latent-attention "
        "--q-lora-rank 144 --kv-lora-rank 128 --qk-pos-emb-head-dim 16 --qk-head-dim 32 --v-head-dim 16 "
        "--num-experts 2 --moe-ffn-hidden-size 176 --disable-bias-linear"
    )
    for flags in (narrow, latent):
        exact, found = (losses_and_grads(f"{flags} {fp8}") for fp8 in ("", "--fp8-format e4m3 --fp8-recipe blockwise"))
        torch.testing.assert_close(found[0], exact[0], rtol=0.02, atol=0.0)
        for grad, plain in zip(found[1:], exact[1:], strict=True):
            assert (grad - plain).norm() <= 0.2 * plain.norm() + 1e-7 and not torch.equal(grad, plain)
    run = "--seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer"
    of_experts = read_run_config(
        f"--preset deepseek-v3 --bf16 --fp8-format e4m3 --fp8-recipe blockwise {run} --vocab-size 128000".split(), {}
    )
    assert of_experts.model.kv_lora_rank + of_experts.model.qk_pos_emb_head_dim == 576


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])
def test_recomputation_gives_the_same_numbers(name: str) -> None:
    flags = f"{WIDE} --fp8-format hybrid --fp8-recipe {name}"
    again = f"{flags} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert all(map(torch.equal, losses_and_grads(flags), losses_and_grads(again)))


def saved_bytes(model: GPTModel) -> tuple[float, list[Tensor]]:
    """Bytes that wait for backward beside parameters, each piece of memory once; the loss, and gradients."""
    kept: dict[int, int] = {}
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids, positions, labels = token_batch()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        losses = model(ids, positions, labels=labels)
    model.zero_grad()
    losses.mean().backward()
    return sum(kept.values()), [losses.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"rowwise"}))
def test_inputs_wait_in_eight_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (
        f"{WIDE} --bf16 --num-layers 2 --ffn-hidden-size 256 --fp8-format hybrid --fp8-recipe {name} "
        "--disable-bias-linear --normalization RMSNorm --swiglu"
    )
    found, numbers = saved_bytes(build_model(flags))
    with monkeypatch.context() as patch:
        patch.setattr(ActivationPolicy, "keeps_rounded_input", lambda self, layer: False)
        whole, expected = saved_bytes(build_model(flags))
    assert all(map(torch.equal, numbers, expected)), "backward reads what it had read, too"
    tokens, model = 32, read_config(flags).model
    assert model.rounded_input_bytes is not None
    values = tokens * (2 * 128 + 256) * model.num_layers
    # Blocks of 128 tokens are not full here.
    scales = 2 * (2 * 128 + 256) if name == "blockwise" else values / 32 if name == "mxfp8" else 2 * 3 * 4
    assert whole - found == values - scales


def test_what_waits_in_another_way_needs_no_eight_bits() -> None:
    product, weight = FP8Matmul(recipe("tensorwise")), torch.randn(32, 16, requires_grad=True)
    x = torch.randn(4, 16)
    plain = multiply(product, x, weight)
    with keep_as(x, Recomputed(lambda: x.clone())):
        spared = multiply(product, x, weight)
    assert plain.grad_fn.has_smaller_form and not spared.grad_fn.has_smaller_form  # type: ignore[union-attr]
    grads = [torch.autograd.grad(y.square().sum(), weight)[0] for y in (plain, spared)]
    assert torch.equal(*grads)


@pytest.mark.flags("--fp8-bf16-layers")
def test_layers_stay_in_bf16_by_their_names() -> None:
    flags = "--fp8-format e4m3 --fp8-output-proj"
    assert len(list_fp8(flags)) == 9
    patterns = "--fp8-bf16-layers *.linear_fc2 decoder.layers.0.self_attention.*"
    expected = ["0.mlp.linear_fc1", *(f"1.{n}" for n in ("mlp.linear_fc1", "self_attention.linear_proj"))]
    found = list_fp8(f"{flags} {patterns}")
    assert sorted(found) == [
        *(f"decoder.layers.{name}" for name in [*expected, "1.self_attention.linear_qkv"]),
        "output_layer",
    ]
    assert "output_layer" not in list_fp8(f"{flags} --fp8-bf16-layers output_layer")
    further = f"--mtp-num-layers 1 --position-embedding-type rope {flags} --fp8-bf16-layers mtp.layers.0.*"
    assert not any(name.startswith("mtp") for name in list_fp8(further))
    with pytest.raises(
        ConfigError, match=r"--fp8-bf16-layers \*.fc3 matches no linear layer; names are such as decoder"
    ):
        read_config(f"{flags} --fp8-bf16-layers *.linear_fc1 *.fc3")


def test_a_layer_that_fell_back_multiplies_exactly() -> None:
    weight, x, grad = torch.randn(32, 16), torch.randn(4, 16), torch.randn(4, 32)
    exact = Matmul()
    product = FP8Matmul(dataclasses.replace(recipe("tensorwise"), may_fall_back=True), exact=exact)
    product.fall_back()
    assert torch.equal(product.forward_keeping(x, weight)[0], exact.forward(x, weight))
    assert product.forward_keeping(x, weight)[1] is x
    assert torch.equal(product.input_grad(grad, weight), exact.input_grad(grad, weight))
    assert torch.equal(product.weight_grad(grad, x, weight, None), exact.weight_grad(grad, x, weight, None))  # type: ignore[arg-type]
    experts, ends = FP8Experts(product.recipe, exact=ExpertByExpert()), torch.tensor([1, 4], dtype=torch.int32)
    experts.fall_back()
    stack, plain = torch.stack((weight, -weight)), ExpertByExpert()
    assert torch.equal(experts.forward(x, stack, ends=ends), plain.forward(x, stack, ends=ends))
    assert torch.equal(experts.input_grad(grad, stack, ends), plain.input_grad(grad, stack, ends))
    found, expected = (kind.weight_grad(grad, x, stack, None, ends) for kind in (experts, plain))
    assert torch.equal(found, expected)  # type: ignore[arg-type]


@pytest.mark.flags("--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-margin", "--fp8-interval")
def test_flags_of_delayed_scaling_reach_the_products() -> None:
    flags = "--fp8-format hybrid --fp8-amax-history-len 9 --fp8-amax-compute-algo max --fp8-margin 2 --fp8-interval 3"
    for flags_given, expected in ((flags, (9, True, 2, 3)), ("--fp8-format hybrid", (1, False, 0, 1))):
        product = next(p for p in list_products(flags_given).values() if isinstance(p, FP8Matmul))
        used = product.recipe
        assert (used.history_length, used.takes_largest, used.margin, used.interval) == expected
        assert product.amax_history.shape == (3, expected[0])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--hidden-size 72 --num-attention-heads 4", "--hidden-size 72 is no multiple of 16, as --fp8-recipe delayed"),
        ("--fp8-recipe blockwise", "--hidden-size 32 is no multiple of 128, as --fp8-recipe blockwise"),
        ("--fp8-recipe blockwise --hidden-size 200 --num-attention-heads 4", "--hidden-size 200 is no multiple of 128"),
        (
            "--fp8-recipe blockwise --hidden-size 128 --ffn-hidden-size 144 --tensor-model-parallel-size 2",
            "--ffn-hidden-size 144 is no multiple of 256, as --fp8-recipe blockwise needs it on 2 ranks",
        ),
        ("--fp8-recipe mxfp8 --ffn-hidden-size 48", "--ffn-hidden-size 48 is no multiple of 32"),
        ("--ffn-hidden-size 40", "--ffn-hidden-size 40 is no multiple of 16"),
        ("--fp8-recipe custom", "--fp8-recipe custom is not supported"),
        ("--first-last-layers-bf16", "--first-last-layers-bf16 does not work with --fp8-recipe delayed"),
        ("--fp4-format e2m1", "--fp8-format hybrid and --fp4-format e2m1 contradict each other"),
        ("--fp8-param-gather", "--fp8-param-gather needs --use-distributed-optimizer"),
        ("--num-experts 2 --moe-ffn-hidden-size 24 --disable-bias-linear", "--moe-ffn-hidden-size 24 is no multiple"),
    ],
)
def test_what_does_not_fit_is_one_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(f"--fp8-format hybrid {flags}")
    assert sum(sentence in line for line in str(caught.value).splitlines()) == 1


@pytest.mark.flags("--fp8-param-gather")
def test_parameters_are_gathered_as_they_are() -> None:
    config = read_config("--bf16 --fp8-format hybrid --fp8-param-gather --use-distributed-optimizer")
    assert any("--fp8-param-gather has no effect" in note for note in config.notes)
    with pytest.raises(ConfigError, match="--fp8-param-gather needs --fp8-format"):
        read_config("--fp8-param-gather --use-distributed-optimizer")


def test_what_has_nothing_to_do_is_noted() -> None:
    notes = (
        read_config("--fp8-margin 1").notes + read_config("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-margin 1").notes
    )
    assert any("--fp8-margin 1 has no effect without --fp8-format" in note for note in notes)
    assert any("--fp8-margin 1 has no effect without --fp8-recipe delayed" in note for note in notes)
