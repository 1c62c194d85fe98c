"""Runs of upstream, continued here from its checkpoint of iteration 10: they follow the curve of upstream's own run."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as Saved

from megatron.core.dist_checkpointing.upstream_dist import (
    explain_unusable_optimizer,
    find_upstream_checkpoint,
    translate_table,
)
from megatron.core.errors import CheckpointError
from tests.golden.test_train_curves import (
    DATA,
    GRAD_NORM_TOLERANCE,
    LOSS_TOLERANCE,
    PARAMS_NORM_TOLERANCE,
    lay_out,
    rows,
    train,
)
from tests.golden.test_upstream_checkpoints import SHAPE
from tests.unit.tiny_training import prepare, values

LAST = 20


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("golden"))


def continue_upstream(checkpoint: Path, reference: Path, tmp_path: Path, processes: int, *flags: str) -> str:
    text = (DATA / "train_b" / "args.txt").read_text()
    arguments = text.replace("GOLDEN", str(reference)).replace("CACHE_DIR", str(tmp_path / "cache")).split()
    report = ["--metrics-dir", str(tmp_path / "metrics"), "--exit-interval", str(LAST)]
    return train(processes, [*arguments, "--load", str(checkpoint), *report, *flags])


def assert_upstream_curve(tmp_path: Path) -> None:
    expected = [row for row in rows(DATA / "train_b" / "metrics_rank0.jsonl") if 10 < row["iteration"] <= LAST]
    found = rows(tmp_path / "metrics" / "metrics.jsonl")
    assert [row["iteration"] for row in found] == list(range(11, LAST + 1))
    for ours, theirs in zip(found, expected, strict=True):
        where = f"iteration {ours['iteration']}"
        assert ours["lm loss"] == pytest.approx(theirs["loss"]["lm loss"], rel=LOSS_TOLERANCE), where
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=GRAD_NORM_TOLERANCE), where
        assert ours["params_norm"] == pytest.approx(theirs["params_norm"], rel=PARAMS_NORM_TOLERANCE), where
        assert ours["lr"] == theirs["lr"], where
        assert ours["consumed_samples"] == 8 * ours["iteration"]


# Each with a vocabulary of 1000 rows: rows of padding take part in the softmax.
LAYOUTS = {
    "one process": (1, ()),
    "tp 2": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--make-vocab-size-divisible-by", "4")),
    "pp 2": (2, ("--pipeline-model-parallel-size", "2")),
    "distributed optimizer": (2, ("--use-distributed-optimizer",)),
}


@pytest.mark.flags("--load")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_dist_follows_the_curve(layout: str, golden_dir: Path, reference: Path, tmp_path: Path) -> None:
    processes, flags = LAYOUTS[layout]
    output = continue_upstream(golden_dir / "ckpt" / "b_iter10_torch_dist", reference, tmp_path, processes, *flags)
    assert output.count("which upstream wrote, after 80 samples") == 1
    assert_upstream_curve(tmp_path)


@pytest.fixture(scope="module")
def upstream(golden_dir: Path) -> Path:
    return golden_dir / "ckpt" / "b_iter10_torch_dist"


def writable_copy(upstream: Path, tmp_path: Path) -> Path:
    """The checkpoint's own directory in a copy that can be changed."""
    shutil.copytree(upstream, tmp_path / "copy", copy_function=shutil.copyfile)
    for path in (tmp_path / "copy", *(tmp_path / "copy").rglob("*")):
        path.chmod(0o700)
    return tmp_path / "copy" / "iter_0000010"


def test_both_formats_hold_the_same_weights(
    golden_dir: Path, upstream: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from_torch = dict(values(prepare(*SHAPE, "--pretrained-checkpoint", golden_dir / "ckpt" / "b_iter10_torch")))
    run = prepare(*SHAPE, "--pretrained-checkpoint", upstream)
    assert run.progress.iteration == 0 and run.optimizer.step_count == 0
    for name, tensor in values(run):
        assert torch.equal(tensor, from_torch[name]), name
    assert "iteration, optimizer and random numbers start afresh" in capsys.readouterr().out


def test_without_the_optimizer(upstream: Path) -> None:
    run = prepare(*SHAPE, "--load", upstream, "--no-load-optim", "--train-iters", "12")
    assert run.progress.iteration == 10 and run.progress.consumed_train_samples == 80
    moments = [tensor for name, tensor in values(run) if name.startswith("exp_avg")]
    assert moments and not any(tensor.any() for tensor in moments)


def test_bf16_and_another_padding(upstream: Path) -> None:
    exact = dict(values(prepare(*SHAPE, "--load", upstream, "--override-opt_param-scheduler")))
    flags = ("--bf16", "--make-vocab-size-divisible-by", "128", "--override-opt_param-scheduler")
    found, name = dict(values(prepare(*SHAPE, "--load", upstream, *flags))), "output_layer.weight"
    assert found[name].shape == (1024, 64)
    for kind in ("main_param", "exp_avg", "exp_avg_sq"):
        expected = exact[name if kind == "main_param" else f"{kind} of {name}"]
        assert torch.equal(found[f"{kind} of {name}"][:1000], expected), kind


@pytest.mark.flags("--override-model-settings")
def test_another_model_is_refused(upstream: Path) -> None:
    with pytest.raises(CheckpointError, match=r"linear_fc1.weight is \(352, 64\) in the checkpoint, \(64, 64\) in the"):
        prepare(*SHAPE, "--ffn-hidden-size", "32", "--pretrained-checkpoint", upstream)
    with pytest.raises(CheckpointError, match=r"--rotary-base was 10000 in the checkpoint, is 5000 now"):
        prepare(*SHAPE, "--rotary-base", "5000", "--pretrained-checkpoint", upstream)
    prepare(*SHAPE, "--rotary-base", "5000", "--override-model-settings", "--pretrained-checkpoint", upstream)
    with pytest.raises(CheckpointError, match=r"optimizer state of --optimizer adam, this run has --optimizer sgd"):
        prepare(*SHAPE, "--optimizer", "sgd", "--load", upstream)


def test_another_schedule_is_refused(upstream: Path) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint's schedule differs from this run's: --lr was 0.001"):
        prepare(*SHAPE, "--load", upstream)


def test_ours_without_a_manifest_is_not_taken_for_upstream_s(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    for name in (".metadata", "tensors.json"):
        (tmp_path / "iter_0000003" / name).write_text("{}")
    assert find_upstream_checkpoint(tmp_path) is None
    (tmp_path / "iter_0000003" / "tensors.json").unlink()
    assert find_upstream_checkpoint(tmp_path) == tmp_path / "iter_0000003"
    assert find_upstream_checkpoint(tmp_path / "iter_0000003") == tmp_path / "iter_0000003"
    assert find_upstream_checkpoint(tmp_path, 4) is None


class Evil:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("place", ["table", "common"])
def test_malicious_pickles_run_nothing(place: str, upstream: Path, tmp_path: Path) -> None:
    checkpoint, mark = writable_copy(upstream, tmp_path), tmp_path / "ran"
    if place == "table":
        (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    else:
        torch.save({"args": Evil(mark), "iteration": 10}, checkpoint / "common.pt")
    with pytest.raises(CheckpointError, match="refused class"):
        prepare(*SHAPE, "--load", checkpoint.parent, "--no-load-optim")
    assert not mark.exists()


def test_damage_is_named(upstream: Path, tmp_path: Path) -> None:
    checkpoint = writable_copy(upstream, tmp_path)
    data = checkpoint / "__0_0.distcp"
    whole = data.read_bytes()
    for length in (0, 57366 + 100, len(whole) - 1000):
        data.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"iter_0000010"):
            prepare(*SHAPE, "--load", checkpoint.parent, "--override-opt_param-scheduler")
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp"):
        prepare(*SHAPE, "--load", checkpoint.parent, "--override-opt_param-scheduler")


def test_listings_of_other_checkpoints_translate(golden_dir: Path) -> None:
    """Every tensor of the mixture of experts, and of no other name, has a place; its state as well."""

    def table(name: str) -> Metadata:
        listed = json.loads((golden_dir / "ckpt" / name).read_text())["tensors"]
        return Metadata(
            {
                key: Saved(
                    TensorProperties(getattr(torch, entry["dtype"].removeprefix("torch."))),
                    torch.Size(entry["global_shape"]),
                    [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in entry["chunks"]],
                )
                for key, entry in listed.items()
            }
        )

    found = translate_table(table("c_torch_dist.json"), "c").metadata.state_dict_metadata
    experts = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01")
    expected = {name: tensor.shape for name, tensor in values(prepare(*SHAPE, *experts))}
    assert {name: entry.size for name, entry in found.items() if not name.startswith("optimizer.")} == {  # type: ignore[union-attr]
        name: shape for name, shape in expected.items() if not name.startswith("exp_avg")
    }
    moments = {name.replace("exp_avg of ", "optimizer.state.exp_avg.") for name in expected if name[:8] == "exp_avg "}
    assert moments == {name for name in found if name.startswith("optimizer.state.exp_avg.")}
    assert explain_unusable_optimizer(table("c_torch_dist.json")) is None
    assert "flat buffers" in str(explain_unusable_optimizer(table("b_dp2_distopt_torch_dist.json")))
