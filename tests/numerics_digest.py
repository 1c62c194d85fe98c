# SPDX-License-Identifier: Apache-2.0
"""Digests of what training computes, to show that a change moves no number: run before and after it, then compare.

    python tests/numerics_digest.py > before.txt
    git switch my-change && python tests/numerics_digest.py | diff before.txt -
    python tests/numerics_digest.py "gpt2 1" "llama tp2,sp"        some rows only

One line for each reference run (a, b, c), each layout of the small table and each style of experts: SHA-256 of the
losses and gradient norms of ten iterations (50 for the reference runs), of the first iteration's gradients, and of the
weights after the last, bit for bit. They belong to one processor and one version of torch; they are not expectations.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.verify.parity import RankTrace, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.golden import test_train_curves as curves
from tests.parallel import test_layouts
from tests.parallel.harness import run_distributed, server
from tests.parallel.small_training import EXPERTS, OPTIONS, own_rank, training

EXPERT_LAYOUTS = (
    "1",
    "dp2,ep2",
    "tp2,ep2,etp1,sp",
    "pp2,dp2,ep2,--moe-token-dispatcher-type=alltoall,--pipeline-schedule=zb-h1",
    "dp4,ep2,dist-opt,overlap-all,--micro-batch-size=1",
)


def digest_of(share: RankTrace) -> tuple[str, str, str]:
    """Digests of one rank's losses and gradient norms, gradients, and weights."""
    curve = hashlib.sha256(repr((share.losses, share.grad_norms)).encode())
    grads, weights = hashlib.sha256(), hashlib.sha256()
    for held in sorted(share.held, key=lambda held: held.placement.name):
        for total, tensor in ((grads, held.grad), (weights, held.weight)):
            total.update(held.placement.name.encode())
            total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return curve.hexdigest()[:16], grads.hexdigest()[:16], weights.hexdigest()[:16]


def layout_digest(flags: str, layout: str) -> tuple[str, str, str]:
    """One rank's part of a small run."""
    config, recipe = training(flags, layout)
    return digest_of(trace_rank(config, recipe, rank=own_rank(config), iterations=test_layouts.ITERATIONS))


def reference_digest(case: str, reference: Path, scratch: Path) -> tuple[str, str, str]:
    """A reference run on one process."""
    config = read_run_config(curves.command_line(case, reference, scratch), {"WORLD_SIZE": "1"})
    recipe = build_gpt_recipe(config)
    return digest_of(trace_rank(config, recipe, rank=0, iterations=50))


def show(name: str, digests: list[tuple[str, str, str]]) -> None:
    """One line: the name and the digest of all ranks' digests."""
    parts = (hashlib.sha256("".join(part).encode()).hexdigest()[:16] for part in zip(*digests, strict=True))
    print(name, *parts, flush=True)


def main() -> None:
    server()
    rows_asked_for = sys.argv[1:]

    def wanted(name: str) -> bool:
        return not rows_asked_for or name in rows_asked_for

    with tempfile.TemporaryDirectory() as directory:
        reference = curves.lay_out(Path(directory) / "golden")
        for case in "abc":
            if wanted(f"golden {case}"):
                scratch = Path(directory) / case
                scratch.mkdir()
                show(f"golden {case}", run_distributed(reference_digest, 1, case, reference, scratch, timeout=600.0))
    rows = [(style, layout) for style, layouts in test_layouts.SMALL.items() for layout in ["1", *layouts]]
    rows += [(style, layout) for style in EXPERTS for layout in EXPERT_LAYOUTS]
    rows += [("sandwich", "1"), ("sandwich", "tp2,sp,pp2"), ("parallel", "1"), ("parallel", "pp2")]
    styles = test_layouts.STYLES | EXPERTS | OPTIONS
    for style, layout in rows:
        if wanted(f"{style} {layout}"):
            flags = f"{styles[style]} {test_layouts.MICRO_BATCH}"
            world_size = parse_layout(layout).world_size
            show(f"{style} {layout}", run_distributed(layout_digest, world_size, flags, layout, timeout=240.0))


if __name__ == "__main__":
    main()
