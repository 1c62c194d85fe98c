# SPDX-License-Identifier: Apache-2.0
"""Sites of a job: the dataset that is near each (--data-site), and the hosts of each (--site-topology)."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from megatron.core.errors import ConfigError
from megatron.training.launch.initialize import build_rank_grid
from megatron.training.launch.launch import Launch
from megatron.training.launch.sites import take_site
from tests.support.run_flags import SMALLEST_RUN, run_config

BASE = SMALLEST_RUN.replace("--mock-data", "--data-path far")
FLAGS = "--diloco-replicas 3 --global-batch-size 12 --data-site 1:/near/a 2:b:c"


@pytest.mark.flags("--data-site")
def test_a_site_reads_what_is_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # sites after the first one say nothing
    for rank, expected in enumerate(["far", "far", "/near/a", "/near/a", "b:c", "b:c"]):
        config = run_config(FLAGS, BASE, world_size=6)
        take_site(config, Launch(rank=rank, world_size=6))
        assert config.data.data_path == [expected]
    alone = "--datacenter-id 1 --diloco-address here:5000 --diloco-key-file key"
    config = run_config(f"{FLAGS} {alone}", BASE, world_size=2)
    take_site(config, Launch(rank=0, world_size=2))
    assert config.data.data_path == ["/near/a"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("3:a", "0 to 2, a colon"), ("1:a 1:b", "different sites"), ("a", "is not SITE:PREFIX"), ("1:", "SITE:PREFIX"),
        ("1:a --data-path 1 x 1 y", "without a blend"),
    ],
)  # fmt: skip
def test_what_names_no_site(given: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(f"--diloco-replicas 3 --global-batch-size 12 --data-site {given}", BASE, world_size=6)


DIVIDED = "--use-distributed-optimizer --num-layers 2 --pipeline-model-parallel-size 2"


@pytest.mark.flags("--site-topology")
@pytest.mark.parametrize("experts", [1, 2])
def test_of_a_topology_only_the_sum_of_gradients_crosses(experts: int, tmp_path: Path) -> None:
    file = tmp_path / "sites"
    file.write_text("# near\na b\nc d\n\ne f  # far\n")
    flags = f"{DIVIDED} --site-topology {file} --global-batch-size 12"
    if experts > 1:
        flags += f" --num-experts 2 --expert-model-parallel-size {experts}"
    config = run_config(flags, world_size=12)
    assert config.ddp.num_distributed_optimizer_instances == 3
    grid = build_rank_grid(config, 12)
    inside = [*grid.groups("tp"), *grid.groups("pp"), *grid.groups("ep"), *grid.optimizer_groups(of_experts=False)[0]]
    inside += grid.optimizer_groups(of_experts=True)[0]
    assert all(len({rank // 4 for rank in ranks}) == 1 for ranks in inside)
    assert all(sorted(rank // 4 for rank in ranks) == [0, 1, 2] for ranks in grid.optimizer_groups(of_experts=False)[1])


def test_hosts_are_compared_with_the_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sites"
    file.write_text("a b\nc d\n")
    config = run_config(f"--use-distributed-optimizer --site-topology {file}", world_size=4)
    for rank, host in enumerate(["a", "b.east.example", "c", "d"]):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        take_site(config, Launch(rank=rank, world_size=4))
    with pytest.raises(
        ConfigError, match=r"rank 1 of 4 belongs to site 0, whose hosts are a, b in .* runs on d; start"
    ):
        take_site(config, Launch(rank=1, world_size=4))
    config.ddp.num_distributed_optimizer_instances = 4
    with pytest.raises(ConfigError, match="has 2 sites, and --num-distributed-optimizer-instances is 4; give 2"):
        take_site(config, Launch(rank=3, world_size=4))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("", "needs --use-distributed-optimizer, by which a site has a copy"),
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances 4",
            "instances 4, and --site-topology .* 2",
        ),
        ("--diloco-replicas 4", "--diloco-replicas 4, and --site-topology .* has 2 sites; give 2"),
        ("--site-topology none", "--site-topology none cannot be read"),
        ("--site-topology /dev/null", "--site-topology /dev/null names no host"),
    ],
)
def test_what_a_topology_contradicts(given: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "sites"
    file.write_text("a b\nc d\n")
    with pytest.raises(ConfigError, match=sentence):
        run_config(f"--site-topology {file} {given}", world_size=4)
