# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a divided optimizer state changes hands: any number of processes, divided or not, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.checkpoint.trained_model import load_trained_model
from megatron.training.flags.read import read_run_config
from megatron.training.launch.initialize import Process, build_rank_grid, set_seeds
from megatron.training.launch.launch import Launch
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.setup import setup
from megatron.training.step import train_step
from tests.parallel.checkpoint_contents import assert_bit_equal, saved
from tests.parallel.harness import run_distributed

SMALL = """
    --num-layers 2 --hidden-size 24 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --global-batch-size 12 --lr 1e-2 --train-iters 2 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 60 --make-vocab-size-divisible-by 16 --eval-iters 0 --num-workers 0 --hidden-dropout 0
    --attention-dropout 0 --save-interval 2
"""
DIVIDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"


def work(world_size: int, flags: str, iterations: int) -> None:
    """Set up (and load), train so many steps, save."""
    rank = dist.get_rank() if world_size > 1 else 0
    config = read_run_config([*SMALL.split(), *flags.split()], {"WORLD_SIZE": str(world_size)})
    groups = ProcessGroupCollection.build(build_rank_grid(config, world_size), rank)
    set_seeds(config.model.seed, groups)
    recipe = build_gpt_recipe(config)
    process = Process(Launch(rank=rank, world_size=world_size, local_rank=rank), torch.device("cpu"), groups)
    run = setup(config, process, recipe)
    batches = run.data.open("train", 0)
    for _ in range(iterations):
        train_step(run, batches)
    assert run.progress.iteration == 2
    save_checkpoint(run)
    run.data.close()


def on(world_size: int, flags: str, iterations: int = 0) -> None:
    if world_size == 1:
        work(1, flags, iterations)
    else:
        run_distributed(work, world_size, world_size, flags, iterations)


@pytest.mark.parametrize(
    ("number_format", "further"),
    [("", [(1, ""), (2, DIVIDED), (2, "")]), ("--bf16", [(1, ""), (2, DIVIDED), (3, DIVIDED)])],
)
def test_what_three_divided_processes_saved_is_the_same_in_other_hands(
    tmp_path: Path, number_format: str, further: list[tuple[int, str]]
) -> None:
    on(3, f"{number_format} {DIVIDED} --save {tmp_path / 'three'}", iterations=2)
    original = saved(tmp_path / "three", 2)
    assert any(tensor.any() for key, tensor in original.items() if "exp_avg" in key)
    for index, (world_size, flags) in enumerate(further):
        on(world_size, f"{number_format} {flags} --load {tmp_path / 'three'} --save {tmp_path / str(index)}")
        assert_bit_equal(original, saved(tmp_path / str(index), 2))


def test_divided_over_tensor_parallel_stages_too(tmp_path: Path) -> None:
    """TP 2 x DP 2, divided, to one process and back to DP 2."""
    on(4, f"{DIVIDED} --tensor-model-parallel-size 2 --save {tmp_path / 'four'}", iterations=2)
    original = saved(tmp_path / "four", 2)
    on(1, f"--load {tmp_path / 'four'} --save {tmp_path / 'one'}")
    assert_bit_equal(original, saved(tmp_path / "one", 2))
    on(2, f"{DIVIDED} --load {tmp_path / 'one'} --save {tmp_path / 'two'}")
    assert_bit_equal(original, saved(tmp_path / "two", 2))


@pytest.mark.parametrize("tied", ["", "--untie-embeddings-and-output-weights"])
def test_one_process_reads_tables_that_two_had_padded_further(tied: str, tmp_path: Path) -> None:
    """Two tensor-parallel ranks pad 60 tokens to 128 rows, one process to 64."""
    padding = "--make-vocab-size-divisible-by 64 --vocab-size 60"
    on(2, f"--tensor-model-parallel-size 2 {padding} {tied} --save {tmp_path}", 2)
    tables = saved(tmp_path, 2)
    trained = load_trained_model(tmp_path)
    found = {"embedding.word_embeddings.weight": trained.model.embedding.word_embeddings.weight}
    if tied:
        found["output_layer.weight"] = trained.model.output_layer.weight
    for name, table in found.items():
        assert (tables[name].shape[0], table.shape[0], trained.vocab_size) == (128, 64, 60), name
        assert torch.equal(table[:60], tables[name][:60]), name
