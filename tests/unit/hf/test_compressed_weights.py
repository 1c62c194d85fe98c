# SPDX-License-Identifier: Apache-2.0
"""convert --weight-format: what transformers and compressed-tensors read is what the emulation of training has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.fp4 import quantise_nvfp4
from megatron.core.fp8 import E4M3, quantise_blocks
from megatron.hf.conversion import import_model, open_source
from megatron.hf.convert import WEIGHT_FORMATS, convert, parse_arguments
from megatron.hf.tensor_files import open_tensors
from tests.support.huggingface_models import randomised

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in `hf`, with a row of zeros, and as a checkpoint in `ours`."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("compressed")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    llama = randomised(transformers.LlamaForCausalLM(config))
    with torch.no_grad():
        llama.model.layers[0].mlp.up_proj.weight[3] = 0
    llama.save_pretrained(directory / "hf")
    import_model(open_source(directory / "hf"), directory / "ours", verify=False)
    return directory


def round_like_training(weight: Tensor, kind: str) -> Tensor:
    """The values that stand for a weight, by the definition of the format."""
    if kind == "fp8-block":
        return quantise_blocks(weight, E4M3, (128, 128)).dequantise()
    if kind == "nvfp4":
        # The reader rounds the product of its two scales and the value to bfloat16, whatever the model computes in.
        return quantise_nvfp4(weight, (1, 16)).dequantise().bfloat16().float()
    if kind == "mxfp4":
        blocks = weight.unflatten(1, (-1, 32))
        scale = 2.0 ** (torch.log2(blocks.abs().amax(2, keepdim=True)).floor() - 2)
        scale = torch.where(blocks.abs().amax(2, keepdim=True) > 0, scale, 1.0)
        nearest = _E2M1[((blocks / scale).abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)]
        return (nearest.copysign(blocks) * scale).flatten(1)
    amax = weight.abs().amax() if kind == "fp8-tensor" else weight.abs().amax(1, keepdim=True)
    scale = torch.where(amax > 0, amax / 448, 1.0)
    return (weight / scale).to(E4M3).float() * scale


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_the_reader_computes_with_the_values_of_the_emulation(model: Path, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if kind != "fp8-block":
        pytest.importorskip("compressed_tensors")
    places = ["--input-path", str(model / "ours"), "--output-path", str(tmp_path / kind)]
    convert(parse_arguments(["--source", "megatron", "--target", "hf", *places, "--weight-format", kind]))
    emulated = transformers.LlamaForCausalLM.from_pretrained(model / "hf", dtype=torch.float32)
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        exact = emulated(tokens).logits
        for parameter in emulated.model.layers.parameters():
            if parameter.dim() == 2:
                parameter.copy_(round_like_training(parameter, kind))
        expected = emulated(tokens).logits
        blocks = kind == "fp8-block"
        reading = (transformers.FineGrainedFP8Config if blocks else transformers.CompressedTensorsConfig)(
            dequantize=True
        )
        read = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / kind, quantization_config=reading, dtype=torch.float32
        )
        found = read(tokens).logits
    assert (expected - exact).abs().max() > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    stored = open_tensors(tmp_path / kind).contents
    said = json.loads((tmp_path / kind / "config.json").read_text())["quantization_config"]
    assert (
        said["modules_to_not_convert" if blocks else "ignore"] == ["lm_head"]
        and stored["lm_head.weight"].dtype == torch.float32
    )
    bits = {str(tensor.dtype) for name, tensor in stored.items() if "q_proj.weight" in name and "scale" not in name}
    assert bits == {"torch.float8_e4m3fn" if kind.startswith("fp8") else "torch.uint8"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--target megatron --weight-format nvfp4", "--weight-format is a format of --target hf"),
        ("--target hf --fp8-weights --weight-format nvfp4", "--fp8-weights is --weight-format fp8-block, and nvfp4"),
        (
            "--target hf --adapter --weight-format nvfp4",
            "--adapter writes no weights of the model; leave --weight-form",
        ),
        ("--target hf --weight-format int3", "invalid choice: 'int3'"),
    ],
)
def test_formats_that_contradict_are_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_arguments(f"--source megatron --input-path a --output-path b {words}".split())


def test_experts_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "hf")
    import_model(open_source(tmp_path / "hf"), tmp_path / "ours", verify=False)
    places = ["--input-path", str(tmp_path / "ours"), "--output-path", str(tmp_path / "out")]
    with pytest.raises(
        ConfigError, match="this model has experts, which readers join .*give --weight-format fp8-block"
    ):
        convert(parse_arguments(["--source", "megatron", "--target", "hf", *places, "--weight-format", "nvfp4"]))
    assert not (tmp_path / "out").exists()
