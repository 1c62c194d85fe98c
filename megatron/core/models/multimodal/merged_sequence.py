# SPDX-License-Identifier: Apache-2.0
"""A sequence of text in which each image token has been replaced by the features of its image.

    tokens      a   b   <image>             c   d
    repeats     1   1   tiles * features    1   1
    merged      a   b   f0  f1  f2  ...     c   d

A token's label, and its weight in the loss, go to its last place: the place before the next token, which is to be
predicted there. An image's other places, and the one before an image, predict nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.errors import DataError

IGNORE_INDEX = -100
"""Label of a place that predicts nothing."""


@dataclass(frozen=True)
class MergedSequence:
    """The places of a batch of merged sequences, t each: shorter ones are filled up at their end."""

    token: Tensor
    """int64 [b, t]: the token that each place belongs to."""
    feature: Tensor
    """int64 [b, t]: the number of the feature that lies there, counted in all images; -1 where there is none."""
    is_filled: Tensor
    """bool [b, t]: nothing lies there."""
    predicts: Tensor
    """bool [b, t]: the place before a token of text, which is to be predicted there."""

    @classmethod
    def plan(
        cls,
        is_image: Tensor,
        tiles: Tensor | None,
        features: int,
        *,
        num_tiles: int | None,
        longest: int,
        length: int | None = None,
        multiple: int = 1,
    ) -> MergedSequence:
        """Plan the merging of a batch.

        is_image: bool [b, s], the image tokens. tiles: int [images], of each of them in order; one each when None.
        features: of a tile. num_tiles: that there are; None where it is not known. longest: what is longer is cut.
        length: of the result; the longest sequence's when None. multiple: the length divides by it. Reads three
        numbers on the host, at once. Raises DataError where tokens, images and tiles do not fit each other.
        """
        repeats = torch.where(is_image, features, 1)
        if tiles is not None and len(tiles):
            number = (is_image.flatten().cumsum(0) - 1).clamp(0, len(tiles) - 1).view(is_image.shape)
            repeats = torch.where(is_image, tiles.to(repeats)[number] * features, 1)
        ends, found = repeats.cumsum(1), is_image.sum()
        total = found if tiles is None else tiles.to(found).sum()
        needed, tokens, told = torch.stack((ends[:, -1].max(), found, total)).tolist()
        _check_counts(tokens, told, num_tiles, None if tiles is None else len(tiles))
        length = min(needed, longest) if length is None else length
        length = -(-length // multiple) * multiple
        places = torch.arange(length, device=ends.device).expand(len(ends), -1).contiguous()
        token = torch.searchsorted(ends, places, right=True)
        is_filled = (token == ends.shape[1]) | (places >= longest)
        token = token.clamp(max=ends.shape[1] - 1)
        # Images lie one behind the other in the features, sequence after sequence.
        widths = torch.where(is_image, repeats, 0)
        first = (widths.flatten().cumsum(0) - widths.flatten()).view(widths.shape)
        feature = (first - (ends - repeats)).gather(1, token) + places
        feature = feature.masked_fill(is_filled | ~is_image.gather(1, token), -1)
        before_image = torch.cat((is_image[:, 1:], torch.zeros_like(is_image[:, :1])), dim=1)
        is_last = places == ends.gather(1, token) - 1
        return cls(token, feature, is_filled, is_last & ~before_image.gather(1, token) & ~is_filled)

    def merge(self, text: Tensor, features: Tensor | None) -> Tensor:
        """Embeddings of the tokens [s, b, h] and features of all images, one below the other, [n, h] -> [t, b, h];
        zeros where nothing lies."""
        index = self.token.t()[..., None].expand(-1, -1, text.shape[-1])
        merged = text.gather(0, index).masked_fill(self.is_filled.t()[..., None], 0.0)
        if features is None or not len(features):
            return merged
        chosen = features.to(text.dtype)[self.feature.t().clamp(min=0)]
        return torch.where(self.feature.t()[..., None] >= 0, chosen, merged)

    def find_positions(self, is_image: Tensor, sizes: Tensor) -> Tensor:
        """Positions of time, height and width, int64 [3, b, t] (M-RoPE; Wang et al., 2024). A token of text has three
        that are equal. An image's features count from the position behind the token before it, each in its direction;
        the text after it goes on behind the larger of height and width.

        is_image: bool [b, s]. sizes: int64 [images, 3], frames, rows and columns of each image's features.
        """
        # With a row for the token of no image.
        sizes = torch.cat((sizes, sizes.new_ones(1, 3)))
        number = (is_image.flatten().cumsum(0) - 1).view(is_image.shape).masked_fill(~is_image, len(sizes) - 1)
        frames, rows, columns = sizes[number].unbind(-1)
        widths, advances = frames * rows * columns, torch.maximum(rows, columns)
        starts, begins = (each.cumsum(1) - each for each in (advances, widths))
        place = torch.arange(self.token.shape[1], device=self.token.device) - begins.gather(1, self.token)
        rows, columns = rows.gather(1, self.token), columns.gather(1, self.token)
        streams = torch.stack((place // (rows * columns), place // columns % rows, place % columns))
        in_image = is_image.gather(1, self.token)
        return starts.gather(1, self.token) + streams.where(in_image, torch.zeros_like(streams))

    def place_labels(self, labels: Tensor) -> Tensor:
        """Labels of the tokens [b, s] int64 -> [b, t]; IGNORE_INDEX where nothing is predicted."""
        return labels.gather(1, self.token).masked_fill(~self.predicts, IGNORE_INDEX)

    def place_loss_mask(self, loss_mask: Tensor) -> Tensor:
        """Weights of the tokens in the loss, [b, s] -> [b, t]; zeros where nothing is predicted."""
        return loss_mask.gather(1, self.token).masked_fill(~self.predicts, 0)


def _check_counts(tokens: int, told: int, num_tiles: int | None, images: int | None) -> None:
    """Raise DataError where image tokens are not as many as images, or tiles not as many as was told."""
    images = num_tiles if images is None else images
    if images is not None and tokens != images:
        raise DataError(f"the batch has {tokens} image tokens and {images} images; give one token for each image")
    if num_tiles is not None and told != num_tiles:
        raise DataError(
            f"num_image_tiles adds up to {told}, and there are {num_tiles} tiles; give the number of each image's tiles"
        )
