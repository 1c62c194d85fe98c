# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 or 4 bits with scales: read as the bfloat16 values that they stand for, and written in 8 bits.

    fp8     NAME [m, n] in E4M3, NAME_scale_inv [m / 128, n / 128]: each block of 128 x 128 times its scale
            (DeepSeek-V3, 2024, section 3.3)
    mxfp4   NAME_blocks [..., m, n / 32, 16], NAME_scales [..., m, n / 32]: two E2M1 numbers in a byte, the lower half
            first, times two to the power of scale - 127 (OCP Microscaling Formats, 1.0, 2023; gpt-oss). In memory, and
            in files that are not quantised, NAME is [..., n, m]

Products are taken in float32 and rounded once. Whatever else is in the files stays as it is. Written scales are powers
of two, as in training with --fp8-recipe blockwise: read again, the values are exact in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from megatron.core.errors import CheckpointError
from megatron.core.fp8 import E4M3, SCALED_BLOCK, quantise_blocks
from megatron.core.placement import Box
from megatron.hf.entries import Entry, list_their_shapes
from megatron.hf.tensor_files import HFTensor, Shapes, TensorDirectory

SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MX_BLOCK = 32
_NO_NUMBER = 255
"""The scale of a block that holds no numbers."""


class FP8Weights:
    """Weights that are written in FP8 with their scales: matrices of linear layers, one tensor each."""

    block: Final = (SCALED_BLOCK, SCALED_BLOCK)

    def __init__(self, entries: Iterable[Entry]) -> None:
        kinds = {
            name: entry.placement.kind
            for entry in entries
            for name, shape in list_their_shapes([entry]).items()
            if len(shape) == 2
        }
        self.names = {name for name, kind in kinds.items() if kind == "matrix"}
        # Readers of the files take these for linear layers, too: the output layer and routers.
        others = (name for name, kind in kinds.items() if kind not in ("matrix", "embedding"))
        self._others = [name.removesuffix(".weight") for name in others]

    def list_shapes(self, shapes: Shapes) -> Shapes:
        """Of what is written; shapes: of the weights."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (dtype, shape) in shapes.items():
            found[name] = (E4M3 if name in self.names else dtype, shape)
            if name in self.names:
                found[name + SCALE] = (torch.float32, tuple(-(-length // SCALED_BLOCK) for length in shape))
        return found

    def store(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what is written of a weight: itself, or its 8 bits and what they are to be multiplied by."""
        if name not in self.names:
            yield name, tensor
            return
        rounded = quantise_blocks(tensor, E4M3, self.block)
        yield name, rounded.values.contiguous()
        yield name + SCALE, rounded.inverse

    def describe(self) -> dict[str, object]:
        """The `quantization_config` of config.json."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": self._others,
        }


class DequantisedTensors:
    """The weights of a directory as if they were stored in bfloat16; see `TensorDirectory`."""

    def __init__(self, stored: TensorDirectory, quantisation: Any, where: Path) -> None:
        """quantisation: the `quantization_config` of the config.json `where`. Raises CheckpointError for what is none,
        for a method that is not known, and for scales that are missing or have another shape."""
        self._stored = stored
        self._readers: dict[str, Callable[[str, Box], Tensor]] = {}
        self._block = (0, 0)
        self.contents: Mapping[str, HFTensor] = {}
        """The tensors by the names that they have where nothing is quantised."""
        self.note = ""
        """A sentence about what is done."""
        if not isinstance(quantisation, Mapping):
            raise CheckpointError(
                f"{where}: quantization_config is {str(quantisation)[:40]!r}; it must be an object with a "
                "quant_method, or null"
            )
        method = quantisation.get("quant_method")
        if method == "fp8" and _is_block_size(quantisation.get("weight_block_size")):
            self._block = tuple(quantisation["weight_block_size"])
            self.contents = self._list_fp8()
        elif method == "mxfp4":
            self.contents = self._list_mxfp4()
        else:
            raise CheckpointError(
                f"{where} has a quantization_config with the method {method!r}; known are 'fp8' with a "
                "weight_block_size, and 'mxfp4': give a directory with weights that are not quantised"
            )
        self.note = f"{len(self._readers)} tensors stored as {method} are read as bfloat16"

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises CheckpointError."""
        return self.read_box(name, tuple((0, length) for length in self.contents[name].shape))

    def read_box(self, name: str, box: Box) -> Tensor:
        """A part of a tensor: (start, length) for each dimension."""
        return self._readers.get(name, self._stored.read_box)(name, box)

    # ---- FP8

    def _list_fp8(self) -> dict[str, HFTensor]:
        found = {}
        for name, tensor in self._stored.contents.items():
            if name.endswith(SCALE) and name.removesuffix(SCALE) in self._stored.contents:
                continue
            if tensor.dtype == torch.float8_e4m3fn:
                if len(tensor.shape) != 2:
                    raise CheckpointError(
                        f"{tensor.file}: {name} is {tensor.shape}; weights in blocks of FP8 are matrices"
                    )
                blocks = tuple(math.ceil(n / b) for n, b in zip(tensor.shape, self._block, strict=True))
                self._require(name + SCALE, blocks, name)
                self._readers[name] = self._read_fp8
                tensor = tensor._replace(dtype=torch.bfloat16)
            found[name] = tensor
        return found

    def _read_fp8(self, name: str, box: Box) -> Tensor:
        values = self._stored.read_box(name, box).float()
        scales = self._stored.read(name + SCALE).float()
        for dim, ((start, length), block) in enumerate(zip(box, self._block, strict=True)):
            scales = scales.index_select(dim, torch.arange(start, start + length) // block)
        return values.mul_(scales).to(torch.bfloat16)

    # ---- MXFP4

    def _list_mxfp4(self) -> dict[str, HFTensor]:
        found = {}
        for stored_name, tensor in self._stored.contents.items():
            name = stored_name.removesuffix(_BLOCKS)
            if stored_name.endswith(_SCALES) and stored_name.removesuffix(_SCALES) + _BLOCKS in self._stored.contents:
                continue
            if name != stored_name and tensor.dtype == torch.uint8:
                if len(tensor.shape) < 3 or 2 * tensor.shape[-1] != _MX_BLOCK:
                    raise CheckpointError(
                        f"{tensor.file}: {stored_name} is {tensor.shape}, and not [..., rows, blocks, bytes]; "
                        f"blocks of MXFP4 have {_MX_BLOCK // 2} bytes"
                    )
                *leading, rows, groups, _ = tensor.shape
                self._require(name + _SCALES, (*leading, rows, groups), stored_name)
                self._readers[name] = self._read_mxfp4
                tensor = tensor._replace(dtype=torch.bfloat16, shape=(*leading, groups * _MX_BLOCK, rows))
            found[name] = tensor
        return found

    def _read_mxfp4(self, name: str, box: Box) -> Tensor:
        *leading, (start, length), rows = box
        first, last = start // _MX_BLOCK, math.ceil((start + length) / _MX_BLOCK)
        groups = (*leading, rows, (first, last - first))
        packed = self._stored.read_box(name + _BLOCKS, (*groups, (0, _MX_BLOCK // 2)))
        exponents = self._stored.read_box(name + _SCALES, groups).to(torch.int32)
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        values = table[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()]  # [..., rows, groups, 32]
        values = torch.ldexp(values, (exponents - 127).unsqueeze(-1))
        values = values.masked_fill_((exponents == _NO_NUMBER).unsqueeze(-1), math.nan)
        columns = values.to(torch.bfloat16).flatten(-2).narrow(-1, start - first * _MX_BLOCK, length)
        return columns.transpose(-1, -2).contiguous()

    def _require(self, scales: str, shape: tuple[int, ...], weight: str) -> None:
        file = self._stored.contents[weight].file
        found = self._stored.contents.get(scales)
        if found is None:
            raise CheckpointError(f"{file}: {weight} has no {scales} beside it; download the directory again")
        if found.shape != shape:
            raise CheckpointError(f"{found.file}: {scales} is {found.shape}; {weight} needs {shape}")


def _is_block_size(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)
