# SPDX-License-Identifier: Apache-2.0
"""The engine on two and four gloo ranks: the same texts and log-probabilities as on one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.speculation import PromptLookup
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.flags.read import read_run_config
from megatron.training.launch.initialize import build_rank_grid
from megatron.training.recipes.gpt import build_gpt_model
from tests.parallel.harness import run_distributed
from tests.unit.inference.test_engine import draw_requests
from tests.unit.inference.test_unequal_prompts import KINDS, LATENT, ROPE

SIZES = """--num-layers 4 --hidden-size 36 --num-attention-heads 6 --seq-length 64 --max-position-embeddings 64
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 --micro-batch-size 1 --train-iters 1 --lr 1e-3
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --use-cpu-initialization"""
STYLES = {
    "dense": f"{ROPE} --group-query-attention --num-query-groups 2 --window-size 5,0 --window-attn-skip-freq 2",
    "latent": LATENT,
    "states": KINDS["states"].replace("--num-layers 5", "").replace("MG*-K", "MG*-").replace("heads 3", "heads 2"),
    "experts": KINDS["experts"],
}  # fmt: skip
TP, PP, EP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"

Found = list[tuple[list[int], list[float]]]


def write_texts(flags: str) -> Found:
    """New tokens and all log-probabilities of a few requests in little room, one of which is cancelled."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = read_run_config([*SIZES.split(), *flags.split()], {"WORLD_SIZE": str(world)})
    groups = ProcessGroupCollection.single()
    if world > 1:
        groups = ProcessGroupCollection.build(build_rank_grid(config, world), dist.get_rank())
    first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
    model = build_gpt_model(config, 64, first, last, pg_collection=groups)
    engine = Engine(model, EngineSettings(64, capacity_tokens=96, max_requests=4, max_step_tokens=19), vocab_size=61)
    batch = [
        *draw_requests(1, 5, logprobs=0, prompt_logprobs=0),
        *draw_requests(2, 3, Sampling(seed=5, top_k=20), logprobs=0),
    ]
    for request in batch:
        engine.add(request)
    engine.step()
    engine.end(batch[2])
    engine.run([])
    assert [pool.num_used for pool in engine.state.pools] == [int(config.model.sequence_parallel)] * len(
        engine.state.pools
    )
    assert model.training, "the model goes on training"
    if not engine.state.is_recurrent:  # the greedy texts again, by drafts
        drafter = PromptLookup()
        again = Engine(model, engine.settings, vocab_size=61, drafter=drafter).run(draw_requests(1, 5, logprobs=0))
        texts = {tuple(each.prompt): each.new_tokens for each in batch if each is not batch[2]}
        assert all(texts.get(tuple(each.prompt), each.new_tokens) == each.new_tokens for each in again)
        assert drafter.drafted > 0
    return [
        (request.new_tokens, [entry.logprob for entry in (*request.read_logprobs, *request.token_logprobs)])
        for request in batch
        if request is not batch[2]
    ]


def compare(found: Found, expected: Found) -> None:
    for (tokens, logprobs), (own_tokens, own_logprobs) in zip(found, expected, strict=True):
        assert tokens == own_tokens
        assert logprobs == pytest.approx(own_logprobs, abs=2e-5, rel=0)


@pytest.mark.parametrize(
    ("style", "layouts"),
    [
        ("dense", [(2, TP), (2, PP), (4, f"{TP} {PP} --sequence-parallel")]),
        ("latent", [(2, f"{TP} --sequence-parallel"), (2, PP)]),
        ("states", [(2, TP)]),
        ("experts", [(2, EP), (4, f"{TP} {EP} --sequence-parallel"), (4, f"{PP} {EP}")]),
    ],
)
def test_texts_are_those_of_one_process(style: str, layouts: list[tuple[int, str]]) -> None:
    expected = write_texts(STYLES[style])
    for ranks, layout in layouts:
        every = run_distributed(write_texts, ranks, f"{STYLES[style]} {layout}")
        assert all(found == every[0] for found in every)
        compare(every[0], expected)
