# SPDX-License-Identifier: Apache-2.0
"""In a step whose values are not read, the host never waits for the device, except at the places listed here.

Counted on the CPU, where nothing waits: every operation that would need an answer from a device is seen by its name.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.training.run import Hook, Phase, Run, Step
from tests.support.tiny_training import finish, prepare

ROOT = Path(__file__).resolve().parents[3]
WAITING = {
    "aten._local_scalar_dense",  # .item(), .tolist(), float(), bool(), if tensor
    "aten.nonzero",
    "aten.masked_select",
    "aten.equal",
    "aten.is_nonzero",
    "aten._unique2",
}
"""Operations whose result's size, or the next Python line, depends on values on the device."""

LOADING = "megatron/training/data/loading.py"
"""Batches are in the host's memory until they are copied to the device, which is not waited for."""
OPTIMIZER = ("megatron/core/optimizer/megatron_optimizer.py", "step")
ALLOWED = {
    OPTIMIZER: "--fp16: the next loss scale; lion, muon, soap: update or not; --no-check-for-nan-in-loss-and-grad: the "
    "next learning rate",
    ("megatron/core/optimizer/soap.py", "update"): "the number of the update decides what is computed",
    ("megatron/core/transformer/moe/grouped_products.py", "count_rows"): "products of single experts need their sizes",
    ("megatron/core/transformer/moe/token_dispatcher.py", "dispatch"): "how many rows other ranks send",
    ("megatron/core/transformer/moe/token_dispatcher.py", "_permute_to_experts"): "how many rows capacity, or the "
    "other ranks' share of the experts, leaves",
    (
        "megatron/training/hooks/replicas.py",
        "compare_weights",
    ): "--check-weight-hash-across-dp-replicas-interval, where it is due: all ranks end after the same iteration",
}
"""(file, function) -> why the host needs the value; docs/logging.md has the list for users."""


class Counting:
    """By the nearest function of ours: how often the host would wait."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.modes: list[Any] = [_Operations(self), _Methods(self)]

    def __enter__(self) -> Counter[tuple[str, str]]:
        for mode in self.modes:
            mode.__enter__()
        return self.found

    def __exit__(self, *exception: Any) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*exception)

    def add(self) -> None:
        for frame in reversed(traceback.extract_stack()):
            path = Path(frame.filename)
            if path.is_relative_to(ROOT / "megatron"):
                self.found[str(path.relative_to(ROOT)), frame.name] += 1
                return
        self.found["outside", ""] += 1


class _Operations(TorchDispatchMode):
    """Sees what is called below Python's methods, in backward too."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func).rpartition(".")[0], kwargs or {}
        by_mask = name.startswith("aten.index") and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        unknown_size = name == "aten.repeat_interleave" and kwargs.get("output_size") is None
        if name in WAITING or by_mask or unknown_size:
            self.counting.add()
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):
    """Sees what on the CPU calls no operation."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A torch.device may be the run's own, to which tables and batches are copied without waiting.
        to_host = func is torch.Tensor.to and any(isinstance(word, str) for word in (*args[1:], *kwargs.values()))
        if func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy) or to_host:
            self.counting.add()
        return func(*args, **kwargs)


class Watch(Hook):
    """Counts in the iterations between the progress lines."""

    phase = Phase.SAVE  # around everything that other hooks do

    def __init__(self) -> None:
        self.by_iteration: dict[int, Counter[tuple[str, str]]] = {}

    def wrap_step(self, step: Step) -> Step:
        def watched(run: Run, batches: Iterator[Any]) -> None:
            with Counting() as found:
                step(run, batches)
            self.by_iteration[run.progress.iteration] = found

        return watched


def places(run: Run) -> set[tuple[str, str]]:
    """Where the host waits, beside loading, in iterations between progress lines; the run has one in every third."""
    run.hooks.hooks.append(watch := Watch())  # type: ignore[attr-defined]
    finish(run)
    assert all(watch.by_iteration[iteration][READING] for iteration in (3, 6)), "values are read there"
    found = [place for iteration, counts in watch.by_iteration.items() if iteration % 3 for place in counts]
    return {place for place in found if place[0] != LOADING}


READING = ("megatron/training/metrics.py", "_read_together")


@pytest.mark.parametrize(
    "flags",
    [
        "", "--bf16", "--log-params-norm --log-num-zeros-in-grad", "--check-for-spiky-loss", "--optimizer sgd",
        "--swiglu --ffn-hidden-size 32 --normalization RMSNorm --position-embedding-type rope",
        "--log-max-attention-logit", "--exit-duration-in-mins 900", "--exit-signal-handler",
        "--bf16 --num-experts 4 --moe-grouped-gemm --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1",
        "--num-experts 4 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_yardstick")
def test_nothing_waits_between_progress_lines(flags: str) -> None:
    assert places(prepare("--log-interval", "3", *flags.split())) == set()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--fp16", OPTIMIZER[0]), ("--no-check-for-nan-in-loss-and-grad", OPTIMIZER[0]),
        ("--optimizer lion", OPTIMIZER[0]), ("--optimizer soap", "megatron/core/optimizer/soap.py"),
        ("--num-experts 4", "megatron/core/transformer/moe/grouped_products.py"),
        (
            "--bf16 --num-experts 4 --moe-grouped-gemm --moe-expert-capacity-factor 1",
            "megatron/core/transformer/moe/token_dispatcher.py",
        ),
        ("--check-weight-hash-across-dp-replicas-interval 2", "megatron/training/hooks/replicas.py"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_yardstick")
def test_what_waits_is_known_and_has_a_reason(flags: str, expected: str) -> None:
    found = places(prepare("--log-interval", "3", *flags.split()))
    assert found <= set(ALLOWED), "a new place: do without it, or list it with its reason"
    assert expected in {file for file, _ in found}
