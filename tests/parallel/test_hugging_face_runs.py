# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes that start from a Hugging Face directory and end in one, in any layout: the weights that
each layout reads and streams out are those that one process reads and writes, bit for bit."""

from __future__ import annotations

import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.errors import CheckpointError, StorageError, TemporaryError
from megatron.core.mesh import RankGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.hf import broadcast_buckets, receive_buckets, send_buckets, stream_weights
from megatron.hf.auto_bridge import AutoBridge
from megatron.hf.conversion import Source, export_model, open_model
from megatron.hf.convert import convert, parse_arguments
from megatron.hf.running import HuggingFaceFiles
from megatron.hf.tensor_files import open_tensors
from megatron.hf.weight_buckets import pack_buckets
from megatron.training.checkpoint.foreign_files import save_foreign
from megatron.training.checkpoint.save import save_checkpoint
from megatron.training.flags.read import read_run_config
from megatron.training.loop import train
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.verify.parity import open_local_run, trace_rank
from megatron.training.verify.parity_layouts import parse_layout
from tests.parallel.harness import distributed, run_distributed
from tests.parallel.small_training import own_rank
from tests.preprocess_runs import DATA

RUN = """--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 1 --mock-data --eval-iters 0
    --num-workers 0 --no-initialization --use-checkpoint-args"""


def read_all(directory: Path) -> dict[str, Tensor]:
    tensors = open_tensors(directory)
    return {name: tensors.read(name) for name in tensors.contents}


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def start_and_save(directory: Path, layout_text: str, flags: str, result: Path) -> None:
    """Start from the directory, compare what the layout streams out with it, train a step, and save in both formats."""
    layout = parse_layout(layout_text)
    argv = [*RUN.split(), "--load", f"hf:{directory}", *flags.split(), *layout.flags, "--save", f"{result}/ours"]
    config = read_run_config([*argv, "--save-hf", f"{result}/hf"], {"WORLD_SIZE": str(layout.world_size)})
    recipe = dataclasses.replace(build_gpt_recipe(config), foreign_files=HuggingFaceFiles())
    with open_local_run(config, recipe, own_rank(config)) as run:
        bridge = AutoBridge.from_run(run)
        streamed = [(name, tensor.clone()) for name, tensor in bridge.export_weights()]
        assert [name for name, _ in streamed] == list(dict(streamed)), "every tensor comes once"
        assert_same_tensors(dict(streamed), read_all(directory))
        on_first = dict(AutoBridge.from_hf_pretrained(directory).export_weights(run.model, on_all_ranks=False))
        assert on_first.keys() == (dict(streamed).keys() if run.is_first_rank else set())
        train(run)
        save_checkpoint(run)
        save_foreign(run)
        with pytest.raises(StorageError, match="writing .*disk is full"):
            save_where_the_disk_is_full(bridge, result / "full", run.is_first_rank)


def save_where_the_disk_is_full(bridge: AutoBridge, directory: Path, is_first: bool) -> None:
    """The first rank cannot write; the others, which only send, are told and do not wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        if is_first:

            def refuse(*arguments: Any) -> None:
                raise OSError(28, "disk is full")

            patch.setattr("megatron.hf.tensor_files._write_file", refuse)
        bridge.save_hf(directory)


LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 48, "vocab_size": 101}
CASES = {
    "key-value heads on several ranks, padding": ("Llama", LLAMA, "tp4", ""),
    "virtual stages": ("Qwen2", LLAMA, "pp2,vpp2", ""),
    "tied, on two stages": ("Llama", LLAMA | {"tie_word_embeddings": True}, "tp2,sp,pp2", ""),
    "divided parameters": ("Llama", LLAMA, "dp2,fsdp2", "--bf16"),
    "matrices that lie the other way round": ("GPT2", {"tie_word_embeddings": True}, "tp2,dp2,dist-opt", ""),
    "experts": (
        "Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}, "tp2,sp,ep2,dp2", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.flags("--load", "--save-hf", "--use-checkpoint-args")
def test_from_hugging_face_and_back(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.unit.training.recipes.test_model_families import make

    kind, settings, layout, flags = CASES[name]
    model = make(kind, **settings).to(torch.bfloat16 if "bf16" in flags else torch.float32)
    model.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    (tmp_path / "result").mkdir()
    processes = parse_layout(layout).world_size
    run_distributed(start_and_save, processes, tmp_path / "hf", layout, flags, tmp_path / "result")
    assert not (tmp_path / "result" / "full").exists()
    export_model(open_model(tmp_path / "result" / "ours"), tmp_path / "expected", verify=False)
    trained = read_all(tmp_path / "result" / "hf")
    assert_same_tensors(trained, read_all(tmp_path / "expected"))
    assert any(not torch.equal(tensor, trained[name]) for name, tensor in read_all(tmp_path / "hf").items())
    assert sorted(entry.name for entry in (tmp_path / "result").iterdir()) == ["hf", "ours"]


def train_on(directory: Path, ranks: int) -> tuple[int, list[float]]:
    """Rows of the vocabulary's matrix that this rank holds, and the losses of two iterations from the checkpoint."""
    argv = [*RUN.split(), "--train-iters", "2", "--pretrained-checkpoint", str(directory)]
    argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(DATA / "tok" / "hf_bpe1k")]
    config = read_run_config([*argv, "--tensor-model-parallel-size", str(ranks)], {"WORLD_SIZE": str(ranks)})
    trace = trace_rank(config, build_gpt_recipe(config), rank=own_rank(config), iterations=2)
    rows = next(held.weight.shape[0] for held in trace.held if held.placement.name.endswith("word_embeddings.weight"))
    return rows, [losses["lm loss"] for losses in trace.losses]


@pytest.mark.flags("--use-checkpoint-args")
def test_more_rows_than_tokens_in_any_layout(tmp_path: Path) -> None:
    """1100 rows, a tokenizer of 1000 tokens: every layout has the checkpoint's rows, and trains as one process does."""
    pytest.importorskip("transformers")
    from tests.unit.training.recipes.test_model_families import make

    model = make("Llama", vocab_size=1100)
    model.save_pretrained(tmp_path / "hf")
    for file in (DATA / "tok" / "hf_bpe1k").glob("*.json"):
        shutil.copy(file, tmp_path / "hf")
    convert(
        parse_arguments(
            f"--source hf --target megatron --input-path {tmp_path}/hf --output-path {tmp_path}/ours".split()
        )
    )
    [(rows, expected)] = run_distributed(train_on, 1, tmp_path / "ours", 1)
    assert rows == 1100 and expected[0] != expected[1]
    for ranks, rows in ((2, 550), (4, 275)):
        for found_rows, losses in run_distributed(train_on, ranks, tmp_path / "ours", ranks):
            assert found_rows == rows
            assert losses == pytest.approx(expected, rel=1e-6)


def convert_together(source: Path, result: Path, broken_rank: int | None) -> tuple[str, int]:
    """There, to two ranks of upstream's and back, as torchrun's processes do; what this one was told, and how many
    values it has read of the source."""
    count, read = 0, Source.read

    def counting(opened: Source, name: str) -> Tensor:
        nonlocal count
        if dist.get_rank() == broken_rank:
            raise CheckpointError("it cannot be read")
        tensor = read(opened, name)
        count += tensor.numel()
        return tensor

    Source.read = counting  # type: ignore[method-assign]
    assert dist.group.WORLD is not None
    try:
        for kinds, ours, theirs in (
            ("hf megatron", source, result / "ours"),
            ("megatron megatron --ckpt-format torch --target-tp 2", result / "ours", result / "ranks"),
            ("megatron hf", result / "ours", result / "hf"),
        ):
            first, second, *more = kinds.split()
            argv = ["--source", first, "--target", second, "--input-path", str(ours), "--output-path", str(theirs)]
            convert(parse_arguments([*argv, *more]), dist.group.WORLD)
    except CheckpointError as error:
        return str(error), count
    return "", count


def test_several_processes_convert_a_share_each(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.unit.training.recipes.test_model_families import make

    directory = tmp_path / "source"
    make("Llama", **LLAMA).save_pretrained(directory)
    expected = read_all(directory)
    shares = run_distributed(convert_together, 2, directory, tmp_path, None)
    assert [told for told, _ in shares] == ["", ""]
    assert_same_tensors(read_all(tmp_path / "hf"), expected)
    # Once to write it, and once to compare.
    total = 2 * sum(tensor.numel() for tensor in expected.values())
    assert sum(read for _, read in shares) == total and all(read < 0.7 * total for _, read in shares)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) >= 2
    assert len(list((tmp_path / "ranks").glob("release/mp_rank_0?/*.pt"))) == 2
    failed = tmp_path / "failed"
    failed.mkdir()
    told = run_distributed(convert_together, 2, directory, failed, 1)
    assert told[0][0] == told[1][0] and "cannot be read" in told[0][0] and list(failed.iterdir()) == []


BUCKET_BYTES = 9000


def send_to(address: Path, directory: Path, layout_text: str) -> tuple[dict[str, Tensor], list[int]]:
    """Start from a directory, hand the weights to the process at the address, then to all ranks, which return theirs
    with the bytes of the buckets of several."""
    layout = parse_layout(layout_text)
    argv = [*RUN.split(), "--load", f"hf:{directory}", *layout.flags]
    config = read_run_config(argv, {"WORLD_SIZE": str(layout.world_size)})
    recipe = dataclasses.replace(build_gpt_recipe(config), foreign_files=HuggingFaceFiles())
    with open_local_run(config, recipe, own_rank(config)) as run:
        send_buckets(stream_weights(run, BUCKET_BYTES), address, timeout_seconds=60)
        buckets = [*stream_weights(run, BUCKET_BYTES, on_all_ranks=True)]
    sizes = [sum(each.nbytes for each in bucket.values()) for bucket in buckets if len(bucket) > 1]
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}, sizes


def test_buckets_of_weights_reach_another_process(tmp_path: Path) -> None:
    """tp2, pp2, ep2 -> one process by shared memory, and all ranks: the tensors of the directory, bit for bit."""
    pytest.importorskip("transformers")
    from tests.unit.training.recipes.test_model_families import make

    kind, settings, *_ = CASES["experts"]
    directory = tmp_path / "hf"
    make(kind, **settings).to(torch.float32).save_pretrained(directory)
    address = tmp_path / "weights"
    with ThreadPoolExecutor() as threads:
        received = threads.submit(lambda: [*receive_buckets(address)])
        ranks = run_distributed(send_to, 4, address, directory, "tp2,sp,pp2,ep2,etp1")
        buckets = received.result(timeout=60)
    expected = read_all(directory)
    assert_same_tensors({name: tensor for bucket in buckets for name, tensor in bucket.items()}, expected)
    assert len(buckets) > 5
    for tensors, sizes in ranks:
        assert_same_tensors(tensors, expected)
        assert sizes and max(sizes) <= BUCKET_BYTES


@distributed(world_size=3)
def test_buckets_go_to_all_members_of_a_group() -> None:
    drawn = {f"{size}": torch.arange(size, dtype=dtype) for size, dtype in ((3, torch.float32), (70, torch.bfloat16))}
    tensors = {**drawn, "whole": torch.tensor(7), "large": torch.arange(300.0).view(30, 10).t()}
    groups = ProcessGroupCollection.build(RankGrid(3), dist.get_rank())
    buckets = pack_buckets(tensors.items(), 200) if dist.get_rank() == 1 else None
    found = [*broadcast_buckets(buckets, groups.world, source=1)]
    assert [[*bucket] for bucket in found] == [["3", "70", "whole"], ["large"]]
    assert_same_tensors({name: tensor for bucket in found for name, tensor in bucket.items()}, tensors)


def test_nobody_receives(tmp_path: Path) -> None:
    with pytest.raises(TemporaryError, match="nobody receives weights"):
        send_buckets([{"a": torch.ones(3)}], tmp_path / "nobody", timeout_seconds=0)
