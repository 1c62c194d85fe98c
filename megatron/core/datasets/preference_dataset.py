# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers to the same messages, of which one is preferred, for direct preference optimisation.

A line of the JSONL file is an object {"messages": [...], "chosen": ..., "rejected": ...}, each answer a text or a list
of messages; "prompt", a text or a list, may stand for "messages". A sample is one pair: both conversations one after
the other in a sequence, each as if it were alone, and padding behind them. Only the answers' tokens count, as the chat
template writes them: the assistant's turn and its end marker, without the marker that opens it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron.core.datasets.gpt_dataset import Sample
from megatron.core.datasets.index_cache import Arrays
from megatron.core.datasets.sft_dataset import SFTDataset, are_messages, encode
from megatron.core.errors import DataError

Array = npt.NDArray[Any]

CHOSEN, REJECTED = 1, 2
"""Marks of the tokens of the two answers in a sample's `answers`; 0 are all others."""


class PreferenceDataset(SFTDataset):
    """Pairs of conversations; the prefix of a dataset is the path of its JSONL file.

    dataset[i] -> as SFTDataset, and answers int64 [s]: CHOSEN and REJECTED where a label belongs to that answer, else
    0; pair int64 []: a number by which the pair is known, whatever sample it is in, a digest of its tokens.
    """

    arrays = (*SFTDataset.arrays, "pairs")

    def __getitem__(self, index: int | None) -> Sample:
        sample = super().__getitem__(index)
        first = int(self._conversations(0 if index is None else index)[0])
        # The chosen conversation of n tokens takes the first n - 1 positions.
        end_of_chosen = int(self.bounds[first + 1] - self.bounds[first]) - 1
        answers = sample["loss_mask"].long() * REJECTED
        answers[:end_of_chosen] //= REJECTED // CHOSEN
        return sample | {"answers": answers, "pair": torch.tensor(int(self.pairs[first // 2]))}

    @property
    def pairs(self) -> Array:
        """int64 [pairs]: the number of each pair."""
        return self.cached["pairs"]

    def summary(self) -> str:
        """Return what was read, and how much of the sequences is padding."""
        pairs, skipped = len(self.pairs), int(self.left_out[2])
        used = int(self.bounds[-1]) - 2 * pairs
        return (
            f"{self.index_split.name} data: {pairs} pairs of answers, a sequence each, "
            f"{100 * (1 - used / (pairs * self.config.sequence_length)):.2f} % padding"
            + f", {skipped} skipped with mistakes"
            * (skipped > 0)
        )

    def _encode_line(self, line: int) -> list[tuple[list[int], list[bool]]]:
        """The chosen and the rejected conversation. Raises DataError naming the line."""
        place = self.dataset.place(line)
        shared, answers = read_pair(self.dataset.line(line), place)
        # Nothing behind the answer: what would be added after both says nothing about either.
        encoded = [
            encode([*shared, *answer], self.config.tokenizer, place, first=len(shared), ends_document=False)
            for answer in answers
        ]
        for name, (_, counts) in zip(("chosen", "rejected"), encoded, strict=True):
            if not any(counts[1:]):
                raise DataError(f"{place}: {name} has no token of an assistant's turn; give an answer")
        if encoded[0] == encoded[1]:
            raise DataError(f"{place}: chosen and rejected are the same {sum(encoded[0][1])} tokens; give two answers")
        needed = sum(len(ids) - 1 for ids, _ in encoded)
        if needed > self.config.sequence_length:
            raise DataError(
                f"{place}: the two conversations take {needed} positions and --seq-length is "
                f"{self.config.sequence_length}; raise it, or skip such lines with --skip-bad-conversations"
            )
        return encoded

    def _pack(self, lengths: Array, random: np.random.RandomState) -> tuple[Array, Array]:
        """One pair in each sequence."""
        return np.arange(len(lengths)), np.arange(0, len(lengths) + 1, 2)

    def _build_indices(self) -> Arrays:
        arrays = super()._build_indices()
        bounds = arrays["bounds"]
        pairs = []
        for first in range(0, len(bounds) - 1, 2):
            digest = hashlib.blake2b(digest_size=8)
            for number in (first, first + 1):
                span = slice(*bounds[number : number + 2])
                digest.update(arrays["tokens"][span].tobytes() + arrays["counts"][span].tobytes() + b"|")
            pairs.append(int.from_bytes(digest.digest(), "big", signed=True))
        return {**arrays, "pairs": np.asarray(pairs, dtype=np.int64)}


def read_pair(line: dict[str, Any], place: str) -> tuple[list[Any], list[list[Any]]]:
    """The messages that both answers follow, and the messages of the chosen and of the rejected answer.

    Without "messages" and "prompt" the two lists' common beginning is what they follow. Raises DataError.
    """
    shared = line.get("messages", line.get("prompt"))
    if isinstance(shared, str):
        shared = [{"role": "user", "content": shared}]
    chosen, rejected = (
        [{"role": "assistant", "content": answer}] if isinstance(answer, str) and answer else answer
        for answer in (line.get("chosen"), line.get("rejected"))
    )
    if shared is None and are_messages(chosen) and are_messages(rejected):
        same = [first == second for first, second in zip(chosen, rejected, strict=False)]
        length = min(same.index(False) if False in same else len(same), len(chosen) - 1, len(rejected) - 1)
        shared, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    if not (are_messages(shared) and are_messages(chosen) and are_messages(rejected)):
        raise DataError(
            f'{place}: expected an object {{"messages": [{{"role": ..., "content": ...}}, ...], "chosen": ..., '
            '"rejected": ...}, each answer a text that is not empty or a list of messages'
        )
    return shared, [chosen, rejected]
