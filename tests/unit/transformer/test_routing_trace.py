# SPDX-License-Identifier: Apache-2.0
"""--moe-routing-trace-path writes which experts each token got; --moe-enable-routing-replay gives them back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import SingleRankGroup
from megatron.core.transformer.moe.route_log import RouteLog
from tests.support.tiny_training import SEQUENCE, differing, train_tiny

EXPERTS = ("--num-experts", "8", "--moe-ffn-hidden-size", "8", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01")
LIMITED = ("--moe-router-num-groups", "4", "--moe-router-group-topk", "1")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
NAME = "decoder.layers.1.mlp.router"


def read(root: Path, iteration: int, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Tensors of the second layer's router, by their last name."""
    alone = SingleRankGroup()
    found = serialization.find(root, iteration, alone)
    assert found is not None
    kinds = {name: torch.int64 if name == "experts" else torch.float32 for name in shapes}
    tensors = {name: torch.zeros(shape, dtype=kinds[name]) for name, shape in shapes.items()}
    wanted = {f"{NAME}.{name}": ShardedTensor.whole(f"{NAME}.{name}", tensor) for name, tensor in tensors.items()}
    serialization.load(wanted, found, alone, may_have_more=True)
    return tensors


@pytest.mark.flags(
    "--moe-routing-trace-path", "--moe-enable-routing-replay", "--moe-routing-trace-max-training-iters",
    "--moe-routing-trace-capture-logits", "--moe-routing-trace-capture-hidden-states",
    "--moe-routing-trace-dump-weights",
)  # fmt: skip
def test_replayed_choices_are_the_same_run(tmp_path: Path) -> None:
    """A router that would choose others, because it is limited to groups, is given those of one that is not."""
    root = tmp_path / "below" / "routes"
    captured = ("--moe-routing-trace-capture-logits", "--moe-routing-trace-capture-hidden-states")
    first = train_tiny(*EXPERTS, "--moe-routing-trace-path", root, *captured, "--moe-routing-trace-dump-weights")
    replayed = ("--moe-routing-trace-path", root, "--moe-enable-routing-replay")
    assert differing(first, train_tiny(*EXPERTS, *LIMITED, *replayed)) == []
    assert differing(first, train_tiny(*EXPERTS, *LIMITED, *FULL, *replayed)) == []
    assert differing(first, train_tiny(*EXPERTS, *LIMITED)) != []
    tokens = 4 * SEQUENCE
    found = read(root, 6, experts=(tokens, 2), logits=(tokens, 8), hidden_states=(tokens, 16), weight=(8, 16))
    assert torch.equal(found["experts"], found["logits"].topk(2).indices)
    weight = dict(first.model[0].module.named_parameters())[f"{NAME}.weight"]
    assert torch.equal(found["weight"], weight.detach())
    before = read(root, 5, weight=(8, 16))["weight"]
    torch.testing.assert_close(found["hidden_states"] @ before.t(), found["logits"], rtol=1e-5, atol=1e-6)
    short = tmp_path / "short"
    train_tiny(*EXPERTS, "--moe-routing-trace-path", short, "--moe-routing-trace-max-training-iters", "2")
    assert sorted(path.name for path in short.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    with pytest.raises(CheckpointError, match="has no choices of iteration 3; record so many iterations"):
        train_tiny(*EXPERTS, "--moe-routing-trace-path", short, "--moe-enable-routing-replay")


def test_a_step_with_more_microbatches_is_refused() -> None:
    log = RouteLog([torch.zeros(3, 2, dtype=torch.int64)])
    log.take()
    with pytest.raises(CheckpointError, match="the recorded step has 1 microbatches"):
        log.take()
