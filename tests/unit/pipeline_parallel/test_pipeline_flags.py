# SPDX-License-Identifier: Apache-2.0
"""Pipeline flags reach the layers, the plan and the executor; what contradicts each other is refused in a sentence."""

from __future__ import annotations

import pytest

from megatron.core.errors import ConfigError
from megatron.core.pipeline_parallel.programs import Pipeline
from megatron.core.pipeline_parallel.schedules import Action
from megatron.core.plan.stages import build_pipeline_layout, build_virtual_stages
from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from tests.support.pretend_groups import pretend

SIZES = """--hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1
    --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 31"""


def read(flags: str, stages: int = 2, layers: int = 8, batch: int = 8, replicas: int = 1) -> RunConfig:
    given = f"--num-layers {layers} --global-batch-size {batch} --pipeline-model-parallel-size {stages} {flags}"
    return read_run_config([*SIZES.split(), *given.split()], {"WORLD_SIZE": str(stages * replicas)})


def layer_counts(flags: str, **sizes: int) -> list[int]:
    """Layers of every virtual stage in order."""
    config = read(flags, **sizes).model
    return [len(stage.layers) for stage in build_pipeline_layout(config, build_virtual_stages(config))]


def pipeline(flags: str, stages: int = 2, replicas: int = 1) -> Pipeline:
    config = read(flags, stages, replicas=replicas).model
    return Pipeline.from_config(config, pretend(pp=stages), config.virtual_pipeline_model_parallel_size or 1)


@pytest.mark.flags("--pipeline-model-parallel-size")
def test_layers_are_divided() -> None:
    assert layer_counts("") == [4, 4]
    assert layer_counts("", stages=4) == [2, 2, 2, 2]


@pytest.mark.flags("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
def test_stages_are_divided_into_chunks() -> None:
    assert layer_counts("--num-layers-per-virtual-pipeline-stage 1") == [1] * 8
    assert layer_counts("--num-virtual-stages-per-pipeline-rank 2") == [2] * 4
    assert pipeline("--num-virtual-stages-per-pipeline-rank 2").schedule == "interleaved"


@pytest.mark.flags("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
def test_ends_may_have_other_numbers_of_layers() -> None:
    assert layer_counts("--decoder-first-pipeline-num-layers 3") == [3, 5]
    assert layer_counts("--decoder-last-pipeline-num-layers 2", stages=4) == [2, 2, 2, 2]
    assert layer_counts("--decoder-last-pipeline-num-layers 2") == [6, 2]


@pytest.mark.flags("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
def test_embedding_and_loss_may_count_as_layers() -> None:
    assert layer_counts("--account-for-embedding-in-pipeline-split", layers=7) == [3, 4]
    assert layer_counts("--account-for-loss-in-pipeline-split", layers=7) == [4, 3]


@pytest.mark.flags("--pipeline-model-parallel-layout")
def test_a_written_layout_is_followed() -> None:
    assert layer_counts("--pipeline-model-parallel-layout Et*3|(tt|)*2tL") == [3, 2, 2, 1]


@pytest.mark.flags("--pipeline-schedule")
def test_the_schedule_is_chosen() -> None:
    assert pipeline("").schedule == "1f1b"
    assert pipeline("--pipeline-schedule gpipe").program(0, 4)[-1] == Action("B", 0)
    kinds = {step.kind for step in pipeline("--pipeline-schedule zb-h1").program(1, 4)}
    assert kinds == {"F", "B", "W", "send", "receive"}
    folded = pipeline("--pipeline-schedule zb-v")
    assert folded.shape.folded and folded.shape.chunks == 2


@pytest.mark.flags("--microbatch-group-size-per-virtual-pipeline-stage")
def test_chunks_run_groups_of_the_given_size() -> None:
    flags = "--num-virtual-stages-per-pipeline-rank 2"
    for group, flag in ((2, ""), (4, "--microbatch-group-size-per-virtual-pipeline-stage 4")):
        program = pipeline(f"{flags} {flag}").program(0, 8)
        forwards = [step for step in program if isinstance(step, Action) and step.kind == "F"]
        assert [step.chunk for step in forwards[: 2 * group]] == [0] * group + [1] * group


@pytest.mark.flags("--overlap-p2p-communication", "--no-overlap-p2p-communication")
def test_receives_are_posted_early_or_when_needed() -> None:
    flags = "--num-virtual-stages-per-pipeline-rank 2"
    early, late = pipeline(flags, 4), pipeline(f"{flags} --no-overlap-p2p-communication", 4)
    assert early.overlap and not late.overlap
    assert early.program(1, 8) != late.program(1, 8)
    assert read(f"{flags} --overlap-p2p-communication").model.overlap_p2p_comm


@pytest.mark.flags("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit")
def test_the_output_layer_may_wait() -> None:
    def products(flags: str, rank: int) -> list[tuple[int, str]]:
        """(microbatch, kind of the action before it) of every weight gradient that has an action of its own."""
        actions = [step for step in pipeline(flags).program(rank, 4) if isinstance(step, Action)]
        return [(step.microbatch, actions[i - 1].kind) for i, step in enumerate(actions) if step.kind == "W"]

    assert products("", 1) == []
    assert products("--defer-embedding-wgrad-compute", 0) == []
    assert products("--defer-embedding-wgrad-compute", 1) == [(0, "B"), (1, "W"), (2, "W"), (3, "W")]
    limited = products("--defer-embedding-wgrad-compute --wgrad-deferral-limit 1", 1)
    assert limited == [(1, "B"), (2, "B"), (3, "B"), (0, "W")]


@pytest.mark.flags("--overlap-p2p-communication-warmup-flush")
def test_transfers_overlap_in_every_phase() -> None:
    notes = read("--overlap-p2p-communication-warmup-flush").notes
    assert any("transfers overlap in every phase already" in note for note in notes)


@pytest.mark.parametrize(
    ("flags", "stages", "sentence"),
    [
        ("--defer-embedding-wgrad-compute", 1, "needs --pipeline-model-parallel-size of at least 2, not 1"),
        ("--defer-embedding-wgrad-compute --pipeline-schedule zb-h1", 2, "defers all weight gradients; leave out"),
        ("--overlap-p2p-communication-warmup-flush --no-overlap-p2p-communication", 2, "contradicts"),
        ("--pipeline-schedule gpipe", 1, "needs --pipeline-model-parallel-size of at least 2, not 1"),
        ("--pipeline-schedule interleaved", 2, "add --num-virtual-stages-per-pipeline-rank"),
        ("--pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2", 2, "ask for 2; use --pipeline-schedule"),
        ("--pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 4", 2, "lays 2 chunks on each stage, not 4"),
        ("--pipeline-schedule zb-v --num-layers 6", 2, "use 4 or 8 layers"),
        (
            "--pipeline-schedule zb-h1 --no-gradient-accumulation-fusion",
            2,
            "--no-gradient-accumulation-fusion rules out",
        ),
        ("--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 7", 2, "makes 6 or 8 microbatches"),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 2",
            4,
            "--microbatch-group-size-per-virtual-pipeline-stage 2 is below --pipeline-model-parallel-size 4; use 4",
        ),
        ("--num-virtual-stages-per-pipeline-rank 2", 1, "needs --pipeline-model-parallel-size of at least 2, not 1"),
        ("--pipeline-model-parallel-layout t|EttttttL", 2, "must begin with the one embedding"),
    ],
)
def test_what_cannot_run_is_refused(flags: str, stages: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(flags, stages)
    assert any(sentence in problem for problem in caught.value.problems), caught.value.problems


def test_a_group_size_without_chunks_is_noted() -> None:
    notes = read("--microbatch-group-size-per-virtual-pipeline-stage 4").notes
    assert any("has no effect without the interleaved schedule" in note for note in notes)
