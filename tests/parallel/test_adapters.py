# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: losses and gradients of peft, its files in both directions, the same run in each layout."""

from __future__ import annotations

import dataclasses
import functools
import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.placement import get_placement
from megatron.hf.convert import convert, parse_arguments
from megatron.hf.running import HuggingFaceFiles
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.run import Run
from megatron.training.verify.comparison import compare
from megatron.training.verify.parity import RankTrace, Trace, join, open_local_run, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, OPTIONS, STYLES, own_rank, training
from tests.support.huggingface_models import randomised

RANK, ALPHA = 3, 7
NAMES = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
RUN = f"""--micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 2 --mock-data --seq-length 16
    --tokenizer-type NullTokenizer --vocab-size 97 --make-vocab-size-divisible-by 1 --eval-iters 0 --num-workers 0
    --lora-rank {RANK} --lora-alpha {ALPHA} --use-checkpoint-args"""
LAYOUTS = [
    ("llama", "tp2,sp,--recompute-granularity=full,--recompute-method=uniform,--recompute-num-layers=1", "dora"),
    ("llama", "tp2,pp2", "dora"), ("llama", "pp2,--lora-target-modules=*.layers.3.*", "rslora"),
    ("gpt2", "cp2", "rslora"), ("gpt2", "dp2,fsdp2", "dora"), ("latent", "tp2,sp,dist-opt", "dora"),
    ("moe", "ep2,dp2", "rslora"), ("moe", "tp2,sp,etp2", "dora"),
]  # fmt: skip
ADAPTED = f"--lora-rank {RANK} --lora-alpha {ALPHA} --lora-type"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of odd sizes in `base`, and adapters of some of its layers, none of them zero, in `adapters`."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("adapters")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=72, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = randomised(transformers.LlamaForCausalLM(config))
    model.save_pretrained(directory / "base")
    for kind in ("lora", "dora"):
        options = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=NAMES, task_type="CAUSAL_LM", use_dora=kind == "dora"
        )
        model = transformers.LlamaForCausalLM.from_pretrained(directory / "base", dtype=torch.float32)
        lengths = {}
        adapted = peft.get_peft_model(model, options)
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude_vector" in name:
                lengths[name] = parameter.detach().clone()
        randomised(adapted)
        for name, parameter in adapted.named_parameters():
            if name in lengths:
                # Some rows longer than the weight's, and some shorter.
                parameter.data = lengths[name] * torch.linspace(0.7, 1.6, len(parameter))
        adapted.save_pretrained(directory / kind)
    return directory


def open_run(directory: Path, *flags: str, kind: str = "lora") -> object:
    named = f"--load hf:{directory}/base --load-adapter {directory}/{kind} --save {directory}/run-{kind}"
    named += f" --lora-type {kind}"
    words = [*RUN.split(), *named.split(), "--lora-target-modules", *NAMES, *flags]
    config = read_run_config(words, {})
    recipe = dataclasses.replace(build_gpt_recipe(config), foreign_files=HuggingFaceFiles())
    return open_local_run(config, recipe, 0)


def read_gradients(run: Run) -> dict[str, torch.Tensor]:
    named = ((get_placement(p, n).name, p) for n, p in run.model[0].module.named_parameters() if p.requires_grad)
    return {name: p.main_grad if hasattr(p, "main_grad") else p.grad for name, p in named}


@pytest.mark.flags("--lora-rank", "--lora-alpha", "--lora-target-modules", "--load-adapter")
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_losses_gradients_and_files_are_those_of_peft(made: Path, kind: str) -> None:
    import peft
    import transformers
    from safetensors.torch import load_file

    theirs = transformers.LlamaForCausalLM.from_pretrained(made / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, made / kind, is_trainable=True)
    tokens = torch.randint(97, (2, 17), generator=torch.Generator().manual_seed(3))
    logits = theirs(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    with open_run(made, kind=kind) as run:
        positions = torch.arange(16).expand(2, 16)
        loss = run.model[0].module(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
        loss.backward()
        found = read_gradients(run)
        save_checkpoint(run)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    grads = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if "lora_" in n}
    for layer in range(2):
        ours, module = f"decoder.layers.{layer}", f"base_model.model.model.layers.{layer}"
        qkv = found[f"{ours}.self_attention.linear_qkv.adapter.linear_in.weight"].split(RANK)
        rows = found[f"{ours}.self_attention.linear_qkv.adapter.linear_out.weight"].unflatten(0, (3, 4, 12))
        pairs = {
            "self_attn.q_proj.lora_A": qkv[0], "self_attn.v_proj.lora_A": qkv[1],
            "self_attn.q_proj.lora_B": rows[:, :2].flatten(0, 2), "self_attn.v_proj.lora_B": rows[:, 3].flatten(0, 1),
            "self_attn.o_proj.lora_A": found[f"{ours}.self_attention.linear_proj.adapter.linear_in.weight"],
            "mlp.gate_proj.lora_B": found[f"{ours}.mlp.linear_fc1.adapter.linear_out.weight"][:40],
            "mlp.down_proj.lora_A": found[f"{ours}.mlp.linear_fc2.adapter.linear_in.weight"],
        }  # fmt: skip
        if kind == "dora":
            fc1 = found[f"{ours}.mlp.linear_fc1.adapter.magnitude_change"]
            query = found[f"{ours}.self_attention.linear_qkv.adapter.magnitude_change"].unflatten(0, (3, 4, 12))
            pairs |= {
                "mlp.gate_proj.lora_magnitude_vector": fc1[:40],
                "self_attn.q_proj.lora_magnitude_vector": query[:, :2].flatten(),
                "mlp.down_proj.lora_magnitude_vector": found[f"{ours}.mlp.linear_fc2.adapter.magnitude_change"],
            }
            assert not fc1[40:].any() and not query[:, 2].any()
        for name, ours_of_it in pairs.items():
            theirs_of_it = grads[f"{module}.{name}.weight"]
            torch.testing.assert_close(ours_of_it, theirs_of_it, rtol=1e-5, atol=1e-5 * float(theirs_of_it.abs().max()))
        # Of projections without an adapter.
        assert not rows[:, 2].any() and not found[f"{ours}.mlp.linear_fc1.adapter.linear_out.weight"][40:].any()
    assert len(found) == 2 * (2 + (kind == "dora")) * 4

    # Written again they are peft's, bit for bit, and merged they compute the same.
    for name, words in (("again", ["--adapter"]), ("merged", [])):
        places = ["--input-path", f"{made}/run-{kind}", "--output-path", f"{made}/{name}-{kind}"]
        convert(parse_arguments(["--source", "megatron", "--target", "hf", *places, *words]))
    written, given = (load_file(made / name / "adapter_model.safetensors") for name in (f"again-{kind}", kind))
    assert written.keys() == given.keys() and all(torch.equal(written[name], given[name]) for name in given)
    described, said = (
        json.loads((made / name / "adapter_config.json").read_text()) for name in (f"again-{kind}", kind)
    )
    fields = ("r", "lora_alpha", "peft_type", "task_type", "use_rslora", "use_dora")
    assert all(described[name] == said[name] for name in fields)
    assert set(described["target_modules"]) == set(said["target_modules"])
    # In float64, so that only the rounding of the merged weights is seen.
    merged = transformers.LlamaForCausalLM.from_pretrained(made / f"merged-{kind}", dtype=torch.float64)
    with torch.no_grad():
        exact = theirs.double()(tokens[:, :-1]).logits
        torch.testing.assert_close(merged(tokens[:, :-1]).logits, exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


def test_adapters_of_experts_are_merged_and_written_one_by_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=97, hidden_size=24, intermediate_size=32, moe_intermediate_size=20, num_hidden_layers=2, head_dim=8,
        num_attention_heads=3, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
    )  # fmt: skip
    randomised(transformers.Qwen3MoeForCausalLM(config)).save_pretrained(tmp_path / "base")
    tokens, positions = torch.arange(16).expand(2, 16), torch.arange(16).expand(2, 16)
    places = f"--load hf:{tmp_path}/base --lora-type dora --lora-target-modules gate_proj down_proj"
    words = [*RUN.split(), *places.split(), "--save", f"{tmp_path}/run"]

    def open_it(*flags: str) -> AbstractContextManager[Run]:
        run_config = read_run_config([*words, *flags], {})
        recipe = dataclasses.replace(build_gpt_recipe(run_config), foreign_files=HuggingFaceFiles())
        return open_local_run(run_config, recipe, 0)

    with open_it() as run, torch.no_grad():
        plain = run.model[0].module(tokens, positions, None)
        for parameter in run.model[0].module.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
        adapted = run.model[0].module(tokens, positions, None)
        run.optimizer.reload_model_params()
        save_checkpoint(run)
    for name, further in (("adapters", ["--adapter"]), ("merged", [])):
        there = ["--input-path", f"{tmp_path}/run", "--output-path", f"{tmp_path}/{name}"]
        convert(parse_arguments(["--source", "megatron", "--target", "hf", *there, *further]))
    with open_it("--load-adapter", f"{tmp_path}/adapters") as run, torch.no_grad():
        assert torch.equal(run.model[0].module(tokens, positions, None), adapted)
    from safetensors import safe_open

    with safe_open(tmp_path / "adapters" / "adapter_model.safetensors", "pt") as file:
        names = {name.removeprefix("base_model.model.model.layers.1.mlp.") for name in file.keys()}  # noqa: SIM118
    assert {f"experts.{expert}.gate_proj.lora_A.weight" for expert in range(4)} < names
    assert not any("up_proj" in name for name in names)
    merged = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found = merged(tokens).logits
    assert (found - plain).abs().max() > 0.1
    torch.testing.assert_close(found, adapted, rtol=0, atol=1e-5 * float(adapted.abs().max()))


def test_adapters_of_another_kind_are_refused(made: Path) -> None:
    for flags, error, said in (
        (["--lora-rank", "4"], ConfigError, "r is 3 and 4 in this run; give --lora-rank 3"),
        (["--lora-type", "rslora"], ConfigError, "use_rslora is False"),
        (["--lora-type", "dora"], ConfigError, "use_dora is False and True in this run; give the --lora-type"),
        (["--lora-exclude", "o_proj"], CheckpointError, "o_proj.lora_A.weight is .* missing in this model"),
        (["--load-adapter", f"{made}/none"], CheckpointError, "--load-adapter .*/none does not exist"),
    ):
        with pytest.raises(error, match=said), open_run(made, *flags):
            pass


@pytest.mark.flags("--lora-dropout", "--lora-exclude")
def test_dropout_and_layers_without_adapters(made: Path) -> None:
    tokens, positions = torch.arange(16).expand(2, 16), torch.arange(16).expand(2, 16)
    losses = []
    with open_run(made, "--lora-dropout", "0.5") as run, torch.no_grad():
        for training_ in (True, True, False, False):
            model = run.model[0].module.train(training_)
            losses.append(model(tokens, positions, None, labels=tokens).mean().item())
    assert losses[0] != losses[1] and losses[2] == losses[3] not in losses[:2]
    config, recipe = training(f"{STYLES['llama']} {ADAPTED} rslora --lora-exclude down_proj *.layers.0.*", "1")
    with open_local_run(config, recipe, 0) as run:
        names = read_gradients(run)
    with pytest.raises(ConfigError, match="no parameter of the model is trained"):
        config, recipe = training(f"{STYLES['llama']} {ADAPTED} rslora --lora-target-modules *.layers.9.*", "1")
        with open_local_run(config, recipe, 0):
            pass
    layers = {name.partition(".adapter.")[0] for name in names}
    assert layers == {
        f"decoder.layers.{layer}.{name}" for layer in (1, 2, 3)
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
    }  # fmt: skip


def share(style: str, text: str, kind: str) -> RankTrace:
    config, recipe = training(f"{(STYLES | OPTIONS | EXPERTS)[style]} {ADAPTED} {kind}", text)
    return trace_rank(config, recipe, rank=own_rank(config), iterations=4)


@functools.cache
def reference(style: str, flags: str, kind: str) -> Trace:
    return join([share(style, flags or "1", kind)])


@pytest.mark.flags("--lora-type")
@pytest.mark.parametrize(("style", "layout", "kind"), LAYOUTS)
def test_layout_is_the_same_run(style: str, layout: str, kind: str) -> None:
    trace = join(run_distributed(share, parse_layout(layout).world_size, style, layout, kind, timeout=240.0))
    named = next((term for term in layout.split(",") if term.startswith("--lora")), "")
    assert compare(reference(style, named, kind), trace) == []
    # The base is frozen; each B learns in the first step, and A from the second one on.
    assert trace.grads and all(".adapter." in name for name in trace.grads)
    assert all(grad.any() for name, grad in trace.grads.items() if "linear_out" in name)
