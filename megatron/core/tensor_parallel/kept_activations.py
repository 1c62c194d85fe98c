# SPDX-License-Identifier: Apache-2.0
"""Ways to save an activation for backward other than simply keeping it, and the one context that applies them.

| way         | what waits                                 | in backward                 | price                       |
|-------------|--------------------------------------------|-----------------------------|-----------------------------|
| kept        | the tensor                                 | read                        | its memory                  |
| Recomputed  | what its function needs, kept by somebody  | computed again              | its computation             |
| RecomputedTogether | the same, of several tensors        | computed again, once for all| their computation           |
| Divided     | this rank's part of it                     | gathered from all ranks     | an all-gather               |
| on the host | a copy there (offloaded_activations.py)    | copied back                 | two transfers               |

A further way is one more subclass of `Way`. Two others need no context, because a separate operation keeps what they
need: a whole part of the network that is computed again from its inputs
(`checkpoint` in random.py), and the input of a column layer under sequence parallelism, of which each rank keeps its
tokens and gathers the others' during a product (GatherInput in communication_plans.py).

transformer/execution/activation_policy.py decides which activation goes which way.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import all_gather_into_tensor
from megatron.core.process_groups_config import Group


class Way(ABC):
    """Way to hold a tensor between forward and backward."""

    def takes(self, value: Tensor) -> bool:
        """Return whether a tensor that `keep_all_as` meets is to go this way."""
        return True

    @abstractmethod
    def pack(self, value: Tensor) -> Any:
        """Return what is held in place of `value` until backward; in `keep_all_as` None keeps the tensor itself."""

    @abstractmethod
    def unpack(self, waiting: Any, shape: Sequence[int]) -> Tensor:
        """Restore the tensor in this shape from what `pack` returned."""


class Recomputed(Way):
    """Nothing is saved: compute() makes the values again, in their order and dtype."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute = compute

    def pack(self, value: Tensor) -> None:
        """Hold nothing."""

    def unpack(self, waiting: Any, shape: Sequence[int]) -> Tensor:
        """Compute the values again."""
        with torch.no_grad():
            return self.compute().view(shape)


class RecomputedTogether:
    """Tensors that one function makes: nothing is saved, and the first that is needed brings the others with it.

    compute: makes all of them again, in their order and dtypes.
    """

    def __init__(self, compute: Callable[[], Sequence[Tensor]]) -> None:
        self._compute = compute
        self._made: Sequence[Tensor] | None = None
        self._waiting = 0  # how often any of them was left out, and not yet asked for

    def way(self, index: int) -> Way:
        """The way of one of the tensors, by its number in what `compute` returns."""
        return _OneOfSeveral(self, index)

    def leave_out(self) -> None:
        """Note that one of them will be asked for."""
        self._waiting += 1

    def take(self, index: int) -> Tensor:
        """Return one of them, computing all where they are not there."""
        if self._made is None:
            with torch.no_grad():
                self._made = self._compute()
        value = self._made[index]
        self._waiting -= 1
        if self._waiting <= 0:  # not before: two operations may have kept the same tensor
            self._made = None
        return value


class _OneOfSeveral(Way):
    def __init__(self, together: RecomputedTogether, index: int) -> None:
        self.together, self.index = together, index

    def pack(self, value: Tensor) -> None:
        self.together.leave_out()

    def unpack(self, waiting: Any, shape: Sequence[int]) -> Tensor:
        return self.together.take(self.index).view(shape)


class Divided(Way):
    """Of a tensor that is the same on all ranks of the group each keeps a part; backward gathers them."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def pack(self, value: Tensor) -> Tensor:
        """This rank's part of the elements in order, [ceil(elements / ranks)]; zeros fill the last one."""
        # Of equal length on all ranks, as a gather needs it.
        length = -(-value.numel() // self.group.size())
        first = self.group.rank() * length
        own = value.detach().reshape(-1)[first : first + length]
        part = value.new_zeros(length)
        part[: own.numel()] = own
        return part

    def unpack(self, waiting: Tensor, shape: Sequence[int]) -> Tensor:
        """Gather the parts of all ranks."""
        whole = waiting.new_empty(waiting.numel() * self.group.size())
        all_gather_into_tensor(whole, waiting, self.group)
        return whole[: math.prod(shape)].view(shape)


class _Rule:
    """A tensor as it is now, and the way that is meant for it. Its block releases the tensor at its end."""

    def __init__(self, value: Tensor, way: Way) -> None:
        self.way, self.version = way, value._version
        self._value: Tensor | None = value
        self.storage = value.untyped_storage()._cdata

    @property
    def value(self) -> Tensor:
        """The tensor, while the block lasts."""
        assert self._value is not None, "nothing is kept for backward behind the end of a block"
        return self._value

    def release(self) -> None:
        """Hold the tensor no longer: torch holds the function that packs, and with it its rules, until backward."""
        self._value = None

    def concerns(self, kept: Tensor) -> bool:
        """Return whether `kept` is the value, or a view of all its elements in their order, and still unchanged."""
        # Operations may keep a view or a detached twin, so the memory is compared, not the object. A value that was
        # changed in place since is another one, which its function would not compute.
        value = self.value
        if kept.untyped_storage()._cdata != self.storage or kept._version != self.version:
            return False
        if kept.storage_offset() != value.storage_offset() or kept.numel() != value.numel():
            return False
        same_strides = kept.shape == value.shape and kept.stride() == value.stride()
        return same_strides or (kept.is_contiguous() and value.is_contiguous())

    def is_permuted(self, kept: Tensor) -> bool:
        """Return whether `kept` has the elements of the value, unchanged, with its dimensions in another order:
        attention kernels want heads before positions."""
        value = self.value
        if kept.untyped_storage()._cdata != self.storage or kept._version != self.version:
            return False
        if kept.storage_offset() != value.storage_offset() or kept.numel() != value.numel():
            return False
        size = 1
        for stride, length in sorted(zip(kept.stride(), kept.shape, strict=True)):
            if length > 1 and stride != size:
                return False
            size *= length
        return value.is_contiguous()


class _RuleOfAll:
    """A way that is meant for everything."""

    def __init__(self, way: Way) -> None:
        self.way = way


_Rules = tuple[_Rule | _RuleOfAll, ...]

# torch asks only the innermost pair of hooks for saved tensors. So that a context inside another one does not switch
# that one off, each asks the rules of all contexts around it. Like torch's stack of hooks, this one is the thread's.
_RULES: ContextVar[_Rules] = ContextVar("rules in force", default=())


@contextlib.contextmanager
def keep_as(value: Tensor, way: Way) -> Iterator[None]:
    """Make what operations in this block keep of `value` for backward wait as the way says; everything else is kept.

    A copy of it, or a view of some of its elements, is kept, too. Blocks may be nested.
    """
    rule = _Rule(value, way)
    try:
        with _in_force((*_RULES.get(), rule)):
            yield
    finally:
        rule.release()


@contextlib.contextmanager
def keep_all_as(way: Way) -> Iterator[None]:
    """Save what operations in this block keep for backward in this way, where the way takes it; except for values with
    a separate `keep_as`, inside or outside of the block."""
    # In front: the last rule wins, and rules of single values come last.
    with _in_force((_RuleOfAll(way), *_RULES.get())):
        yield


@contextlib.contextmanager
def _in_force(rules: _Rules) -> Iterator[None]:
    token = _RULES.set(rules)
    try:
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_pack, rules), _unpack):
            yield
    finally:
        _RULES.reset(token)


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Disable the contexts around this block: `checkpoint` has separate hooks, and what is kept of a function must be
    the same when backward calls it again, outside of those contexts."""
    token = _RULES.set(())
    try:
        yield
    finally:
        _RULES.reset(token)


def has_way(value: Tensor) -> bool:
    """Return whether a block around here says how this tensor waits, so that no operation needs to keep it in another
    form."""
    return any(isinstance(rule, _Rule) and (rule.concerns(value) or rule.is_permuted(value)) for rule in _RULES.get())


def _pack(rules: _Rules, kept: Tensor) -> Any:
    # The innermost rule wins.
    for rule in reversed(rules):
        if isinstance(rule, _RuleOfAll):
            waiting = rule.way.pack(kept) if rule.way.takes(kept) else None
            if waiting is not None:
                return rule.way, waiting, kept.shape, None
        elif rule.concerns(kept):
            return rule.way, rule.way.pack(kept), kept.shape, None
        elif rule.is_permuted(kept):
            return rule.way, rule.way.pack(rule.value), rule.value.shape, (kept.shape, kept.stride())
    # An operation may keep its result, which would hold the operation that holds it: neither would ever be freed where
    # backward does not run.
    return kept if kept.grad_fn is None else kept.detach()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    way, waiting, shape, order = packed
    value: Tensor = way.unpack(waiting, shape)
    return value if order is None else value.contiguous().as_strided(*order)
