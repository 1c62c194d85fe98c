# SPDX-License-Identifier: Apache-2.0
"""The base of every module of a transformer: it knows its config, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.placement import get_placement
from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(nn.Module):
    """An nn.Module with the TransformerConfig it was built from.

    Inside a layer it is told what surrounds its computation (execution/execution.py); alone it keeps what it computes.
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

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """The parameters as parts of those of the whole model, for dist_checkpointing.save() and load().

        By prefix + name in this module, so that what load() returns fits load_state_dict() of the same module; the key
        of each ShardedTensor is prefix + name in the whole model, which does not depend on the layout. sharded_offsets,
        metadata: part of upstream's signature; a parameter's Placement says all of it.
        """
        return {
            # Read at the time of the call: placements are completed after construction (names, rows that are tokens).
            prefix + name: ShardedTensor.from_placement(param, get_placement(param, name), prefix=prefix)
            for name, param in self.named_parameters()
        }
