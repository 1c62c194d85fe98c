# SPDX-License-Identifier: Apache-2.0
"""A step on a policy-gradient loss: as a short formula has it, and the same in each layout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.post_training.log_probs import compute_log_probs
from megatron.core.post_training.policy_loss import PolicyLoss, PolicyTokens
from megatron.training.recipes.forward_step import compute_token_losses
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.recipes.recipe import Recipe
from megatron.training.verify.comparison import compare
from megatron.training.verify.parity import RankTrace, Trace, join, open_local_run, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import own_rank
from tests.parallel.test_preferences import settings, write_pairs
from tests.unit.post_training.test_policy_loss import reference_loss

LAYOUTS = ["tp3,sp,--num-layers=1", "pp2", "cp2", "dp2,dist-opt"]
COMMON: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.2, "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
FORMS: dict[str, dict[str, Any]] = {
    "tokens": COMMON | {"mean_over": "token"},
    "sequences": COMMON | {"mean_over": "sequence", "ratio_of": "sequence"},
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


def make_up(labels: Tensor, factor: float) -> Tensor:
    """Log-probabilities that another policy might have had, a function of the token."""
    return -7 + 0.3 * torch.sin(factor * labels.double())


def policy_step(form: str, batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Both answers of each pair as drawn texts, the chosen ones with an advantage."""
    batch = dict(next(batches))
    answers, _ = batch.pop("answers"), batch.pop("pair")
    rows = torch.arange(len(answers)).unsqueeze(1)
    batch["segments"] = torch.where(answers > 0, 2 * rows + answers - 1, -1)
    lengths = torch.stack([(answers == 1).sum(1), (answers == 2).sum(1)], dim=1).flatten().float()
    logits, own = compute_token_losses(batch, model, returns_logits=True)

    def find_loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        log_probs, entropies = compute_log_probs(logits, own["labels"].unsqueeze(-1), model.groups.tp)
        segments, shape = own["segments"], own["segments"].shape
        old, references = (make_up(own["labels"], factor).float() for factor in (1.0, 2.0))
        advantages = torch.tensor([1.0, -0.5]).repeat(len(answers))
        if FORMS[form].get("ratio_of") != "sequence":
            advantages = advantages[segments.clamp(min=0)]
        tokens = PolicyTokens(log_probs.view(shape), old, advantages, segments, lengths, references, entropies)
        return PolicyLoss(**FORMS[form])(tokens, model.groups.cp)

    return logits, find_loss


def build_recipe(config: Any, form: str) -> Recipe:
    return dataclasses.replace(build_gpt_recipe(config), forward_step=functools.partial(policy_step, form))


def share(form: str, layout: str, data: Path) -> RankTrace:
    config = settings("llama", data, layout=layout)
    return trace_rank(config, build_recipe(config, form), rank=own_rank(config), iterations=2)


@functools.cache
def run_alone(form: str, data: Path, flags: str) -> Trace:
    return join([share(form, flags or "1", data)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_the_same_run(layout: str, pairs: Path) -> None:
    for form in FORMS:
        trace = join(run_distributed(share, parse_layout(layout).world_size, form, layout, pairs))
        alone = run_alone(form, pairs, ",".join(term for term in layout.split(",") if term.startswith("--")))
        assert compare(alone, trace) == []


@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_the_formula(form: str, pairs: Path) -> None:
    """The first microbatch's loss, from a float64 softmax of each conversation by itself."""
    config = settings("llama", pairs, "--calculate-per-token-loss")
    with open_local_run(config, build_recipe(config, form), 0) as run:
        dataset = run.data.parts("train")[0]
        log_probs, entropies, labels, segments = [], [], [], []
        for pair in (0, 1):
            sample = dataset[pair]
            bounds = sample["cu_seqlens"].tolist()
            for number in (0, 1):
                span = slice(bounds[number], bounds[number + 1])
                tokens = sample["tokens"][None, span]
                logits = run.model[0].module(tokens, torch.arange(tokens.shape[1])[None], None)[0]
                table = logits.double().log_softmax(-1)
                log_probs.append(table.gather(1, sample["labels"][span, None])[:, 0])
                entropies.append(-(table.exp() * table).sum(-1))
                labels.append(sample["labels"][span])
                segments += [2 * pair + number if mark > 0 else -1 for mark in sample["answers"][span].tolist()]
        values = torch.cat(log_probs)
        old, references = (make_up(torch.cat(labels), factor) for factor in (1.0, 2.0))
        advantages = torch.tensor([1.0, -0.5, 1.0, -0.5]).double()
        expected = reference_loss(
            values, old, advantages, segments, references, torch.cat(entropies), torch.ones(4), FORMS[form]
        )
        output, find_loss = policy_step(form, iter(run.data.open("train", 0)), run.model[0])
        loss, number, _ = find_loss(output)
        torch.testing.assert_close((loss / number).double(), expected, rtol=1e-5, atol=1e-6)
