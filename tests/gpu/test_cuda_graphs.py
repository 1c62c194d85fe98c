# SPDX-License-Identifier: Apache-2.0
"""Layers as CUDA graphs: losses, gradients and dropout of the run without, by a GPU's graphs with `-m gpu`, and by
their stand-in on the CPU."""

from __future__ import annotations

import pytest
import torch

from megatron.core.device_graphs import GraphRecorder, Recorder
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from tests.support.gpt_models import build_model
from tests.support.graph_stand_in import StandInRecorder
from tests.unit.transformer.test_cuda_graphs import GRAPHS, LLAMA, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [
    "--hidden-dropout 0.2 --attention-dropout 0.1",
    f"{LLAMA} --cuda-graph-modules attn mlp",
    f"{LLAMA} --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", CASES)
def test_recorded_layers_train_as_others_do(device: str, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setenv("MEGATRON_DEVICE", "cpu")  # where there is a GPU, too
    recorder: Recorder = StandInRecorder() if device == "cpu" else GraphRecorder()
    plain, _ = train(f"{flags} --cuda-graph-impl local", None)
    recorded, model = train(f"{flags} {GRAPHS}", recorder)
    assert model.decoder.passes is not None and model.decoder.passes.slots == 1
    # Some of a GPU's kernels add in an order that is left to chance.
    tolerance = 2e-2 if "bf16" in flags else 1e-4
    for one, other in zip(recorded, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_passes_write_what_others_do(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's layers and others, two sizes, the same weights: as many graphs as sizes, and greedy texts."""
    if device == "cpu":
        monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    model = build_model(f"{LLAMA} --window-size 5,0 --window-attn-skip-freq 2 --init-method-std 0.1").to(device)
    recorder: Recorder = StandInRecorder() if device == "cpu" else GraphRecorder()

    def write(sizes: tuple[int, ...]) -> Engine:
        settings = EngineSettings(48, max_requests=5, graph_sizes=sizes)
        engine = Engine(model, settings, recorder=recorder)
        requests = [Request([3 + row, *range(2, 4 + row)], 9 + row, Sampling(greedy=True)) for row in range(5)]
        texts.append([each.text for each in engine.run(requests)])
        return engine

    texts: list[list[list[int]]] = []
    write(())
    recorded = write((2, 5)).runner.recorded
    assert texts[0] == texts[1]
    assert recorded is not None and recorded.recordings == 2 and recorded.replays > 8
