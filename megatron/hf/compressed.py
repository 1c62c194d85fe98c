# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 or 4 bits as compressed-tensors, and servers with its formats, read them.

    fp8-tensor    NAME.weight [m, n] in E4M3, NAME.weight_scale [1]: times it
    fp8-channel   the same with a scale for each row, [m, 1]
    nvfp4         NAME.weight_packed [m, n / 2], two E2M1 numbers in a byte, the lower half first;
                  NAME.weight_scale [m, n / 16] in E4M3: times it; NAME.weight_global_scale [1]: divided by it
    mxfp4         NAME.weight_packed, NAME.weight_scale [m, n / 32] uint8: times two to the power of it - 127

Only weights are rounded, by the same functions as in training with --fp8-format and --fp4-format. Sources: NVIDIA,
"Pretraining Large Language Models with NVFP4", 2025; OCP Microscaling Formats, 1.0, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.fp4 import quantise_nvfp4, round_to_e2m1
from megatron.core.fp8 import E4M3, compute_scale, find_amax, quantise_tensor
from megatron.hf.entries import Entry, list_their_shapes
from megatron.hf.tensor_files import Shapes

PACKED, SCALE, GLOBAL_SCALE = "_packed", "_scale", "_global_scale"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUPS = {"fp8-tensor": 1, "fp8-channel": 1, "nvfp4": 16, "mxfp4": 32}
_SCHEMES: Mapping[str, Mapping[str, object]] = {
    "fp8-tensor": {"num_bits": 8, "strategy": "tensor"},
    "fp8-channel": {"num_bits": 8, "strategy": "channel"},
    "nvfp4": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}


class CompressedWeights:
    """Weights that are written in such a format; see quantised.FP8Weights."""

    def __init__(self, entries: Sequence[Entry], kind: str) -> None:
        """Raises ConfigError for a model whose linear layers the format's readers take for others."""
        self._kind, self._group = kind, _GROUPS[kind]
        self.names: set[str] = set()
        self._others: list[str] = []
        for entry in entries:
            if entry.is_by_expert or entry.row.transposed:
                what = "experts, which readers join" if entry.is_by_expert else "layers with transposed weights"
                raise ConfigError(
                    f"--weight-format {kind}: this model has {what} ({entry.names[0][0]}); give --weight-format "
                    "fp8-block, or leave it out"
                )
            for name, shape in list_their_shapes([entry]).items():
                if len(shape) == 2 and entry.placement.kind != "embedding":
                    # Readers take every matrix for a linear layer of this format that is not named.
                    fits = entry.placement.kind == "matrix" and shape[1] % self._group == 0
                    self.names |= {name} if fits else set()
                    self._others += [] if fits else [name.removesuffix(".weight")]

    def list_shapes(self, shapes: Shapes) -> Shapes:
        """Of what is written; shapes: of the weights."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (dtype, shape) in shapes.items():
            # As many, and of the same kinds, for any values.
            written = self.store(name, torch.zeros(shape, dtype=dtype)) if name in self.names else ()
            found |= {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in written} or {name: (dtype, shape)}
        return found

    def store(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what is written of a weight: itself, or its rounded values and what they are to be multiplied by."""
        if name not in self.names:
            yield name, tensor
        elif self._kind.startswith("fp8"):
            amax = find_amax(tensor) if self._kind == "fp8-tensor" else tensor.abs().amax(1, keepdim=True).float()
            rounded = quantise_tensor(tensor, E4M3, compute_scale(amax, E4M3))
            yield name, rounded.values
            yield name + SCALE, rounded.inverse.reshape((1,) if self._kind == "fp8-tensor" else (-1, 1))
        elif self._kind == "nvfp4":
            rounded = quantise_nvfp4(tensor, (1, self._group))
            assert rounded.factor is not None
            yield name + PACKED, pack_e2m1(rounded.values.float())
            yield name + SCALE, rounded.inverse.to(E4M3)
            yield name + GLOBAL_SCALE, (1.0 / rounded.factor).reshape(1)
        else:
            values, exponents = round_to_mxfp4(tensor)
            yield name + PACKED, pack_e2m1(values)
            yield name + SCALE, (exponents + 127).to(torch.uint8)

    def describe(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        weights = {**_SCHEMES[self._kind], "type": "float", "symmetric": True, "dynamic": False}
        stored = "float-quantized" if self._kind.startswith("fp8") else f"{self._kind}-pack-quantized"
        group = {"targets": ["Linear"], "weights": weights, "format": stored}
        return {
            "quant_method": "compressed-tensors",
            "format": stored,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": self._others,
        }


def round_to_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [m, n] to MXFP4.

    Returns the E2M1 numbers in float32 and, of each 32 values of a row, the exponent of their factor, [m, n / 32]: the
    exponent of the greatest value, less 2, which is the one of E2M1's greatest number.
    """
    blocks = x.float().unflatten(-1, (-1, _GROUPS["mxfp4"]))
    # frexp's mantissas are below 1.
    exponents = torch.frexp(blocks.abs().amax(-1)).exponent.sub_(3).clamp_(-127, 127)
    return round_to_e2m1(torch.ldexp(blocks, -exponents.unsqueeze(-1))).flatten(-2), exponents


def pack_e2m1(values: Tensor) -> Tensor:
    """E2M1 numbers [m, n] in float32 -> two in a byte, [m, n / 2] uint8: 8 for minus, and the place among _VALUES."""
    codes = torch.searchsorted(torch.tensor(_VALUES, device=values.device), values.abs())
    codes = (codes + 8 * values.signbit()).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4
