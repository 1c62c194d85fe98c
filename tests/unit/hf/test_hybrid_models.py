# SPDX-License-Identifier: Apache-2.0
"""Hybrids of Hugging Face: what their layers have and others lack, generation, training on, files as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core.errors import ConfigError
from megatron.core.inference.generate import generate
from megatron.core.inference.sampling import Sampling
from megatron.hf.conversion import open_source
from megatron.training.checkpoint.foreign_files import save_foreign
from megatron.training.loop import train
from megatron.training.recipes.families import find_family
from megatron.training.recipes.family_flags import build_flags
from megatron.training.recipes.family_letters import read_pattern
from tests.support.family_models import make_model
from tests.support.huggingface_models import assert_each_flag_counts, converted, list_flags, token_ids
from tests.unit.hf.test_bridge import assert_same_tensors, read_all
from tests.unit.hf.test_hugging_face_runs import open_run
from tests.unit.training.recipes.test_model_families import make

pytest.importorskip("transformers")

NAMES = (
    "Qwen3-Next", "Qwen 3.5", "Nemotron-H, Nemotron 3", "Mamba 2", "Bamba", "Granite 4", "Falcon-H1", "OLMo Hybrid",
    "Kimi Linear",
)  # fmt: skip


@pytest.mark.flags(
    "--mamba-dt-min", "--mamba-dt-max", "--mamba-norm-epsilon", "--embedding-multiplier", "--residual-multiplier",
    "--logit-multiplier", "--softmax-scale",
)  # fmt: skip
def test_each_option_of_granite_counts() -> None:
    hf = make(
        "GraniteMoeHybrid", layer_types=["mamba", "attention"] * 2, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=6,
        num_local_experts=0, shared_intermediate_size=40, rms_norm_eps=0.01, time_step_limit=[0.5, 0.9],
        embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=0.5, attention_multiplier=0.5,
        position_embedding_type="rope",
    )  # fmt: skip
    assert_each_flag_counts(
        hf, list_flags(hf), "--mamba-dt-min", "--mamba-dt-max", "--mamba-norm-epsilon", "--embedding-multiplier",
        "--residual-multiplier", "--logit-multiplier", "--softmax-scale",
    )  # fmt: skip


@pytest.mark.flags(
    "--attention-input-multiplier", "--attention-output-multiplier", "--mamba-input-multiplier",
    "--mamba-output-multiplier", "--mamba-section-multipliers", "--key-multiplier", "--activation-input-multiplier",
    "--mlp-output-multiplier", "--latent-norm-epsilon", "--linear-allow-neg-eigval",
)  # fmt: skip
def test_each_factor_of_falcon_counts_and_what_others_have_alone() -> None:
    factors = (
        "--attention-input-multiplier", "--attention-output-multiplier", "--mamba-input-multiplier",
        "--mamba-output-multiplier", "--mamba-section-multipliers", "--key-multiplier",
        "--activation-input-multiplier", "--mlp-output-multiplier", "--embedding-multiplier", "--logit-multiplier",
    )  # fmt: skip
    for name, flags in (
        ("Falcon-H1", factors), ("Kimi Linear", ("--latent-norm-epsilon",)),
        ("OLMo Hybrid", ("--linear-allow-neg-eigval", "--linear-norm-epsilon")),
    ):  # fmt: skip
        hf = make_model(name)
        assert_each_flag_counts(hf, list_flags(hf), *flags)


def test_published_names_and_parts_of_a_convolution(tmp_path: Path) -> None:
    """Other names than transformers writes, and a convolution cut where queries, keys and values end."""
    for name, written, published in (
        ("OLMo Hybrid", "layers.1.feedforward_layer_norm", "layers.1.post_attention_layernorm"),
        ("Kimi Linear", "layers.0.block_sparse_moe.", "layers.0.mlp."),
    ):
        path = tmp_path / name
        make_model(name).save_pretrained(path)
        file, expected = path / "model.safetensors", {}
        for entry in open_source(path).entries:
            expected[entry.key] = entry.join(open_source(path).read)
        tensors = {each.replace(written, published): value for each, value in load_file(file).items()}
        parts = [each for each in tensors if "q_conv1d" in each] if name == "OLMo Hybrid" else []
        for first in parts:
            names = [first.replace("q_conv1d", f"{letter}_conv1d") for letter in "qkv"]
            whole = torch.cat([tensors[each] for each in names])
            tensors |= {each: x.clone() for each, x in zip(names, whole.split([30, 30, 84]), strict=True)}
        save_file(tensors, file)
        source = open_source(path)
        for entry in source.entries:
            assert torch.equal(entry.join(source.read), expected[entry.key]), entry.key
            box = tuple((0, size) for size in expected[entry.key].shape)
            assert torch.equal(entry.read_box(box, source.read_box), expected[entry.key]), entry.key


def test_layers_and_biases_that_contradict_are_refused() -> None:
    kimi, falcon = find_family("kimi_linear"), find_family("falcon_h1")
    fields = {"num_hidden_layers": 4, "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}}
    assert "--hybrid-layer-pattern K-KEKE+E" in build_flags(kimi, fields)
    with pytest.raises(ConfigError, match="each of the layers from 1 to 4 must be in one of the two"):
        build_flags(kimi, fields | {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]}})
    with pytest.raises(ConfigError, match="projectors_bias is True in config.json, and mamba_proj_bias False"):
        build_flags(falcon, {"projectors_bias": True})


@pytest.mark.flags(
    "--disable-mamba-conv-bias", "--mamba-proj-bias", "--add-attention-output-bias", "--add-mlp-bias", "--add-qkv-bias"
)
def test_every_bias_is_a_flag() -> None:
    """Each flag is one more parameter, or one less, in their file and ours; what they compute is compared elsewhere."""
    biases = {
        "--mamba-proj-bias": "mixer.in_proj.bias", "--add-attention-output-bias": "linear_proj.bias",
        "--add-mlp-bias": "linear_fc2.bias", "--add-qkv-bias": "linear_qkv.bias",
    }  # fmt: skip
    fields = {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6}
    with_all = {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}
    for settings, expected in ((fields, False), (fields | with_all, True)):
        hf = make("Bamba", **settings)
        model = converted(hf, list_flags(hf))
        names = list(model.state_dict())
        for flag, name in biases.items():
            assert (flag in list_flags(hf)) is expected is any(each.endswith(name) for each in names), flag
        assert any(each.endswith("conv1d.bias") for each in names) is not expected


@pytest.mark.flags("--mamba-beside-attention", "--linear-gate-rank", "--output-norm-freq")
@pytest.mark.parametrize("name", NAMES)
def test_generation_is_theirs(name: str) -> None:
    """Token by token, with the state that each kind of layer keeps."""
    hf = make_model(name)
    prompts, new = token_ids(9), 8
    model = converted(hf, list_flags(hf))
    options: Any = {"max_new_tokens": new, "sampling": Sampling(greedy=True)}
    texts = [list(found.tokens) for found in generate(model, prompts.tolist(), **options)]
    reference = prompts
    for _ in range(new):
        with torch.no_grad():
            logits = hf(input_ids=reference, use_cache=False).logits[:, -1]
        reference = torch.cat([reference, logits.argmax(-1, keepdim=True)], dim=1)
    assert [text[-new:] for text in texts] == reference[:, -new:].tolist()


@pytest.mark.flags("--save-hf", "--hybrid-layer-pattern")
@pytest.mark.parametrize("name", NAMES)
def test_a_run_starts_from_the_directory_and_ends_in_one(name: str, tmp_path: Path) -> None:
    """Without learning every weight comes back as it was; with some, a loss that falls."""
    make_model(name).save_pretrained(tmp_path / "hf")
    flags = ("--load", f"hf:{tmp_path}/hf", "--use-checkpoint-args", "--train-iters", "1")
    still = ("--lr", "0", "--min-lr", "0", "--weight-decay", "0", "--moe-router-bias-update-rate", "0")
    with open_run(*flags, *still, "--save-hf", tmp_path / "result") as run:
        train(run)
        save_foreign(run)
    assert_same_tensors(read_all(tmp_path / "result"), read_all(tmp_path / "hf"))
    before, after = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("hf", "result"))
    assert before == after


def test_tensors_that_nobody_reads_are_left_out_with_a_note(tmp_path: Path) -> None:
    """The layers with which the published Qwen3-Next predicts further tokens."""
    make_model("Qwen3-Next").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.layers.0.mlp.gate.weight": torch.ones(2)}, file)
    assert open_source(tmp_path).notes == [
        "1 tensors that transformers does not read either are left out: mtp.layers.0.mlp.gate.weight, ..."
    ]


def test_the_text_model_of_one_that_sees_images(tmp_path: Path) -> None:
    """Qwen 3.5 as published: a config.json around the text model's, and its names in the middle of the others."""
    make_model("Qwen 3.5").save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    expected = {entry.key: entry.join(open_source(tmp_path).read) for entry in open_source(tmp_path).entries}
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in load_file(file).items()}
    save_file(tensors | {"model.visual.patch_embed.proj.weight": torch.ones(2)}, file)
    config.write_text(json.dumps({"model_type": "qwen3_5", "text_config": json.loads(config.read_text())}))
    source = open_source(tmp_path)
    assert source.notes == [
        "1 tensors are left out, which are not of the text model: model.visual.patch_embed.proj.weight, ..."
    ]
    for entry in source.entries:
        assert torch.equal(entry.join(source.read), expected[entry.key]), entry.key


def test_the_published_form_of_nemotron_h() -> None:
    """Layers as a pattern of letters, and the number of layers beside."""
    family = find_family("nemotron_h")
    fields = {"hybrid_override_pattern": "-M*M", "num_hidden_layers": 4}
    assert "--hybrid-layer-pattern=-M*M" in build_flags(family, fields)
    assert not any(flag.startswith("--num-experts") for flag in build_flags(family, fields))
    with pytest.raises(ConfigError, match="num_hidden_layers is 5 in config.json, and layers_block_type has 4 layers"):
        build_flags(family, fields | {"num_hidden_layers": 5})
    with pytest.raises(ConfigError, match="layers_block_type in config.json has 'X'; only 'linear_attention', 'moe'"):
        build_flags(family, fields | {"hybrid_override_pattern": "MX*M"})


def test_layers_of_no_family_have_no_words() -> None:
    """Each family says which letters its layers can be, and in which order."""
    for model_type, pattern in (
        ("qwen3_next", "MEME"), ("qwen3_5_text", "GE*E"), ("granitemoehybrid", "M-*E"), ("mamba2", "M*"),
        ("bamba", "M-*"), ("nemotron_h", "G*"), ("qwen3_next", None),
    ):  # fmt: skip
        letters = find_family(model_type).letters
        assert letters is not None and read_pattern(letters, pattern) is None, (model_type, pattern)
