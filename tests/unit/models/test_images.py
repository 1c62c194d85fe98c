# SPDX-License-Identifier: Apache-2.0
"""Images in a text: features in the places of their tokens, labels and weights behind them, parts that stay frozen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.errors import ConfigError, DataError
from megatron.core.models.multimodal.merged_sequence import IGNORE_INDEX, MergedSequence
from tests.support.image_models import IMAGE, TILES, build_image_model, make_batch

FEATURES = 3


def merge_by_definition(ids: Tensor, tiles: list[int], longest: int) -> list[list[tuple[str, int, bool]]]:
    """Of each sequence its places: ("text", token's place) or ("image", number of the feature), and whether the next
    token, which is text, is predicted there."""
    sequences, image, feature = [], 0, 0
    for row in ids.tolist():
        places: list[tuple[str, int, bool]] = []
        for index, token in enumerate(row):
            predicts = index + 1 == len(row) or row[index + 1] != IMAGE
            if token != IMAGE:
                places.append(("text", index, predicts))
                continue
            count = tiles[image] * FEATURES
            places += [("image", feature + n, predicts and n == count - 1) for n in range(count)]
            image, feature = image + 1, feature + count
        sequences.append(places[:longest])
    return sequences


@pytest.mark.parametrize(("longest", "multiple"), [(100, 1), (100, 4), (9, 1)])
def test_merged_sequences_are_those_of_the_definition(longest: int, multiple: int) -> None:
    ids = torch.arange(21).view(3, 7)
    for image in ((0, 2), (0, 3), (1, 0), (1, 6)):
        ids[image] = IMAGE
    tiles = [1, 2, 3, 1]
    plan = MergedSequence.plan(
        ids == IMAGE, torch.tensor(tiles), FEATURES, num_tiles=7, longest=longest, multiple=multiple
    )
    text, features = torch.randn(7, 3, 2), torch.randn(sum(tiles) * FEATURES, 2)
    merged, labels = plan.merge(text, features), plan.place_labels(ids + 100)
    weights = plan.place_loss_mask(ids / 7)
    expected = merge_by_definition(ids, tiles, longest)
    assert merged.shape[0] == -(-max(map(len, expected)) // multiple) * multiple
    for row, places in enumerate(expected):
        for place, (kind, number, predicts) in enumerate(places):
            vector = text[number, row] if kind == "text" else features[number]
            assert torch.equal(merged[place, row], vector), (row, place)
            if kind == "text":
                assert labels[row, place] == (ids[row, number] + 100 if predicts else IGNORE_INDEX)
                assert weights[row, place] == (ids[row, number] / 7 if predicts else 0)
            else:
                assert labels[row, place] == (IMAGE + 100 if predicts else IGNORE_INDEX)
        assert not merged[len(places) :, row].any()
        assert not weights[row, len(places) :].any()


def test_a_frozen_part_gets_no_gradients_and_the_others_do() -> None:
    model, (images, ids, labels) = build_image_model(), make_batch()
    model.freeze(freeze_language_model=True, freeze_vision_model=True, freeze_vision_projection=False)
    losses, weights = model(images, ids, None, None, labels, num_image_tiles=TILES)
    assert weights is not None and losses.shape == weights.shape
    (losses * weights).sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {name.partition(".")[0] for name in trained} == {"vision_projection"} and len(trained) == 4


def test_a_text_without_images_is_the_language_models() -> None:
    model, (_, ids, labels) = build_image_model(), make_batch()
    ids, labels = ids.clamp(min=0), labels.clamp(min=0)
    losses, _ = model(None, ids, None, None, labels)
    assert torch.equal(losses, model.language_model(ids, None, labels=labels))


def test_mistakes_are_named() -> None:
    model, (images, ids, _) = build_image_model(), make_batch()
    with pytest.raises(DataError, match="the batch has 3 image tokens and 4 images"):
        model(images, ids, None)
    with pytest.raises(DataError, match="the batch has 3 image tokens and 2 images"):
        model(images, ids, None, num_image_tiles=TILES[:2])
    with pytest.raises(DataError, match="num_image_tiles adds up to 3, and there are 4 tiles"):
        model(images, ids, None, num_image_tiles=torch.ones(3))
    with pytest.raises(ConfigError, match=r"images are \(4, 3, 28, 14\), and the model of images takes \[b, 3, 28, 28"):
        model(images[..., :14], ids, None, num_image_tiles=TILES)
    with pytest.raises(ConfigError, match=r"(?s)has no attention_mask .*leave it out"):
        model(images, ids, None, torch.zeros(1, 1, 8, 8))
    with pytest.raises(ConfigError, match="30 x 28 pixels are not made of patches of 14 x 14; use 42 x 28"):
        build_image_model(img_w=30)
    with pytest.raises(ConfigError, match="the projector's hidden_size is 24, the text model's 32"):
        build_image_model(projection_width=24)
