"""tools/check_parity.py as its users start it."""

from __future__ import annotations

import subprocess
import sys

from tests.functional.pretrain_runs import ROOT, TINY, environment


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "check_parity.py"), *TINY, *arguments],
        capture_output=True, text=True, env=environment({}), timeout=200, check=False,
    )  # fmt: skip


def test_layouts_that_agree() -> None:
    done = check("--iterations", "2", "--layouts", "tp2,sp", "dp2")
    assert done.returncode == 0, done.stderr
    assert "tp2,sp (2 processes): the same run" in done.stdout and "dp2 (2 processes): the same run" in done.stdout


def test_a_layout_that_does_not_agree_is_told_where() -> None:
    """Another seed stands for a mistake in one axis."""
    done = check("--iterations", "1", "--layouts", "dp2,--seed=99")
    assert done.returncode == 1, done.stderr
    assert "dp2,--seed=99 (2 processes): " in done.stdout and "DIFFERENCES" in done.stdout
    assert "lm loss at iteration 1: " in done.stdout
    assert "gradient of the first iteration of embedding.word_embeddings.weight: element" in done.stdout
    assert "dp2 (2 processes): the same run" in done.stdout
    assert "the smallest part of dp2,--seed=99 that differs: dp2,--seed=99" in done.stdout


def test_illegal_layouts_are_refused_before_anything_runs() -> None:
    done = check("--layouts", "tp3", "dp2", "tp4,--num-attention-heads=6")
    assert done.returncode == 2 and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert errors[0].startswith("error: layout tp3: --num-attention-heads 2 cannot be split over")
    assert any("layout tp4,--num-attention-heads=6: " in line for line in errors[1:])
