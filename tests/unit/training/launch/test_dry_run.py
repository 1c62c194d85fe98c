# SPDX-License-Identifier: Apache-2.0
"""--dry-run: a rank's memory is the planner's, its products are the model's, and every deadlock names its culprit."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.cli import train
from megatron.core.mesh import RankGrid
from megatron.core.process_groups_config import ProcessGroupCollection, torch_group
from megatron.planner.step_memory import predict_step_memory
from megatron.planner.throughput import count_training_flops_per_token
from megatron.training.flags.read import examine, read_run_config
from megatron.training.launch.collective_order import find_deadlock
from megatron.training.launch.dry_memo import OperationMemo
from megatron.training.launch.dry_recorder import RecordedCall
from megatron.training.launch.dry_run import choose_ranks, dry_run
from megatron.training.recipes.gpt import build_gpt_recipe, describe_gpt_workload
from megatron.training.setup import build_run

SMALL = """--num-layers 4 --hidden-size 96 --num-attention-heads 6 --num-query-groups 2 --group-query-attention
    --lr 1e-4 --seq-length 32 --max-position-embeddings 32 --vocab-size 1009 --mock-data --tokenizer-type NullTokenizer
    --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --hidden-dropout 0 --attention-dropout 0"""


def run(text: str, tmp_path: Path, change: Callable[[Any], Any] = lambda recipe: recipe) -> tuple[int, dict[str, Any]]:
    config = read_run_config(f"{SMALL} {text} --dry-run --dry-run-json {tmp_path / 'dry.json'}".split(), {})
    code = dry_run(config, change(build_gpt_recipe(config)), build_run)
    found: dict[str, Any] = json.loads((tmp_path / "dry.json").read_text())
    return code, found


@pytest.mark.flags("--dry-run", "--world-size", "--ranks", "--dry-run-json")
def test_the_program_answers_for_every_rank_of_a_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = "--world-size 4 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    flags = f"{SMALL} {layout} --dry-run --dry-run-json {tmp_path / 'dry.json'}"
    save = f"--save {tmp_path / 'saved'} --tensorboard-dir {tmp_path / 'board'}"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *f"{flags} --ranks all {save}".split()])
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 0
    found = json.loads((tmp_path / "dry.json").read_text())
    assert (found["world_size"], found["deadlock"]) == (4, None)
    assert [entry["rank"] for entry in found["ranks"]] == [0, 1, 2, 3]
    for entry in found["ranks"]:
        assert min(entry["peak_bytes"], entry["flops"], entry["kernels"]) > 0
        assert {(2,)} == {(len(c["group"]),) for c in entry["collectives"] if c["op"] in ("send", "recv")}
    # The first stage sends four microbatches forward.
    sent = [c for c in found["ranks"][0]["collectives"] if c["op"] == "send"]
    assert [(c["group"], c["count"]) for c in sent] == [([0, 2], 4)]
    assert "the ranks agree on every collective" in capsys.readouterr().out
    # Nothing is left behind.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dry.json"]
    assert not dist.is_initialized() and not ProcessGroupCollection.has_current()


def test_memory_is_what_the_planner_says_and_products_are_the_models(tmp_path: Path) -> None:
    """In sizes at which products and logits outweigh what is rounded."""
    text = """--bf16 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights --hidden-size 384 --ffn-hidden-size 1056 --seq-length 512
        --max-position-embeddings 512 --global-batch-size 6"""
    code, found = run(text, tmp_path)
    config = examine(f"{SMALL} {text}".split(), {}).config
    stages = predict_step_memory(config.model, config.ddp, config.optimizer, describe_gpt_workload(config, 1024))
    # Without Triton the loss makes a copy of the logits.
    assert code == 0 and found["ranks"][0]["peak_bytes"] == pytest.approx(stages[0].total, rel=0.12)
    assert (found["microbatches_run"], found["microbatches"]) == (2, 6)
    flops = count_training_flops_per_token(config.model, seq_length=512, padded_vocab_size=1024, sees_all=True)
    # Torch counts attention's full square, and its scores once more in backward.
    assert 1.0 < found["ranks"][0]["flops"] / (flops * 512 * 6) < 1.25


DEEPSEEK = """--bf16 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --lr 1e-4
    --untie-embeddings-and-output-weights --multi-latent-attention --mock-data --tokenizer-type NullTokenizer
    --vocab-size 4095 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --hidden-dropout 0 --num-layers 2
    --attention-dropout 0 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
    --qk-pos-emb-head-dim 32"""
FURTHER_TOKENS = f"""{DEEPSEEK} --hidden-size 1024 --q-lora-rank 384 --kv-lora-rank 256 --qk-head-dim 64
    --v-head-dim 64 --qk-layernorm --ffn-hidden-size 2816 --mtp-num-layers 2"""
DEEPSEEK_V4 = f"""{DEEPSEEK} --experimental-attention-variant dsv4_hybrid --csa-compress-ratios [4,128,0]
    --hidden-size 2048 --ffn-hidden-size 4096 --q-lora-rank 512 --v-head-dim 512 --o-groups 4 --o-lora-rank 512
    --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 128 --dsa-indexer-topk 256 --dsa-indexer-loss-coeff 0.01
    --enable-hyper-connections --mtp-num-layers 1"""
NARROW = f"""{DEEPSEEK} --experimental-attention-variant dsv4_hybrid --csa-compress-ratios [0,0] --hidden-size 256
    --ffn-hidden-size 512 --q-lora-rank 64 --v-head-dim 64 --num-attention-heads 4 --o-groups 2 --o-lora-rank 64
    --enable-hyper-connections --vocab-size 1009"""
INDEXED = f"""{DEEPSEEK} --experimental-attention-variant dsa --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32
    --v-head-dim 32 --qk-layernorm --hidden-size 256 --num-attention-heads 6 --ffn-hidden-size 1024 --seq-length 256
    --qk-pos-emb-head-dim 16 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --dsa-indexer-topk 64
    --vocab-size 1009"""
LEARNS = f"{INDEXED} --dsa-indexer-loss-coeff 0.01"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DEEPSEEKS = {
    "further tokens": FURTHER_TOKENS, "DeepSeek-V4": DEEPSEEK_V4, "whose streams weigh most": NARROW,
    "an indexer": INDEXED, "that learns": LEARNS, "that learns from few": f"{LEARNS} --dsa-indexer-use-sparse-loss",
    "and again": f"{LEARNS} {RECOMPUTED}",
}  # fmt: skip


@pytest.mark.parametrize("text", DEEPSEEKS.values(), ids=DEEPSEEKS)
def test_memory_of_deepseek_is_planned(text: str, tmp_path: Path) -> None:
    path = tmp_path / "dry.json"
    config = read_run_config(f"{text} --dry-run --dry-run-json {path}".split(), {})
    assert dry_run(config, build_gpt_recipe(config), build_run) == 0
    size = 1024 if "1009" in text else 4096
    (stage,) = predict_step_memory(config.model, config.ddp, config.optimizer, describe_gpt_workload(config, size))
    (found,) = json.loads(path.read_text())["ranks"]
    assert stage.total == pytest.approx(found["peak_bytes"], rel=0.03)


def test_experts_and_replicas_agree(tmp_path: Path) -> None:
    text = """--world-size 4 --bf16 --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2
        --moe-token-dispatcher-type alltoall --moe-grouped-gemm --use-distributed-optimizer --overlap-grad-reduce
        --overlap-param-gather --ranks all"""
    code, found = run(text, tmp_path)
    assert code == 0
    exchanged = {tuple(c["group"]) for c in found["ranks"][1]["collectives"] if c["op"].startswith("alltoall")}
    assert exchanged == {(0, 1)}


def test_what_is_remembered_of_operations_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = """--world-size 2 --bf16 --num-experts 4 --moe-router-topk 2 --tensor-model-parallel-size 2
        --sequence-parallel --moe-token-dispatcher-type alltoall --recompute-granularity full --recompute-method uniform
        --recompute-num-layers 1 --use-distributed-optimizer --num-layers 2 --global-batch-size 2"""
    _, found = run(text, tmp_path)
    monkeypatch.setattr(OperationMemo, "recall", lambda memo, key, tensors: None)
    assert run(text, tmp_path)[1] == found
    # Of 2 layers and 2 microbatches: launches, not every question about a tensor.
    assert found["ranks"][0]["kernels"] < 2 * 2 * 300


def test_a_sample_stands_for_a_large_job() -> None:
    grid = RankGrid(1024, tp=8, pp=16, ep=4)
    chosen = choose_ranks(grid)
    assert len(chosen) <= 20 and {0, 1023} <= set(chosen)
    for axis in ("tp", "dp", "pp", "ep"):
        assert any(len(set(group) & set(chosen)) > 1 for group in grid.groups(axis)), axis


def test_flags_of_a_dry_run_alone_are_noted() -> None:
    found = examine(f"{SMALL} --ranks all".split(), {})
    assert any("--ranks" in note and "--dry-run" in note for note in found.config.notes)
    assert examine(f"{SMALL} --dry-run --world-size 7 --tensor-model-parallel-size 2".split(), {}).problems


# ---- deadlocks, injected into a real step


def _skip(rank: int, group: Any, other: Any) -> None:
    if rank != 1:
        dist.all_reduce(torch.empty(8), group=group)


def _other_size(rank: int, group: Any, other: Any) -> None:
    dist.all_reduce(torch.empty(9 if rank == 1 else 8), group=group)


def _other_operation(rank: int, group: Any, other: Any) -> None:
    if rank == 1:
        dist.broadcast(torch.empty(8), src=0, group=group)
    else:
        dist.all_reduce(torch.empty(8), group=group)


def _other_group(rank: int, group: Any, other: Any) -> None:
    dist.all_reduce(torch.empty(8), group=other if rank == 1 else group)


def _once_more(rank: int, group: Any, other: Any) -> None:
    for _ in range(2 if rank == 1 else 1):
        dist.all_reduce(torch.empty(8), group=group)


def _other_order(rank: int, group: Any, other: Any) -> None:
    for members in (other, group) if rank == 1 else (group, other):
        dist.all_reduce(torch.empty(8), group=members)


@pytest.mark.parametrize("inject", [_skip, _other_size, _other_operation, _other_group, _once_more, _other_order])
def test_a_deadlock_is_found_with_its_culprit(
    inject: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(recipe: Any) -> Any:
        @functools.wraps(recipe.forward_step)
        def forward_step(batches: Iterator[Any], model: Any) -> Any:
            groups = ProcessGroupCollection.current()
            inject(dist.get_rank(), torch_group(groups.world), torch_group(groups.tp))  # type: ignore[arg-type]
            return recipe.forward_step(batches, model)

        return dataclasses.replace(recipe, forward_step=forward_step)

    code, found = run(
        "--world-size 4 --tensor-model-parallel-size 2 --num-layers 1 --global-batch-size 2 --ranks all",
        tmp_path,
        change,
    )
    assert code == 1
    assert found["deadlock"]["ranks"] == [1], found["deadlock"]
    assert "test_dry_run.py:" in found["deadlock"]["sentence"] and "rank 1" in found["deadlock"]["sentence"]
    assert found["deadlock"]["sentence"] in capsys.readouterr().out


# ---- the comparison alone, on random programs


def make_program(seed: int) -> tuple[dict[int, list[RecordedCall]], random.Random]:
    """What 12 ranks in groups of 3, 4 and 12 call, all alike."""
    chooser = random.Random(seed)
    calls: dict[int, list[RecordedCall]] = {rank: [] for rank in range(12)}
    rows = [tuple(range(start, start + 4)) for start in (0, 4, 8)]
    columns = [tuple(range(start, 12, 4)) for start in range(4)]
    for number in range(20):
        for group in chooser.choice([rows, columns, [tuple(range(12))]]):
            size = 8 * chooser.randrange(1, 4)
            for rank in group:
                calls[rank].append(RecordedCall("allreduce", group, size, f"program.py:{number}"))
    return calls, chooser


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_agree_until_one_rank_differs(seed: int) -> None:
    calls, chooser = make_program(seed)
    assert find_deadlock(calls) is None
    culprit = chooser.randrange(12)
    at = chooser.randrange(len(calls[culprit]))
    call = calls[culprit][at]
    kind = chooser.choice(["skip", "size", "op", "more"])
    if kind == "skip":
        del calls[culprit][at]
    elif kind == "more":
        calls[culprit].insert(at, call._replace(op="reduce_scatter"))
    else:
        calls[culprit][at] = call._replace(bytes=call.bytes + 1) if kind == "size" else call._replace(op="broadcast")
    found = find_deadlock(calls)
    assert found is not None and found.ranks == (culprit,), (kind, culprit, found)


def test_transfers_are_compared_by_pair() -> None:
    sends = [RecordedCall("send", (0, 1), size, "a.py:1") for size in (4, 8)]
    receives = [call._replace(op="recv") for call in sends]
    assert find_deadlock({0: sends, 1: receives}) is None
    missing = find_deadlock({0: sends, 1: receives[:1]})
    assert missing is not None and missing.ranks == (1,) and "does not come" in missing.sentence
    other = find_deadlock({0: sends, 1: receives[::-1]})
    assert other is not None and set(other.ranks) == {0, 1}
    # Of a rank that was not tried nothing is known.
    assert find_deadlock({0: sends}) is None
