# SPDX-License-Identifier: Apache-2.0
"""The engine on two and four gloo ranks: the same texts and log-probabilities as on one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.recorded_passes import find_obstacle
from megatron.core.inference.request import Request, TokenLogprobs
from megatron.core.inference.sampling import Sampling
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.flags.read import read_run_config
from megatron.training.launch.initialize import build_rank_grid
from megatron.training.recipes.gpt import build_gpt_model
from tests.parallel.harness import run_distributed
from tests.support.gpt_models import VOCAB_SIZE
from tests.support.graph_stand_in import StandInRecorder
from tests.unit.inference.crossings import GREEDY, LONGEST, Way, assert_as_alone, draw_requests, write_crossing
from tests.unit.inference.test_unequal_prompts import KINDS, LATENT, ROPE

SIZES = """--num-layers 4 --hidden-size 36 --num-attention-heads 6 --seq-length 64 --max-position-embeddings 64
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 --micro-batch-size 1 --train-iters 1 --lr 1e-3
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --use-cpu-initialization"""
STYLES = {
    "dense": f"{ROPE} --group-query-attention --num-query-groups 2 --window-size 5,0 --window-attn-skip-freq 2",
    "latent": LATENT,
    "states": KINDS["states"].replace("--num-layers 6", "").replace("MG*-KL", "MG*-").replace("heads 3", "heads 2"),
    "experts": KINDS["experts"],
}  # fmt: skip
SEEDS = (236, 515)
"""Of crossings: 65 texts, read in parts, with drafts but for states, and some preempted; 12 in room for a few."""
TP, PP, EP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"

Found = list[tuple[list[int], list[int], list[TokenLogprobs], list[TokenLogprobs]]]


def build_part(flags: str) -> Any:
    """This rank's part of a model, or all of it on one process."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = read_run_config([*SIZES.split(), *flags.split()], {"WORLD_SIZE": str(world)})
    groups = ProcessGroupCollection.single()
    if world > 1:
        groups = ProcessGroupCollection.build(build_rank_grid(config, world), dist.get_rank())
    first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
    return build_gpt_model(config, VOCAB_SIZE, first, last, pg_collection=groups)


def list_results(requests: list[Request]) -> Found:
    """Prompt, new tokens and all log-probabilities of each."""
    return [(each.prompt, each.new_tokens, each.token_logprobs, each.read_logprobs) for each in requests]


def write_texts(flags: str, seeds: Sequence[int], ways: Sequence[Way]) -> tuple[Found, Found]:
    """Drawn texts of a few requests in little room, on several ranks by recorded passes where a model's can be; and
    greedy ones of crossings."""
    model = build_part(flags)
    records = dist.is_initialized() and find_obstacle(model) is None  # on one process as ever
    settings = EngineSettings(
        LONGEST, capacity_tokens=96, max_requests=4, max_step_tokens=19, graph_sizes=(1, 4) if records else ()
    )
    recorder = StandInRecorder()
    engine = Engine(model, settings, recorder=recorder)
    # Two in step, of an odd length; then some of all lengths.
    drawn = engine.run([Request([first, 5, 7], 3, GREEDY) for first in (3, 4)])
    drawn += engine.run(draw_requests(2, 5, Sampling(seed=5, top_k=20), logprobs=0, prompt_logprobs=0))
    assert model.training, "the model goes on training"
    assert (recorder.replays > 9) == records
    return list_results(drawn), list_results([each for seed in seeds for each in write_crossing(model, seed, ways)])


@pytest.mark.parametrize(
    ("style", "layouts"),
    [
        ("dense", [(2, TP), (2, PP), (4, f"{TP} {PP} --sequence-parallel")]),
        ("latent", [(2, f"{TP} --sequence-parallel"), (2, PP)]),
        ("states", [(2, TP), (2, PP)]),
        ("experts", [(2, EP), (4, f"{TP} {EP} --sequence-parallel"), (4, f"{PP} {EP}")]),
    ],
)
def test_texts_are_those_of_one_process(style: str, layouts: list[tuple[int, str]]) -> None:
    flags = STYLES[style]
    expected, _ = write_texts(flags, (), ())
    whole = build_part(flags).eval()
    for ranks, layout in layouts:
        ways: list[Way] = ["none"] if style == "states" else ["none", "lookup"]
        seeds = SEEDS if ranks == 2 else SEEDS[:1]
        every = run_distributed(write_texts, ranks, f"{flags} {layout}", seeds, ways)
        assert all(found == every[0] for found in every)
        drawn, greedy = every[0]
        for (_, tokens, new, read), (_, own_tokens, own_new, own_read) in zip(drawn, expected, strict=True):
            assert tokens == own_tokens
            assert [each.logprob for each in (*new, *read)] == pytest.approx(
                [each.logprob for each in (*own_new, *own_read)], abs=2e-5, rel=0
            )
        for prompt, tokens, new, read in greedy:
            request = Request(prompt, len(tokens), GREEDY, logprobs=1, prompt_logprobs=0 if read else None)
            request.text, request.token_logprobs, request.read_logprobs = [*prompt, *tokens], new, read
            assert_as_alone(whole, request)
