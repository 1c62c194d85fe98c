# SPDX-License-Identifier: Apache-2.0
"""Weights in FP8 and MXFP4 are read as what their definition says, bit for bit, whole and by parts."""

from __future__ import annotations

import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.fp8 import quantise_blocks
from megatron.hf import conversion
from megatron.hf.auto_bridge import AutoBridge
from megatron.hf.conversion import export_model, import_model, open_model, open_source
from megatron.hf.convert import convert, parse_arguments
from megatron.hf.quantised import DequantisedTensors
from megatron.hf.tensor_files import open_tensors, plan_files, write_tensors
from tests.unit.hf.test_bridge import MODELS, assert_same_tensors, change_config, make_model, read_all

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def write(directory: Path, tensors: dict[str, Tensor]) -> Path:
    for file in directory.glob("model*"):
        file.unlink()
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_tensors(directory, shapes, iter(tensors.items()))
    return directory


def bfloat16(value: float) -> float:
    """The nearest number in bfloat16."""
    return torch.tensor(value, dtype=torch.float32).bfloat16().item()


def fp8_value(byte: int) -> float:
    """E4M3 without infinities: sign, exponent (bias 7), mantissa; subnormal below 2 ** -6."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, (byte >> 3) & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp4_value(bits: int) -> float:
    """E2M1: sign, exponent (bias 1), mantissa; subnormal below 1."""
    sign, exponent, mantissa = -1.0 if bits >> 3 else 1.0, (bits >> 1) & 3, bits & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1))


def assert_same_values(found: Tensor, expected: list[Any]) -> None:
    values = torch.tensor(expected)
    assert found.shape == values.shape and found.dtype == torch.bfloat16
    # A sign of zero counts, too; there is one NaN.
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found.float().nan_to_num(), values.nan_to_num())
    assert torch.equal(found.signbit()[~found.isnan()], values.signbit()[~values.isnan()])


def test_fp8_blocks(tmp_path: Path) -> None:
    """All 256 values, and blocks that the matrix cuts off."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.arange(130 * 140).reshape(130, 140).to(torch.uint8)
    scales = torch.rand(2, 2, generator=generator) * 0.1
    stored = {"w": weight.view(torch.float8_e4m3fn), "w_scale_inv": scales, "norm": torch.ones(3)}
    tensors = DequantisedTensors(open_tensors(write(tmp_path, stored)), FP8, tmp_path / "config.json")
    assert set(tensors.contents) == {"w", "norm"}
    expected = [
        [
            bfloat16(torch.tensor(fp8_value(int(weight[i, j]))).mul(scales[i // 128, j // 128]).item())
            for j in range(140)
        ]
        for i in range(130)
    ]
    assert_same_values(tensors.read("w"), expected)
    assert_same_values(tensors.read_box("w", ((120, 10), (3, 130))), [row[3:133] for row in expected[120:]])
    assert torch.equal(tensors.read("norm"), stored["norm"])


def test_mxfp4_blocks(tmp_path: Path) -> None:
    """All 16 values, scales from the smallest to the one that means no number; theirs is transposed in memory."""
    packed = torch.arange(2 * 6 * 2 * 16).reshape(2, 6, 2, 16).mul(7).to(torch.uint8)
    scales = torch.tensor([0, 1, 3, 100, 120, 126, 127, 128, 130, 140, 200, 250, 254, 255] * 2)[:24].reshape(2, 6, 2)
    stored = {"w_blocks": packed, "w_scales": scales.to(torch.uint8), "w_bias": torch.ones(2, 6)}
    tensors = DequantisedTensors(open_tensors(write(tmp_path, stored)), MXFP4, tmp_path / "config.json")
    assert set(tensors.contents) == {"w", "w_bias"} and tensors.contents["w"].shape == (2, 64, 6)

    def value(expert: int, column: int, row: int) -> float:
        block, place = divmod(column, 32)
        byte, scale = int(packed[expert, row, block, place // 2]), int(scales[expert, row, block])
        if scale == 255:
            return math.nan
        return bfloat16(fp4_value(byte >> 4 if place % 2 else byte & 15) * 2.0 ** (scale - 127))

    expected = [[[value(expert, column, row) for row in range(6)] for column in range(64)] for expert in range(2)]
    assert_same_values(tensors.read("w"), expected)
    random_numbers = random.Random(1)
    for _ in range(10):
        box = tuple((start := random_numbers.randrange(n), random_numbers.randint(1, n - start)) for n in (2, 64, 6))
        (e, m), (c, n), (r, k) = box
        part = [[line[r : r + k] for line in expert[c : c + n]] for expert in expected[e : e + m]]
        assert_same_values(tensors.read_box("w", box), part)


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    blocks = {"w_blocks": torch.zeros(4, 2, 16, dtype=torch.uint8)}
    for stored, quantisation, message in (
        (blocks, MXFP4, "w_blocks has no w_scales beside it"),
        (
            blocks | {"w_scales": torch.zeros(4, 3, dtype=torch.uint8)},
            MXFP4,
            r"w_scales is \(4, 3\); .* needs \(4, 2\)",
        ),
        ({"w_blocks": torch.zeros(4, 2, 8, dtype=torch.uint8)}, MXFP4, "blocks of MXFP4 have 16 bytes"),
        ({"w_blocks": torch.zeros(16, dtype=torch.uint8)}, MXFP4, "blocks of MXFP4 have 16 bytes"),
        (blocks, {"quant_method": "gptq"}, "method 'gptq'; known are 'fp8' with a weight_block_size, and 'mxfp4'"),
        (blocks, {"quant_method": "fp8"}, "method 'fp8'; known are"),
    ):
        with pytest.raises(CheckpointError, match=message):
            DequantisedTensors(open_tensors(write(tmp_path, stored)), quantisation, tmp_path / "config.json")


def quantise_gpt_oss(directory: Path) -> None:
    """Random blocks and scales in the place of the experts' matrices."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: tensor.bfloat16() for name, tensor in read_all(directory).items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
    write(directory, tensors)
    change_config(directory, quantization_config=MXFP4)


def test_a_quantised_model_is_imported(tmp_path: Path) -> None:
    """gpt-oss as it is published; what comes back is the same model in bfloat16, and says so."""
    make_model("gpt-oss, 32").save_pretrained(tmp_path / "hf")
    quantise_gpt_oss(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    assert source.notes == ["8 tensors stored as mxfp4 are read as bfloat16"]
    import_model(source, tmp_path / "ours")
    export_model(open_model(tmp_path / "ours"), tmp_path / "back")
    assert_same_tensors(
        read_all(tmp_path / "back"), {name: source.tensors.read(name) for name in source.tensors.contents}
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    bridge.to_megatron()
    bridge.save_hf(tmp_path / "saved")
    assert_same_tensors(read_all(tmp_path / "saved"), read_all(tmp_path / "back"))
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    # As transformers dequantises them.
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    stored = open_tensors(tmp_path / "hf")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    theirs = _convert_moe_packed_tensors(stored.read(f"{name}_blocks"), stored.read(f"{name}_scales"))
    assert torch.equal(theirs, source.tensors.read(name))


@pytest.mark.parametrize("name", ["DeepSeek V3", "Llama"])
def test_a_model_is_written_in_fp8_and_read_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those that training with --fp8-recipe blockwise multiplies, and a second time loses nothing."""
    name = next(found for found in MODELS if found.startswith(name))
    make_model(name).bfloat16().save_pretrained(tmp_path / "hf")
    import_model(open_source(tmp_path / "hf"), tmp_path / "ours")
    monkeypatch.setattr(conversion, "plan_files", functools.partial(plan_files, shard_bytes=20_000))
    export_model(open_model(tmp_path / "ours"), tmp_path / "fp8", weight_format="fp8-block")
    assert len(list((tmp_path / "fp8").glob("model-*.safetensors"))) > 2, "scales may lie in another file"
    plain, written = read_all(tmp_path / "hf"), read_all(tmp_path / "fp8")
    rounded = {key for key, tensor in written.items() if tensor.dtype == torch.float8_e4m3fn}
    assert set(written) == set(plain) | {f"{key}_scale_inv" for key in rounded}
    left = {key for key, tensor in plain.items() if tensor.dim() == 2} - rounded
    assert all(key.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")) for key in left), left
    for key, tensor in plain.items():
        if key not in rounded:
            assert torch.equal(written[key], tensor)
            continue
        expected = quantise_blocks(tensor, torch.float8_e4m3fn, (128, 128))
        assert torch.equal(written[key].view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(written[f"{key}_scale_inv"], expected.inverse)
    quantisation = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    others = {key.removesuffix(".weight") for key in left if "embed" not in key}
    assert set(quantisation.pop("modules_to_not_convert")) == others and "lm_head" in others
    assert quantisation == FP8
    source = open_source(tmp_path / "fp8")
    assert f"{len(rounded)} tensors stored as fp8 are read as bfloat16" in source.notes
    import_model(source, tmp_path / "again")
    export_model(open_model(tmp_path / "again"), tmp_path / "twice", weight_format="fp8-block")
    read = {key: open_source(tmp_path / "twice").tensors.read(key) for key in plain}
    assert_same_tensors(read, {key: source.tensors.read(key) for key in plain})


def test_fp8_weights_are_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_model(next(found for found in MODELS if found.startswith("Llama"))).save_pretrained(tmp_path / "hf")
    import_model(open_source(tmp_path / "hf"), tmp_path / "ours")
    command = ["--source", "megatron", "--target", "hf", "--input-path", str(tmp_path / "ours"), "--fp8-weights"]
    convert(parse_arguments([*command, "--output-path", str(tmp_path / "fp8")]))
    assert "every weight bit for bit as it is rounded" in capfd.readouterr().out
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in read_all(tmp_path / "fp8").values())
    with pytest.raises(ConfigError, match="--fp8-weights is a format of --target hf"):
        parse_arguments("--source hf --target megatron --input-path a --output-path b --fp8-weights".split())
