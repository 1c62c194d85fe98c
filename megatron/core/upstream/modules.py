# SPDX-License-Identifier: Apache-2.0
"""Upstream's small tools around modules, and module classes that other frameworks name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron.core.distributed.model_chunk import ModelChunk
from megatron.core.transformer.module import Float16Module


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
