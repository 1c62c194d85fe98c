# SPDX-License-Identifier: Apache-2.0
"""Instruction tuning: conversations, packed so that few positions are padding, each as if it were alone.

A conversation of n tokens is n - 1 pairs of a token and its label. The pairs of several conversations share a sequence;
attention and positions stop at their borders (cu_seqlens), so that their loss equals the loss of the conversations one
by one. Everything is tokenized once, and kept with the packing in the index cache.

Conversations come from a JSONL file and become token ids through a chat template. A line of the file is an object
{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from megatron.core.datasets.blend import DataSplit
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import (
    GPTDatasetConfig,
    Sample,
    attention_mask,
    cumulative_lengths,
    position_ids,
)
from megatron.core.datasets.index_cache import Arrays, IndexCache
from megatron.core.datasets.indexed_format import file_size
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.object_storage import is_object
from megatron.core.errors import ConfigError, DataError, StorageError
from megatron.core.progress import CountedProgress

Array = npt.NDArray[Any]

# ---- the file, and the token ids of a conversation

_ROLES_WITH_LOSS = ("assistant",)


class ConversationFile:
    """The lines of a JSONL file, by number; blank lines do not count."""

    def __init__(self, path: str) -> None:
        self.path = path
        if is_object(path):
            raise ConfigError(f"{path}: conversations are read from a disk only; copy the file to one")
        if file_size(path) == 0:
            raise DataError(f"{path}: is empty; give a file with a conversation on each line")
        try:
            with open(path, "rb") as file:
                # Mapped, so that loader processes share it.
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error
        self._lines = np.asarray(list(self._places()), dtype=np.int64).reshape(-1, 3)
        if not len(self):
            raise DataError(f"{path}: has blank lines only; give a file with a conversation on each line")

    def __len__(self) -> int:
        return len(self._lines)

    def line(self, index: int) -> dict[str, Any]:
        """The object on line `index`, empty for another kind of value. Raises DataError naming the line."""
        begin, end, number = self._lines[index].tolist()
        try:
            line = json.loads(self._content[begin:end])
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.path}, line {number}: not JSON: {error}") from error
        return line if isinstance(line, dict) else {}

    def messages(self, index: int) -> list[dict[str, Any]]:
        """The messages of conversation `index`. Raises DataError naming the line."""
        messages = self.line(index).get("messages")
        if not are_messages(messages):
            raise DataError(
                f'{self.place(index)}: expected an object {{"messages": [{{"role": ..., "content": ...}}, ...]}}'
            )
        for number, message in enumerate(messages, 1):
            # A call of tools may stand in place of text.
            if message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls")):
                raise DataError(
                    f"{self.place(index)}: message {number}, the assistant's, is empty; a model that is trained on it "
                    "learns to say nothing"
                )
        return list(messages)

    def place(self, index: int) -> str:
        """Return the place of a conversation, for messages."""
        return f"{self.path}, line {int(self._lines[index, 2])}"

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the content."""
        digest = hashlib.blake2b(self._content, digest_size=16).hexdigest()
        return {"bytes": os.path.getsize(self.path), "blake2b": digest}

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """(begin, end, line number) of each line that is not blank."""
        begin = number = 0
        while begin < len(self._content):
            end = self._content.find(b"\n", begin)
            end = len(self._content) if end < 0 else end
            number += 1
            if self._content[begin:end].strip():
                yield begin, end, number
            begin = end + 1


def are_messages(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a value of a JSON file is a list of messages, at least one."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def encode(
    messages: Sequence[dict[str, Any]], tokenizer: Any, place: str, *, first: int = 0, ends_document: bool = True
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them the model is to learn: the assistant's answers.

    The chat template gives the text. It is cut where an answer begins and ends, and the parts are tokenized one by one,
    so that an answer has the tokens it would have when it is generated. first: message from which on answers count.
    ends_document: add the end-of-document token unless the template writes it. Raises DataError for a template that
    rewrites earlier messages.
    """
    ids: list[int] = []
    counts: list[bool] = []
    done = ""

    def add(text: str, has_loss: bool) -> None:
        nonlocal done
        if not text.startswith(done):
            raise DataError(
                f"{place}: the chat template writes earlier messages differently when later ones follow, so that the "
                "tokens of the answers cannot be told; give another --chat-template"
            )
        new = tokenizer.tokenize_as_is(text[len(done) :]) if len(text) > len(done) else []
        ids.extend(new)
        counts.extend([has_loss] * len(new))
        done = text

    def render(messages: Sequence[dict[str, Any]], **options: Any) -> str:
        try:
            return str(tokenizer.render_chat(messages, **options))
        except DataError as error:
            raise DataError(f"{place}: {error}") from error

    for number, message in enumerate(messages):
        if message["role"] in _ROLES_WITH_LOSS and number >= first:
            if number > 0:
                add(render(messages[:number], add_generation_prompt=True), has_loss=False)
            add(render(messages[: number + 1]), has_loss=True)
    if ends_document and tokenizer.eod is not None and ids and ids[-1] != tokenizer.eod:
        ids.append(tokenizer.eod)
        counts.append(True)
    return ids, counts


# ---- packing: few sequences with little room left over


def pack(lengths: Array, capacity: int, random: np.random.RandomState) -> tuple[Array, Array]:
    """Each sequence takes the longest piece that is left, then again and again the longest that still fits.

    lengths: 1 to capacity each. Returns (order int64 [pieces], bounds int64 [sequences + 1]): sequence k holds the
    pieces order[bounds[k] : bounds[k + 1]]. Pieces of the same length are taken in a random order.
    """
    # Shuffled before the stable sort: conversations of equal length are combined differently with another seed.
    shuffled = random.permutation(len(lengths))
    by_length = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    distinct, firsts = np.unique(lengths[by_length], return_index=True)
    left = np.diff([*firsts, len(by_length)]).tolist()  # pieces left of each distinct length
    sizes, heads = distinct.tolist(), firsts.tolist()
    order: list[int] = []
    bounds = [0]
    while sizes:
        room = capacity
        # The longest piece that fits: first-fit-decreasing, with one entry per distinct length instead of one per
        # piece.
        while (k := bisect.bisect_right(sizes, room) - 1) >= 0:
            order.append(heads[k])
            room -= sizes[k]
            heads[k] += 1
            left[k] -= 1
            if not left[k]:
                del sizes[k], heads[k], left[k]
        bounds.append(len(order))
    return by_length[np.asarray(order, dtype=np.int64)], np.asarray(bounds, dtype=np.int64)


# ---- the dataset


class ConversationDataset(MegatronDataset):
    """Conversations; the prefix of a dataset is the path of its JSONL file (see ConversationFile)."""

    config: GPTDatasetConfig
    dataset: ConversationFile
    arrays: tuple[str, ...]
    """Names of what the index cache keeps."""

    def __init__(
        self,
        dataset: ConversationFile,
        dataset_path: str | None,
        indices: npt.NDArray[np.int32],
        num_samples: int | None,
        index_split: DataSplit,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        name = f"{type(self).__name__}-{index_split.name}"
        cache = IndexCache(self.cache_directory(), name, self.unique_description, self.arrays, config.cache_policy)
        self.cached = cache.load_or_build(self._build_indices)
        self._take(self.cached)

    @staticmethod
    def source_files(dataset_path: str) -> list[str]:
        """The JSONL file itself."""
        return [dataset_path]

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> Any:
        """Open the JSONL file."""
        if dataset_path is None:
            raise ConfigError("conversations come from a JSONL file; give it as --data-path")
        return ConversationFile(dataset_path)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The number of conversations in the file."""
        return len(low_level_dataset)

    def _build_indices(self) -> Arrays:
        """Make `arrays`, which the index cache keeps."""
        raise NotImplementedError

    def _take(self, arrays: Arrays) -> None:
        """Take `arrays`, just made or from the cache."""
        raise NotImplementedError

    def _shuffled(self, sequences: int, random: np.random.RandomState) -> npt.NDArray[np.int64]:
        """The order of the sequences: all of them once, and again in another order until there are num_samples."""
        wanted = sequences if self.num_samples is None else self.num_samples
        # Every sequence once before any comes twice.
        epochs = [random.permutation(sequences) for _ in range(-(wanted // -sequences))]
        return np.concatenate(epochs)[:wanted].astype(np.int64)


class SFTDataset(ConversationDataset):
    """Packed conversations.

    dataset[i] -> tokens, labels, position_ids int64 [s], loss_mask float32 [s], cu_seqlens int32 [s + 1], max_seqlen
    int32, and as configured attention_mask bool [1, s, s].
    """

    arrays: tuple[str, ...] = (
        "tokens", "counts", "bounds", "lines", "order", "pack_bounds", "shuffle_index", "left_out"
    )  # fmt: skip

    def _take(self, arrays: Arrays) -> None:
        self.tokens, self.counts, self.bounds = (arrays[name] for name in ("tokens", "counts", "bounds"))
        self.lines, self.order, self.pack_bounds = (arrays[name] for name in ("lines", "order", "pack_bounds"))
        self.shuffle_index, self.left_out = arrays["shuffle_index"], arrays["left_out"]

    def describe(self) -> dict[str, Any]:
        """The base description, the chat template, and whether bad lines are skipped."""
        described = super().describe() | {"chat_template": getattr(self.config.tokenizer, "chat_template", None)}
        return described | ({"skips_bad_lines": True} if self.config.skip_bad_conversations else {})

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int | None) -> Sample:
        length = self.config.sequence_length
        tokens, labels = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
        loss_mask = np.zeros(length, dtype=np.float32)
        starts: list[int] = []
        filled = 0
        for number in self._conversations(0 if index is None else index):
            # Each conversation loses one position: its last token has no label.
            own_tokens, own_labels, counts = self._pairs(int(number))
            stop = filled + len(own_tokens)
            tokens[filled:stop], labels[filled:stop], loss_mask[filled:stop] = own_tokens, own_labels, counts
            filled = stop
            if filled < length:
                starts.append(filled)  # of the next conversation, or of the padding
        if index is None:
            loss_mask[:] = 0.0
        bounds, longest = cumulative_lengths(length, starts)
        sample: Sample = {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(position_ids(length, starts)),
            "cu_seqlens": torch.from_numpy(bounds),
            "max_seqlen": torch.tensor(longest, dtype=torch.int32),
        }
        if self.config.create_attention_mask:
            sample["attention_mask"] = torch.from_numpy(attention_mask(length, starts))
        return sample

    def document_lengths(self, index: int) -> list[int]:
        """See PackedDocuments."""
        numbers = self._conversations(index)
        lengths: list[int] = (self.bounds[numbers + 1] - self.bounds[numbers] - 1).tolist()
        return lengths

    def document(self, index: int, number: int) -> Sample:
        """See PackedDocuments."""
        tokens, labels, counts = self._pairs(int(self._conversations(index)[number]))
        return {
            "tokens": torch.from_numpy(tokens.astype(np.int64)),
            "labels": torch.from_numpy(labels.astype(np.int64)),
            "loss_mask": torch.from_numpy(counts.astype(np.float32)),
            "position_ids": torch.arange(len(tokens)),
        }

    def locate(self, index: int) -> str:
        """Return the place of the first conversation of sample `index`, for messages."""
        return self.dataset.place(int(self.lines[int(self._conversations(index)[0])]))

    def summary(self) -> str:
        """Return what was packed, and how much of the sequences is padding."""
        cut, without_answer, skipped = (*self.left_out.tolist(), 0)[:3]  # caches of earlier releases have two
        sequences, conversations = len(self.pack_bounds) - 1, len(self.order)
        positions = sequences * self.config.sequence_length
        used = int(self.bounds[-1]) - conversations
        details = f", {cut} cut to the sequence length" * (cut > 0)
        details += f", {without_answer} left out without an answer" * (without_answer > 0)
        details += f", {skipped} skipped with mistakes" * (skipped > 0)
        return (
            f"{self.index_split.name} data: {conversations} conversations packed into {sequences} sequences, "
            f"{100 * (1 - used / positions):.2f} % padding{details}"
        )

    def _pairs(self, number: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Tokens and labels of a conversation, and which of the labels count."""
        begin, end = self.bounds[number : number + 2].tolist()
        return self.tokens[begin : end - 1], self.tokens[begin + 1 : end], self.counts[begin + 1 : end]

    def _conversations(self, index: int) -> npt.NDArray[np.int64]:
        """Numbers of the conversations in sample `index`."""
        begin, end = self.pack_bounds[int(self.shuffle_index[index]) :][:2].tolist()
        return np.asarray(self.order[begin:end])

    def _encode_line(self, line: int) -> list[tuple[list[int], list[bool]]]:
        """Token ids of the conversations of a line, and which of them count. Raises DataError naming the line."""
        return [encode(self.dataset.messages(line), self.config.tokenizer, self.dataset.place(line))]

    def _pack(self, lengths: Array, random: np.random.RandomState) -> tuple[Array, Array]:
        """See `pack`; lengths: of the conversations in tokens."""
        # A conversation of n tokens takes n - 1 positions.
        return pack(lengths - 1, self.config.sequence_length, random)

    def _build_indices(self) -> Arrays:
        longest = self.config.sequence_length + 1
        pieces: list[npt.NDArray[np.int32]] = []
        counted: list[npt.NDArray[np.bool_]] = []
        lines: list[int] = []
        cut = without_answer = skipped = 0
        progress = CountedProgress(f"{self.dataset_path}: reading", len(self.indices), "conversations")
        for line in self.indices.tolist():
            progress.add()
            try:
                encoded = self._encode_line(line)
            except DataError:
                if not self.config.skip_bad_conversations:
                    raise
                skipped += 1
                continue
            for ids, counts in encoded:
                cut += len(ids) > longest
                # Without an answer within the sequence length there is nothing to learn from it.
                if not any(counts[1:longest]):
                    without_answer += 1
                    continue
                pieces.append(np.asarray(ids[:longest], dtype=np.int32))
                counted.append(np.asarray(counts[:longest], dtype=np.bool_))
                lines.append(line)
        if not lines:
            raise DataError(
                f"{self.dataset_path}: none of the {len(self.indices)} conversations of the {self.index_split.name} "
                f"split has an answer within {longest} tokens; raise --seq-length, or look at the roles of its messages"
                + f" ({skipped} were skipped with mistakes)"
                * (skipped > 0)
            )
        lengths = np.asarray([len(piece) for piece in pieces])
        random = np.random.RandomState(self.config.random_seed)
        order, pack_bounds = self._pack(lengths, random)
        return {
            "tokens": np.concatenate(pieces),
            "counts": np.concatenate(counted),
            "bounds": np.concatenate([[0], np.cumsum(lengths)]),
            "lines": np.asarray(lines, dtype=np.int64),
            "order": order,
            "pack_bounds": pack_bounds,
            "shuffle_index": self._shuffled(len(pack_bounds) - 1, random),
            "left_out": np.asarray([cut, without_answer, skipped]),
        }
