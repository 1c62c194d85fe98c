# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that upstream wrote, as --pretrained-checkpoint and --load see them."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from megatron.core.dist_checkpointing.safe_pickle import read_restricted
from megatron.core.errors import CheckpointError
from megatron.core.upstream_checkpoints.rank_file import find_legacy_file
from megatron.core.upstream_checkpoints.rank_files import open_legacy
from megatron.hf.checkpoints import OpenCheckpoint
from megatron.hf.upstream_source import import_upstream, open_upstream
from tests.support.tiny_training import differing, prepare, values

# The shape of model "b"; its vocabulary has 1000 tokens.
SHAPE = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 176 --group-query-attention
    --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --vocab-size 1000 --make-vocab-size-divisible-by 8
""".split()


@pytest.fixture(scope="module")
def upstream(golden_dir: Path) -> Path:
    return golden_dir / "ckpt" / "b_iter10_torch"


@pytest.fixture(scope="module")
def weights(upstream: Path) -> dict[str, torch.Tensor]:
    path = find_legacy_file(upstream)
    assert path is not None
    return {name: tensor.read() for name, tensor in open_legacy(path).tensors.items()}


@pytest.mark.flags("--pretrained-checkpoint")
def test_weights_of_an_upstream_checkpoint(
    upstream: Path, weights: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepare(*SHAPE, "--pretrained-checkpoint", upstream)
    loaded = {name: tensor for name, tensor in values(run) if not name.startswith("exp_avg")}
    assert loaded.keys() == weights.keys() and len(weights) == 27
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    assert run.progress.iteration == 0
    assert capsys.readouterr().out.count("_extra_state") == 1, "one note for all of them"


def test_upstream_weights_in_bf16_with_other_padding(upstream: Path, weights: dict[str, torch.Tensor]) -> None:
    run = prepare(*SHAPE, "--pretrained-checkpoint", upstream, "--bf16", "--make-vocab-size-divisible-by", "128")
    loaded, name = dict(values(run)), "output_layer.weight"
    assert loaded[name].shape == (1024, 64)
    assert torch.equal(loaded[name][:1000], weights[name].bfloat16())
    assert torch.equal(loaded[f"main_param of {name}"][:1000], weights[name]), "in full precision"


def test_L9_upstream_checkpoint_of_another_shape(upstream: Path) -> None:
    with pytest.raises(CheckpointError, match=r"decoder.layers.2-3.mlp.linear_fc2.weight is in the checkpoint only"):
        prepare(*SHAPE, "--num-layers", "2", "--pretrained-checkpoint", upstream)
    with pytest.raises(CheckpointError, match=r"linear_fc1.weight is \(352, 64\) in the checkpoint, \(64, 64\)"):
        prepare(*SHAPE, "--ffn-hidden-size", "32", "--pretrained-checkpoint", upstream)


def test_load_takes_all_of_it(upstream: Path) -> None:
    run = prepare(*SHAPE, "--load", upstream, "--override-opt_param-scheduler")
    assert run.progress.iteration == 10 and run.progress.consumed_train_samples == 80
    assert run.optimizer.step_count == 10 and run.scheduler.num_steps == 80
    dist = prepare(*SHAPE, "--load", upstream.with_name("b_iter10_torch_dist"), "--override-opt_param-scheduler")
    assert differing(run, dist) == [], "both formats hold the same"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_L11_torch_dist_of_another_program_is_refused_as_such(tmp_path: Path) -> None:
    weights = {"decoder.final_layernorm.weight": torch.ones(64)}
    torch.distributed.checkpoint.save(weights, checkpoint_id=tmp_path / "iter_0000010", no_dist=True)
    with pytest.raises(
        CheckpointError, match=r"iter_0000010 holds no manifest.json: it is no complete checkpoint of ours; .* upstream"
    ):
        prepare(*SHAPE, "--load", tmp_path)


def nested(weights: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in reversed(names):
        weights = {name: weights}
    return weights


@pytest.mark.parametrize("names", [("model",), ("state_dict",), ("model", "state_dict"), ("state_dict", "model"), ()])
@pytest.mark.parametrize(
    "where", ["iter_0000000/mp_rank_00", "release/mp_rank_00", "iter_0000007/mp_rank_00", "mp_rank_00"]
)
def test_places_and_nestings(tmp_path: Path, names: tuple[str, ...], where: str) -> None:
    path = tmp_path / where / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    weights = {"module.a.weight": torch.ones(2), "a._extra_state": None, "b._extra_state": torch.ones(1)}
    torch.save({**nested(weights, *names), **({"iteration": 3} if names else {})}, path)
    found = find_legacy_file(tmp_path)
    assert found == path
    opened = open_legacy(path)
    assert list(opened.tensors) == ["a.weight"] and len(opened.ignored) == 2
    assert opened.common.iteration == (3 if names else 0)


def test_tracker_decides_between_checkpoints(tmp_path: Path) -> None:
    for name in ("iter_0000001", "iter_0000002", "release"):
        (tmp_path / name / "mp_rank_00").mkdir(parents=True)
        torch.save({"model": {}}, tmp_path / name / "mp_rank_00" / "model_optim_rng.pt")
    for text, name in (("1", "iter_0000001"), ("release", "release")):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
        found = find_legacy_file(tmp_path)
        assert found is not None and found.parent.parent.name == name
    step = find_legacy_file(tmp_path, 2)
    assert step is not None and step.parent.parent.name == "iter_0000002"


def test_several_ranks_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / "iter_0000001" / f"mp_rank_0{rank}").mkdir(parents=True)

    def save(**settings: int) -> None:
        for rank in range(2):
            content = {"model": {"a": torch.ones(1)}, "args": Namespace(**settings)}
            torch.save(content, tmp_path / "iter_0000001" / f"mp_rank_0{rank}" / "model_optim_rng.pt")

    for settings, sentence in (
        ({}, "its settings do not say tensor_model_parallel_size; merge it"),
        ({"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1}, "holds the files of 2 ranks"),
        (
            {
                "tensor_model_parallel_size": 1,
                "pipeline_model_parallel_size": 1,
                "expert_model_parallel_size": 2,
                "expert_tensor_parallel_size": 2,
            },
            "was written with expert_tensor_parallel_size 2 and tensor_model_parallel_size 1",
        ),
    ):
        save(**settings)
        with pytest.raises(CheckpointError, match=sentence):
            prepare(*SHAPE, "--pretrained-checkpoint", tmp_path)


# How upstream cuts, written down once more: (part of a name, dimension), and the first layer's two halves.
CUTS = (("word_embeddings", 0), ("output_layer", 0), ("linear_qkv", 0), ("linear_fc1", 0), ("linear_proj", 1),
        ("linear_fc2", 1))  # fmt: skip


def take_shard(name: str, tensor: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    dim = next((dim for part, dim in CUTS if part in name), None)
    if dim is None or tp == 1:
        return tensor
    halves = tensor.chunk(2, 0) if "linear_fc1" in name else (tensor,)
    return torch.cat([half.chunk(tp, dim)[rank] for half in halves], dim if len(halves) == 1 else 0).clone()


def write_ranks(source: Path, directory: Path, tp: int, pp: int) -> None:
    """The reference's checkpoint as upstream's ranks would have written it: 4 layers over the stages, shards."""
    content = read_restricted(source, "the reference")
    weights = {name: tensor for name, tensor in content["model"].items() if tensor is not None}
    vectors = {name for name, tensor in weights.items() if tensor.dim() == 1}
    ordered = [name for name in weights if name not in vectors] + [name for name in weights if name in vectors]
    settings = content["args"].state | {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    settings.pop("exit_signal")
    args = Namespace(**{name: value for name, value in settings.items() if isinstance(value, int | str | float)})
    per_stage = 4 // pp
    for stage in range(pp):
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        local = {f"decoder.layers.{layer}.": f"decoder.layers.{layer - layers[0]}." for layer in layers}
        here = {name: name for name in weights if ".layers." not in name
                and (stage == 0 if "embedding" in name else stage == pp - 1)}  # fmt: skip
        here |= {n: n.replace(a, b) for a, b in local.items() for n in weights if n.startswith(a)}
        mine = [name for name in weights if name in here]
        grouped = [[n for n in mine if n not in vectors], [n for n in mine if n in vectors]]
        for rank in range(tp):
            numbered = [name for group in grouped for name in group]
            state = {
                number: {
                    kind: value if kind == "step" else take_shard(name, value, rank, tp)
                    for kind, value in content["optimizer"]["state"][ordered.index(name)].items()
                }
                for number, name in enumerate(numbered)
            }
            groups = [
                {"wd_mult": mult, "params": [numbered.index(name) for name in group]}
                for mult, group in zip((1.0, 0.0), grouped, strict=True)
            ]
            path = directory / "iter_0000010" / (f"mp_rank_{rank:02d}" + f"_{stage:03d}" * (pp > 1))
            path.mkdir(parents=True)
            model = {here[name]: take_shard(name, weights[name], rank, tp) for name in mine}
            saved = {"model": model, "args": args, "optimizer": {"state": state, "param_groups": groups}}
            saved |= {name: content[name] for name in ("iteration", "opt_param_scheduler", "checkpoint_version")}
            torch.save(saved, path / "model_optim_rng.pt")


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 4)])
def test_files_of_several_ranks_are_joined(tp: int, pp: int, upstream: Path, tmp_path: Path) -> None:
    source = find_legacy_file(upstream)
    assert source is not None
    write_ranks(source, tmp_path, tp, pp)
    flags = ("--override-opt_param-scheduler",)
    one, several = (prepare(*SHAPE, "--load", root, *flags) for root in (upstream, tmp_path))
    assert several.optimizer.step_count == 10 and differing(one, several) == []
    # A rank's file that is gone is missed.
    next(path for path in tmp_path.rglob("*.pt") if "mp_rank_00" not in path.parent.name or pp > 1).unlink()
    with pytest.raises(CheckpointError, match="files are missing or mixed up"):
        prepare(*SHAPE, "--load", tmp_path, *flags)


def test_the_listing_of_two_ranks_has_these_shards(upstream: Path, golden_dir: Path) -> None:
    source = find_legacy_file(upstream)
    assert source is not None
    weights = {name: tensor.read() for name, tensor in open_legacy(source).tensors.items()}
    listed = json.loads((golden_dir / "ckpt" / "b_tp2_torch.json").read_text())["model_optim_rng.pt"]["model"]
    for name, tensor in weights.items():
        assert listed[name] == f"Tensor{list(take_shard(name, tensor, 0, 2).shape)} torch.float32", name


def test_damaged_upstream_file(tmp_path: Path, upstream: Path) -> None:
    source = find_legacy_file(upstream)
    assert source is not None
    path = tmp_path / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    for length in (0, 1, 100, source.stat().st_size // 2, source.stat().st_size - 1):
        shutil.copy(source, path)
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.truncate(length)
        with pytest.raises(CheckpointError, match="model_optim_rng.pt"):
            open_legacy(path)


def test_the_converter_takes_them(upstream: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    for root in (upstream, upstream.with_name("b_iter10_torch_dist")):
        source = open_upstream(root)
        assert source is not None
        found = OpenCheckpoint(import_upstream(source, tmp_path / root.name))
        assert found.contents.keys() == weights.keys()
        assert all(torch.equal(found.read(key), tensor) for key, tensor in weights.items())
