# SPDX-License-Identifier: Apache-2.0
"""The moments of a run on several sites: after each step, and around checkpoints."""

from __future__ import annotations

import sys
from typing import Any

from megatron.core.dist_checkpointing.agreement import on_every_rank
from megatron.core.errors import format_bytes, say
from megatron.core.many_sites.outer_optimizer import OuterOptimizer
from megatron.core.many_sites.pending import Position
from megatron.training.config.container import RunConfig
from megatron.training.run import Hook, HookContext, Phase, Run, StepResult


class SitesHook(Hook):
    """Exchanges weights with the other sites (core/many_sites/)."""

    phase = Phase.CONTROL

    def __init__(self) -> None:
        self._outer: OuterOptimizer | None = None
        self._loaded: dict[str, Any] | None = None
        self._told: set[int] = {0}

    @classmethod
    def build(cls, config: RunConfig, context: HookContext) -> SitesHook | None:
        """Return the hook of a run on several sites; None for others."""
        return cls() if config.sites.diloco_replicas > 1 else None

    def on_train_start(self, run: Run) -> None:
        """Go on with the outer state of the checkpoint, or begin with the weights as they are."""
        outer = self._outer = run.outer
        assert outer is not None
        on_every_rank(run.groups.world, lambda: outer.meet(say if run.is_first_rank else lambda text: None))
        if self._loaded is None:
            outer.restart()
        else:
            outer.load_state_dict(self._loaded)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Exchange what is due."""
        outer, progress = self._outer, run.progress
        assert outer is not None
        moved = outer.after_step(Position(progress.iteration, progress.consumed_train_samples))
        self._tell(run, outer)
        if moved is None:
            return
        if run.is_first_rank:
            say(f"the other sites are at iteration {moved.iteration}: going on there from {progress.iteration}")
        before = progress.consumed_train_samples
        # The ledger then says that this site has not trained on them.
        while progress.iteration < moved.iteration:
            run.pass_over("this site was away")
        run.scheduler.step(progress.consumed_train_samples - before)
        run.is_rewound = True

    def on_train_end(self, run: Run) -> None:
        """Say what the exchange has cost."""
        outer = self._outer
        if outer is not None and outer.exchange is not None and run.is_first_rank:
            sent, waited = format_bytes(outer.exchange.bytes_sent), outer.waited_seconds
            say(f"sites: {outer.version} outer steps; rank 0 has sent {sent} and waited {waited:.1f} s for other sites")

    def on_close(self, run: Run) -> None:
        """End the connections."""
        if run.outer is not None:
            run.outer.close(is_done=run.progress.finished)

    def state_dict(self) -> dict[str, Any]:
        """Called while a checkpoint is written, whose tensors are read afterwards."""
        if self._outer is None:
            return {}
        self._outer.settle()
        return self._outer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it until the run begins."""
        self._loaded = state

    def _tell(self, run: Run, outer: OuterOptimizer) -> None:
        exchange = outer.exchange
        if exchange is None or not run.is_first_rank:
            return
        if exchange.problem is not None:
            say(f"warning: a site was turned away: {exchange.problem}", sys.stderr)
            exchange.problem = None
        there = {exchange.site} | exchange.connected
        for site in sorted(self._told - there - {exchange.site}):
            say(f"site {site} {'is done' if site in exchange.ended else 'is lost'}; this one goes on")
        for site in sorted(there - self._told - {exchange.site}):
            say(f"site {site} is connected")
        self._told = there
