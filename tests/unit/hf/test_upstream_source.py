# SPDX-License-Identifier: Apache-2.0
"""megatron.bridge.convert on checkpoints in upstream's formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_training import train_tiny
from tests.unit.hf.test_bridge import assert_same_tensors, convert, read_all


def test_what_upstream_saved_is_converted_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same model in our format and in two of upstream's: each becomes the same, without its rows of padding."""
    llama = """--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --train-iters 1
        --untie-embeddings-and-output-weights --ffn-hidden-size 40 --num-layers 3""".split()
    for kind in ("torch_dist", "upstream_torch_dist", "torch"):
        train_tiny(*llama, "--ckpt-format", kind, "--save", tmp_path / kind)
        assert convert(monkeypatch, tmp_path / kind, tmp_path / f"{kind} hf", "megatron hf") == 0
        assert "verified: every weight bit for bit; logits of 48" in capsys.readouterr().out
        found, expected = (read_all(tmp_path / f"{name} hf") for name in (kind, "torch_dist"))
        assert_same_tensors(found, expected)
        assert len(found["lm_head.weight"]) == 50
    assert len(list(tmp_path.iterdir())) == 6, "nothing else is left"
    source = tmp_path / "upstream_torch_dist"
    assert convert(monkeypatch, source, tmp_path / "ours", "megatron megatron", "--target-tp", "2") == 0
    assert convert(monkeypatch, tmp_path / "ours", tmp_path / "back", "megatron hf") == 0
    assert_same_tensors(read_all(tmp_path / "back"), expected)
    ranks = ("--target-tp", "2", "--ckpt-format", "torch")
    assert convert(monkeypatch, source, tmp_path / "ranks", "megatron megatron", *ranks) == 0
    assert len(list((tmp_path / "ranks").glob("release/mp_rank_0*/*.pt"))) == 2
    file = next(source.glob("iter_*/*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert convert(monkeypatch, source, tmp_path / "damaged", "megatron hf") == 2
    assert f"{file.name} is damaged" in capsys.readouterr().err and not (tmp_path / "damaged").exists()
