# SPDX-License-Identifier: Apache-2.0
"""What docs/conversion.md shows beside the commands: scripts, and a family of one's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.hf.tensor_files import write_tensors
from megatron.training.checkpoint.trained_model import load_trained_model
from tests.support.huggingface_models import token_ids
from tests.unit.hf.test_bridge import assert_same_tensors, convert, make, read_all

ROOT = Path(__file__).parents[3]


def test_documented_scripts(tmp_path: Path) -> None:
    """Those of docs/conversion.md; a variable or a file that is missing is one sentence, and nothing starts."""
    make("Llama").save_pretrained(tmp_path / "Llama-3.1-8B")
    text = (ROOT / "docs" / "conversion.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(.*) bash (tools/checkpoint/convert_\w+.sh)$", text, flags=re.MULTILINE)
    assert len(commands) == 2

    def run(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MEGATRON_DEVICE": "cpu"}
        return subprocess.run(
            ["bash", str(ROOT / script), *words], cwd=tmp_path, env=environment | variables, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip

    (to_megatron, there), (to_hf, back) = [
        (script, dict(v.split("=") for v in words.split())) for words, script in commands
    ]
    for script, variables, message in (
        (to_megatron, {}, "HF_DIR is not set"),
        (to_megatron, {"HF_DIR": "x"}, "MEGATRON_DIR is not set"),
        (to_megatron, {"HF_DIR": "x", "MEGATRON_DIR": "y"}, "HF_DIR=x has no config.json"),
        (to_megatron, there | {"TP": "two"}, "TP=two is no whole number"),
        (to_hf, {}, "MEGATRON_DIR is not set"),
        (to_hf, {"MEGATRON_DIR": "x"}, "HF_DIR is not set"),
        (to_hf, back, "MEGATRON_DIR=llama-3 is no directory"),
        (to_hf, back | {"MEGATRON_DIR": ".", "ITERATION": "last"}, "ITERATION=last is no whole number"),
    ):
        refused = run(script, **variables)
        assert refused.returncode == 2 and re.fullmatch(f"error: {message}.*\n", refused.stderr), refused.stderr
    for script, variables in ((to_megatron, there | {"TP": "2"}), (to_hf, back)):
        done = run(script, "--no-verify", **variables)
        assert done.returncode == 0, done.stderr
    assert_same_tensors(read_all(tmp_path / "llama-3-hf"), read_all(tmp_path / "Llama-3.1-8B"))


TINY_NAMES = {
    "model.embed_tokens": "tokens", "model.norm": "norm", "lm_head": "head", "model.layers": "blocks",
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.o_proj": "out", "mlp.down_proj": "down",
    "mlp.gate_proj": "gate", "mlp.up_proj": "up", **{f"self_attn.{x}_proj": x for x in "qkv"},
}  # fmt: skip


def test_a_documented_family_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of docs/conversion.md, both ways: the model is the Llama that its weights come from."""
    text = (ROOT / "docs" / "conversion.md").read_text(encoding="utf-8")
    (tmp_path / "tiny_gpt.py").write_text(
        text.split("## A family of one's own")[1].split("```python\n")[1].split("```")[0]
    )
    llama = make("Llama", num_key_value_heads=4, rms_norm_eps=1e-5)
    llama.save_pretrained(tmp_path / "llama")
    theirs = tmp_path / "tiny"
    theirs.mkdir()
    tensors = read_all(tmp_path / "llama")
    for long, short in TINY_NAMES.items():
        tensors = {re.sub(rf"\b{re.escape(long)}\b", short, name): tensor for name, tensor in tensors.items()}
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_tensors(theirs, shapes, iter(tensors.items()))
    fields = {"depth": 4, "width": 32, "inner_width": 48, "heads": 4, "max_position_embeddings": 64, "vocab_size": 96}
    (theirs / "config.json").write_text(json.dumps({"model_type": "tiny_gpt", **fields}))

    own = ("--family", str(tmp_path / "tiny_gpt.py"))
    assert convert(monkeypatch, theirs, tmp_path / "ours", "hf megatron") == 2
    assert "models of the type tiny_gpt are not known" in capsys.readouterr().err
    assert convert(monkeypatch, theirs, tmp_path / "ours", "hf megatron", *own) == 0
    assert convert(monkeypatch, tmp_path / "ours", tmp_path / "back", "megatron hf", *own) == 0
    assert_same_tensors(read_all(tmp_path / "back"), tensors)
    ids = token_ids()
    trained = load_trained_model(tmp_path / "ours").model(ids, torch.arange(ids.shape[1]).expand_as(ids))
    torch.testing.assert_close(trained[..., :96], llama(input_ids=ids, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    assert load_trained_model(tmp_path / "ours").config.gpt.rotary_base == 10000

    (tmp_path / "empty.py").write_text("FAMILY = 3\n")
    for name, message in (
        ("empty.py", "has no FAMILY that is a Family"),
        ("none.py", "is no file"),
        ("ours", "is no file"),
    ):
        assert convert(monkeypatch, theirs, tmp_path / "x", "hf megatron", "--family", str(tmp_path / name)) == 2
        assert message in capsys.readouterr().err
