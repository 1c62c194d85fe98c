# SPDX-License-Identifier: Apache-2.0
"""megatron.hf: tiny random models of every family, from Hugging Face to our checkpoint and back."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.hf.auto_bridge import AutoBridge
from megatron.hf.conversion import Model, export_model, import_model, open_model, open_source
from megatron.hf.convert import main
from megatron.hf.entries import list_entries
from megatron.hf.logits import compare_logits, find_their_class
from megatron.hf.settings import build_config_json, read_settings
from megatron.hf.tensor_files import open_tensors, plan_files, write_tensors
from megatron.training.checkpoint.trained_model import load_trained_model
from megatron.training.recipes.families import FAMILIES, find_family
from tests.support.family_models import MODELS, MSCALE, make_model
from tests.support.huggingface_models import token_ids
from tests.unit.training.recipes.test_model_families import make

transformers = pytest.importorskip("transformers")


def read_all(directory: Path) -> dict[str, Tensor]:
    tensors = open_tensors(directory)
    return {name: tensors.read(name) for name in tensors.contents}


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def change_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@torch.no_grad()
def logits_of_directory(directory: Path) -> Tensor:
    model = find_their_class(directory).from_pretrained(directory, attn_implementation="eager")
    return model.eval()(input_ids=token_ids(), use_cache=False).logits


def forget_origin(model: Model) -> Model:
    """As if it had been trained here from the beginning: its config.json follows from our settings alone."""
    embedding = model.checkpoint.contents["embedding.word_embeddings.weight"]
    vocab_size = embedding.global_shape[0]
    # Two families may have the same model: Qwen 3.5 and Qwen3-Next have it under other names.
    family, config_json = build_config_json(model.config, vocab_size, embedding.dtype)
    return dataclasses.replace(model, config_json=config_json, entries=list_entries(family, model.config, vocab_size))


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    """Weights and config.json come back to the bit, and so logits; our settings alone say what the model computes."""
    hf = make_model(name)
    hf.save_pretrained(tmp_path / "hf")
    expected = hf(input_ids=token_ids(), use_cache=False).logits.detach()
    import_model(open_source(tmp_path / "hf"), tmp_path / "ours")
    assert "differ by at most" in compare_logits(tmp_path / "hf", tmp_path / "ours")
    assert load_trained_model(tmp_path / "ours").vocab_size == hf.config.vocab_size

    model = open_model(tmp_path / "ours")
    export_model(model, tmp_path / "back")
    assert_same_tensors(read_all(tmp_path / "back"), read_all(tmp_path / "hf"))
    before, after = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("hf", "back"))
    assert after == before

    export_model(forget_origin(model), tmp_path / "anew")
    difference = (logits_of_directory(tmp_path / "anew") - expected).abs().max().item()
    assert difference <= 1e-5 * max(1.0, expected.abs().max().item())


def test_every_family_with_rows_for_all_its_layers_is_tried() -> None:
    tried = {find_family(make_model(name).config.model_type).name for name in MODELS}
    assert tried == {family.name for family in FAMILIES}


@pytest.mark.flags("--moe-router-add-bias")
def test_the_router_of_gpt_oss_has_a_bias(tmp_path: Path) -> None:
    """It chooses and weighs experts: without it the logits are others."""
    make_model("gpt-oss").save_pretrained(tmp_path / "hf")
    model = AutoBridge.from_hf_pretrained(tmp_path / "hf").to_megatron()
    ids = token_ids()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        expected = logits_of_directory(tmp_path / "hf")
        torch.testing.assert_close(model(ids, positions), expected, rtol=1e-5, atol=1e-5)
        for layer in model.decoder.layers:
            layer.mlp.router.bias.zero_()
        assert (model(ids, positions) - expected).abs().max() > 0.01


def test_the_same_files_under_another_model_type(tmp_path: Path) -> None:
    """Kimi K2's, which come back under their own."""
    make_model("DeepSeek V3").save_pretrained(tmp_path / "hf")
    change_config(tmp_path / "hf", model_type="kimi_k2")
    import_model(open_source(tmp_path / "hf"), tmp_path / "ours")
    export_model(open_model(tmp_path / "ours"), tmp_path / "back")
    assert_same_tensors(read_all(tmp_path / "back"), read_all(tmp_path / "hf"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "kimi_k2"


def test_what_a_family_cannot_say_is_refused(tmp_path: Path) -> None:
    """Fields that would change what the model computes."""
    for name, fields, message in (
        ("GPT-2, GPT-3", {"tie_word_embeddings": False}, "tie_word_embeddings is False in its config.json; only True"),
        ("DeepSeek V2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc' in its config.json; only 'greedy' and"),
        ("DeepSeek V3", {"rope_interleave": False}, "rope_interleave is False"),
        ("DeepSeek V3", {"rope_parameters": MSCALE | {"mscale_all_dim": 0}}, "mscale 0.7 without mscale_all_dim"),
    ):
        fields = {**make_model(name).config.to_dict(), **fields}
        with pytest.raises(ConfigError, match=message):
            read_settings(fields, tmp_path / "config.json", torch.float32)


# ---- files


def convert(monkeypatch: pytest.MonkeyPatch, source: Path, result: Path, kinds: str, *more: str) -> int:
    """The program; kinds: `hf megatron`. Returns its exit code."""
    first, second = kinds.split()
    argv = ["--source", first, "--target", second, "--input-path", str(source), "--output-path", str(result), *more]
    monkeypatch.setattr(sys, "argv", ["convert.py", *argv])
    return main()


def test_the_program_in_both_directions(
    hf_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards, number format, tokenizer and generation config come back; our own programs open what lies between."""
    sizes = ("--tensor-model-parallel-size", "3", "--pipeline-model-parallel-size", "2")
    assert convert(monkeypatch, hf_directory, tmp_path / "ours", "hf megatron", *sizes) == 0
    printed = capsys.readouterr().out
    assert "verified: every weight bit for bit; logits of 48 random tokens" in printed
    assert "note: the checkpoint has no layout: it loads with tensor-parallel size 3" in printed
    trained = load_trained_model(tmp_path / "ours", bf16=True)
    assert trained.vocab_size == 1009
    assert trained.tokenizer.tokenize("def main") != []

    layouts = ("--source-tp", "4", "--source-pp", "2", "--target-tp", "6", "--target-pp", "1")
    assert convert(monkeypatch, tmp_path / "ours", tmp_path / "copy", "megatron megatron", *layouts) == 0
    assert "note: --source-tp is 4, and the checkpoint was saved with 1" in capsys.readouterr().out
    assert convert(monkeypatch, tmp_path / "copy", tmp_path / "back", "megatron hf") == 0
    assert_same_tensors(read_all(tmp_path / "back"), read_all(hf_directory))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((hf_directory / name).read_text())
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "back")("def main")["input_ids"]) > 0
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (hf_directory / "tokenizer.json").read_bytes()


def test_documented_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of docs/conversion.md, as they stand there."""
    text = (Path(__file__).parents[3] / "docs" / "conversion.md").read_text(encoding="utf-8")
    commands = re.search(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    assert commands is not None
    make("Llama", num_attention_heads=8, num_key_value_heads=4).save_pretrained(tmp_path / "Llama-3.1-8B")
    monkeypatch.chdir(tmp_path)
    for command in commands[1].splitlines():
        program = "python -m megatron.bridge.convert "
        assert command.startswith(program)
        monkeypatch.setattr(sys, "argv", ["convert.py", *command.removeprefix(program).split()])
        assert main() == 0, command
    assert_same_tensors(read_all(tmp_path / "llama-hf"), read_all(tmp_path / "Llama-3.1-8B"))


def test_auto_bridge(hf_directory: Path, tmp_path: Path) -> None:
    """The model in Python: its weights under their names there, saved with what was changed."""
    bridge = AutoBridge.from_hf_pretrained(hf_directory)
    with pytest.raises(ConfigError, match=r"there is no model to export; call to_megatron\(\) first"):
        bridge.save_hf(tmp_path / "saved")
    model = bridge.to_megatron()
    assert isinstance(model, GPTModel)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_same_tensors(dict(bridge.export_weights()), read_all(hf_directory))
    with torch.no_grad():
        model.decoder.final_layernorm.weight.fill_(2.0)
    bridge.save_hf(tmp_path / "saved")
    weights = read_all(hf_directory)
    weights["model.norm.weight"].fill_(2.0)
    assert_same_tensors(read_all(tmp_path / "saved"), weights)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "saved" / name).read_text()) == json.loads((hf_directory / name).read_text())
    with pytest.raises(ConfigError, match="is missing in the model, and .* by its settings; give a whole model"):
        bridge.save_hf(tmp_path / "other", torch.nn.Linear(2, 2))


def test_shards_that_we_write_and_bin_shards(hf_directory: Path, tmp_path: Path) -> None:
    weights = read_all(hf_directory)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    (tmp_path / "written").mkdir()
    write_tensors(tmp_path / "written", shapes, iter(weights.items()), plan_files(shapes, shard_bytes=100_000))
    assert len(list((tmp_path / "written").glob("model-*-of-*.safetensors"))) > 2
    assert_same_tensors(read_all(tmp_path / "written"), weights)
    shutil.copy(hf_directory / "config.json", tmp_path / "written")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written").state_dict()
    assert_same_tensors(theirs, weights)

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(weights, pickled / "pytorch_model.bin")
    assert_same_tensors(read_all(pickled), weights)


def test_published_files_of_gpt2(tmp_path: Path) -> None:
    """Without the prefix, and with the masks that old releases stored beside the weights."""
    make_model("GPT-2, GPT-3").save_pretrained(tmp_path / "hf")
    weights = {name.removeprefix("transformer."): tensor for name, tensor in read_all(tmp_path / "hf").items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    (tmp_path / "old").mkdir()
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "old")
    torch.save(weights, tmp_path / "old" / "pytorch_model.bin")
    import_model(open_source(tmp_path / "old"), tmp_path / "ours")
    export_model(open_model(tmp_path / "ours"), tmp_path / "back")
    assert_same_tensors(read_all(tmp_path / "back"), read_all(tmp_path / "hf"))
