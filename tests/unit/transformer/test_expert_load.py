# SPDX-License-Identifier: Apache-2.0
"""--moe-per-layer-logging: how evenly experts are chosen, in rows of metrics, and drawn by tools/draw_experts.py."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.routing import Routing
from tests.support.tiny_training import finish, prepare

ROOT = Path(__file__).parents[3]
FLAGS = """
    --num-experts 4 --moe-router-topk 2 --moe-router-enable-expert-bias --moe-router-score-function sigmoid
    --moe-expert-capacity-factor 1.0 --moe-per-layer-logging --log-interval 1 --train-iters 2 --moe-layer-freq [0,1]
""".split()


def test_values_are_those_of_a_loop_over_all_choices(tmp_path: Path) -> None:
    run = prepare(*FLAGS, "--metrics-dir", tmp_path)
    seen: list[Routing] = []

    def look(router: TopKRouter, inputs: Any, routing: Routing) -> None:
        seen.append(routing)

    (router,) = (part for chunk in run.model for part in chunk.module.modules() if isinstance(part, TopKRouter))
    router.register_forward_hook(look)
    finish(run)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and len(seen) == 4  # two microbatches a step
    for step, row in enumerate(rows):
        of_step = seen[2 * step : 2 * step + 2]
        counts = Counter(int(expert) for routing in of_step for expert in routing.experts.flatten())
        total = sum(counts.values())
        assert total == 2 * 2 * 16 * 2
        load = max(counts.values()) / (total / 4)
        entropy = -sum(n / total * math.log(n / total) for n in counts.values()) / math.log(4)
        dropped = sum(int((~routing.kept).sum()) for routing in of_step if routing.kept is not None)
        assert dropped > 0
        assert row["expert_load layer 2"] == pytest.approx(load) == row["expert_load"]
        assert row["expert_entropy layer 2"] == pytest.approx(entropy)
        assert row["tokens_dropped layer 2"] == pytest.approx(dropped / total)
        assert not any("layer 1" in name or "rank" in name for name in row)
    bias = router.expert_bias
    assert bias is not None
    # Measured after the step that has moved it.
    assert rows[-1]["expert_bias layer 2"] == pytest.approx(float(bias.max() - bias.min())) != 0


def test_nothing_is_counted_without_the_flag(tmp_path: Path) -> None:
    run = finish(prepare(*(flag for flag in FLAGS if flag != "--moe-per-layer-logging")))
    routers = [part for chunk in run.model for part in chunk.module.modules() if isinstance(part, TopKRouter)]
    assert [router.take_load() for router in routers] == [None]


# ---- the drawing


def draw(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "draw_experts.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def write_metrics(directory: Path) -> None:
    rows = [
        {"iteration": n, "lm loss": 3.0} | {f"expert_load layer {k}": 1 + k * n for k in (1, 3)} for n in range(1, 9)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_map_in_the_terminal(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    finished = draw(str(tmp_path))
    first, *layers = finished.stdout.splitlines()
    assert first == "expert_load: ' ' 2 to '@' 25; iterations 1 to 8"
    assert layers == ["layer   1 |  ..:::-| 9", "layer   3 |.:-=+#%@| 25"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{}", "--metric", "entropy"], "has no entropy of layers; there are expert_load"),
        (["{}/nothing"], "nothing/metrics.jsonl cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    write_metrics(tmp_path)
    finished = draw(*(argument.format(tmp_path) for argument in arguments))
    assert finished.returncode == 2 and sentence in finished.stderr


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_metrics(tmp_path)
    assert draw(str(tmp_path), "--output", str(tmp_path / "load.png")).returncode == 0
    assert (tmp_path / "load.png").read_bytes()[:4] == b"\x89PNG"
