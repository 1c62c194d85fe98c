# SPDX-License-Identifier: Apache-2.0
"""--dpo: pairs of answers and their losses as short formulas have them, the same run in each layout, references that
outlive a restart."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax, logsigmoid

from megatron.core.datasets.preference_dataset import read_pair
from megatron.core.errors import ConfigError, DataError
from megatron.training.config.container import RunConfig
from megatron.training.config.preference import PREFERENCE_VALUES
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.step import train_step
from megatron.training.verify.comparison import compare
from megatron.training.verify.parity import RankTrace, Trace, join, open_local_run, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import run_distributed
from tests.parallel.small_training import own_rank
from tests.preprocess_runs import DATA
from tests.support import tiny_training

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS = "the cat sat on a mat with some old dogs and new birds".split()
SEQUENCE, PAIRS, BETA = 96, 8, 0.3
MODELS = {
    "llama": """--hidden-size 72 --num-attention-heads 6 --group-query-attention --num-query-groups 3 --swiglu
        --position-embedding-type rope --normalization RMSNorm --disable-bias-linear
        --untie-embeddings-and-output-weights""",
    "experts": """--hidden-size 64 --num-attention-heads 4 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1
        --calculate-per-token-loss""",
}  # fmt: skip
COMMON = f"""--num-layers 2 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --micro-batch-size 2
    --global-batch-size 4 --lr 1e-3 --adam-eps 1e-5 --train-iters 4 --eval-iters 0 --num-workers 0 --hidden-dropout 0
    --attention-dropout 0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model {DATA}/tok/hf_bpe1k
    --dpo --dpo-beta {BETA} --split 100,0,0"""
LAYOUTS = [
    ("llama", "tp3,sp,--num-layers=1"), ("llama", "pp2,--micro-batch-size=1"), ("llama", "pp2"),
    ("llama", "cp2"), ("llama", "dp2,dist-opt"), ("experts", "tp2,ep2,etp1,sp"),
]  # fmt: skip


def write_pairs(path: Path) -> Path:
    draw = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(PAIRS):
            asked, *answers = (" ".join(draw.choices(WORDS, k=draw.randint(2, 6))) for _ in range(3))
            messages = [{"role": "user", "content": asked}]
            file.write(json.dumps({"messages": messages, "chosen": f"{answers[0]}.", "rejected": answers[1]}) + "\n")
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


def settings(model: str, data: Path, *flags: object, layout: str = "1") -> RunConfig:
    parsed = parse_layout(layout)
    words = [*COMMON.split(), *MODELS[model].split(), "--chat-template", TEMPLATE, "--data-path", str(data)]
    # 1,008 rows whatever the tensor-parallel size.
    words += ["--make-vocab-size-divisible-by", str(1008 // parsed.sizes["tp"])]
    given = [*words, *parsed.flags, *" ".join(map(str, flags)).split()]
    return read_run_config(given, {"WORLD_SIZE": str(parsed.world_size)})


def measure_answers(run: Any, sample: dict[str, Any]) -> list[torch.Tensor]:
    """Log-probabilities of the chosen and the rejected answer, each conversation by itself."""
    bounds, answers = sample["cu_seqlens"].tolist(), sample["answers"]
    found = []
    for number in (0, 1):
        span = slice(bounds[number], bounds[number + 1])
        tokens, labels = sample["tokens"][None, span], sample["labels"][span]
        logits = run.model[0].module(tokens, torch.arange(tokens.shape[1])[None], None)[0]
        of_labels = log_softmax(logits.float(), -1).gather(1, labels[:, None])[:, 0]
        found.append(of_labels[answers[span] == number + 1].sum())
    return found


@pytest.mark.flags("--dpo", "--dpo-beta")
def test_a_step_is_the_formulas(pairs: Path) -> None:
    """Loss, gradients and answers' tokens, against each conversation alone; the first loss is log 2, the second not."""
    config = settings("llama", pairs)
    with open_local_run(config, build_gpt_recipe(config), 0) as run:
        dataset, model = run.data.parts("train")[0], run.model[0]
        tokenizer = run.recipe.tokenizer
        sample = dataset[0]
        line = json.loads(pairs.read_text().splitlines()[int(dataset.lines[dataset._conversations(0)[0]])])
        for name, mark in (("chosen", 1), ("rejected", 2)):
            text = tokenizer.detokenize(sample["labels"][sample["answers"] == mark].tolist())
            assert text == f"{line[name]}<|endoftext|>"
        with torch.no_grad():
            references = [[float(x) for x in measure_answers(run, dataset[index])] for index in range(PAIRS)]
        batches = run.data.open("train", 0)
        for iteration in (0, 1):
            losses = []
            for index in range(4 * iteration, 4 * iteration + 4):
                chosen, rejected = measure_answers(run, dataset[index])
                ahead = (chosen - references[index][0]) - (rejected - references[index][1])
                losses.append(-logsigmoid(BETA * ahead))
            expected = torch.stack(losses).mean()
            model.zero_grad_buffer()
            expected.backward()
            grads = [param.main_grad.double() for param in model.module.parameters()]
            norm = math.sqrt(sum(float(grad.pow(2).sum()) for grad in grads))
            result = train_step(run, batches)
            torch.testing.assert_close(result.losses["dpo loss"], expected.detach(), rtol=1e-5, atol=1e-6)
            assert float(result.grad_norm) == pytest.approx(norm, rel=1e-4)
            assert (abs(float(expected.detach()) - math.log(2)) < 1e-6) == (iteration == 0)


def share(model: str, layout: str, data: Path) -> RankTrace:
    config = settings(model, data, layout=layout)
    return trace_rank(config, build_gpt_recipe(config), rank=own_rank(config), iterations=2)


@functools.cache
def reference(model: str, data: Path, flags: str) -> Trace:
    return join([share(model, flags or "1", data)])


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_layout_is_the_same_run(model: str, layout: str, pairs: Path) -> None:
    trace = join(run_distributed(share, parse_layout(layout).world_size, model, layout, pairs))
    alone = reference(model, pairs, ",".join(term for term in layout.split(",") if term.startswith("--")))
    assert compare(drop_rewards(alone), drop_rewards(trace)) == []
    for ours, theirs in zip(trace.losses, alone.losses, strict=True):
        assert list(ours) == list(PREFERENCE_VALUES)
        # Rewards are small differences of log-probabilities of about -50, and have the rounding of these.
        assert all(ours[name] == pytest.approx(theirs[name], abs=2e-5) for name in PREFERENCE_VALUES)


def drop_rewards(trace: Trace) -> Trace:
    return dataclasses.replace(trace, losses=[{"dpo loss": losses["dpo loss"]} for losses in trace.losses])


@pytest.mark.flags("--dpo-reference", "--dpo-reference-free")
def test_references_are_of_the_beginning_or_of_another_model(pairs: Path, tmp_path: Path) -> None:
    """A run that goes on is bit for bit the one that did not stop, more data included; another reference counts."""
    first, second = tmp_path / "first", tmp_path / "second"

    def train(*flags: object) -> list[float]:
        config = settings("llama", pairs, *flags)
        with open_local_run(config, build_gpt_recipe(config), 0) as run:
            run.metrics.record_losses = lambda found: noted.append(found["dpo loss"].item())  # type: ignore
            noted: list[float] = []
            tiny_training.finish(run)
        return noted

    train("--train-iters 1 --lr 1e-2 --save", first)
    start = f"--pretrained-checkpoint {first}"
    whole = train(start)
    train(start, "--train-iters 1", "--save", second, "--lr-decay-iters 4")
    resumed = train(start, "--load", second)
    assert whole[0] == pytest.approx(math.log(2), abs=1e-6) and resumed == whole[1:]
    other = train(start, f"--dpo-reference {second}", "--train-iters 2")
    free = train(start, "--dpo-reference-free", "--train-iters 2")
    assert len({round(losses[0], 4) for losses in (whole, other, free)}) == 3
    with pytest.raises(ConfigError, match=r"--dpo-reference names .* --pretrained-checkpoint"):
        settings("llama", pairs, f"--dpo-reference {first}")


@pytest.mark.flags("--skip-bad-conversations")
def test_bad_pairs_are_named_or_counted(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "a"}]
    bad = {
        "not JSON": "{",
        "expected an object": json.dumps({"messages": message, "chosen": "a"}),
        "same 3 tokens": json.dumps({"messages": message, "chosen": "cat", "rejected": "cat"}),
        "positions and --seq-length": json.dumps({"messages": message, "chosen": "cat " * 200, "rejected": "dog"}),
        "no token of an assistant's turn": json.dumps(
            {"messages": message, "chosen": message, "rejected": [{"role": "user", "content": "b"}]}
        ),
    }
    good = write_pairs(tmp_path / "good.jsonl").read_text()
    for number, (said, line) in enumerate(bad.items()):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(f"{good}{line}\n")
        config = settings("llama", path)
        with pytest.raises(DataError, match=f"{number}.jsonl, line {PAIRS + 1}: .*{said}"):
            build_gpt_recipe(config).build_datasets((4, None, None))
    path = tmp_path / "all.jsonl"
    path.write_text("\n".join([*bad.values(), good]))
    config = settings("llama", path, "--skip-bad-conversations")
    (dataset, *_) = build_gpt_recipe(config).build_datasets((4, None, None))
    part = getattr(dataset, "datasets", [dataset])[0]
    assert f"{PAIRS} pairs of answers" in part.summary() and f"{len(bad)} skipped with mistakes" in part.summary()


def test_pairs_in_other_forms() -> None:
    user, one, two = ({"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "1"),
                                                                         ("assistant", "2")))  # fmt: skip
    expected = ([user], [[one], [two]])
    assert read_pair({"prompt": "q", "chosen": "1", "rejected": "2"}, "") == expected
    assert read_pair({"messages": [user], "chosen": [one], "rejected": "2"}, "") == expected
    assert read_pair({"chosen": [user, one], "rejected": [user, two]}, "") == expected
