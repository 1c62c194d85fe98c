# SPDX-License-Identifier: Apache-2.0
"""Choices of routers recorded and given back by a program, such as one that generates elsewhere with the same experts.

With TransformerConfig(moe_enable_routing_replay=True) each router of the model has a RouterReplay, in the order in
which they are built. A run of pretrain_gpt.py gives them nothing to do: it replays what --moe-routing-trace-path names.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from megatron.core.errors import ConfigError


class RouterReplayAction(enum.Enum):
    """The work of a RouterReplay in the forwards to come."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


class RouterReplay:
    """One router's choices, [T, k] int64 for the T tokens that this process routes in a microbatch.

    REPLAY_FORWARD takes those that were set last. REPLAY_BACKWARD takes all that were set, first come first served: for
    programs that compute forward again by themselves; what recomputation repeats here keeps its choice in any case.
    """

    global_router_replay_instances: ClassVar[list[RouterReplay]] = []

    def __init__(self) -> None:
        self.target_topk_idx: Tensor | None = None
        self.recorded_topk_idx: Tensor | None = None
        self.replay_backward_list: list[Tensor] = []
        self.router_replay_action: RouterReplayAction | None = None
        self.global_router_replay_instances.append(self)

    # ---- all of this process

    @classmethod
    def set_replay_data(cls, all_layers_topk_indices: Sequence[Tensor]) -> None:
        """Set the choices of every router, in their order. Raises ConfigError for another number of them."""
        routers = cls.global_router_replay_instances
        if len(all_layers_topk_indices) != len(routers):
            raise ConfigError(
                f"set_replay_data() got the choices of {len(all_layers_topk_indices)} routers; give those of the "
                f"{len(routers)} on this process"
            )
        for router, indices in zip(routers, all_layers_topk_indices, strict=True):
            router.set_target_indices(indices)

    @classmethod
    def get_recorded_data(cls) -> list[Tensor | None]:
        """The recorded choices of every router."""
        return [router.recorded_topk_idx for router in cls.global_router_replay_instances]

    @classmethod
    def clear_global_indices(cls) -> None:
        """Forget the choices of every router."""
        for router in cls.global_router_replay_instances:
            router.clear_indices()

    @classmethod
    def set_global_router_replay_action(cls, router_replay_action: RouterReplayAction | None) -> None:
        """Set what every router does from now on."""
        for router in cls.global_router_replay_instances:
            router.router_replay_action = router_replay_action

    @classmethod
    def clear_global_router_replay_action(cls) -> None:
        """Let every router choose by itself."""
        cls.set_global_router_replay_action(None)

    @classmethod
    def clear_global_router_replay_instances(cls) -> None:
        """Forget the routers, before another model is built."""
        cls.global_router_replay_instances.clear()

    # ---- one router

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Set the choices of the next microbatch."""
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> Tensor | None:
        """The choices of the last microbatch with RECORD; None before."""
        return self.recorded_topk_idx

    def record_indices(self, topk_indices: Tensor) -> None:
        """Keep the choices."""
        self.recorded_topk_idx = topk_indices

    def clear_indices(self) -> None:
        """Forget what was recorded and set."""
        self.recorded_topk_idx = self.target_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction | None) -> None:
        """Set what this router does from now on."""
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Let this router choose by itself."""
        self.router_replay_action = None

    def take(self, tokens: int, topk: int) -> Tensor | None:
        """Return the choices of the next microbatch, or None where the router is to choose. Raises ConfigError where
        none are set, or choices for other tokens."""
        action = self.router_replay_action
        if action not in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
            return None
        backward = action == RouterReplayAction.REPLAY_BACKWARD and self.replay_backward_list
        given = self.replay_backward_list.pop(0) if backward else self.target_topk_idx
        if given is None or tuple(given.shape) != (tokens, topk):
            found = "none" if given is None else f"{list(given.shape)}"
            raise ConfigError(
                f"RouterReplay has {found} to give a router; set_target_indices() takes [{tokens}, {topk}], the "
                "experts of the tokens that this process routes"
            )
        return given

    def note(self, topk_indices: Tensor) -> None:
        """Keep the choices of a microbatch, with RECORD."""
        if self.router_replay_action == RouterReplayAction.RECORD:
            self.record_indices(topk_indices.detach())
