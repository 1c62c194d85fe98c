# SPDX-License-Identifier: Apache-2.0
"""--save-params-interval and its like: whatever the layout, the dumped tensors are those of one process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from megatron.core.upstream_checkpoints.stored_tensors import open_checkpoint
from megatron.training.loop import train
from megatron.training.verify.parity import open_local_run
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import EXPERTS, STYLES, own_rank, training

KINDS = ("params", "wgrads", "activations", "dgrads", "tokens_per_expert")
FLAGS = " ".join(f"--save-{kind.replace('_', '-')}-interval 2" for kind in KINDS)
ALLTOALL = "--moe-token-dispatcher-type=alltoall"
ITERATION = 2


def dump(style: str, layout: str, root: str) -> None:
    config, recipe = training(
        f"{(STYLES | EXPERTS)[style]} {FLAGS} --train-iters 3 --lr-warmup-iters 0 --save {root}", layout
    )
    with open_local_run(config, recipe, own_rank(config)) as run:
        train(run)


@functools.cache
def of_one_process(style: str) -> Path:
    root = Path(tempfile.mkdtemp())
    dump(style, "1", str(root))
    return root


def read(root: Path, kind: str) -> dict[str, torch.Tensor]:
    return {tensor.key: tensor.read() for tensor in open_checkpoint(root / kind, ITERATION).tensors}


@pytest.mark.parametrize(
    ("style", "layout"),
    [
        ("llama", "tp2,sp,pp2"), ("llama", "tp4"), ("gpt2", "dp2,dist-opt,--micro-batch-size=3"), ("gpt2", "dp2,fsdp2"),
        ("moe", f"dp2,ep2,{ALLTOALL}"),
    ],
)  # fmt: skip
def test_a_layout_dumps_the_tensors_of_one_process(style: str, layout: str, tmp_path: Path) -> None:
    run_distributed(dump, parse_layout(layout).world_size, style, layout, str(tmp_path), timeout=300.0)
    kinds = KINDS if style == "moe" else KINDS[:-1]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {*kinds, "iter_0000003"}
    for kind in kinds:
        assert [path.name for path in (tmp_path / kind).glob("iter_*")] == ["iter_0000002"]
        found, expected = read(tmp_path, kind), read(of_one_process(style), kind)
        assert found.keys() == expected.keys() and found, set(found) ^ set(expected)
        for key, tensor in expected.items():
            if kind == "tokens_per_expert":
                assert torch.equal(found[key], tensor) and tensor.sum() == 2 * 12 * 16, key
                continue
            limit = 1e-4 * float(tensor.abs().max()) + 1e-8
            torch.testing.assert_close(
                found[key], tensor, rtol=0, atol=limit, msg=lambda m, at=f"{kind} {key}": f"{at}: {m}"
            )
