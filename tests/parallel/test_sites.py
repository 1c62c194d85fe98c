# SPDX-License-Identifier: Apache-2.0
"""Several sites that exchange weights now and then (DiLoCo) against a simulation of the algorithm in one process."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.many_sites.formats import count_padded, decode, encode
from megatron.training.launch.initialize import shut_down
from megatron.training.loop import open_batches
from megatron.training.step import train_step
from tests.functional.pretrain_runs import environment, finish, free_port
from tests.programs import ROOT, Program
from tests.support.tiny_training import RandomTokens, prepare

FLAGS = """
    --num-layers 4 --hidden-size 24 --num-attention-heads 6 --group-query-attention --num-query-groups 2
    --micro-batch-size 1 --log-interval 1 --hidden-dropout 0 --attention-dropout 0 --clip-grad 0.5 --qk-layernorm
    --normalization RMSNorm
""".split()
PROGRAM = """
import dataclasses, os, sys
from tests.support.tiny_training import *
config = read_run_config([*FLAGS.split(), *sys.argv[1:]], os.environ)
data = lambda counts: [RandomTokens(count) if count else None for count in counts]
finish(setup(config, initialize(config), dataclasses.replace(build_gpt_recipe(config), build_datasets=data)))
"""
SITES, ITERATIONS, BATCH = 2, 8, 8


def round_in(form: str, value: torch.Tensor) -> torch.Tensor:
    """A tensor after a journey in this format."""
    flat = torch.zeros(count_padded(value.numel(), form))
    flat[: value.numel()] = value.flatten()
    return decode(encode(flat, form), flat.numel(), form)[: value.numel()].view_as(value)


def average(form: str, deltas: list[torch.Tensor], lost: list[torch.Tensor]) -> torch.Tensor:
    """The mean of what the sites send. What each rounds away, the first one also of the mean, it adds next time."""
    exact = torch.zeros_like(deltas[0])
    for delta, own in zip(deltas, lost, strict=True):
        wanted = delta + own
        sent = round_in(form, wanted)
        own.copy_(wanted - sent)
        exact += sent / SITES
    mean = round_in(form, exact)
    lost[0].add_(exact - mean, alpha=SITES)
    return mean


def simulate(
    replicas: int, steps: int, *, iterations: int = ITERATIONS, fragments: int = 1, overlap: int = 0,
    mixing: float = 0.0, form: str = "fp32",
) -> list[float]:  # fmt: skip
    """Train two models in turns, with torch's SGD for the outer steps; the mean of their losses after each step.

    replicas: of a site, which take neighbouring samples: one that takes as many at once stands for them.
    """
    share = ["--global-batch-size", str(BATCH // SITES), "--train-iters", str(iterations)]
    share += ["--micro-batch-size", str(replicas)]
    data = [RandomTokens(BATCH * iterations), None, None]
    runs = [prepare(*FLAGS, *share, build_datasets=lambda _: data) for _ in range(SITES)]
    batches = []
    for site, run in enumerate(runs):
        run.data.settings = dataclasses.replace(run.data.settings, dp_rank=site, dp_size=SITES)
        batches.append(open_batches(run))
    weights = [dict(run.model[0].module.named_parameters()) for run in runs]

    def find_fragment(name: str) -> int:
        if ".layers." in name:
            return int(name.split(".layers.")[1].split(".")[0]) % fragments
        return 0 if "embedding" in name else fragments - 1

    outer = {name: torch.nn.Parameter(value.detach().clone()) for name, value in weights[0].items()}
    optimizers = {
        name: torch.optim.SGD([value], lr=0.7, momentum=0.9, nesterov=True) for name, value in outer.items()
    }  # fmt: skip
    lost = [{name: torch.zeros_like(value) for name, value in outer.items()} for _ in runs]
    losses, due = [], []
    for iteration in range(1, iterations + 1):
        results = [train_step(run, batch) for run, batch in zip(runs, batches, strict=True)]
        losses.append(sum(float(result.losses["lm loss"]) for result in results) / SITES)
        for fragment in range(fragments):
            if (iteration + fragment * steps // fragments) % steps == 0:
                for name in filter(lambda name: find_fragment(name) == fragment, outer):
                    deltas = [outer[name].detach() - mine[name].detach() for mine in weights]
                    due.append((iteration + overlap, name, average(form, deltas, [own[name] for own in lost])))
        for _, name, mean in [entry for entry in due if entry[0] == iteration]:
            outer[name].grad = mean
            optimizers[name].step()
            for mine in weights:
                mine[name].data.lerp_(outer[name].data, 1 - mixing)
        due = [entry for entry in due if entry[0] > iteration]
    for run in runs:
        run.data.close()
    shut_down()
    return losses


def start(
    directory: Path, ranks: int, *flags: str | Path, batch: int = BATCH, iterations: int = ITERATIONS
) -> list[Program]:
    """A job of `ranks` processes that are divided into sites."""
    port = free_port()
    directory.mkdir()
    program = directory / "train.py"
    program.write_text(PROGRAM)
    words = [*FLAGS, "--global-batch-size", str(batch), "--train-iters", str(iterations), "--diloco-replicas", "2"]
    words += ["--metrics-dir", str(directory), *map(str, flags)]
    jobs = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
         "MASTER_PORT": port}
        for rank in range(ranks)
    ]  # fmt: skip
    return [Program([program, *words], environment(job), ROOT) for job in jobs]


def read_losses(directory: Path) -> list[float]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["lm loss"] for row in rows if "lm loss" in row]


def check(programs: list[Program]) -> None:
    for done in finish(programs):
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


PLAIN = ["--diloco-inner-steps", "3"]
STREAMING = (
    "--diloco-sync-interval 4 --diloco-fragments 2 --diloco-overlap-steps 1 --diloco-mixing 0.5 "
    "--use-distributed-optimizer --diloco-exchange-dtype bf16"
).split()
STREAMED: dict[str, Any] = {"steps": 4, "mixing": 0.5}
LAYOUTS = {
    "replicas": (4, ["--diloco-exchange-dtype", "int8"]),
    "divided state": (4, ["--use-distributed-optimizer"]),
    "tensor parallel": (4, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pipeline": (4, ["--pipeline-model-parallel-size", "2"]),
}


@pytest.mark.flags(
    "--diloco-replicas",
    "--diloco-inner-steps",
    "--diloco-outer-lr",
    "--diloco-outer-momentum",
    "--diloco-fragments",
    "--diloco-overlap-steps",
    "--diloco-mixing",
)
@pytest.mark.parametrize(
    ("flags", "sizes", "layouts"),
    [
        (PLAIN, {"steps": 3}, ("replicas", "tensor parallel")),
        (STREAMING, STREAMED | {"fragments": 2, "overlap": 1, "form": "bf16"}, ("divided state", "pipeline")),
    ],
    ids=["plain", "streaming"],
)
def test_sites_train_as_the_simulation_says(
    flags: list[str], sizes: dict[str, Any], layouts: tuple[str, ...], tmp_path: Path
) -> None:
    programs = []
    for name in layouts:
        ranks, layout = LAYOUTS[name]
        programs += start(tmp_path / name, ranks, *flags, *layout)
    check(programs)
    for name in layouts:
        replicas = 2 if name in ("replicas", "divided state") else 1
        expected = simulate(replicas, **sizes | ({"form": "int8"} if name == "replicas" else {}))
        assert read_losses(tmp_path / name) == pytest.approx(expected, abs=2e-5), name


@pytest.mark.flags("--diloco-exchange-dtype")
def test_a_resumed_run_is_the_same_with_an_exchange_under_way_and_rounded_numbers(tmp_path: Path) -> None:
    """Saved after iteration 4, whose exchange is applied after iteration 6; what it has rounded away is part of the one
    of iteration 8, which is applied after iteration 10."""
    flags = [*STREAMING, "--diloco-fragments", "1", "--diloco-overlap-steps", "2", "--diloco-exchange-dtype", "e3m0"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    check(start(whole, 2, *flags, iterations=12))
    expected = simulate(1, **STREAMED, iterations=12, overlap=2, form="e3m0")
    assert read_losses(whole) == pytest.approx(expected, abs=2e-5)
    keeps = ["--save", tmp_path / "saved", "--load", tmp_path / "saved", "--save-interval", "4"]
    check(start(parted, 2, *flags, *keeps, "--exit-interval", "4", iterations=12))
    assert (tmp_path / "saved" / "site_1" / "iter_0000004").is_dir()
    check(start(tmp_path / "on", 2, *flags, *keeps, iterations=12))
    assert read_losses(parted) + read_losses(tmp_path / "on") == read_losses(whole)


# On a fast machine the others would be done before a site is back.
SLOW = """
import time
from megatron.training.hooks.sites import SitesHook
SitesHook.on_step_start = lambda self, run: time.sleep(0.08)
"""


def start_site(directory: Path, site: int, address: str, *flags: str | Path) -> Program:
    """A site that is a job of its own, of one process."""
    program = directory / "train.py"
    program.write_text(SLOW + PROGRAM)
    key = directory / "key"
    key.write_bytes(b"sixteen bytes and more")
    words = [*FLAGS, *PLAIN, "--global-batch-size", str(BATCH), "--diloco-replicas", str(SITES), "--train-iters", "160"]
    words += ["--datacenter-id", str(site), "--diloco-address", address, "--diloco-key-file", str(key)]
    words += ["--metrics-dir", str(directory / f"site{site}"), *map(str, flags)]
    return Program([program, *words], environment({}), ROOT)


def wait_for_iteration(directory: Path, iteration: int) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if (directory / "metrics.jsonl").is_file() and len(read_losses(directory)) >= iteration:
            return
        time.sleep(0.05)
    raise AssertionError(f"{directory} did not come to iteration {iteration}")


@pytest.mark.flags("--diloco-timeout-seconds", "--diloco-min-replicas")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_site_that_is_lost_and_comes_back_goes_on_with_the_others(lost: int, tmp_path: Path) -> None:
    """From the beginning, without a checkpoint: whoever is left has the outer state."""
    address, other = f"127.0.0.1:{free_port()}", 1 - lost
    # A site that is gone is not waited for, so that the time-out does not matter.
    limits = ["--diloco-timeout-seconds", "60", "--diloco-min-replicas", "1", "--lr", "1e-3"]
    programs = [start_site(tmp_path, site, address, *limits) for site in range(SITES)]
    wait_for_iteration(tmp_path / f"site{other}", 8)
    programs[lost].kill()
    programs[lost].wait(20)
    count = len(read_losses(tmp_path / f"site{other}"))
    wait_for_iteration(tmp_path / f"site{other}", count + 8)
    back = start_site(tmp_path, lost, address, *limits)
    done = finish([programs[other], back])
    for ended in done:
        assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    assert f"site {lost} is lost; this one goes on" in done[0].stdout
    assert re.search(r"the other sites are at iteration \d+: going on there from \d", done[1].stdout)
    first, second = (read_losses(tmp_path / f"site{site}")[-30:] for site in range(SITES))
    assert first == pytest.approx(second, abs=1e-6), "both log the mean of their losses"
