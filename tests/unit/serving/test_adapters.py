# SPDX-License-Identifier: Apache-2.0
"""Several adapters behind one server: each is a model of its own by name, and the one with its adapters merged."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

from megatron.cli.serve import build_engine, parse_arguments
from megatron.core.errors import ConfigError, MegatronError
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.transformer.adapters import get_merged_weight
from megatron.serving.app import Application, Limits
from megatron.serving.service import Service
from megatron.training.checkpoint.trained_model import TrainedModel, load_trained_model
from tests.support.tiny_training import train_tiny

PROMPT = [3, 4, 5, 6, 7, 8]
ADAPTERS = {
    "one": "--lora-rank 2 --lora-alpha 64 --lora-dropout 0.5",
    "two": "--lora-rank 3 --lora-alpha 64 --lora-type dora --lora-target-modules q_proj linear_fc2",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    train_tiny("--save", root / "base", "--train-iters", "2", "--position-embedding-type", "rope")
    for name, flags in ADAPTERS.items():
        common = f"--pretrained-checkpoint {root / 'base'} --save {root / name} --save-adapter-only --train-iters 4"
        train_tiny(*f"{common} --position-embedding-type rope {flags}".split())
    return root


def open_engine(root: Path, *flags: object) -> tuple[Engine, Application]:
    named = [f"{name}={root / name}" for name in ADAPTERS]
    arguments = parse_arguments(["--load", str(root / "base"), "--adapter", *named, *map(str, flags)])
    engine, served = build_engine(arguments, load_trained_model(root / "base"))
    application = Application(Service(8), Limits())
    application.served = served
    return engine, application


def read(engine: Engine, names: list[str | None], prompt: list[int]) -> list[torch.Tensor]:
    """Log-probabilities of the prompt's and of four further tokens, by each of these adapters, read together."""
    requests = [
        Request(prompt, 4, Sampling(greedy=True), logprobs=0, prompt_logprobs=0, adapter=name) for name in names
    ]
    return [
        torch.tensor([entry.logprob for entry in (*request.read_logprobs, *request.token_logprobs)])
        for request in engine.run(requests)
    ]


def merge(trained: TrainedModel) -> torch.nn.Module:
    for layer in [*trained.model.modules()]:
        if getattr(layer, "adapter", None) is not None:
            layer.weight.data = get_merged_weight(layer).detach()  # type: ignore[union-attr]
            layer.adapter = None  # type: ignore[assignment]
    return trained.model


def test_each_is_its_merged_model(root: Path) -> None:
    engine, _ = open_engine(root)
    names = ["two", None, "one", "two", None]
    found = read(engine, names, PROMPT)
    by_name: dict[str | None, torch.Tensor] = {}
    for name in (None, *ADAPTERS):
        model = merge(load_trained_model(root / (name or "base")))
        alone = Engine(model, EngineSettings(16), vocab_size=engine.vocab_size)
        by_name[name] = read(alone, [None], PROMPT)[0]
    for name, logprobs in zip(names, found, strict=True):
        torch.testing.assert_close(logprobs, by_name[name], rtol=1e-4, atol=1e-4)
    for name in ADAPTERS:
        assert (by_name[name][:5] - by_name[None][:5]).abs().max() > 0.01
    assert engine.counters.passes < 10


def test_texts_of_different_adapters_share_no_pages(root: Path) -> None:
    """Keys and values of a beginning are those of the adapters that read it."""
    engine, _ = open_engine(root)
    engine = Engine(engine.runner.model, EngineSettings(80), vocab_size=50, adapters=engine.adapters)
    long = PROMPT * 12
    for again in range(2):
        requests = [Request(long, 2, Sampling(greedy=True), adapter=name) for name in ("one", None)]
        for request in requests:
            engine.run([request])
            assert (request.reused_tokens > 0) == bool(again)


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[TestClient]:
    engine, application = open_engine(root)
    worker = threading.Thread(target=application.service.run, args=(engine,))
    worker.start()
    try:
        with TestClient(application.build()) as client:
            while application.service.state == "loading":
                pass
            yield client
    finally:
        application.service.drain(0)
        worker.join()


def test_the_model_field_chooses(root: Path, client: TestClient) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["base", "one", "two"]
    assert client.get("/v1/models/two").json()["id"] == "two"
    engine, _ = open_engine(root)
    for name in ("one", "base", "two"):
        body = {"model": name, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 0, "echo": True}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["model"] == name
        (expected,) = read(engine, [None if name == "base" else name], PROMPT)
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        torch.testing.assert_close(torch.tensor(logprobs[1:]), expected, rtol=1e-4, atol=1e-4)
    streamed = client.post("/v1/completions", json=body | {"stream": True}).text
    assert {json.loads(line[6:])["model"] for line in streamed.split("\n\n") if line[6:7] == "{"} == {"two"}
    refused = client.post("/v1/completions", json=body | {"model": "three"})
    assert refused.status_code == 404 and "the model is 'base' or 'one' or 'two'" in refused.text


def test_bad_input_is_named(root: Path) -> None:
    load = ["--load", str(root / "base"), "--adapter"]
    for words, said in (
        (["one"], "'one' must be NAME=DIR"),
        (["a=b", "a=c"], "the name a is given twice"),
        (["a=b", "--num-speculative-tokens", "1", "--speculate", "mtp"], "reads the states of one pass"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_arguments([*load, *words])
    for words, said in (
        ([f"base={root / 'one'}"], "the model has this name"),
        ([f"a={root / 'base'}"], "is no checkpoint of adapters alone"),
    ):
        with pytest.raises(MegatronError, match=said):
            build_engine(parse_arguments([*load, *words]), load_trained_model(root / "base"))
    with pytest.raises(MegatronError, match="has adapters already"):
        build_engine(
            parse_arguments(["--load", str(root / "one"), "--adapter", f"a={root / 'two'}"]),
            load_trained_model(root / "one"),
        )
    engine, _ = open_engine(root)
    with pytest.raises(ConfigError, match="no adapters of the name three"):
        engine.add(Request(PROMPT, 1, Sampling(), adapter="three"))
