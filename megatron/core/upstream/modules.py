# SPDX-License-Identifier: Apache-2.0
"""Upstream's small tools around modules, and module classes that other frameworks name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec


class Float16Module(MegatronModule):
    """A model in half precision behind a float32 door: inputs are converted on the first stage, outputs on the last.

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


def unwrap_model(model: Any, module_instances: type | tuple[type, ...] | None = None) -> Any:
    """The model, or each of a list, without its wrappers. module_instances: the classes that count as wrappers."""
    wrappers = (ModelChunk, nn.parallel.DistributedDataParallel, Float16Module)
    found = module_instances or tuple(kind for kind in wrappers if isinstance(kind, type))
    if isinstance(model, list | tuple):
        return [unwrap_model(one, module_instances) for one in model]
    while _is_wrapper(model, found):
        model = model.module
    return model


def _is_wrapper(model: Any, kinds: Any) -> bool:
    return isinstance(getattr(model, "module", None), nn.Module) and isinstance(model, kinds)


def get_attr_wrapped_model(model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """An attribute of the model or of what it wraps, from the outside in. allow_none: None is a value, not a miss.
    return_model_obj: the module that has the attribute instead. Raises RuntimeError where none has it."""
    if isinstance(model, list):
        raise RuntimeError("get_attr_wrapped_model() takes one model, not a list")
    while model is not None:
        if hasattr(model, attr) and (allow_none or getattr(model, attr) is not None):
            return model if return_model_obj else getattr(model, attr)
        model = getattr(model, "module", None)
    raise RuntimeError(f"neither the model nor what it wraps has an attribute {attr!r}")


def get_model_config(model: nn.Module) -> Any:
    """The TransformerConfig of a model, wrapped or bare."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def import_module(module_path: Iterable[str]) -> Any:
    """(module, name) -> what is called so there: `import_module(("torch.nn", "Linear"))`. Raises ImportError."""
    base, name = module_path
    try:
        return getattr(importlib.import_module(base), name)
    except AttributeError as error:
        raise ImportError(f"cannot import {name!r} from {base!r}") from error


def get_submodules(spec: ModuleSpec | type) -> Any:
    """The specs of a module's parts; None for a class without any."""
    return spec.submodules if isinstance(spec, ModuleSpec) else None


def _get_main_grad_attr(param: Tensor) -> str:
    """Return where a parameter's gradient is: in the flat buffers of DistributedDataParallel, or where autograd leaves
    it."""
    return "main_grad" if hasattr(param, "main_grad") else "grad"


def _unshard_if_dtensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that PyTorch has divided; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _reshard_if_dtensor(tensor_to_shard: Tensor, reference_tensor: Tensor) -> Tensor:
    """The tensor divided as the reference is; as it is where the reference is not divided."""
    if not isinstance(reference_tensor, DTensor):
        return tensor_to_shard
    return distribute_tensor(tensor_to_shard, reference_tensor.device_mesh, reference_tensor.placements)
