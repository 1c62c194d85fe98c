# SPDX-License-Identifier: Apache-2.0
"""Samplers as functions of consumed samples; loading, its workers, and what goes wrong in them."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from megatron.core.errors import DataError, TemporaryError
from megatron.training.data.loading import LoaderSettings, TrainingData, say_unless_cut_off
from megatron.training.data.samples import PADDING, CyclicSampler, SingleSampler, WholeSampler


def _upstream_cyclic(total: int, consumed: int, mbs: int, rank: int, size: int, count: int) -> list[list[int]]:
    """The reference's rule, written as it is defined: a bucket per rank, a permutation per epoch."""
    step = mbs * size
    microbatches: list[list[int]] = []
    active = total - total % step
    while len(microbatches) < count:
        epoch, consumed_of_epoch = divmod(consumed, active)
        bucket = total // step * mbs
        generator = torch.Generator()
        generator.manual_seed(epoch)
        order = torch.randperm(bucket, generator=generator).tolist()
        indices = [rank * bucket + i for i in order[consumed_of_epoch // size :]]
        for start in range(0, len(indices), mbs):
            microbatches.append(indices[start : start + mbs])
            consumed += step
    return microbatches[:count]


def _take(sampler: Any, count: int) -> list[list[int]]:
    return [batch for batch, _ in zip(sampler, range(count), strict=False)]


@pytest.mark.flags("--dataloader-type", "--micro-batch-size")
def test_single_is_the_datasets_order() -> None:
    assert list(SingleSampler(11, 4, 1, dp_rank=1, dp_size=2)) == [[5], [7], [9]]
    assert list(SingleSampler(8, 0, 2, dp_rank=0, dp_size=2)) == [[0, 1], [4, 5]]


def test_evaluation_begins_again_at_the_end() -> None:
    assert _take(SingleSampler(5, 2, 1, dp_rank=0, dp_size=2, repeats=True), 4) == [[2], [0], [2], [0]]
    assert _take(SingleSampler(5, 10, 1, dp_rank=1, dp_size=2, repeats=True), 3) == [[3], [1], [3]]


@pytest.mark.flags("--dataloader-type")
@pytest.mark.parametrize("consumed", [0, 4, 20, 24, 60])
@pytest.mark.parametrize("rank", [0, 1])
def test_cyclic_is_the_references_order(consumed: int, rank: int) -> None:
    sampler = CyclicSampler(27, consumed, 2, dp_rank=rank, dp_size=2)
    assert _take(sampler, 20) == _upstream_cyclic(27, consumed, 2, rank, 2, 20)


def test_cyclic_epochs_differ_and_cover_everything() -> None:
    batches = _take(CyclicSampler(12, 0, 3, dp_rank=0, dp_size=1), 8)
    first, second = (sorted(sum(part, [])) for part in (batches[:4], batches[4:]))
    assert first == second == list(range(12))
    assert batches[:4] != batches[4:]


@pytest.mark.parametrize("sampler_class", [SingleSampler, CyclicSampler])
def test_a_restart_continues_the_same_stream(sampler_class: Any) -> None:
    whole = _take(sampler_class(100, 0, 2, dp_rank=0, dp_size=2), 25)
    for done in (1, 7, 24):
        assert _take(sampler_class(100, done * 4, 2, dp_rank=0, dp_size=2), 25 - done) == whole[done:]


def test_global_batches_do_not_depend_on_the_number_of_ranks() -> None:
    alone = _take(SingleSampler(32, 8, 4, dp_rank=0, dp_size=1), 6)
    shared = [_take(SingleSampler(32, 8, 2, dp_rank=rank, dp_size=2), 6) for rank in range(2)]
    assert [a + b for a, b in zip(*shared, strict=True)] == alone


class Numbers(Dataset[Any]):
    """Sample i is four tokens of value i; some samples misbehave."""

    def __init__(self, length: int = 40, *, fails_at: int = -1, dies_at: int = -1, hangs_at: int = -1) -> None:
        self.length, self.fails_at, self.dies_at, self.hangs_at = length, fails_at, dies_at, hangs_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.fails_at:
            raise DataError(f"sample {index} is damaged")
        if index == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.hangs_at:
            signal.pause()
        tokens = np.full(4, index, dtype=np.int64)
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": np.ones(4, dtype=np.float32)}


def _data(dataset: Dataset[Any], **changes: Any) -> TrainingData:
    settings = {"micro_batch_size": 2, "dp_rank": 0, "dp_size": 1, "device": torch.device("cpu")} | changes
    return TrainingData({"train": dataset, "validation": None}, LoaderSettings(**settings))


@pytest.mark.flags("--num-workers")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_in_order_whatever_the_number_of_workers(num_workers: int) -> None:
    data = _data(Numbers(), num_workers=num_workers)
    batches = data.open("train", 6)
    assert [next(batches)["tokens"][:, 0].tolist() for _ in range(5)] == [[6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    data.close()


@pytest.mark.flags("--num-workers")
def test_workers_are_other_processes() -> None:
    class Pids(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"tokens": np.array([os.getpid()]), "labels": np.array([0])}

    for num_workers in (0, 1):
        data = _data(Pids(), num_workers=num_workers)
        assert (int(next(data.open("train", 0))["tokens"][0, 0]) == os.getpid()) == (num_workers == 0)
        data.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_leaves_the_random_state_alone(num_workers: int) -> None:
    before = torch.get_rng_state()
    data = _data(Numbers(), num_workers=num_workers)
    next(data.open("train", 0))
    data.close()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_I15_bad_data_in_a_worker_is_one_sentence(num_workers: int) -> None:
    data = _data(Numbers(fails_at=3), num_workers=num_workers)
    batches = data.open("train", 0)
    next(batches)
    with pytest.raises(DataError, match="^sample 3 is damaged$"):
        next(batches)
    data.close()


def test_I15_a_killed_worker_is_reported() -> None:
    data = _data(Numbers(dies_at=4), num_workers=1)
    with pytest.raises(TemporaryError, match="a data loader process was lost"):
        for _ in data.open("train", 0):
            pass
    data.close()


def test_I15_a_hanging_worker_is_reported() -> None:
    data = _data(Numbers(hangs_at=0), num_workers=1, worker_timeout_seconds=1.0)
    with pytest.raises(TemporaryError, match="timed out"):
        next(data.open("train", 0))
    data.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_I8_token_beyond_the_vocabulary(num_workers: int) -> None:
    data = _data(Numbers(), num_workers=num_workers, vocabulary_limit=5)
    batches = data.open("train", 0)
    next(batches)
    next(batches)
    with pytest.raises(DataError, match="sample 4 of the train data .* has token id 5 at position 0 of its labels"):
        next(batches)
    data.close()


def test_no_data_used_up_data_and_too_little_data() -> None:
    data = _data(Numbers(4))
    assert data.has("train")
    assert not data.has("validation")
    with pytest.raises(DataError, match="there is no validation data"):
        next(data.open("validation", 0))
    batches = data.open("train", 2)
    next(batches)
    with pytest.raises(DataError, match="used up: 4 samples"):
        next(batches)
    with pytest.raises(DataError, match="has 4 samples, fewer than"):
        next(_data(Numbers(4), micro_batch_size=8).open("train", 0))


def test_the_whole_is_every_sample_once() -> None:
    ranks = [list(WholeSampler(10, 3, 2, dp_rank=rank, dp_size=2)) for rank in range(2)]
    assert ranks == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [PADDING, PADDING]]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_padding_has_tokens_but_no_loss(num_workers: int) -> None:
    data = _data(Numbers(5), num_workers=num_workers)
    data.datasets["validation"] = [Numbers(5)]
    batches = data.open_whole("validation", 0, 4)
    read = list(batches)
    assert [batch["tokens"][:, 0].tolist() for batch in read] == [[0, 1], [2, 3], [4, 0], [0, 0]]
    assert [batch["loss_mask"][:, 0].tolist() for batch in read] == [[1, 1], [1, 1], [1, 0], [0, 0]]


class Batches:
    """A source of a user's own: three microbatches, from where it is told."""

    def __init__(self, count: int = 3) -> None:
        self.count, self.first = count, 0

    def start_at(self, consumed_samples: int) -> None:
        self.first = consumed_samples // 2

    def __iter__(self) -> Any:
        for number in range(self.first, self.count):
            yield {"tokens": torch.full((2, 4), number), "labels": np.full((2, 4), number)}


@pytest.mark.flags("--dataloader-type")
def test_external_batches_come_as_they_are() -> None:
    data = _data(Batches(), dataloader_type="external")
    train = data.open("train", 2)
    assert [int(next(train)["tokens"][0, 0]) for _ in range(2)] == [1, 2]
    with pytest.raises(DataError, match="the train data is used up"):
        next(train)
    data.datasets["validation"] = Batches()
    validation = data.open("validation", 0)
    assert [int(next(validation)["labels"][0, 0]) for _ in range(5)] == [0, 1, 2, 0, 1]
    plain = _data(iter([{"tokens": torch.zeros(2, 4)}]), dataloader_type="external")  # type: ignore[arg-type]
    assert next(plain.open("train", 100))["tokens"].shape == (2, 4), "without start_at it begins where it likes"


def test_I8_external_batches_are_checked() -> None:
    data = _data(Batches(), dataloader_type="external", vocabulary_limit=2)
    batches = data.open("train", 0)
    next(batches), next(batches)
    with pytest.raises(DataError, match="a batch of the train data has token id 2 at position 0 of its tokens"):
        next(batches)


@pytest.mark.parametrize(
    ("error", "said"), [(EOFError(), ""), (ConnectionResetError(), ""), (KeyError("x"), "KeyError: 'x'\n")]
)
def test_I15_a_loader_process_is_silent_about_a_trainer_that_is_gone(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say_unless_cut_off(type(error), error, None)
    assert capsys.readouterr().err == said


def test_loader_processes_have_that_hook() -> None:
    class Hooks(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"tokens": np.array([sys.excepthook is say_unless_cut_off]), "labels": np.array([0])}

    for num_workers in (0, 1):
        data = _data(Hooks(), num_workers=num_workers)
        assert int(next(data.open("train", 0))["tokens"][0, 0]) == num_workers
        data.close()
