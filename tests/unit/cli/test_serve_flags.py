# SPDX-License-Identifier: Apache-2.0
"""Flags of upstream's inference engine as `serve` takes them: with an effect on the engine, a note, or a refusal."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron.cli.inference_flags import compare_with_checkpoint, read_upstream_flags
from megatron.cli.serve import build_engine, parse_arguments
from megatron.core.errors import ConfigError
from megatron.core.inference.engine import Engine
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.speculation import ModelDrafter, PromptLookup
from megatron.serving.service import RequestEvent, ServedRequest, Service
from megatron.training.checkpoint.trained_model import TrainedModel, load_trained_model
from megatron.training.flags.flag import former_flags
from tests.functional.pretrain_runs import run
from tests.support.graph_stand_in import StandInRecorder
from tests.support.tiny_training import train_tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    root = tmp_path_factory.mktemp("flags") / "tiny"
    train_tiny("--save", root, "--save-interval", "2", "--train-iters", "2", "--lr-warmup-iters", "1")
    return load_trained_model(root)


def parse(trained: TrainedModel, *flags: str) -> argparse.Namespace:
    return parse_arguments(["--load", str(trained.path), *flags])


def build(trained: TrainedModel, *flags: str) -> Engine:
    return build_engine(parse(trained, *flags), trained)[0]


def test_flags_with_an_effect(trained: TrainedModel) -> None:
    plain = build(trained).settings
    assert (plain.max_sequence_length, plain.max_requests, plain.max_step_tokens) == (16, 64, 512)
    assert plain.reuses_prefixes and not plain.batch_invariant
    assert build(trained, "--inference-max-seq-length", "9").settings.max_sequence_length == 9
    assert build(trained, "--inference-max-requests", "3").settings.max_requests == 3
    assert build(trained, "--inference-dynamic-batching-max-requests", "3").settings.max_requests == 3
    assert build(trained, "--inference-dynamic-batching-max-tokens", "7").settings.max_step_tokens == 7
    assert not build(trained, "--no-inference-dynamic-batching-prefix-caching").settings.reuses_prefixes
    assert build(trained, "--inference-dynamic-batching-prefix-caching").settings.reuses_prefixes
    assert build(trained, "--batch-invariant-mode").settings.batch_invariant
    assert isinstance(build(trained, "--num-speculative-tokens", "2").drafter, PromptLookup)
    smaller = build(trained, "--num-speculative-tokens", "3", "--draft-model", str(trained.path)).drafter
    assert isinstance(smaller, ModelDrafter) and smaller.most == 3
    with pytest.raises(ConfigError, match="--num-speculative-tokens, which must be at least 1"):
        parse(trained, "--draft-model", str(trained.path))
    assert parse(trained, "--inference-dynamic-batching-logprobs-mode", "raw_logprobs")
    with pytest.raises(ConfigError, match="processed_logprobs"):
        parse(trained, "--inference-dynamic-batching-logprobs-mode", "processed_logprobs")
    with pytest.raises(ConfigError, match="leave out speculation"):
        build(trained, "--batch-invariant-mode", "--num-speculative-tokens", "2")


def test_a_draft_model_of_other_tokens_or_fewer_positions(trained: TrainedModel, tmp_path: Path) -> None:
    flags = ("--save-interval", "1", "--train-iters", "1", "--lr-warmup-iters", "0", "--save")
    train_tiny(*flags, tmp_path / "tokens", "--vocab-size", "51")
    train_tiny(*flags, tmp_path / "padding", "--make-vocab-size-divisible-by", "128")
    train_tiny(*flags, tmp_path / "longer", "--max-position-embeddings", "32")
    longer = load_trained_model(tmp_path / "longer")
    for target, draft, words in (
        (trained, tmp_path / "tokens", r"has 5\d tokens; 5\d are needed"),
        (trained, tmp_path / "padding", "has 128 tokens with padding; 64 are needed"),
        (longer, trained.path, "has 16 positions; 32 are needed"),
    ):
        with pytest.raises(ConfigError, match=words):
            build(target, "--num-speculative-tokens", "2", "--draft-model", str(draft))


def test_memory_in_gigabytes(trained: TrainedModel) -> None:
    """Two layers, two heads of 8: keys and values take 2 * 2 * 16 * 4 bytes for each token."""
    engine = build(trained, "--inference-dynamic-batching-buffer-size-gb", str(1000 * 256 / 2**30))
    assert engine.capacity_tokens == 1000
    with pytest.raises(ConfigError, match="must be above 0"):
        parse(trained, "--inference-dynamic-batching-buffer-size-gb", "-1")


def test_numbers_of_texts_for_cuda_graphs(trained: TrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    count, linear = "--inference-dynamic-batching-num-cuda-graphs", "--inference-dynamic-batching-cuda-graph-sizing"

    def sizes(*flags: str) -> tuple[int, ...]:
        arguments = parse(trained, "--inference-max-requests", "8", *flags)
        return build_engine(arguments, trained, StandInRecorder())[0].settings.graph_sizes

    assert sizes() == ()
    assert sizes(count, "3") == (2, 4, 8)
    assert sizes(count, "-1") == (1, 2, 4, 8)
    assert sizes(count, "4", f"{linear}-distribution", "linear") == (2, 4, 6, 8)
    assert sizes(count, "4", "--inference-cuda-graph-scope", "none") == ()
    assert not capsys.readouterr().err
    assert build(trained, count, "3").settings.graph_sizes == ()
    assert capsys.readouterr().err == f"note: {count} 3 has no effect: there is no GPU\n"
    with pytest.raises(ConfigError, match=f"{count} -2 must be at least 0"):
        build(trained, count, "-2")


def test_every_other_flag_of_upstreams_engine_is_noted_or_refused(trained: TrainedModel) -> None:
    """As many as the table of training has, each with its value, also behind an equals sign."""
    flags = [each for each in former_flags() if "python -m megatron serve takes it" in each.text]
    assert len(flags) > 45
    own = set()
    for each in flags:
        words = [each.name] if each.nargs == 0 else [each.name, "1"]
        try:
            notes = parse(trained, *words).notes
        except ConfigError as error:
            assert each.name in str(error) and "unrecognized" not in str(error)
            continue
        if notes:
            assert len(notes) == 1 and notes[0].startswith(f"{each.name} ")
            assert each.nargs == 0 or [*read_upstream_flags([f"{each.name}=1"], "")] == notes
        else:
            own.add(each.name)
    assert len(own) == 11  # those above and below but for those of which 1 is no value
    for words, problem in (
        (["--inference-coordinator-port"], "needs a value"),
        (["--num-lears", "2"], "unrecognized"),
        (["--num-layers", "two"], "--num-layers"),
    ):
        with pytest.raises(ConfigError, match=problem):
            parse(trained, *words)


def test_flags_of_training_are_compared_with_the_checkpoint(trained: TrainedModel) -> None:
    """Upstream's scripts describe the model once more."""
    layers = trained.config.model.num_layers
    flags = f"--num-layers {layers} --hidden-size=7 --micro-batch-size 1 --use-checkpoint-args --max-tokens-to-oom 9"
    arguments = parse(trained, *flags.split())
    assert len(arguments.notes) == 1 and arguments.notes[0].startswith("--max-tokens-to-oom")
    other, idle = compare_with_checkpoint(arguments.training_flags, trained.config)
    assert other == f"--hidden-size 7: the checkpoint has {trained.config.model.hidden_size}, which is used"
    assert idle == "without effect where text is written: --micro-batch-size, --use-checkpoint-args"


def test_a_line_every_few_passes(trained: TrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    service = Service(4, log_interval=2)
    events: list[RequestEvent] = []

    def note(event: RequestEvent) -> None:
        events.append(event)
        if event.ended_by is not None:
            service.drain(10)

    service.submit(ServedRequest({"prompt": [3], "max_new_tokens": 5, "sampling": Sampling(greedy=True)}, note))
    service.run(build(trained))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"pass {n}: 1 running, 0 waiting, {n} tokens written, 0 preemptions" for n in (2, 4)]
    assert [token for event in events for token in event.tokens]


def test_upstreams_script_is_the_same_program() -> None:
    done = run(("--load", "nowhere", "--inference-shards", "tp=2"), program="tools/run_text_generation_server.py")
    assert done.returncode == 2 and "--inference-shards: prompts are read by" in done.stderr
