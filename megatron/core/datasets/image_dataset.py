# SPDX-License-Identifier: Apache-2.0
"""Conversations about images, each alone in its sequence.

They come from a JSONL file whose lines name image files, relative to its directory, and have one of two forms:

    {"images": ["a.png"], "messages": [{"role": "user", "content": "<image>\\nWhat is this?"}, ...]}
    {"image": "a.png", "conversations": [{"from": "human", "value": "<image>\\nWhat is this?"}, ...]}       LLaVA's

Each <image> stands for the next of the images. Images are decoded when their sample is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, Sample
from megatron.core.datasets.index_cache import Arrays
from megatron.core.datasets.sft_dataset import ConversationDataset, are_messages, encode
from megatron.core.errors import ConfigError, DataError
from megatron.core.optional_deps import require
from megatron.core.progress import CountedProgress

MARKER = "<image>"
LONGEST_SIDE = 20_000
"""Pixels; what is longer is no photograph, and could fill the memory."""
_IMAGE = -1
_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass(kw_only=True)
class ImageDatasetConfig(GPTDatasetConfig):
    """Settings by which conversations about images become samples."""

    image_height: int
    """Pixels that images are resized to, as `image_width`."""
    image_width: int
    features: int
    """Places that an image takes in the merged sequence."""
    images_per_sample: int
    """Most images of a conversation."""
    mean: tuple[float, float, float]
    """Of each colour, in pixels of 0 to 1: what the model's images have been normalised by, and `deviation`."""
    deviation: tuple[float, float, float]
    skip_bad_images: bool = False
    """Leave out conversations with an image that cannot be used, and count them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images_per_sample * self.features >= self.sequence_length:
            raise ConfigError(
                f"--seq-length {self.sequence_length} has no room for text beside --images-per-sample "
                f"{self.images_per_sample} images of {self.features} places; give more than "
                f"{self.images_per_sample * self.features}"
            )


class _MarkedTokenizer:
    """A tokenizer whose texts may have image markers, which become the token _IMAGE."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    # Templates and answers are tokenised by `encode`, which need not know of images.
    def tokenize_as_is(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(text.split(MARKER)):
            ids += [_IMAGE] * (number > 0)
            ids += self._tokenizer.tokenize_as_is(part) if part else []
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def read_image(path: str, place: str, height: int, width: int) -> npt.NDArray[np.uint8]:
    """The pixels of an image file [height, width, 3], resized. place: names its line in messages. Raises DataError for
    a file that is none, and, before it is decoded, for one that is too large."""
    pil = require("PIL.Image", needed_by="images")
    try:
        with pil.open(path) as image:
            if max(image.size) > LONGEST_SIDE:
                raise DataError(
                    f"{place}: {path} is {image.size[0]} x {image.size[1]} pixels, and images may have {LONGEST_SIDE} "
                    "a side; make it smaller, or add --skip-bad-images"
                )
            return np.asarray(image.convert("RGB").resize((width, height), pil.Resampling.BICUBIC))
    except (OSError, ValueError, SyntaxError, EOFError, pil.DecompressionBombError) as error:
        raise DataError(
            f"{place}: {path} cannot be decoded as an image: {error}; mend it, or add --skip-bad-images"
        ) from None


class ImageConversationDataset(ConversationDataset):
    """Conversations with images.

    dataset[i] -> tokens (0 where an image is), labels, position_ids int64 [s]; is_image bool [s]; loss_mask float32
    [s]; images float32 [images_per_sample, 3, height, width], of which those are images that has_image, a bool for
    each, says.
    """

    config: ImageDatasetConfig
    arrays = ("lines", "shuffle_index", "left_out")

    def _take(self, arrays: Arrays) -> None:
        self.lines, self.shuffle_index, left_out = (arrays[name] for name in self.arrays)
        self.left_out = int(left_out[0])
        self.marked = _MarkedTokenizer(self.config.tokenizer)

    def describe(self) -> dict[str, Any]:
        """The base description, and whether bad images are skipped."""
        return super().describe() | {"skips_bad_images": self.config.skip_bad_images}

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int | None) -> Sample:
        config, line = self.config, self._find_line(0 if index is None else index)
        paths, messages = self._read_line(line)
        ids, counts = encode(messages, self.marked, self.dataset.place(line))
        self._check_count(line, paths, ids.count(_IMAGE))
        length = config.sequence_length
        tokens, labels = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
        loss_mask = np.zeros(length, dtype=np.float32)
        pairs = min(len(ids) - 1, length)
        # The last token has no label; what is longer than the sequence is cut.
        tokens[:pairs], labels[:pairs], loss_mask[:pairs] = ids[:pairs], ids[1 : pairs + 1], counts[1 : pairs + 1]
        is_image = tokens == _IMAGE
        if index is None:
            loss_mask[:] = 0.0
        images = torch.zeros(config.images_per_sample, 3, config.image_height, config.image_width)
        has_image = torch.arange(config.images_per_sample) < int(is_image.sum())
        # Images behind the cut are not decoded.
        for number, path in enumerate(paths[: int(is_image.sum())]):
            images[number] = self.normalise(
                read_image(path, self.dataset.place(line), config.image_height, config.image_width)
            )
        return {
            "tokens": torch.from_numpy(tokens.clip(min=0)),
            "labels": torch.from_numpy(labels.clip(min=0)),
            "loss_mask": torch.from_numpy(loss_mask * (labels != _IMAGE)),
            "position_ids": torch.arange(length),
            "is_image": torch.from_numpy(is_image),
            "images": images,
            "has_image": has_image,
        }

    def locate(self, index: int) -> str:
        """Return the place of conversation `index`, for messages."""
        return self.dataset.place(self._find_line(index))

    def summary(self) -> str:
        """Return how many conversations there are."""
        skipped = f", {self.left_out} skipped with bad images" * (self.left_out > 0)
        return f"{self.index_split.name} data: {len(self.lines)} conversations about images{skipped}"

    def _find_line(self, index: int) -> int:
        return int(self.lines[self.shuffle_index[index]])

    def _read_line(self, line: int) -> tuple[list[str], list[dict[str, Any]]]:
        """Paths of the images, and messages, of a line. Raises DataError naming it."""
        content, place = self.dataset.line(line), self.dataset.place(line)
        paths = content.get("images", content.get("image", []))
        paths = [paths] if isinstance(paths, str) else paths
        messages = content.get("messages")
        if messages is None and isinstance(content.get("conversations"), list):
            messages = [
                {"role": _ROLES.get(str(turn.get("from")), turn.get("from")), "content": turn.get("value")}
                for turn in content["conversations"]
                if isinstance(turn, dict)
            ]
        if not are_messages(messages) or not all(isinstance(one.get("content"), str) for one in messages):
            raise DataError(
                f'{place}: expected "messages" with role and content, or "conversations" with from and value; write one'
            )
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise DataError(f'{place}: "images" is not a list of paths; write ["a.png"]')
        base = os.path.dirname(self.dataset.path)
        return [os.path.join(base, path) for path in paths], messages

    def _check_count(self, line: int, paths: list[str], markers: int) -> None:
        place, most = self.dataset.place(line), self.config.images_per_sample
        if markers != len(paths):
            raise DataError(f"{place}: the text has {MARKER} {markers} times, and {len(paths)} images; write as many")
        if markers > most:
            raise DataError(f"{place}: {markers} images are more than --images-per-sample {most}; raise it")

    def normalise(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """[height, width, 3] -> float32 [3, height, width]."""
        values = torch.from_numpy(pixels.astype(np.float32) / 255)
        return ((values - torch.tensor(self.config.mean)) / torch.tensor(self.config.deviation)).permute(2, 0, 1)

    def _build_indices(self) -> Arrays:
        """The lines of this split, with skip_bad_images the ones whose images can be decoded, and their order. Raises
        DataError for a line without a conversation, and where no line is left."""
        kept, progress = [], CountedProgress(f"{self.dataset.path}: looking at", len(self.indices), "lines")
        for line in self.indices.tolist():
            progress.add()
            if self.config.skip_bad_images:
                paths, _ = self._read_line(line)
                try:
                    for path in paths:
                        read_image(path, self.dataset.place(line), 1, 1)
                except DataError:
                    continue
            kept.append(line)
        if not kept:
            raise DataError(f"{self.dataset.path}: no image of the {self.index_split.name} data can be used; mend them")
        return {
            "lines": np.asarray(kept, dtype=np.int64),
            "shuffle_index": self._shuffled(len(kept), np.random.RandomState(self.config.random_seed)),
            "left_out": np.asarray([len(self.indices) - len(kept)], dtype=np.int64),
        }
