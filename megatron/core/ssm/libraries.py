# SPDX-License-Identifier: Apache-2.0
"""Kernels of other packages for states and convolutions, where they are installed on a GPU, and their choice.

| package                       | computes                | of            | takes                              |
|-------------------------------|-------------------------|---------------|------------------------------------|
| flash-linear-attention (fla)  | chunk_gated_delta_rule  | G             | 16-bit numbers, keys of up to 256  |
|                               | chunk_kda               | K             | the same                           |
| mamba-ssm                     | the chunked scan        | M             | numbers of 16 and 32 bits          |
| causal-conv1d                 | convolution with SiLU   | all of them   | 8n channels of a rank, 2-4 tokens  |

They compute whole sequences from an empty state. Generation, pieces of a sequence whose states are handed over, and
what a package does not take are computed by our chunks and convolution; --attention-backend local and unfused, and
--deterministic-mode, choose these for everything.

Called as their published interfaces say; not yet run on a GPU: tests put stand-ins in their places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron.core.device import is_cuda
from megatron.core.errors import ConfigError
from megatron.core.kernels.launching import kernels_work
from megatron.core.optional_deps import require
from megatron.core.ssm.chunks import Inputs
from megatron.core.ssm.linear_attention import CHUNK, attend
from megatron.core.ssm.pieces import Pieces
from megatron.core.transformer.transformer_config import TransformerConfig

_16_BITS = (torch.bfloat16, torch.float16)
_WIDEST_KEY = 256
_SCAN_CHUNK = 128


class StateCall(NamedTuple):
    """Linear attention over whole sequences, from an empty state."""

    inputs: Inputs
    """See `attend`."""
    unit: tuple[float, float] | None
    """See `attend`."""
    pieces: Pieces
    """Of the sequences, with their documents."""
    rate: Tensor | None
    """[H], where decay is rate * strength (Mamba-2)."""


class States(ABC):
    """Computation of the states of a mixer."""

    name: str
    """For the log."""

    @abstractmethod
    def __call__(self, call: StateCall) -> tuple[Tensor, Tensor]:
        """The outputs [b, s, H, V], and the state after the last token [b, H, K, V]."""


class OwnStates(States):
    """Chunks by products of torch, and states from chunk to chunk by a kernel of ours on a GPU."""

    def __init__(self, device: torch.device, remark: str = "") -> None:
        """remark: why no package computes them, in words for the log."""
        by_kernel = ", states from one to the next by one kernel each way" if kernels_work(device) else ""
        self.name = f"chunks of {CHUNK} tokens by products of PyTorch{by_kernel}{remark}"

    def __call__(self, call: StateCall) -> tuple[Tensor, Tensor]:
        """See States."""
        return attend(call.inputs, documents=call.pieces.list_all_documents(), unit=call.unit)


class StateLibrary(States):
    """A function of a package."""

    package: ClassVar[str]
    module: ClassVar[str]
    function: ClassVar[str]
    number_formats: ClassVar[tuple[torch.dtype, ...]] = _16_BITS

    def __init__(self, own: OwnStates) -> None:
        """own: computes what this does not take. Raises ConfigError where the package cannot be imported."""
        self.name, self._own = f"{self.package}, {self.function}", own
        module = require(self.module, needed_by="mixers on a GPU")
        self._function: Callable[..., Any] = getattr(module, self.function)

    @classmethod
    def find_problem(cls, dtype: torch.dtype, key_width: int) -> str | None:
        """Return why it cannot compute mixers with such numbers and keys; None where it can."""
        if dtype not in cls.number_formats:
            return f"it does not take {str(dtype).removeprefix('torch.')}"
        return f"it takes keys of at most {_WIDEST_KEY} channels" if key_width > _WIDEST_KEY else None

    def __call__(self, call: StateCall) -> tuple[Tensor, Tensor]:
        """See States."""
        value = call.inputs.value
        takes = self.find_problem(value.dtype, call.inputs.key.shape[-1]) is None
        # Documents of one row: the bounds of packed sequences say nothing of others beside it.
        takes &= not call.pieces.has_documents or value.shape[0] == 1
        return self._compute(call) if takes and not torch.compiler.is_compiling() else self._own(call)

    @abstractmethod
    def _compute(self, call: StateCall) -> tuple[Tensor, Tensor]:
        """See States."""


class DeltaRuleLibrary(StateLibrary):
    """The gated delta rule by flash-linear-attention (Yang et al., 2024)."""

    package, module, function = "flash-linear-attention", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"

    def _compute(self, call: StateCall) -> tuple[Tensor, Tensor]:
        inputs, heads = call.inputs, call.inputs.value.shape[2]
        # A query and key for each value head: releases differ in whether heads may share them.
        query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (inputs.query, inputs.key))
        assert call.unit is not None and inputs.erase is not None
        output, state = self._function(
            query, key, inputs.value.contiguous(), g=inputs.log_decay.float().contiguous(),
            beta=inputs.erase.to(key.dtype).contiguous(), scale=call.unit[1], initial_state=None,
            output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=call.pieces.find_bounds(),
        )  # fmt: skip
        return output, state[-1:] if call.pieces.has_documents else state


class KimiDeltaLibrary(DeltaRuleLibrary):
    """Kimi delta attention by the same package."""

    module, function = "fla.ops.kda", "chunk_kda"


class ScanLibrary(StateLibrary):
    """Mamba-2 by mamba-ssm (Dao and Gu, 2024)."""

    package, module, function = "mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"
    number_formats = (*_16_BITS, torch.float32)

    def _compute(self, call: StateCall) -> tuple[Tensor, Tensor]:
        inputs, numbers = call.inputs, call.pieces.list_all_documents()
        output, state = self._function(
            inputs.value, inputs.strength, call.rate, inputs.key, inputs.query, chunk_size=_SCAN_CHUNK,
            seq_idx=None if numbers is None else numbers.int(), return_final_states=True,
        )  # fmt: skip
        return output, state.mT  # theirs is [b, H, V, K]


def choose_states(
    library: type[StateLibrary] | None,
    config: TransformerConfig,
    key_width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> States:
    """Return the computation of a mixer's states. library: that may; None where no package has such a rule."""
    if library is None or not is_cuda(device):
        return OwnStates(device)
    problem = _find_refusal(config) or library.find_problem(dtype, key_width)
    if problem is None:
        try:
            return library(OwnStates(device))
        except (AttributeError, ConfigError) as error:
            problem = str(error)
    return OwnStates(device, f" (not by {library.package}: {problem})")


class ConvolutionLibrary:
    """The causal convolution with SiLU of causal-conv1d."""

    package, module, function = "causal-conv1d", "causal_conv1d", "causal_conv1d_fn"

    def __init__(self) -> None:
        """Raises ConfigError where the package cannot be imported."""
        self._function: Callable[..., Tensor] = getattr(
            require(self.module, needed_by="mixers on a GPU"), self.function
        )

    @staticmethod
    def find_problem(channels: int, width: int) -> str | None:
        """Return why it cannot compute a convolution of so many channels over so many tokens; None where it can."""
        if width not in (2, 3, 4):
            return f"its filters read 2 to 4 tokens, not {width}"
        return None if channels % 8 == 0 else f"it takes multiples of 8 channels, not {channels}"

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Return whether it computes numbers of x's format."""
        return x.dtype in (*_16_BITS, torch.float32) and not torch.compiler.is_compiling()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
        """[s, b, c] -> [s, b, c]. weight: [c, width]; documents: int [1 or b, s]."""
        # It reads channels 16 bytes at a time, in rows that begin at multiples of 8 channels.
        strides = x.stride()
        if strides[2] != 1 or strides[0] % 8 or strides[1] % 8 or x.storage_offset() * x.element_size() % 16:
            x = x.contiguous()
        numbers = None if documents is None else documents.expand(x.shape[1], -1).int().contiguous()
        convolved = self._function(x.permute(1, 2, 0), weight, bias, seq_idx=numbers, activation="silu")
        return convolved.permute(2, 0, 1)


def choose_convolution(
    config: TransformerConfig, channels: int, width: int, device: torch.device
) -> tuple[ConvolutionLibrary | None, str]:
    """Return the package that computes the convolution of a mixer, None for ours, and a name for the log."""
    own = "some tokens at a time" if not is_cuda(device) else "elementary operations"
    if not is_cuda(device):
        return None, own
    package = ConvolutionLibrary.package
    problem = _find_refusal(config) or ConvolutionLibrary.find_problem(channels, width)
    if problem is None:
        try:
            return ConvolutionLibrary(), f"{package}, {ConvolutionLibrary.function}"
        except (AttributeError, ConfigError) as error:
            problem = str(error)
    return None, f"{own} (not by {package}: {problem})"


def _find_refusal(config: TransformerConfig) -> str | None:
    """Return the setting that chooses our implementation."""
    if config.attention_backend in ("local", "unfused"):
        return f"--attention-backend {config.attention_backend}"
    return "--deterministic-mode" if config.deterministic_mode else None
