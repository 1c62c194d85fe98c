# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a trained model by the position of a token in its sequence: does a longer context help, or harm?

    python tools/loss_by_position.py --load CHECKPOINTS --data-path PREFIX --seq-length 8192
    python tools/loss_by_position.py --load CHECKPOINTS --synthetic 64 --seq-length 256

Sequences are cut from the dataset one after another. Positions are put together in bins that double: 1-16, 17-32,
33-64, ... A model that uses its context gets better to the right; one that does not know such positions gets much
worse there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.errors import ConfigError, DataError, command_line
from megatron.training.flags.argument import ProgramParser, path

if TYPE_CHECKING:
    from torch import Tensor, nn

FIRST_BIN = 16


def read_sequences(prefix: str, length: int, number: int) -> Iterator[list[int]]:
    """Up to `number` sequences of length + 1 tokens of a .bin/.idx dataset. Raises DataError where there is none."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset, given = IndexedDataset(prefix), 0
    kept: list[int] = []
    for index in range(len(dataset)):
        kept.extend(int(token) for token in dataset[index])
        while len(kept) > length and given < number:
            yield kept[: length + 1]
            kept, given = kept[length:], given + 1
        if given == number:
            return
    if given == 0:
        raise DataError(f"--data-path {prefix} has fewer than {length + 1} tokens; give a shorter --seq-length")


def make_sequences(period: int, length: int, number: int, vocab_size: int) -> Iterator[list[int]]:
    """Random tokens that repeat after `period`: to be predicted only from the context, once it is that long."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        once = torch.randint(0, vocab_size, (period,), generator=generator)
        yield once.repeat(length // period + 2)[: length + 1].tolist()


def compute_losses(model: nn.Module, sequences: list[list[int]], batch_size: int) -> Tensor:
    """The mean loss at each position, float64 [s]."""
    import torch

    total = torch.zeros(len(sequences[0]) - 1, dtype=torch.float64)
    device = next(model.parameters()).device
    with torch.no_grad():
        for first in range(0, len(sequences), batch_size):
            tokens = torch.tensor(sequences[first : first + batch_size], device=device)
            places = torch.arange(tokens.shape[1] - 1, device=device).expand(tokens.shape[0], -1)
            losses = model(tokens[:, :-1], places, None, labels=tokens[:, 1:])  # [b, s]
            total += losses.double().sum(0).cpu()
    return total / len(sequences)


def list_bins(length: int) -> list[tuple[int, int]]:
    """(first, end) positions from 0: each as long as all before it."""
    bounds, end = [0], FIRST_BIN
    while end < length:
        bounds.append(end)
        end *= 2
    return list(zip(bounds, [*bounds[1:], length], strict=True))


@command_line
def main() -> int:
    """Load the model, read the data, print the table."""
    parser = ProgramParser(__doc__)
    parser.add_argument("--load", metavar="DIR", required=True, type=path, help="directory of checkpoints")
    parser.add_argument("--ckpt-step", metavar="N", type=int, help="iteration to load (the latest)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data-path", metavar="PREFIX", help="a .bin/.idx dataset of the model's tokenizer")
    source.add_argument(
        "--synthetic", metavar="PERIOD", type=int, help="made-up sequences that repeat after PERIOD tokens"
    )
    parser.add_argument("--seq-length", metavar="N", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--sequences", metavar="N", type=int, default=32, help="how many (32)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=4, help="sequences computed together (4)")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    arguments = parser.parse_args()
    for name in ("seq_length", "sequences", "batch_size", "synthetic"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    # torch takes seconds to import: mistakes in the command line are found before that.
    from megatron.training.checkpoint.trained_model import load_trained_model

    trained, length = load_trained_model(arguments.load, arguments.ckpt_step), arguments.seq_length
    if trained.max_sequence_length is not None and length > trained.max_sequence_length:
        raise ConfigError(
            f"--seq-length {length}: the model has {trained.max_sequence_length} positions "
            "(--max-position-embeddings); give at most that, or train it with more"
        )
    if arguments.synthetic:
        found = make_sequences(arguments.synthetic, length, arguments.sequences, trained.vocab_size)
    else:
        found = read_sequences(arguments.data_path, length, arguments.sequences)
    sequences = list(found)
    losses = compute_losses(trained.model, sequences, arguments.batch_size)
    rows = [
        {"first": first + 1, "last": end, "loss": float(losses[first:end].mean())} for first, end in list_bins(length)
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{trained.path}: {len(sequences)} sequences of {length} tokens")
    print(f"{'positions':>13}  {'loss':>8}  {'perplexity':>10}")
    for row in rows:
        places = f"{row['first']}-{row['last']}"
        # A loss of some hundreds has no perplexity that anybody reads.
        print(f"{places:>13}  {row['loss']:8.4f}  {math.exp(min(row['loss'], 100.0)):10.4g}")
    return 0
