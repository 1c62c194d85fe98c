# SPDX-License-Identifier: Apache-2.0
"""Last step of the quickstart: what was learnt, in numbers and as a picture.

The yardstick is the unigram entropy of the corpus: the loss of the best model that ignores context and only knows
how frequent each token is. A model whose loss is well below it has learnt to use what came before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.line_files import read_rows


def compute_unigram_entropy(prefix: str) -> float:
    """Entropy of the token frequencies of a .bin/.idx dataset, in nats per token."""
    dataset = IndexedDataset(prefix)
    counts = np.zeros(0, dtype=np.int64)
    for index in range(len(dataset)):
        found = np.bincount(np.asarray(dataset[index]), minlength=len(counts))
        # bincount is as long as the largest id, which may be larger than any before.
        found[: len(counts)] += counts
        counts = found
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@dataclass
class Curves:
    """What metrics.jsonl holds of a run's losses, in nats per token."""

    training: list[tuple[int, float]] = field(default_factory=list)
    """(iteration, lm loss of its step); iterations whose loss was not a number are left out."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """(iteration, mean lm loss of an evaluation)."""
    tokens: set[int] = field(default_factory=set)
    """How many an iteration has; several numbers where the batch grows."""


def read_metrics(folder: Path) -> Curves:
    """The losses in metrics.jsonl."""
    curves = Curves()
    for row in read_rows(folder / "metrics.jsonl")[0]:  # without a last line that is not finished
        # A value that is not known or not finite is null in the file; the key is there all the same.
        if "eval" in row and row["split"] == "validation":
            curves.validation.append((row["iteration"], row["eval"]["lm loss"]))
        elif row.get("lm loss") is not None:
            curves.training.append((row["iteration"], row["lm loss"]))
            curves.tokens.add(round(row["tokens_per_second"] * row["iteration_time_seconds"]))
    return curves


def smooth(losses: Sequence[float], window: int) -> np.ndarray:
    """Running means over `window` losses around each one, fewer near the ends.

    Near the beginning, where the loss falls steeply, as many before as after, so that it begins where the run did.
    """
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    at = np.arange(len(losses))
    before = np.minimum(window // 2, at)
    after = np.minimum(before, len(losses) - 1 - at)
    return (sums[at + after + 1] - sums[at - before]) / (before + after + 1)


def draw(path: Path, curves: Curves, entropy: float | None) -> None:
    """Draw loss over iterations as a PNG."""
    import matplotlib

    # Draws into a file; no display is needed.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    iterations, losses = zip(*curves.training, strict=True)
    window = compute_window(len(losses))
    axes.plot(iterations, losses, linewidth=0.7, color="tab:blue", alpha=0.35, label="training, each iteration")
    axes.plot(
        iterations,
        smooth(losses, window),
        linewidth=1.8,
        color="tab:blue",
        label=f"training, mean over {window} iterations",
    )
    if curves.validation:
        axes.plot(
            *zip(*curves.validation, strict=True), "o", color="tab:orange", markeredgecolor="white", markersize=7,
            zorder=3, label="validation",
        )  # fmt: skip
    if entropy is not None:
        axes.axhline(entropy, linestyle="--", color="grey", label=f"unigram entropy of the corpus, {entropy:.2f}")
    each = f" ({min(curves.tokens):,} tokens each)" if len(curves.tokens) == 1 else ""
    axes.set(xlabel=f"iteration{each}", ylabel="loss (nats per token)", title="Language-model loss")
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def compute_window(points: int) -> int:
    """Losses in a running mean: 4 % of all of them, at least 5, an odd number."""
    return max(5, points // 25 // 2 * 2 + 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metrics-dir", type=Path, required=True, help="folder that holds metrics.jsonl")
    parser.add_argument("--data-path", help="dataset prefix, for the unigram entropy")
    parser.add_argument("--output", type=Path, required=True, help="the .png to write")
    arguments = parser.parse_args()
    if not (arguments.metrics_dir / "metrics.jsonl").is_file():
        print(f"error: {arguments.metrics_dir} holds no metrics.jsonl; train with --metrics-dir first", file=sys.stderr)
        return 2

    curves = read_metrics(arguments.metrics_dir)
    training, validation = curves.training, curves.validation
    if not training:
        print(f"error: {arguments.metrics_dir}/metrics.jsonl has no iterations yet", file=sys.stderr)
        return 2
    entropy = compute_unigram_entropy(arguments.data_path) if arguments.data_path else None
    last = [loss for _, loss in training[-10:]]
    print(f"iterations trained:          {training[-1][0]}")
    print(f"first training loss:         {training[0][1]:.3f} nats per token")
    print(f"training loss, last {len(last):2d}:      {sum(last) / len(last):.3f}")
    if validation:
        print(f"validation loss:             {validation[-1][1]:.3f}")
    if entropy is not None:
        print(f"unigram entropy of corpus:   {entropy:.3f}   (what knowing only token frequencies would reach)")
    draw(arguments.output, curves, entropy)
    print(f"loss curve:                  {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
