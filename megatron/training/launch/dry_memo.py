# SPDX-License-Identifier: Apache-2.0
"""Results of operations on fake tensors, remembered by the shapes of their operands.

A step repeats the same operations for every layer and microbatch. What an operation with these shapes returns is worked
out once, by torch, and made again from what is remembered: a new tensor, a view of an operand, or the operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MOST_TENSORS = 16
"""Of an operation; those that take the lists of all parameters come once a step."""
_RESHAPE = frozenset(("set_", "resize_", "resize_as_"))
_SCALARS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class _Spec(NamedTuple):
    """Recipe of a result that is made again."""

    operand: int | None
    """The operand that it is, or whose storage it shares; None for a new tensor."""
    is_operand: bool
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


class _MemoEntry(NamedTuple):
    form: type | None
    """list or tuple of results; None for one alone."""
    results: list[_Spec | None]
    flops: int


class OperationMemo:
    """Remembers results. The caller works out what is not known, and tells it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _MemoEntry] = {}
        self._unfit: set[Any] = set()
        self._fields: dict[torch.device, dict[str, Any]] = {}
        """Device -> attributes of a fake tensor that nothing is known of."""

    def find_key(self, func: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...] | None, list[FakeTensor]]:
        """Return a key for the operation, None where its result is not to be remembered; and its tensors, in order."""
        tensors: list[FakeTensor] = []
        if func in self._unfit:
            return None, tensors
        parts: list[Any] = [func]
        fits = _describe(args, parts, tensors) and (not kwargs or _describe(list(kwargs.items()), parts, tensors))
        return (tuple(parts) if fits else None), tensors

    def recall(self, key: tuple[Any, ...], tensors: Sequence[FakeTensor]) -> tuple[Any, int] | None:
        """Return the result for these tensors and its FLOPs; None where the key is new."""
        entry = self._known.get(key)
        if entry is None:
            return None
        made = [None if spec is None else self._make(spec, tensors) for spec in entry.results]
        return (made[0] if entry.form is None else entry.form(made)), entry.flops

    def remember(self, key: tuple[Any, ...], tensors: Sequence[FakeTensor], result: Any, flops: int) -> None:
        """Keep how to make such a result again, where it can be."""
        form = type(result) if isinstance(result, list | tuple) else None
        results = list(result) if form else [result]
        specs = [None if value is None else _specify(value, tensors) for value in results]
        unclear = any(value is not None and spec is None for value, spec in zip(results, specs, strict=True))
        func = key[0]
        if unclear or form not in (None, list, tuple) or torch.Tag.inplace_view in func.tags or _name(func) in _RESHAPE:
            self._unfit.add(func)
            return
        self._known[key] = _MemoEntry(form, specs, flops)

    def _make(self, spec: _Spec, tensors: Sequence[FakeTensor]) -> FakeTensor:
        if spec.is_operand:
            assert spec.operand is not None
            return tensors[spec.operand]
        mode = tensors[0].fake_mode if tensors else torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        fields = self._fields.get(spec.device)
        with torch._C._DisableTorchDispatch():
            if fields is None or fields["fake_mode"] is not mode:
                fields = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), spec.device)))
                self._fields[spec.device] = fields
            if spec.operand is None:
                made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
            else:
                made = torch.empty(0, dtype=spec.dtype, device="meta")
                made.set_(tensors[spec.operand].untyped_storage(), spec.offset, spec.shape, spec.stride)
            # What the constructor does, but for its checks, which take most of the time of a dry run.
            result: FakeTensor = torch.Tensor._make_subclass(
                FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=spec.device
            )
        vars(result).update(fields)
        return result


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _describe(values: Any, parts: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add what results depend on to the parts; False where there is something that cannot be told so."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                return False
            if len(tensors) == _MOST_TENSORS:
                return False
            # Where a tensor is there twice, a result that is one of them is not told from the other.
            twice = next((number for number, tensor in enumerate(tensors) if tensor is value), None)
            parts += (value.shape, value.stride(), value.dtype, value.storage_offset(), value.fake_device, twice)
            tensors.append(value)
        elif kind in _SCALARS:
            parts += (kind, value)
        elif kind is list or kind is tuple or kind is torch.Size:
            parts.append(len(value))
            if not _describe(value, parts, tensors):
                return False
        else:
            return False
    return True


def _specify(value: Any, tensors: Sequence[FakeTensor]) -> _Spec | None:
    """Return the recipe of a result; None where it has none."""
    if type(value) is not FakeTensor or value.constant is not None:
        return None
    for number, tensor in enumerate(tensors):
        if value is tensor:
            return _Spec(number, True)
    shape, stride, device = tuple(value.shape), value.stride(), value.fake_device
    storage = value.untyped_storage()
    if any(tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors):
        if len(tensors) > 1:
            return None
        return _Spec(0, False, shape, stride, int(value.storage_offset()), value.dtype, device)
    with torch._C._DisableTorchDispatch():
        whole = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta").untyped_storage().nbytes()
    if value.storage_offset() or storage.nbytes() != whole:
        return None
    return _Spec(None, False, shape, stride, 0, value.dtype, device)
