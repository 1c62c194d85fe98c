# SPDX-License-Identifier: Apache-2.0
"""megatron.hf: directories of Hugging Face, files and settings that cannot be converted."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.errors import CheckpointError, ConfigError
from megatron.hf.conversion import import_model, open_source
from megatron.hf.settings import build_config_json, build_empty_model
from megatron.hf.tensor_files import write_tensors
from tests.support.gpt_models import read_config
from tests.unit.hf.test_bridge import change_config, convert, read_all

transformers = pytest.importorskip("transformers")


def rewrite_weights(directory: Path, change: Any, **quantisation: Any) -> None:
    """Store changed weights in one file, under a quantization_config."""
    weights = {name: change(tensor) for name, tensor in read_all(directory).items()}
    for file in directory.glob("model*"):
        file.unlink()
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    write_tensors(directory, shapes, iter(weights.items()))
    change_config(directory, quantization_config=quantisation)


def remove_shard(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[1].unlink()


def cut_shard(directory: Path) -> None:
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])


def escape(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "../model.safetensors"
    path.write_text(json.dumps(index))


def add_code(directory: Path) -> None:
    """A pickle that would make a file when it is loaded as torch once loaded it."""

    class Attack:
        def __reduce__(self) -> Any:
            return Path.touch, (directory / "executed",)

    for file in directory.glob("model*"):
        file.unlink()
    torch.save({"lm_head.weight": Attack()}, directory / "pytorch_model.bin")


BAD: dict[str, tuple[Any, str]] = {
    "shard missing": (remove_shard, "model-00002-of-.* is missing; model.safetensors.index.json names it for"),
    "shard cut off": (cut_shard, "was cut off or is damaged, download it again"),
    "shard elsewhere": (escape, "names the file '../model.safetensors' outside of"),
    "code": (add_code, "pytorch_model.bin cannot be used: refused class"),
    "unknown": (
        lambda d: change_config(d, model_type="lama"),
        "models of the type lama are not known; the nearest name is .*; known are gpt2, llama, ",
    ),
    "narrower": (
        lambda d: change_config(d, intermediate_size=40),
        r"model.layers.0.mlp.gate_proj.weight is \(48, 72\) in model-.*, and config.json makes it \(40, 72\)",
    ),
    "more layers": (lambda d: change_config(d, num_hidden_layers=5), "model.layers.4.* is missing"),
    "tied": (lambda d: change_config(d, attention_bias=True), "attention_bias is True in its config.json; only False"),
    "heads": (lambda d: change_config(d, num_attention_heads="six"), "num_attention_heads is .six. in its config.json"),
    "no number": (lambda d: change_config(d, vocab_size=None), "vocab_size is None; it must be the number of"),
    "quantised": (lambda d: change_config(d, quantization_config={}), "has a quantization_config with the method None"),
    "quantised by a number": (
        lambda d: change_config(d, quantization_config=2**63),
        "quantization_config is '9223372036854775808'; it must be an object with a quant_method, or null",
    ),
    "quantised vector": (
        lambda d: rewrite_weights(d, lambda w: w.to(torch.float8_e4m3fn) if w.dim() == 1 else w, quant_method="fp8",
                                  weight_block_size=[128, 128]),
        r"layernorm.weight is \(72,\); weights in blocks of FP8 are matrices",
    ),
    "index": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": 5}'),
        "index.json has no weight_map with the file of each tensor",
    ),
    "no scales": (
        lambda d: rewrite_weights(d, lambda w: w.to(torch.float8_e4m3fn) if w.dim() == 2 else w, quant_method="fp8",
                                  weight_block_size=[128, 128]),
        "lm_head.weight has no lm_head.weight_scale_inv beside it; download the directory again",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
    "empty config": (lambda d: (d / "config.json").write_text("[]"), "config.json holds a list; it must hold"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_directories(
    name: str, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, exit code 2, nothing executed and nothing left behind."""
    spoil, message = BAD[name]
    spoil(copied)
    assert convert(monkeypatch, copied, copied.parent / "ours", "hf megatron") == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert [entry.name for entry in copied.parent.iterdir()] == ["hf"]
    assert not (copied / "executed").exists()


def test_sizes_and_paths_are_checked(
    hf_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--tensor-model-parallel-size", "4"], "--num-attention-heads 6 cannot be split over"),
        (["--pipeline-model-parallel-size", "3"], "--num-layers 4"),
        (["--target-tp", "0"], "--target-tp 0 must be at least 1"),
        (["--ckpt-step", "3"], "--ckpt-step 3 chooses a checkpoint, and --source hf has none"),
    ):
        assert convert(monkeypatch, hf_directory, tmp_path / "ours", "hf megatron", *flags) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "notes.txt").touch()
    assert convert(monkeypatch, hf_directory, tmp_path / "ours", "hf megatron") == 2
    assert "ours is not empty; give a directory that does not exist yet" in capsys.readouterr().err
    for source, message in (
        (tmp_path / "ours", "ours holds no checkpoint; give a directory that --save has written"),
        (tmp_path / "none", f"--input-path {tmp_path}/none does not exist; give the directory to convert"),
        (
            hf_directory,
            "is a model of Hugging Face, not a checkpoint of a run; training starts from it with --load hf:",
        ),
    ):
        assert convert(monkeypatch, source, tmp_path / "back", "megatron hf") == 2
        assert message in capsys.readouterr().err
    (tmp_path / "run" / "iter_0000001").mkdir(parents=True)
    assert convert(monkeypatch, tmp_path / "run", tmp_path / "back", "hf megatron") == 2
    assert "run holds checkpoints, not a model of Hugging Face; give --source megatron" in capsys.readouterr().err


def test_a_result_that_is_not_the_source_is_found(hf_directory: Path, tmp_path: Path) -> None:
    """Verification can fail, and then leaves nothing behind."""
    source = open_source(hf_directory)
    reads = 0

    def read_once_right(name: str) -> Tensor:
        nonlocal reads
        reads += name == "lm_head.weight"
        tensor = source.tensors.read(name)
        return tensor + 1 if name == "lm_head.weight" and reads > 1 else tensor

    changed = SimpleNamespace(contents=source.tensors.contents, read=read_once_right)
    with pytest.raises(CheckpointError, match=r"1 tensors differ: lm_head.weight differs by up to 1\.00e\+00"):
        import_model(dataclasses.replace(source, tensors=changed), tmp_path / "ours")
    assert list(tmp_path.iterdir()) == []


def test_looking_at_a_model_takes_no_memory(hf_directory: Path) -> None:
    model = build_empty_model(open_source(hf_directory).config, 1009)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_settings_that_no_family_has_are_refused() -> None:
    config = read_config("--normalization RMSNorm --swiglu --position-embedding-type rope --add-qkv-bias")
    with pytest.raises(ConfigError, match=r"no model of Hugging Face transformers .* the closest is .*, which has --"):
        build_config_json(config, 64, torch.float32)


def test_a_refused_model_is_told_by_its_own_settings() -> None:
    # Not by flags that only the family's own config.json stands for, nor in words about a checkpoint.
    told = r"(?!.*(checkpoint|needs)).* the closest is .*--position-embedding-type rope \(here learned_absolute\)"
    with pytest.raises(ConfigError, match=f"^{told}"):
        build_config_json(read_config("--swiglu --disable-bias-linear --num-experts 4"), 64, torch.float32)
