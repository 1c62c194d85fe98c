# SPDX-License-Identifier: Apache-2.0
"""--data-site: each site reads the copy of the dataset that is near it."""

from __future__ import annotations

import sys

import pytest

from megatron.core.errors import ConfigError
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
