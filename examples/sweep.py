# SPDX-License-Identifier: Apache-2.0
"""Several trainings that differ in some flags, their losses in one table: ablations, learning rates, scaling laws.

    python examples/sweep.py --output runs/width --vary "--hidden-size 64" --vary "--hidden-size 128" -- FLAGS ...
    python examples/sweep.py --output runs/qk --vary "" --vary "--qk-layernorm" --seeds 3 -- FLAGS ...
    python examples/sweep.py --output runs/law --vary "--num-layers 2 --hidden-size 64" ... --fit -- FLAGS ...

FLAGS are those of pretrain_gpt.py. A run that has finished is not repeated, so that a sweep can be interrupted and
extended. The loss is the mean over the last tenth of a run's steps; with --seeds also how much it varies by chance.
--fit puts loss = a compute^-b through the variants (Kaplan et al., 2020), compute in floating-point operations.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.core.errors import ConfigError, TemporaryError, command_line  # noqa: E402
from megatron.core.line_files import read_rows  # noqa: E402
from megatron.training.config.container import RunConfig  # noqa: E402
from megatron.training.flags.read import read_run_config  # noqa: E402


@dataclass
class Variant:
    """A set of flags, its sizes by the planner, and the final losses of its runs."""

    flags: str
    parameters: int
    """Without embeddings and output layer, as scaling laws count them."""
    compute: float
    """Floating-point operations of the whole run."""
    losses: list[float] = field(default_factory=list)


def measure_variant(flags: str, config: RunConfig) -> Variant:
    """The sizes of a variant's model and run. Raises ConfigError for a run whose length no flag says."""
    from megatron.planner.memory import count_parameters
    from megatron.planner.throughput import count_training_flops_per_token
    from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size

    length, batch, steps = config.data.seq_length, config.training.global_batch_size, config.training.train_iters
    if length is None or batch is None or steps is None:
        raise ConfigError("a sweep needs --seq-length, --global-batch-size and --train-iters")
    rows = compute_padded_vocab_size(config, build_tokenizer(config))
    untied = config.gpt.untie_embeddings_and_output_weights
    whole = count_parameters(config.model, padded_vocab_size=rows, untied=untied).total
    tables = rows * (config.model.hidden_size or 0) * (2 if untied else 1)
    per_token = count_training_flops_per_token(config.model, seq_length=length, padded_vocab_size=rows)
    return Variant(flags, int(whole - tables), float(per_token) * length * batch * steps)


def train(flags: Sequence[str], directory: Path, steps: int) -> float:
    """The final loss of a run; it is not repeated where the directory has it."""
    losses = read_losses(directory)
    if len(losses) < steps:
        metrics = directory / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "log.txt").open("w") as log:
            command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, "--metrics-dir", str(directory)]
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        losses = read_losses(directory)
        if done.returncode != 0 or len(losses) < steps:
            raise TemporaryError(
                f"a run ended with exit code {done.returncode} after {len(losses)} steps: {directory}/log.txt"
            )
    return statistics.fmean(losses[-max(1, steps // 10) :])


def read_losses(directory: Path) -> list[float]:
    """The loss of each step so far. A loss that is no number counts as infinitely bad."""
    path = directory / "metrics.jsonl"
    rows = read_rows(path)[0] if path.exists() else []
    return [math.inf if row["lm loss"] is None else row["lm loss"] for row in rows if "eval" not in row]


def fit_power_law(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a x^-b by least squares of the logarithms. Raises ConfigError for fewer than two different x."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    if len(set(xs)) < 2:
        raise ConfigError("--fit needs variants of at least two sizes; vary --num-layers or --hidden-size")
    slope, intercept = statistics.linear_regression(xs, ys)
    return math.exp(intercept), -slope


def write_table(variants: Sequence[Variant], output: Path) -> None:
    """Print the variants and keep them in OUTPUT/sweep.json."""
    width = max(len("flags"), *(len(variant.flags) for variant in variants))
    print(f"{'flags':<{width}}  {'parameters':>12}  {'operations':>11}  {'loss':>8}  {'+/-':>7}")
    for variant in variants:
        loss = statistics.fmean(variant.losses)
        # A diverged run has no distance from the others.
        has_spread = len(variant.losses) > 1 and math.isfinite(loss)
        spread = f"{statistics.stdev(variant.losses):7.4f}" if has_spread else "      -"
        print(f"{variant.flags:<{width}}  {variant.parameters:12,}  {variant.compute:11.3g}  {loss:8.4f}  {spread}")
    rows: list[dict[str, Any]] = [vars(variant) for variant in variants]
    (output / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def join_values(argv: Sequence[str]) -> list[str]:
    """--vary X as --vary=X, because argparse takes a value such as --qk-layernorm for a flag of ours."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--vary":
            joined[-1] = f"--vary={word}"
        else:
            joined.append(word)
    return joined


def main() -> int:
    """Check every variant, then train them one after the other."""
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    common = sys.argv[place + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory: one below it for each run")
    parser.add_argument(
        "--vary", action="append", required=True, metavar="FLAGS", help="flags of one variant; repeat it"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each variant, with different seeds (1)")
    parser.add_argument("--fit", action="store_true", help="fit a power law through the variants")
    arguments = parser.parse_args(join_values(sys.argv[1:place]))
    # Every mistake before the first hour of training.
    configs = [read_run_config([*common, *shlex.split(flags)], os.environ) for flags in arguments.vary]
    variants = [measure_variant(flags, config) for flags, config in zip(arguments.vary, configs, strict=True)]
    if arguments.fit:
        fit_power_law([(variant.compute, 1.0) for variant in variants])
    for number, (variant, config) in enumerate(zip(variants, configs, strict=True)):
        for seed in range(arguments.seeds):
            flags = [
                *common,
                *shlex.split(variant.flags),
                *(["--seed", str(1234 + seed)] if arguments.seeds > 1 else []),
            ]
            directory = arguments.output / f"{number:02d}-{seed}"
            print(f"{directory}: {variant.flags or '(as they are)'}", flush=True)
            variant.losses.append(train(flags, directory, config.training.train_iters or 0))
    write_table(variants, arguments.output)
    if arguments.fit:
        a, b = fit_power_law([(variant.compute, statistics.fmean(variant.losses)) for variant in variants])
        print(f"loss = {a:.4g} x operations^-{b:.4g}; ten times the operations: {10**-b:.3f} of the loss")
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main)())
