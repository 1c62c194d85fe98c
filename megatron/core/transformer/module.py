# SPDX-License-Identifier: Apache-2.0
"""The base of every module of a transformer: it knows its config, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.placement import get_placement
from megatron.core.taken_arguments import take_arguments
from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(nn.Module):
    """An nn.Module with the TransformerConfig it was built from.

    Inside a layer it is told what surrounds its computation (execution/execution.py); by itself it keeps what it
    computes.
    """

    recomputable: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Parts of it that --recompute-modules may name -> names of the parts around them, which leave nothing to do."""
    recomputed: frozenset[str] = frozenset()
    """Parts of it that backward computes again."""
    offload: Callable[[str], AbstractContextManager[None]] = staticmethod(nullcontext)  # type: ignore[assignment]
    """`offload` of offloaded_activations.py, where its stage offloads parts of layers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # The same object in all modules: what is set on it later, such as a loss scale, is seen everywhere.
        self.config = config

    @take_arguments("prefix sharded_offsets=() metadata=...", "each layer has a key of its own")
    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        """The parameters as parts of the full model's parameters, for dist_checkpointing.save() and load().

        By prefix + name in this module, so that what load() returns fits load_state_dict() of the same module; the key
        of each ShardedTensor is prefix + name in the whole model, which does not depend on the layout.
        """
        return {
            # Read at the time of the call: placements are completed after construction (names, rows that are tokens).
            prefix + name: ShardedTensor.from_placement(param, get_placement(param, name), prefix=prefix)
            for name, param in self.named_parameters()
        }


class Float16Module(MegatronModule):
    """A model in half precision with a float32 interface: inputs are converted on the first stage, outputs on the last.

    config: bf16 or fp16 says which format; module: one pipeline chunk.
    """

    def __init__(self, config: Any, module: nn.Module) -> None:
        super().__init__(config)
        if config.fp16 == config.bf16:
            raise ValueError("Float16Module needs a config with either fp16 or bf16")
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        self.module = module
        # Layers of ours are made in the formats that the config asks for, a few numbers of float32 among them.
        if not any(hasattr(param, "placement") for param in module.parameters()):
            module.to(self.dtype)
        self.vp_stage = getattr(module, "vp_stage", None)

    def set_input_tensor(self, input_tensor: Any) -> Any:
        """As the wrapped module's."""
        inner: Any = self.module
        return inner.set_input_tensor(input_tensor)

    def forward(self, *inputs: Any, fp32_output: bool = True, **named_inputs: Any) -> Any:
        """The wrapped module's forward; fp32_output: floating-point results become float32 on the last stage."""
        inner: Any = self.module
        is_first, is_last = getattr(inner, "pre_process", True), getattr(inner, "post_process", True)
        if is_first:
            # What comes by name stays as it is: weights of tokens in the loss among it.
            inputs = _converted(inputs, self.dtype)
        outputs = inner(*inputs, **named_inputs)
        return _converted(outputs, torch.float32) if is_last and fp32_output else outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, without a prefix of ours."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """As state_dict()."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module."""
        return self.module.load_state_dict(*args, **kwargs)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, without a prefix of ours."""
        inner: Any = self.module
        return inner.sharded_state_dict(*args, **kwargs)


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _converted(item, dtype) for key, item in value.items()}
    return type(value)(_converted(item, dtype) for item in value) if isinstance(value, list | tuple) else value
