# SPDX-License-Identifier: Apache-2.0
"""Real launchers start a failed job again: it goes on by itself, or says why it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.faults.two_ranks import read_tensors
from tests.functional.pretrain_runs import TINY, launch, metrics, run_ranks

TORCHRUN = "-m torch.distributed.run --standalone --max-restarts 3 --nproc-per-node".split()


@pytest.mark.flags("--simulate-fault", "--save", "--load")
def test_torchrun_starts_a_job_again_that_has_lost_a_rank(tmp_path: Path) -> None:
    """Its agent sends SIGTERM to the rank that is left as soon as it misses the other one; that rank saves first, and
    writes the metrics that the lost one had not written yet. Its loader processes have that signal, too."""
    flags = [*TINY, "--hidden-dropout", "0.1", "--save-interval", "2", "--log-interval", "2", "--num-workers", "2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_ranks([*flags, "--save", whole, "--metrics-dir", whole / "metrics"], 2).returncode == 0
    places = ["--save", parts, "--load", parts, "--metrics-dir", parts / "metrics"]
    done = launch([*TORCHRUN, "2"], [*flags, *places, "--simulate-fault", "kill:0,4"])
    assert done.returncode == 0, done.stderr
    assert "note: iteration 3 is saved in an emergency save of 1 ranks, 1 of 2 being lost" in done.stderr
    assert metrics(parts / "metrics") == metrics(whole / "metrics")
    assert (parts / "ledger.jsonl").read_text() == (whole / "ledger.jsonl").read_text()
    for key, tensor in read_tensors(whole, 5).items():
        assert read_tensors(parts, 5)[key].equal(tensor), key


def test_R8_a_crash_loop_under_torchrun_ends_with_its_reason(tmp_path: Path) -> None:
    """A token that is not in the vocabulary, in the third of the batches."""
    with IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.uint16) as builder:
        for document in range(40):
            builder.add_document([77 if document == 9 else 5] * 33, [33])
        builder.finalize(str(tmp_path / "data.idx"))
    flags = [flag for flag in TINY if flag != "--mock-data"]
    data = ["--data-path", tmp_path / "data", "--split", "100,0,0", "--data-cache-path", tmp_path / "cache"]
    save = tmp_path / "save"
    done = launch([*TORCHRUN, "1"], [*flags, *data, "--save", save, "--load", save, "--save-interval", "1"])
    assert done.returncode != 0
    sentence = "the run has failed 3 times in succession at iteration"
    assert f"note: --save {save}: {sentence}" in done.stderr
    assert f"error: --save {save}: {sentence}" in done.stderr, "the fourth start ends at once"
    assert done.stderr.count("token id 77") >= 3
