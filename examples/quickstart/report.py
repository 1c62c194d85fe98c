"""Last step of the quickstart: what was learnt, in numbers and as a picture.

The yardstick is the unigram entropy of the corpus: the loss of the best model that ignores context and only knows
how frequent each token is. A model whose loss is well below it has learnt to use what came before.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset


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


def read_metrics(folder: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(iteration, lm loss) of training and of evaluation from metrics.jsonl."""
    training, validation = [], []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "eval" in row:
            validation.append((row["iteration"], row["eval"]["lm loss"]))
        # A value that is not known or not finite is null in the file; the key is there all the same.
        elif "lm loss" in row:
            training.append((row["iteration"], row["lm loss"]))
    return training, validation


def draw(
    path: Path, training: list[tuple[int, float]], validation: list[tuple[int, float]], entropy: float | None
) -> None:
    """Draw loss over iterations as a PNG."""
    import matplotlib

    # Draws into a file; no display is needed.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*training, strict=True), linewidth=1.2, color="tab:blue", label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o", color="tab:orange", label="validation")
    if entropy is not None:
        axes.axhline(entropy, linestyle="--", color="grey", label=f"unigram entropy of the corpus, {entropy:.2f}")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title="Language-model loss")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metrics-dir", type=Path, required=True, help="folder that holds metrics.jsonl")
    parser.add_argument("--data-path", help="dataset prefix, for the unigram entropy")
    parser.add_argument("--output", type=Path, required=True, help="the .png to write")
    arguments = parser.parse_args()
    if not (arguments.metrics_dir / "metrics.jsonl").is_file():
        print(f"error: {arguments.metrics_dir} holds no metrics.jsonl; train with --metrics-dir first", file=sys.stderr)
        return 2

    training, validation = read_metrics(arguments.metrics_dir)
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
    draw(arguments.output, training, validation, entropy)
    print(f"loss curve:                  {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
