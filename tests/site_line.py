# SPDX-License-Identifier: Apache-2.0
"""DiLoCo against synchronous data parallelism: two sites of two processes each, and a slow line between them.

    python -m tests.site_line                            # bytes that cross, and speed, over an emulated line (root)
    python -m tests.site_line --quickstart quickstart --diloco-outer-lr 1    # losses on the corpus of the quickstart

The line has 100 Mbit/s and 100 ms there and back; each site is a host of its own (emulated_network.py). Both ways train
the model of the quickstart. Synchronous training has gradients summed inside of a site first, so that one sum crosses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.core.errors import format_bytes
from megatron.core.many_sites.formats import BLOCK, count_bytes
from megatron.planner.many_sites import SiteLines
from tests.emulated_network import EmulatedNetwork, Link
from tests.programs import ROOT, Program

MODEL = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --group-query-attention
    --num-query-groups 2 --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 8 --lr 2e-3 --min-lr 2e-4 --clip-grad 1 --seed 1234 --eval-iters 0
""".split()
RANKS = 2
"""Processes of a site."""
SYNCHRONOUS = ["--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"]


class Measured(NamedTuple):
    """Seconds, and bytes that crossed, of a step."""

    seconds: float
    sent: float


def name_rank(rank: int, ranks: int, port: int, **place: str) -> dict[str, str]:
    """The environment of a process of a job."""
    launched = {"RANK": rank, "LOCAL_RANK": rank % RANKS, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    common = {"OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu", "MASTER_ADDR": "localhost", "PYTHONPATH": str(ROOT)}
    return os.environ | common | place | {name: str(value) for name, value in launched.items()}


def start(flags: Sequence[str | Path], environment: dict[str, str], log: Path) -> Program:
    """One process of a run, whose output goes to a file."""
    return Program(["pretrain_gpt.py", *MODEL, *map(str, flags)], environment, ROOT, log.open("a"))


def finish(programs: Sequence[Program], log: Path) -> None:
    """Wait for all processes; a failed one ends everything with what they said."""
    codes = [program.wait() for program in programs]
    if any(codes):
        sys.exit(log.read_text()[-4000:])


def measure(network: EmulatedNetwork, root: Path, every: int, until: int, flags: Sequence[str | Path]) -> Measured:
    """Train over the line; a step's figures between iterations `every` and `until`. every: between two exchanges."""
    root.mkdir()
    is_one_job = "--diloco-replicas" not in flags
    common = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4096", "--num-workers", "0"]
    common += ["--train-iters", str(until), "--log-interval", str(every), *map(str, flags)]
    programs = []
    for site in range(2):
        for local in range(RANKS):
            place = network.variables(site) | {"LOCAL_WORLD_SIZE": str(RANKS)}
            own: list[str | Path] = [*common, "--metrics-dir", root / f"site{0 if is_one_job else site}"]
            if is_one_job:
                environment = name_rank(site * RANKS + local, 2 * RANKS, 29500, **place)
            else:
                place |= {"GROUP_RANK": "0", "MASTER_ADDR": network.address(site)}
                environment = name_rank(local, RANKS, 29500, **place)
                own += ["--datacenter-id", str(site)]
            programs.append(start(own, environment, root / "log"))
    # The progress line, as it is written at the end of an iteration.
    moments: dict[int, tuple[float, int]] = {}
    metrics = root / "site0" / "metrics.jsonl"
    while any(program.poll() is None for program in programs):
        time.sleep(0.02)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        for line in lines:
            if '"lm loss"' in line and line.endswith("}"):
                moments.setdefault(json.loads(line)["iteration"], (time.monotonic(), sum(network.sent_bytes)))
    finish(programs, root / "log")
    (begun, sent_before), (ended, sent) = moments[every], moments[until]
    steps = until - every
    return Measured((ended - begun) / steps, (sent - sent_before) / steps)


def compare_over_a_line(every: int, form: str) -> None:
    """Print both ways' steps and bytes, and the waiting against the formula."""
    rate = 100e6
    link = Link(delay_seconds=0.05, bytes_per_second=rate / 8)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        key = root / "key"
        key.write_text(secrets.token_hex(32))
        sites = ["--use-distributed-optimizer", "--diloco-replicas", "2", "--diloco-inner-steps", str(every)]
        sites += ["--diloco-address", f"{EmulatedNetwork.address(0)}:29701", "--diloco-key-file", str(key)]
        sites += ["--diloco-exchange-dtype", form]
        with EmulatedNetwork(2, link) as network:
            ours = measure(network, root / "sites", every, 4 * every, sites)
            exact = measure(network, root / "synchronous", 2, 8, SYNCHRONOUS)
            network.link = Link()
            quick = measure(network, root / "quick", every, 4 * every, sites)
        log = (root / "sites" / "log").read_text()
    parameters = int(log.split("training ")[1].split(" parameters")[0].replace(",", ""))
    # The other site hears the mean last. A progress line's losses cross once and back, too.
    said = re.findall(r"sites: (\d+) outer steps; rank 0 has sent .* and waited ([\d.]+) s", log)
    waited = max(float(seconds) / int(steps) for steps, seconds in said) - 2 * link.delay_seconds
    print(
        f"{parameters:,} parameters, exchanged in {form} every {every} steps; a step, and the bytes that cross in it:"
    )
    for name, found in (("synchronous", exact), ("DiLoCo", ours), ("DiLoCo without the line's limits", quick)):
        print(f"  {name:33} {found.seconds:8.3f} s   {format_bytes(int(found.sent))}")
    print(f"bytes: {exact.sent / ours.sent:.1f} times fewer; speed: {exact.seconds / ours.seconds:.2f} times")
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()
    bits = 8 * count_bytes(BLOCK, form) / BLOCK
    lines = SiteLines(
        2, parameters, rate, link.delay_seconds, quick.seconds, every, bits, connections=RANKS, control=control
    )
    print(f"waiting at an exchange: {lines.waiting_seconds:.2f} s by the formula ({control}); measured {waited:.2f} s")


def compare_losses(quickstart: Path, every: int, form: str, steps: int, outer: Sequence[str], seed: int) -> None:
    """Print both ways' losses at the end: of training, over the last tenth of the steps, and of validation, with
    the weights after the last exchange. outer: flags of DiLoCo."""
    data: list[object] = ["--data-path", quickstart / "stdlib_text_document", "--split", "95,5,0", "--tokenizer-type"]
    data += ["HuggingFaceTokenizer", "--tokenizer-model", quickstart / "tokenizer", "--train-iters", steps]
    data += ["--lr-decay-style", "cosine", "--lr-warmup-iters", steps // 10, "--log-interval", 1, "--weight-decay", 0.1]
    data += ["--eval-iters", 80, "--eval-interval", steps + 1, "--seed", seed]
    sites: list[object] = ["--diloco-replicas", 2, "--diloco-inner-steps", every, "--diloco-exchange-dtype", form]
    sites += outer
    ways: list[tuple[str, list[object]]] = [("synchronous", [SYNCHRONOUS[0]]), ("DiLoCo", sites)]
    losses = {}
    with tempfile.TemporaryDirectory() as directory:
        for port, (name, flags) in enumerate(ways, 29520):
            root = Path(directory) / name
            root.mkdir()
            own = [*data, "--data-cache-path", root / "cache", "--metrics-dir", root, *flags]
            ranks = [start(list(map(str, own)), name_rank(rank, 2, port), root / "log") for rank in range(2)]
            finish(ranks, root / "log")
            rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
            last = [row["lm loss"] for row in rows if "lm loss" in row][-(steps // 10) :]
            losses[name] = sum(last) / len(last), rows[-1]["eval"]["lm loss"]
            print(f"{name:12} loss {losses[name][0]:.4f}, validation {losses[name][1]:.4f}", flush=True)
    ours, exact = losses["DiLoCo"], losses["synchronous"]
    more = [f"{100 * (mine / theirs - 1):+.2f} %" for mine, theirs in zip(ours, exact, strict=True)]
    print(f"DiLoCo, every {every} steps in {form}: {more[0]}, validation {more[1]}")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=20, help="steps between two exchanges")
    parser.add_argument("--form", choices=("fp32", "bf16", "int8", "e3m0"), default="fp32")
    parser.add_argument("--quickstart", type=Path, help="directory of the quickstart: compare losses on its corpus")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1234)
    asked, outer = parser.parse_known_args()
    if asked.quickstart is None:
        compare_over_a_line(asked.every, asked.form)
    else:
        compare_losses(asked.quickstart, asked.every, asked.form, asked.steps, outer, asked.seed)


if __name__ == "__main__":
    main()
