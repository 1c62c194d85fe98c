"""Gathers updated parameters while forward already runs.

After an update each process has new values for its slice of every bucket. The gathers of all buckets are started in
the order in which forward needs them; before a layer runs, a hook waits for the buckets that hold its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.bucket import Bucket


class ParamGather:
    """Gathers the buckets of one model chunk.

    buckets: in the order in which forward needs them, each with its parameters. With `overlap`, hooks on the module's
    layers wait for them; otherwise `finish` must be called before the parameters are used.
    """

    def __init__(
        self, module: nn.Module, buckets: Sequence[tuple[Bucket, Sequence[nn.Parameter]]], *, overlap: bool
    ) -> None:
        self.buckets = [bucket for bucket, _ in buckets]
        if not overlap:
            return
        owner = {param: bucket for bucket, params in buckets for param in params}
        for unit in _units(module):
            needed = list(dict.fromkeys(owner[param] for param in unit.parameters() if param in owner))
            if needed:
                unit.register_forward_pre_hook(_waiter(needed))

    def start(self) -> None:
        """Begin to gather everything; the parameters must be updated."""
        for bucket in self.buckets:
            bucket.start_gather()

    def finish(self) -> None:
        """Wait until all parameters are there."""
        for bucket in self.buckets:
            bucket.finish_gather()


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of module lists (layers), whole, and otherwise the modules that have parameters of their own.

    A layer waits as a whole, because it may use a part's weight without calling the part.
    """
    if next(module.parameters(recurse=False), None) is not None:
        yield module
        return
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _units(child)


def _waiter(buckets: list[Bucket]) -> Callable[..., Any]:
    """A forward pre-hook that waits for the buckets; a compiler leaves it as it is."""

    @torch.compiler.disable
    def wait(module: nn.Module, inputs: Any) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    return wait
