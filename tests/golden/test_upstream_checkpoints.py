"""Checkpoints that upstream wrote, as --pretrained-checkpoint and --load see them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from megatron.core.dist_checkpointing.legacy import find_legacy_file, read_legacy_weights
from megatron.core.errors import CheckpointError
from tests.unit.tiny_training import differing, prepare, values

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
    return read_legacy_weights(path).tensors


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
    tensors, ignored, common = read_legacy_weights(path)
    assert list(tensors) == ["a.weight"] and len(ignored) == 2
    assert common.iteration == (3 if names else 0)


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


def test_several_model_parallel_ranks_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / "iter_0000001" / f"mp_rank_0{rank}").mkdir(parents=True)
        torch.save({"model": {}}, tmp_path / "iter_0000001" / f"mp_rank_0{rank}" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="2 model-parallel ranks"):
        find_legacy_file(tmp_path)


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
            read_legacy_weights(path)
