# SPDX-License-Identifier: Apache-2.0
"""Runs of upstream, continued here from its checkpoint of iteration 10: they follow the curve of upstream's own run."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as Saved

from megatron.core.dist_checkpointing.safe_pickle import read_restricted
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.upstream_checkpoints.common_state import find_upstream_checkpoint
from megatron.core.upstream_checkpoints.names import explain_unusable_optimizer, translate_table
from megatron.training.flags.read import read_run_config
from tests.golden.test_train_curves import (
    DATA,
    assert_same_step,
    lay_out,
    rows,
    train,
)
from tests.golden.test_upstream_checkpoints import SHAPE
from tests.support.tiny_training import prepare, values
from tests.unit.upstream_checkpoints.test_upstream_formats import GATED_WRITER

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
        assert_same_step(ours, theirs)


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


def test_torch_follows_the_curve(golden_dir: Path, reference: Path, tmp_path: Path) -> None:
    flags = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "4")
    continue_upstream(golden_dir / "ckpt" / "b_iter10_torch", reference, tmp_path, 2, *flags)
    assert_upstream_curve(tmp_path)


FLAT = {
    "dp_reshardable": ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "4"),
    "torch": ("--use-distributed-optimizer",),
}


@pytest.mark.parametrize("kind", FLAT)
def test_flat_buffers_follow_the_curve(kind: str, golden_dir: Path, reference: Path, tmp_path: Path) -> None:
    """The state of the reference as upstream's distributed optimizer saves it on 4 ranks, loaded by 2."""
    source = golden_dir / "ckpt" / "b_iter10_torch" / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    content = read_restricted(source, "the reference")
    weights = {name: tensor for name, tensor in content["model"].items() if tensor is not None}
    # Its optimizer numbers the matrices first.
    order = sorted(weights, key=lambda name: weights[name].dim() == 1)
    state = content["optimizer"]["state"]
    moments = {k: {n: state[i][k] for i, n in enumerate(order)} for k in ("exp_avg", "exp_avg_sq")}
    writer = dataclasses.replace(GATED_WRITER, tp=2, pp=2, scheduler=content["opt_param_scheduler"])
    full = {"": weights, "param": weights, **moments}
    if kind == "torch":
        writer.write_torch(tmp_path / "checkpoint", full, distributed=True)
    else:
        writer.write_torch_dist(tmp_path / "checkpoint", full, kind)
    continue_upstream(tmp_path / "checkpoint", reference, tmp_path, 2, *FLAT[kind])
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

    found = translate_table(table("c_torch_dist.json")).metadata.state_dict_metadata
    experts = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01")
    expected = {name: tensor.shape for name, tensor in values(prepare(*SHAPE, *experts))}
    assert {name: entry.size for name, entry in found.items() if not name.startswith("optimizer.")} == {  # type: ignore[union-attr]
        name: shape for name, shape in expected.items() if not name.startswith("exp_avg")
    }
    moments = {name.replace("exp_avg of ", "optimizer.state.exp_avg.") for name in expected if name[:8] == "exp_avg "}
    assert moments == {name for name in found if name.startswith("optimizer.state.exp_avg.")}
    assert explain_unusable_optimizer(table("c_torch_dist.json")) is None
    assert explain_unusable_optimizer(table("b_dp2_distopt_torch_dist.json")) is None
    assert "holds no optimizer state" in str(explain_unusable_optimizer(Metadata({})))


RUN = "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 20 --mock-data"


@pytest.mark.flags("--use-checkpoint-args")
@pytest.mark.parametrize("name", ["b_iter10_torch_dist", "b_iter10_torch"])
def test_settings_of_upstream(name: str, golden_dir: Path) -> None:
    root = golden_dir / "ckpt" / name
    given = ("--load", str(root), "--use-checkpoint-args", "--hidden-dropout", "0.1")
    found = read_run_config([*RUN.split(), *given], {})
    shape = (found.model.num_layers, found.model.hidden_size, found.model.num_query_groups, found.data.seq_length)
    assert shape == (4, 64, 2, 128)
    assert found.model.gated_linear_unit and not found.model.add_bias_linear and found.model.normalization == "RMSNorm"
    assert found.gpt.untie_embeddings_and_output_weights and found.model.position_embedding_type == "rope"
    assert found.model.num_moe_experts is None
    assert found.tokenizer.tokenizer_type == "HuggingFaceTokenizer"
    assert found.tokenizer.tokenizer_model is not None
    assert (found.tokenizer.tokenizer_model == str(root / "iter_0000010" / "tokenizer")) == name.endswith("dist")
    assert found.model.hidden_dropout == 0.1, "the command line wins"
    assert "--use-checkpoint-args: --hidden-dropout 0.1 is given; the checkpoint has 0.0" in found.notes


def test_settings_named_after_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    args = Namespace(num_experts=4, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.5, num_layers=2,
                     hidden_size=16, num_attention_heads=2, seq_length=16, max_position_embeddings=16,
                     tokenizer_type="NullTokenizer", vocab_size=50)  # fmt: skip
    torch.save({"model": {"a": torch.ones(1)}, "args": args}, file)
    model = read_run_config([*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args"], {}).model
    assert model.num_moe_experts == 4 and model.moe_aux_loss_coeff == [0.5]


def test_a_malicious_pickle_among_the_settings_is_refused(tmp_path: Path) -> None:
    file, mark = tmp_path / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt", tmp_path / "ran"
    file.parent.mkdir(parents=True)
    torch.save({"model": {"a": torch.ones(1)}, "args": Evil(mark)}, file)
    with pytest.raises(ConfigError, match="refused class"):
        read_run_config([*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args"], {})
    assert not mark.exists()


def test_optimizer_state_that_is_not_there(golden_dir: Path, tmp_path: Path) -> None:
    source = golden_dir / "ckpt" / "b_iter10_torch" / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    content = read_restricted(source, "the reference")
    content["args"] = Namespace(**content["args"].state)
    del content["args"].exit_signal
    file = tmp_path / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    plain = {name: content[name] for name in ("model", "iteration", "opt_param_scheduler")}
    group = content["optimizer"]["param_groups"][0]
    fewer = {"state": content["optimizer"]["state"], "param_groups": [{**group, "params": group["params"][:-1]}]}
    for optimizer, sentence in (
        (None, "holds no optimizer state; pass --no-load-optim"),
        ({"optimizer": {"param_groups": []}}, "distrib_optim.pt is missing: the state of upstream's distributed"),
        (fewer, "group 0 of the optimizer has 17 parameters, the weights that belong there are 18"),
        ({"state": {}, "param_groups": [{}]}, "the optimizer state is not as upstream writes it"),
    ):
        torch.save({**plain, "optimizer": optimizer}, file)
        with pytest.raises(CheckpointError, match=sentence):
            prepare(*SHAPE, "--load", tmp_path)


def test_main_parameters_of_mixed_precision(golden_dir: Path, tmp_path: Path) -> None:
    """As upstream's bf16 optimizer nests it: the float32 parameters beside the state, group by group."""
    source = golden_dir / "ckpt" / "b_iter10_torch" / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    content = read_restricted(source, "the reference")
    inner = content["optimizer"]
    weights = {name: tensor for name, tensor in content["model"].items() if tensor is not None}
    matrices = [tensor for tensor in weights.values() if tensor.dim() > 1]
    vectors = [tensor for tensor in weights.values() if tensor.dim() == 1]
    file = tmp_path / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    saved = {name: content[name] for name in ("iteration", "opt_param_scheduler")}
    saved |= {"model": {name: tensor.bfloat16() for name, tensor in weights.items()}}
    torch.save({**saved, "optimizer": {"optimizer": inner, "fp32_from_fp16_params": [matrices, vectors]}}, file)
    run = prepare(*SHAPE, "--load", tmp_path, "--bf16", "--override-opt_param-scheduler")
    found = dict(values(run))
    assert run.optimizer.step_count == 10
    for name, tensor in weights.items():
        assert torch.equal(found[f"main_param of {name}"], tensor), name
        assert torch.equal(found[name], tensor.bfloat16()), name


EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--ffn-hidden-size", "24", "--swiglu")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stacked", [True, False])
def test_experts_with_a_common_file(stacked: bool, tmp_path: Path) -> None:
    """Layers that differ are saved one by one there, others as a stack; older releases have common.pt."""
    run = prepare(*EXPERTS)
    expected = {name: torch.randn_like(tensor) for name, tensor in values(run)}
    saved: dict[str, torch.Tensor] = {}
    layers: dict[str, list[torch.Tensor]] = {}
    for name, tensor in expected.items():
        kind, _, parameter = name.rpartition(" of ")
        prefix = f"optimizer.state.{kind}." if kind else ""
        theirs = parameter.replace("mlp.experts", "mlp.experts.experts")
        theirs = theirs.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if stacked and theirs.startswith("decoder.layers."):
            layers.setdefault(
                prefix + theirs.replace("layers.0.", "layers.").replace("layers.1.", "layers."), []
            ).append(tensor)
        else:
            saved[prefix + theirs] = tensor
    saved |= {name: torch.stack(tensors) for name, tensors in layers.items()}
    path = tmp_path / "iter_0000004"
    torch.distributed.checkpoint.save(saved, checkpoint_id=path, no_dist=True)
    optimizer = {0: {"param_groups": [{"step": 4.0}]}, 1: {"param_groups": [{"step": 4.0}]}}
    args = Namespace(consumed_train_samples=16, num_experts=4)
    scheduler = {"num_steps": 16}
    torch.save(
        {"args": args, "iteration": 4, "optimizer": optimizer, "opt_param_scheduler": scheduler}, path / "common.pt"
    )
    found = prepare(*EXPERTS, "--load", tmp_path)
    assert (found.progress.iteration, found.optimizer.step_count, found.scheduler.num_steps) == (4, 4, 16)
    assert found.progress.consumed_train_samples == 16
    for name, tensor in values(found):
        assert torch.equal(tensor, expected[name]), name
    with pytest.raises(CheckpointError, match="--num-experts was 4 in the checkpoint, is 2 now"):
        prepare(*EXPERTS, "--num-experts", "2", "--load", tmp_path)
