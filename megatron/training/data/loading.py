# SPDX-License-Identifier: Apache-2.0
"""From datasets to batches on the device: loading the samples that samples.py chooses.

With --dataloader-type external, whole batches, as what the script provides yields them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.core.device import is_cpu
from megatron.core.errors import ConfigError, DataError, MegatronError, TemporaryError
from megatron.core.num_microbatches_calculator import NumMicrobatchesCalculator
from megatron.core.parent_death import end_with_parent
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.config.container import RunConfig
from megatron.training.config.data import DataConfig
from megatron.training.data.samples import PADDING, CyclicSampler, SingleSampler, WholeSampler

Batch: TypeAlias = dict[str, torch.Tensor]
"""One microbatch of one data-parallel rank: tokens, labels, position_ids int64 [b, s]; loss_mask float32 [b, s];
attention_mask bool [b, 1, s, s], True = masked, only where the loader makes masks. The trainer adds nothing to it, so a
dataset may hand further tensors to its script's forward_step."""

# Longer than the handler of SIGCHLD takes on a busy machine, and negligible compared with the restart that follows.
_SIGNAL_SECONDS = 0.2

_MOST_WORKERS = 32
"""Loader processes that any machine can start for one rank within seconds."""
_MOST_WORKERS_PER_CORE = 4

SPLITS = ("train", "validation", "test")

_ON_HOST = frozenset({"local_cp_size", "cu_seqlens"})
"""Decide what is computed, so that nobody should have to ask the device for them."""


@dataclass(frozen=True)
class LoaderSettings:
    """Settings by which batches are read on this process."""

    micro_batch_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    dataloader_type: str = "single"
    num_workers: int = 0
    worker_timeout_seconds: float = 600.0
    evaluation_micro_batch_size: int | None = None
    """Of validation and test batches; micro_batch_size when None."""
    ignored_signal: str | None = None
    """Loader processes do not end on it."""
    vocabulary_limit: int | None = None
    """Token ids must be below this: the padded vocabulary size."""

    def build_sampler(self, total_samples: int, consumed_samples: int, *, repeats: bool) -> Iterable[list[int]]:
        """Build what yields the indices of each microbatch of the rank, from sample `consumed_samples` on."""
        # Both samplers are functions of the samples consumed: nothing about the data needs to stand in a checkpoint.
        place = (total_samples, consumed_samples, self.micro_batch_size, self.dp_rank, self.dp_size)
        return CyclicSampler(*place) if self.dataloader_type == "cyclic" else SingleSampler(*place, repeats=repeats)

    def choose_split(self, split: str) -> LoaderSettings:
        """The settings for one split: evaluation may have microbatches of another size."""
        if split == "train" or self.evaluation_micro_batch_size is None:
            return self
        return dataclasses.replace(self, micro_batch_size=self.evaluation_micro_batch_size)


def check_loader_processes(config: DataConfig) -> None:
    """Raise ConfigError for more loader processes than this machine can sensibly start."""
    # Not a rule of the flags: these may be checked on a machine that is not the one to train on.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(_MOST_WORKERS, _MOST_WORKERS_PER_CORE * cores)
    if config.num_workers > most:
        raise ConfigError(
            f"--num-workers {config.num_workers} is more than the {cores} cores of this machine are good for; give at "
            f"most {most} (usual are 2 to 16): each is a process of its own, for every rank"
        )


def build_loader_settings(
    config: RunConfig,
    groups: ProcessGroupCollection,
    device: torch.device,
    batch_size: NumMicrobatchesCalculator,
    vocabulary_limit: int,
) -> LoaderSettings:
    """The settings of a run on this process. vocabulary_limit: token ids must be below it."""
    # Each site takes the samples that the same ranks would take if all sites were one job.
    replicas_before = (config.sites.datacenter_id or 0) * groups.dp.size()
    return LoaderSettings(
        micro_batch_size=batch_size.micro_batch_size,
        dp_rank=replicas_before + groups.dp.rank(),
        dp_size=groups.dp.size() * config.sites.diloco_replicas,
        device=device,
        dataloader_type=config.data.dataloader_type or "single",
        num_workers=config.data.num_workers,
        worker_timeout_seconds=60.0 * config.distributed.distributed_timeout_minutes,
        vocabulary_limit=vocabulary_limit,
        evaluation_micro_batch_size=config.validation.eval_micro_batch_size,
        ignored_signal=config.training.exit_signal if config.training.exit_signal_handler_for_dataloader else None,
    )


@dataclass
class TrainingData:
    """The datasets of the three splits and how to read them.

    datasets: for each split a dataset, None where there is none, or a list of datasets that are evaluated apart. With
    `external`, a source of batches in place of a dataset.
    """

    datasets: dict[str, Any]
    settings: LoaderSettings
    planned: Callable[[int], Generator[Batch, None, None]] | None = None
    """Counterpart of `open` for training data where a plan says which samples share a microbatch: see
    planned_batches.py."""
    first_sample: int = 0
    """Of the training data, in the order of the whole run: with --phase-transition-iterations others came before."""
    _open: list[Generator[Batch, None, None]] = field(default_factory=list, init=False)

    def has(self, split: str) -> bool:
        """Return whether the split has samples."""
        return bool(self.parts(split))

    def parts(self, split: str) -> list[Any]:
        """The datasets of a split that are evaluated apart: none, one, or several."""
        datasets = self.datasets.get(split)
        if datasets is None:
            return []
        return datasets if isinstance(datasets, list) else [datasets]

    def open(self, split: str, consumed_samples: int, part: int = 0) -> Iterator[Batch]:
        """Microbatches of this rank on the device, from the sample after `consumed_samples` (over all ranks) on.

        Nothing is read before the first one is taken. Raises, when it is taken, DataError if the split has no samples
        or none left or a sample is unusable, TemporaryError if a loader process dies or hangs.
        """
        parts = self.parts(split)
        dataset = parts[part] if parts else None
        if split == "train":
            consumed_samples -= self.first_sample
            if consumed_samples < 0:
                raise DataError(
                    f"sample {consumed_samples + self.first_sample} is of an earlier phase of the data, which this run "
                    f"does not have: its first one is {self.first_sample}; start again with the data of that phase"
                )
        # Evaluation is never planned: its batches are the same as without plans, so losses stay comparable.
        if self.planned is not None and split == "train":
            return self._register(self.planned(consumed_samples))
        if self.settings.dataloader_type == "external" and dataset is not None:
            return self._register(read_external_batches(dataset, split, consumed_samples, self.settings))
        return self._register(read_microbatches(dataset, split, consumed_samples, self.settings.choose_split(split)))

    def open_whole(self, split: str, part: int, num_microbatches: int) -> Generator[Batch, None, None]:
        """The same for every sample of a dataset once; the rest of `num_microbatches` are samples without loss.

        The caller closes it.
        """
        dataset = self.parts(split)[part]
        settings = self.settings.choose_split(split)
        sampler = WholeSampler(
            len(dataset), num_microbatches, settings.micro_batch_size, settings.dp_rank, settings.dp_size
        )
        return load_samples(dataset, split, sampler, settings)

    def close(self) -> None:
        """Close every iterator that was opened, which ends its loader processes."""
        while self._open:
            self._open.pop().close()

    def _register(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        # Remembered, so that `close` ends the loader processes also after an error in the middle of a step.
        self._open.append(batches)
        return batches


def read_microbatches(
    dataset: Dataset[Any] | None, split: str, consumed_samples: int, settings: LoaderSettings
) -> Generator[Batch, None, None]:
    """Microbatches of one dataset in the sampler's order; TrainingData.open says what is raised."""
    if dataset is None:
        raise DataError(f"there is no {split} data; give --data-path with a --split that leaves some, or --mock-data")
    total = len(dataset)  # type: ignore[arg-type]
    # Ranks take whole microbatches in turn; a split smaller than one round would give some of them nothing.
    step = settings.micro_batch_size * settings.dp_size
    if total < step:
        raise DataError(
            f"the {split} data has {total} samples, fewer than one microbatch over all ranks needs ({step}); "
            "use more data, a smaller --micro-batch-size or fewer ranks"
        )
    sampler = settings.build_sampler(total, consumed_samples, repeats=split != "train")
    yield from load_samples(dataset, split, sampler, settings)
    # Evaluation repeats its data, so only training gets here.
    raise build_used_up_error(split, total, consumed_samples)


def build_used_up_error(split: str, total_samples: int, consumed_samples: int) -> DataError:
    """The error of a split that has no further sample."""
    return DataError(
        f"the {split} data is used up: {total_samples} samples, {consumed_samples} consumed before this start; "
        "use more data, or --dataloader-type cyclic"
    )


def read_external_batches(
    source: Iterable[Mapping[str, Any]], split: str, consumed_samples: int, settings: LoaderSettings
) -> Generator[Batch, None, None]:
    """Yield the microbatches of a script's data source, on the device. In evaluation the source begins again at its
    end.

    A source with a method `start_at(consumed_samples)` is told where to begin; another one decides by itself.
    """
    # Without it a resumed run sees the source's first batches again; only the script can know whether that is right.
    start_at = getattr(source, "start_at", None)
    if start_at is not None:
        start_at(consumed_samples)
    repeats = True
    while repeats:
        repeats = False
        for batch in source:
            repeats = split != "train"
            tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
            if settings.vocabulary_limit is not None:
                check_vocabulary(tensors, settings.vocabulary_limit, lambda: f"a batch of the {split} data")
            # non_blocking: the copy of the next microbatch overlaps with the computation of this one.
            yield {name: tensor.to(settings.device, non_blocking=True) for name, tensor in tensors.items()}
    raise DataError(f"the {split} data is used up: the script's own source has no further batch; let it yield more")


def load_samples(
    dataset: Dataset[Any],
    split: str,
    sampler: Iterable[Sequence[Any]],
    settings: LoaderSettings,
    stack: Callable[[list[Any]], Any] = default_collate,
) -> Generator[Batch, None, None]:
    """The sampler's microbatches on the device. stack: makes a microbatch of its samples."""
    loader: DataLoader[Any] = DataLoader(
        # Checked in the loader process: looking at every token costs the training process nothing.
        CheckedDataset(dataset, split, settings.vocabulary_limit),
        batch_sampler=sampler,  # type: ignore[arg-type]
        collate_fn=functools.partial(collate, stack),
        num_workers=settings.num_workers,
        # fork: index arrays are shared, not copied, and nothing is imported again. Workers touch neither device nor
        # groups.
        multiprocessing_context="fork" if settings.num_workers else None,
        timeout=settings.worker_timeout_seconds if settings.num_workers else 0,
        # Only from pinned memory can a GPU copy without making the host wait.
        pin_memory=not is_cpu(settings.device),
        # The loader draws a seed when it starts; from a separate generator, or dropout would depend on when that is.
        generator=torch.Generator(),
        worker_init_fn=_Behaviour(settings.ignored_signal, os.getpid()),
    )
    for batch in _supervise(loader, settings):
        if isinstance(batch, MegatronError):
            raise batch
        yield {
            name: tensor if name in _ON_HOST else tensor.to(settings.device, non_blocking=True)
            for name, tensor in batch.items()
        }


@dataclass(frozen=True)
class _Behaviour:
    """Behaviour of a loader process on signals, and on a trainer that has stopped listening or is gone."""

    ignored_signal: str | None
    trainer: int
    """Process id."""

    def __call__(self, worker: int) -> None:
        # torch looks for the trainer every five seconds, unless the process waits to hand a batch over.
        end_with_parent(self.trainer)
        # A key that is pressed reaches all processes of a terminal. The trainer decides, and needs its batches until it
        # has finished; what it has set up to hear of signals is not the loader's.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.ignored_signal is not None:
            signal.signal(signal.Signals[self.ignored_signal], signal.SIG_IGN)
        # Only in loader processes: the trainer's hook stays as it is.
        sys.excepthook = say_unless_cut_off


def say_unless_cut_off(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """An exception hook for loader processes: when the trainer ends in the middle of a transfer, it says why itself."""
    if not isinstance(error, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, traceback)


def _supervise(loader: DataLoader[Any], settings: LoaderSettings) -> Iterator[Any]:
    """The loader's batches; what its processes do wrong becomes a TemporaryError."""
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            problem = explain_lost_loader(error)
            if problem is None:
                raise
            break
        yield batch
    with contextlib.suppress(RuntimeError):
        time.sleep(_SIGNAL_SECONDS)  # torch reports a death by a signal as well: let it arrive here, not later
    del batches
    raise TemporaryError(f"data-parallel rank {settings.dp_rank}: {problem}")


def explain_lost_loader(error: Exception) -> str | None:
    """The sentence for an error about a loader process that died or hangs; None for other errors.

    A death shows as a closed pipe, or as torch's error from a signal, which can also come up in the middle of a step.
    """
    # torch has no class for this: the name in the text is all that tells it from other RuntimeErrors.
    if isinstance(error, RuntimeError) and "DataLoader" not in str(error):
        return None
    reason = " ".join(str(error).split())[:200].rstrip(". ")
    return (
        f"a data loader process was lost or hangs ({reason}); "
        "look for memory limits and storage trouble, then start again"
    )


class CheckedDataset(Dataset[Any]):
    """A dataset whose unusable samples are values: an error crosses from a loader process without its traceback."""

    def __init__(self, dataset: Dataset[Any], split: str, vocabulary_limit: int | None) -> None:
        self.dataset, self.split, self.vocabulary_limit = dataset, split, vocabulary_limit

    def __getitem__(self, index: int) -> Any:
        try:
            # Any sample will do, since nothing of it counts; it has the shapes of the others.
            if index == PADDING:
                sample = dict(self.dataset[0])
                return sample | {"loss_mask": torch.zeros_like(torch.as_tensor(sample["loss_mask"]))}
            sample = self.dataset[index]
            if self.vocabulary_limit is not None:
                check_vocabulary(sample, self.vocabulary_limit, lambda: self._place(index))
            return sample
        except MegatronError as error:
            return error

    def _place(self, index: int) -> str:
        return f"sample {index} of the {self.split} data ({describe(self.dataset, index)})"


def check_vocabulary(sample: Mapping[str, Any], limit: int, place: Callable[[], str]) -> None:
    """Raise DataError for a token the embedding has no row for: it would read outside its table, on a device without
    a word about where. place: where the sample comes from."""
    for name in ("tokens", "labels"):
        ids = torch.as_tensor(sample.get(name, ()))
        wrong = ids.ge(limit) | ids.lt(0)
        if wrong.any():
            # nonzero makes the host wait on a GPU; these tensors are still on the CPU.
            at = wrong.nonzero()[0].tolist()
            raise DataError(
                f"{place()} has token id {int(ids[tuple(at)])} at position {at[-1]} of its {name}; the model's padded "
                f"vocabulary has {limit} tokens: the data was made with another tokenizer than "
                "--tokenizer-type and --tokenizer-model name"
            )


def describe(dataset: Any, index: int) -> str:
    """Return where a sample comes from, in the dataset's words if it has any."""
    locate = getattr(dataset, "locate", None)
    return str(locate(index)) if locate is not None else type(dataset).__name__


def collate(stack: Callable[[list[Any]], Any], samples: Sequence[Any]) -> Any:
    """A batch of samples; an error among them is passed on instead."""
    for sample in samples:
        # The first error of the batch is the one reported; stacking the rest would be in vain.
        if isinstance(sample, MegatronError):
            return sample
    return stack(list(samples))


def time_batches(batches: Iterator[Batch], watch: contextlib.AbstractContextManager[Any]) -> Iterator[Batch]:
    """Yield the same micro-batches, each fetched inside of `watch`: a timer, or a range with a name in profiles."""
    while True:
        with watch:
            batch = next(batches)
        yield batch
