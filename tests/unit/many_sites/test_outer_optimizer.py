# SPDX-License-Identifier: Apache-2.0
"""The outer optimizer of one site, where the other one is silent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.many_sites.exchange import SiteExchange
from megatron.core.many_sites.outer_optimizer import OuterOptimizer
from megatron.core.many_sites.pending import Position
from megatron.training.launch.initialize import shut_down
from megatron.training.run import Run
from tests.functional.pretrain_runs import free_port
from tests.support.tiny_training import prepare

KEY = b"a key of sixteen bytes or more"
SECONDS = 0.5


@contextlib.contextmanager
def open_site(directory: Path, site: int, *flags: str) -> Iterator[tuple[Run, OuterOptimizer]]:
    """One of two sites, connected to another that never says anything."""
    (directory / "key").write_bytes(KEY)
    port = int(free_port())
    sites = f"--diloco-replicas 2 --datacenter-id {site} --diloco-address 127.0.0.1:{port}".split()
    sites += ["--diloco-key-file", str(directory / "key"), "--diloco-timeout-seconds", str(SECONDS)]
    run = prepare(*sites, *flags)
    outer = run.outer
    assert outer is not None and outer.exchange is not None
    silent = SiteExchange(1 - site, 2, KEY, most=10**8, settings=outer.exchange.settings)
    if site == 0:
        silent.call("127.0.0.1", port)
    else:
        silent.listen("127.0.0.1", port)
    try:
        assert outer.exchange.wait_until(lambda: outer.exchange.connected == {1 - site}, time.monotonic() + 20)
        yield run, outer
    finally:
        silent.close(is_done=False)
        outer.close()
        run.data.close()
        shut_down()


@pytest.mark.flags("--diloco-timeout-seconds", "--diloco-min-replicas")
@pytest.mark.parametrize(("site", "least", "steps"), [(0, 1, 1), (0, 2, 0), (1, 1, 0)])
def test_a_silent_site_is_waited_for_until_the_timeout(site: int, least: int, steps: int, tmp_path: Path) -> None:
    """From the exchange's beginning on. The first site then goes on alone, where it may; another one without a step."""
    flags = f"--diloco-inner-steps 4 --diloco-overlap-steps 1 --diloco-min-replicas {least}"
    with open_site(tmp_path, site, *flags.split()) as (_, outer):
        began_at = time.monotonic()
        assert outer.after_step(Position(4, 16)) is None
        begun = time.monotonic() - began_at
        assert outer.after_step(Position(5, 20)) is None
        waited = time.monotonic() - began_at
    assert begun < SECONDS <= waited < 10 * SECONDS
    assert outer.version == steps


@pytest.mark.parametrize(("more", "tensors"), [("", 2), ("--diloco-exchange-dtype int8 --diloco-overlap-steps 1", 4)])
def test_outer_state_is_as_large_as_planned(more: str, tensors: int, tmp_path: Path) -> None:
    with open_site(tmp_path, 0, *more.split()) as (run, _):
        held = sum(tensor.nbytes for state in run.optimizer.states for tensor in state.companions.values())
        moments = sum(state.tensors["exp_avg"].nbytes for state in run.optimizer.states)
        assert held == tensors * moments and run.config.sites.outer_bytes == 4 * tensors
