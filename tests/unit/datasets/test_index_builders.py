# SPDX-License-Identifier: Apache-2.0
"""The vectorised index functions equal the rules written as plain loops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import index_builders
from megatron.core.datasets.index_builders import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)


def sample_index_by_walking(
    sizes: list[int], documents: list[int], length: int, extra: int, drop_last: bool
) -> list[Any]:
    """Walk over the documents token by token, noting where each sample starts."""
    total = sum(sizes[d] for d in documents) - extra
    samples = total // length if drop_last else -(-total // length)
    position = offset = 0
    rows = [[0, 0]]
    for _ in range(samples):
        left = length + extra
        while left > 0:
            rest = sizes[documents[position]] - offset
            if left <= rest:
                offset += left - extra
                break
            left -= rest
            if position == len(documents) - 1:
                offset = sizes[documents[position]] - extra
                break
            position, offset = position + 1, 0
        rows.append([position, offset])
    return rows


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    epochs=st.integers(1, 3),
    length=st.integers(1, 9),
    extra=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 10),
    documents_at_once=st.sampled_from([1, 2, 5, 1000]),
    int32_max=st.sampled_from([10, 2**31 - 1]),
)
def test_sample_index_equals_the_walk(
    sizes: list[int],
    epochs: int,
    length: int,
    extra: bool,
    drop_last: bool,
    seed: int,
    documents_at_once: int,
    int32_max: int,
) -> None:
    documents = np.random.RandomState(seed).permutation(np.tile(np.arange(len(sizes), dtype=np.int32), epochs))
    if sum(sizes) * epochs <= int(extra):
        return
    options = {"drop_last_partial": drop_last, "add_extra_token": extra}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index_builders, "_DOCUMENTS_AT_ONCE", documents_at_once)
        patched.setattr(index_builders, "_INT32_MAX", int32_max)
        ours = build_sample_index(np.array(sizes, dtype=np.int32), documents, length, **options)
    walked = sample_index_by_walking(sizes, documents.tolist(), length, int(extra), drop_last)
    assert ours.tolist() == walked


@settings(max_examples=200)
@given(
    tokens=st.integers(2, 500),
    wanted=st.one_of(st.none(), st.integers(1, 300)),
    length=st.integers(1, 64),
    extra=st.booleans(),
)
def test_epochs_are_the_fewest_that_suffice(tokens: int, wanted: int | None, length: int, extra: bool) -> None:
    plan = plan_epochs(tokens, wanted, length, int(extra))
    if wanted is None:
        assert plan.num_epochs == 1
        return
    assert plan.num_epochs * tokens - extra >= wanted * length
    assert plan.num_epochs == 1 or (plan.num_epochs - 1) * tokens - extra < wanted * length
    per_epoch = (tokens - extra) // length
    before = ((plan.num_epochs - 1) * tokens - extra) // length
    assert plan.separate_last_epoch == (plan.num_epochs > 1 and wanted - before < int(0.8 * per_epoch))


def test_separate_last_epoch_comes_last() -> None:
    documents = np.arange(10, 60, dtype=np.int32)
    plan = plan_epochs(1000, 102, 30, 1)
    assert plan.separate_last_epoch and plan.num_epochs == 4
    index = build_document_index(documents, plan, np.random.RandomState(0))
    assert sorted(index[:150]) == sorted(documents.tolist() * 3)
    assert sorted(index[150:]) == documents.tolist()
    order = build_shuffle_index(plan.samples_before_last_epoch, 133, np.random.RandomState(0))
    assert sorted(order[: plan.samples_before_last_epoch]) == list(range(plan.samples_before_last_epoch))
    assert sorted(order) == list(range(133))


def test_index_code_needs_no_torch() -> None:
    modules = (
        "blend blending_order index_builders index_cache indexed_dataset blended_dataset "
        "blended_megatron_dataset_builder"
    )
    imports = "; ".join(f"import megatron.core.datasets.{name}" for name in modules.split())
    root = Path(__file__).resolve().parents[3]
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_lengths_in_an_index_file_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie at an odd address there; numpy's take would copy all of them for every chunk."""
    aligned: list[bool] = []

    class Watched(np.ndarray):  # type: ignore[type-arg]
        def take(self, *arguments: Any, **options: Any) -> Any:
            aligned.append(bool(self.flags.aligned))
            return super().take(*arguments, **options)

    buffer = b"xx" + np.full(1000, 7, dtype=np.int32).tobytes()
    sizes = np.frombuffer(buffer, dtype=np.int32, offset=2).view(Watched)
    assert not sizes.flags.aligned
    monkeypatch.setattr(index_builders, "_DOCUMENTS_AT_ONCE", 100)
    assert len(build_sample_index(sizes, np.arange(1000, dtype=np.int32), 10)) == 700
    assert aligned == [True] * 10
