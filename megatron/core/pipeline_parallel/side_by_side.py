# SPDX-License-Identifier: Apache-2.0
"""Two computations in turns on one device: each goes on while the other waits for an exchange.

    forward of micro-batch 5     attention  dispatch: begin              end  experts  combine: begin
    backward of micro-batch 3                                combine: begin                            end  experts
                                 ------------------------------ time ----------------------------------------------->

The forward runs in the calling thread, the backward in a second one, and exactly one of them at any moment: who has
begun an exchange calls `hand_over` before waiting for its end. So both run the same code as alone, in an order that
only the model decides, which is the same on all ranks that exchange. What overlaps is the communication, which torch
runs asynchronously; on CUDA kernels of both go to one stream, and exchanges to the communicator's.

Sources: DeepSeek-V3 technical report, 2024, section 3.2.1 (the computation of one micro-batch hides the exchanges of
another); threads in turns, so that the model need not be taken apart for it: as in vLLM's dual-batch overlap, 2025.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from megatron.core.device import activate, current_device
from megatron.core.exchange_gap import ExchangeGap

_FIRST, _SECOND = 0, 1


class SideBySide:
    """Runs a forward and a backward in turns, or fills the gaps of a single backward. gaps: of the model's
    exchanges."""

    def __init__(self, gaps: Sequence[ExchangeGap]) -> None:
        self._gaps = gaps
        # One thread for all steps: a new one would start the CPU's worker threads again each time.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="side-by-side")
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._is_alive = [False, False]
        self._running = _FIRST
        self._is_stopped = False

    def run(
        self, forward: Callable[[], None] | None, backward: Callable[[], None], weights: Callable[[], None] | None
    ) -> None:
        """Run both in turns, beginning with the forward; only the backward where there is no forward. weights: weight
        gradients that the backward has left so far, computed in each of its gaps.

        An error of one ends the other at its next turn, and is raised.
        """

        def fill() -> None:
            # First what the backward has left: what these products are made of is freed.
            if weights is not None and (forward is None or self._running == _SECOND):
                weights()
            if forward is not None:
                self.hand_over()

        for gap in self._gaps:
            gap.fill = fill
        try:
            if forward is None:
                backward()
            else:
                self._run_in_turns(forward, backward)
        finally:
            for gap in self._gaps:
                gap.fill = None

    def _run_in_turns(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        # New ones in each run: one that failed may have left a turn that nobody took.
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._is_alive, self._running, self._is_stopped = [True, True], _FIRST, False
        future = self._pool.submit(self._run_second, second, current_device())
        try:
            first()
            self._leave(_FIRST)
            future.result()
        except _Stopped:
            future.result()  # raises the second one's error
        except BaseException:
            self._is_stopped = True
            self._leave(_FIRST)
            wait([future])
            raise

    def hand_over(self) -> None:
        """Let the other function go on until it hands over or ends; nothing where it has ended."""
        own, other = self._running, 1 - self._running
        if self._is_stopped:
            raise _Stopped
        if not self._is_alive[other]:
            return
        self._running = other
        self._turns[other].release()
        self._turns[own].acquire()
        if self._is_stopped:
            raise _Stopped

    def _run_second(self, second: Callable[[], None], device: torch.device) -> None:
        activate(device)  # a thread begins with the first one
        self._turns[_SECOND].acquire()
        try:
            if not self._is_stopped:
                second()
        except BaseException:
            self._is_stopped = True
            raise
        finally:
            self._leave(_SECOND)

    def _leave(self, own: int) -> None:
        """The function has ended, and the other one has all turns from here on."""
        other = 1 - own
        self._is_alive[own] = False
        if self._is_alive[other]:
            self._running = other
            self._turns[other].release()


class _Stopped(Exception):
    """Raised where a function should go on after the other has failed."""
