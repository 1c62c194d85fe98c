# SPDX-License-Identifier: Apache-2.0
"""Small pieces of the ground: optional packages, timers, and groups of one process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.collectives import (
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object,
    reduce_scatter_tensor,
)
from megatron.core.errors import ConfigError
from megatron.core.mesh import RankGrid
from megatron.core.optional_deps import OPTIONAL, available, require
from megatron.core.process_groups_config import GROUP_AXES, ProcessGroupCollection, SingleRankGroup, group_ranks
from megatron.core.timers import Timers

ROOT = Path(__file__).parents[3]


# ---- optional packages


def test_installed_packages_are_found() -> None:
    assert available("json") and require("json", needed_by="a test").loads("1") == 1


def test_missing_package_is_one_sentence_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONAL, "no_such_package", "no-such-package[all]")
    assert not available("no_such_package") and not available("no_such_package.inner")
    with pytest.raises(ConfigError) as caught:
        require("no_such_package.inner", needed_by="--tokenizer-type TikTokenizer")
    assert str(caught.value) == (
        "--tokenizer-type TikTokenizer needs the Python package no_such_package, which is not installed; "
        "run: pip install 'no-such-package[all]'"
    )


def test_package_that_fails_inside_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise OSError('libfoo.so.1 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"broken_package, which fails to import \(OSError: libfoo.so.1 is missing\)"):
        require("broken_package", needed_by="--attention-backend flash")


def test_importing_megatron_core_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "tokenizers", "sentencepiece", "regex", "yaml", "tensorboard"}
    program = "import sys, megatron.core; print(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())


# ---- timers


def test_timers_add_up_and_start_anew() -> None:
    timers = Timers()
    for _ in range(2):
        with timers("step"):
            time.sleep(0.01)
    assert timers("step").count == 2 and timers.names() == ["step"]
    assert 0.02 <= timers("step").elapsed() < 1.0
    assert timers("step").elapsed() == 0.0


def test_a_running_timer_can_be_read() -> None:
    timer = Timers()("step")
    timer.start()
    time.sleep(0.01)
    assert timer.elapsed(reset=True) >= 0.01
    timer.stop()
    assert timer.elapsed() < 0.01


def test_timers_finer_than_the_level_measure_nothing() -> None:
    timers = Timers(log_level=1)
    with timers("fine", log_level=2):
        time.sleep(0.005)
    assert timers("fine").elapsed() == 0.0 and timers.names() == []


def test_timers_refuse_to_be_started_twice() -> None:
    timer = Timers()("step")
    with pytest.raises(RuntimeError, match="'step' was stopped without a start"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="'step' was started twice"):
        timer.start()


def test_report_is_in_milliseconds_per_iteration() -> None:
    timers = Timers()
    with timers("forward"):
        pass
    timers("forward")._total_seconds = 3.0
    assert timers.min_max(["forward"], reset=False) == {"forward": (3.0, 3.0)}
    assert "forward" in (text := timers.report(["forward"], per=2)) and "(1500.00, 1500.00)" in text
    assert timers.min_max([]) == {}


# ---- one process


def test_one_process_has_every_group_without_torch_distributed() -> None:
    groups = ProcessGroupCollection.build(RankGrid(1), 0)
    for field in GROUP_AXES:
        group = getattr(groups, field)
        assert (group.size(), group.rank(), group_ranks(group)) == (1, 0, [0])
    assert groups.is_first_stage and groups.is_last_stage


def test_a_ranks_view_without_processes() -> None:
    grid = RankGrid(16, tp=2, pp=2, ep=2, cp=2, cp_levels=(2, 1), optimizer_instances=2)
    views = [ProcessGroupCollection.pretend(grid, rank) for rank in range(16)]
    for field, axes in GROUP_AXES.items():
        for rank, view in enumerate(views):
            group = getattr(view, field)
            members = next((ranks for ranks in grid.groups(axes) if rank in ranks), None)
            assert (group and group_ranks(group)) == members, field
            assert members is None or (group.size(), group.rank()) == (len(members), members.index(rank))
    assert [group.size() for group in views[0].hcp] == [2, 1]
    assert (views[5].optimizer_shards.size(), views[5].optimizer_copies.size()) == (2, 2)
    assert (views[5].expert_optimizer_shards.size(), views[5].expert_optimizer_copies.size()) == (1, 2)
    assert [view.is_last_stage for view in views] == [False] * 8 + [True] * 8
    tensor = torch.ones(2)
    for collective in (all_reduce, broadcast):
        with pytest.raises(RuntimeError, match=r"over ranks \[4, 5\]: .*pretend\(\) made rank 5's"):
            collective(tensor, views[5].tp)
    with pytest.raises(RuntimeError, match="use ProcessGroupCollection.build"):
        barrier(views[0].pp)


def test_collectives_over_one_process_copy_or_do_nothing() -> None:
    alone, tensor = SingleRankGroup(), torch.tensor([1.0, 2.0])
    for result in (all_reduce(tensor, alone, "avg", async_op=True), broadcast(tensor, alone), barrier(alone)):
        assert result is None
    for collective in (all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single):
        output = torch.empty(2)
        assert collective(output, tensor, alone, async_op=True) is None
        assert torch.equal(output, tensor)
    assert all_gather_object("x", alone) == ["x"] and broadcast_object("x", alone) == "x"


def test_current_groups_can_be_set_and_forgotten() -> None:
    assert not parallel_state.model_parallel_is_initialized()
    assert parallel_state.get_data_parallel_world_size() == 1
    made = parallel_state.initialize_model_parallel()
    try:
        assert ProcessGroupCollection.current() is made
        assert parallel_state.is_initialized() and parallel_state.is_rank_in_embedding_group()
    finally:
        parallel_state.destroy_model_parallel()
    assert not ProcessGroupCollection.has_current()


def test_more_processes_need_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="the grid has 2 processes; torch.distributed has none"):
        ProcessGroupCollection.build(RankGrid(2), 0)
