# SPDX-License-Identifier: Apache-2.0
"""Upstream's checkpoints of every format and layout give the tensors that were saved.

Of two formats there are real files (tests/golden); the others are written here, by a writer that follows upstream's
rules and whose buckets are compared with the listing of a real checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.safe_pickle import read_metadata
from megatron.core.dist_checkpointing.saved_boxes import LazyTensor
from megatron.core.dist_checkpointing.validation import ModelMismatchError
from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import SingleRankGroup
from megatron.core.upstream_checkpoints.flat_layout import (
    BucketPadding,
    BucketSlot,
    Parameter,
    fill_buckets,
    place_in_buckets,
)
from megatron.core.upstream_checkpoints.names import name_upstream
from megatron.core.upstream_checkpoints.rank_file import fill_from_full
from megatron.training.run import Run
from tests.support.tiny_training import prepare, values
from tests.support.upstream_files import DistFiles, Full, Writer
from tests.support.upstream_letters import LetterWriter
from tests.unit.upstream_checkpoints.test_checkpoint_tools import Tool

DENSE = ("--ffn-hidden-size", "24", "--hidden-size", "24", "--num-layers", "4")
GATED = (
    *DENSE, "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope",
    "--untie-embeddings-and-output-weights", "--group-query-attention", "--num-query-groups", "2",
    "--num-attention-heads", "4",
)  # fmt: skip
EXPERTS = (*GATED, "--num-experts", "4", "--moe-router-topk", "2")
PLAIN = Writer(layers=4)
GATED_WRITER = Writer(layers=4, gated=True, biases=False, tied=False, positions=False, norm_bias=False)
EXPERTS_WRITER = Writer(layers=4, gated=True, biases=False, tied=False, positions=False, norm_bias=False, experts=4)

LATENT = (
    *GATED[: GATED.index("--group-query-attention")], "--num-attention-heads", "4", *"""
    --multi-latent-attention --qk-layernorm --q-lora-rank 8 --kv-lora-rank 6 --qk-head-dim 4 --qk-pos-emb-head-dim 2
    --v-head-dim 4 --num-experts 4 --moe-router-topk 2 --moe-layer-freq ([0]+[1]*3) --mtp-num-layers 2
    --moe-shared-expert-intermediate-size 8 --moe-router-enable-expert-bias --moe-router-score-function sigmoid
    """.split(),
)  # fmt: skip
LATENT_WRITER = Writer(
    layers=4, gated=True, biases=False, tied=False, positions=False, norm_bias=False, experts=4, latent=True,
    predictions=2,
)  # fmt: skip
LETTERS = (
    *"""--hybrid-layer-pattern MG*E-M/GM --hidden-size 24 --ffn-hidden-size 24 --position-embedding-type rope --swiglu
    --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --num-attention-heads 4
    --num-experts 4 --moe-router-topk 2 --mamba-num-heads 6 --mamba-head-dim 5 --mamba-num-groups 2 --mamba-state-dim 7
    --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 5
    --linear-conv-kernel-dim 3""".split(),
)  # fmt: skip
LETTERS_WRITER = LetterWriter(
    layers=6, gated=True, experts=4, letters="MG*E-M", prediction="GM", predictions=1,
    sections={
        "mixer": {"z": 30, "x": 30, "B": 14, "C": 14, "dt": 6},
        "self_attention": {"query": 12, "key": 12, "value": 20, "z": 20, "beta": 4, "alpha": 4},
    },
    settings={
        "hidden_size": 24, "mamba_num_heads": 6, "mamba_head_dim": 5, "mamba_num_groups": 2, "mamba_state_dim": 7,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
        "experimental_attention_variant": None,
    },
)  # fmt: skip

LAYOUTS: dict[str, tuple[tuple[str, ...], Writer, dict[str, Any]]] = {
    "one rank": (DENSE, PLAIN, {}),
    "tp 2": (DENSE, PLAIN, {"tp": 2}),
    "tied over two stages": (DENSE, PLAIN, {"pp": 2, "te": True}),
    "interleaved": (GATED, GATED_WRITER, {"pp": 2, "vpp": 2, "tp": 2}),
    "uneven stages": (GATED, GATED_WRITER, {"pp": 2, "per_chunk": (1, 3), "te": True}),
    "several buckets": (GATED, GATED_WRITER, {"bucket_size": 3000, "dp": 3}),
    "experts": (EXPERTS, EXPERTS_WRITER, {"tp": 2}),
    "latent attention": (LATENT, LATENT_WRITER, {"tp": 2, "pp": 2, "ep": 2}),
    "latent attention, fused": (LATENT, LATENT_WRITER, {"tp": 2, "te": True, "grouped": True}),
    "letters": (LETTERS, LETTERS_WRITER, {"tp": 2, "pp": 2, "ep": 2, "per_chunk": (4, 2)}),
    "letters, experts in one of a stage's chunks": (
        LETTERS,
        LETTERS_WRITER,
        {"pp": 2, "vpp": 2, "ep": 2, "per_chunk": (2, 0, 3, 1)},
    ),
    "expert parallel": (EXPERTS, EXPERTS_WRITER, {"ep": 2, "tp": 2, "pp": 2, "grouped": True, "te": True}),
}
FORMATS = (
    "torch", "torch with distrib_optim.pt", "dp_reshardable", "fully_sharded_bucket_space", "dp_zero_gather_scatter",
    "fully_sharded_model_space",
)  # fmt: skip


def write(root: Path, layout: str, kind: str, full: Full) -> Path:
    _, writer, changes = LAYOUTS[layout]
    writer = type(writer)(**{**vars(writer), **changes})
    if kind.startswith("torch"):
        return writer.write_torch(root, full, distributed=kind != "torch")
    return writer.write_torch_dist(root, full, kind)


@functools.cache
def draw(flags: tuple[str, ...]) -> Full:
    """Random contents for a run: weights that are rounded main parameters, and moments."""
    run = prepare(*flags, "--bf16")
    names = {name: tensor.shape for name, tensor in values(run) if " of " not in name}
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    # What is no parameter upstream, so that its optimizer knows nothing of it.
    trained = {name: tensor for name, tensor in drawn.items() if not name.endswith(".expert_bias")}
    full = {kind: {n: torch.randn(t.shape, generator=generator) for n, t in trained.items()} for kind in
            ("exp_avg", "exp_avg_sq")}  # fmt: skip
    full |= {"param": trained, "": {name: tensor.bfloat16() for name, tensor in drawn.items()}}
    return full


def assert_loaded(run: Run, full: Full) -> None:
    found = dict(values(run))
    for name, tensor in full[""].items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    for name in full["param"]:
        assert torch.equal(found[f"main_param of {name}"], full["param"][name]), name
        assert torch.equal(found[f"exp_avg of {name}"], full["exp_avg"][name]), name
        assert torch.equal(found[f"exp_avg_sq of {name}"], full["exp_avg_sq"][name]), name


# Every format in the hardest layouts, every layout in a format of each kind.
CASES = [(kind, layout) for kind in FORMATS for layout in ("interleaved", "latent attention", "letters")]
CASES += [(kind, layout) for kind in ("torch with distrib_optim.pt", "dp_reshardable") for layout in LAYOUTS]


@pytest.mark.flags("--load")
@pytest.mark.parametrize(("kind", "layout"), sorted(set(CASES)))
def test_everything_comes_back(kind: str, layout: str, tmp_path: Path) -> None:
    flags = LAYOUTS[layout][0]
    full = draw(flags)
    write(tmp_path, layout, kind, full)
    run = prepare(*flags, "--bf16", "--load", tmp_path)
    assert (run.progress.iteration, run.optimizer.step_count, run.scheduler.num_steps) == (10, 10, 40)
    assert_loaded(run, full)


@pytest.mark.parametrize("kind", ["torch", "dp_reshardable", "fully_sharded_model_space"])
def test_a_hybrid_takes_over_a_gpt(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its optimizer; layers with a state, which a GPT does not have, start with their initial values."""
    full = draw(GATED)
    write(tmp_path, "interleaved", kind, full)
    sizes = "--mamba-num-heads 4 --mamba-num-groups 2 --linear-num-key-heads 2 --linear-num-value-heads 2"
    pattern = ("--hybrid-layer-pattern", "M*-*-G*-*-", "--num-layers", "10")
    flags = (*GATED, "--bf16", *pattern, *sizes.split())
    places = {0: (1, 2), 1: (3, 4), 2: (6, 7), 3: (8, 9)}

    def name(gpt: str) -> str:
        if not gpt.startswith("decoder.layers."):
            return gpt.replace("final_layernorm", "final_norm")
        _, _, number, rest = gpt.split(".", 3)
        return f"decoder.layers.{places[int(number)][rest.startswith(('mlp.', 'pre_mlp'))]}.{rest}"

    run = prepare(*flags, "--load", tmp_path)
    assert "a GPT has no counterpart of layers 1, 6 of the pattern M*-*-G*-*-" in capsys.readouterr().out
    assert (run.progress.iteration, run.optimizer.step_count) == (10, 10)
    assert_loaded(run, {part: {name(key): tensor for key, tensor in full[part].items()} for part in full})
    found, fresh = (
        {key: value for key, value in values(each) if ".layers.0." in key or ".layers.5." in key}
        for each in (run, prepare(*flags))
    )
    assert len(found) > 10 and all(torch.equal(found[key], fresh[key]) for key in found)
    with pytest.raises(CheckpointError, match="leave out --no-initialization"):
        prepare(*flags, "--load", tmp_path, "--no-initialization")


def test_norms_of_heads_that_are_stored_otherwise(tmp_path: Path) -> None:
    flags = (*LETTERS, "--apply-layernorm-1p", "--bf16")
    write(tmp_path, "letters", "torch", draw(LETTERS))
    prepare(*flags, "--load", tmp_path)
    with pytest.raises(CheckpointError, match="--no-linear-norm-1p|--linear-norm-1p"):
        prepare(*flags, "--no-linear-norm-1p", "--load", tmp_path)


def test_main_parameters_without_the_optimizer(tmp_path: Path) -> None:
    full = draw(DENSE)
    write(tmp_path, "tp 2", "dp_reshardable", full)
    flags = ("--bf16", "--load", tmp_path, "--no-load-optim", "--load-main-params-from-ckpt")
    found = dict(values(prepare(*DENSE, *flags)))
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    assert torch.equal(found[f"main_param of {name}"], full["param"][name])
    assert not found[f"exp_avg of {name}"].any()


def test_the_writer_s_buckets_are_upstream_s(golden_dir: Path, tmp_path: Path) -> None:
    """Sizes, and where parameters and the shares of two data-parallel ranks end, as a real checkpoint lists them."""
    listing = json.loads((golden_dir / "ckpt" / "b_dp2_distopt_torch_dist.json").read_text())
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.param"
    listed = listing["tensors"][bucket]
    shapes = {
        "embedding.word_embeddings.weight": (1000, 64), "output_layer.weight": (1000, 64),
        "decoder.final_layernorm.weight": (64,), "input_layernorm.weight": (64,), "pre_mlp_layernorm.weight": (64,),
        "self_attention.linear_proj.weight": (64, 64), "self_attention.linear_qkv.weight": (128, 64),
        "mlp.linear_fc1.weight": (352, 64), "mlp.linear_fc2.weight": (64, 176),
    }  # fmt: skip
    names = [param.full for param in GATED_WRITER.registered(0, 0, 0)]
    zeros = {name: torch.zeros(next(s for end, s in shapes.items() if name.endswith(end))) for name in names}
    full = dict.fromkeys(("", "param", "exp_avg", "exp_avg_sq"), zeros)
    GATED_WRITER.write_torch_dist(tmp_path, full, "dp_reshardable")
    entry = read_metadata(tmp_path / "iter_0000010" / ".metadata").state_dict_metadata[
        bucket.replace("(torch.float32, torch.float32)", "(torch.bfloat16, torch.float32)")
    ]
    assert list(entry.size) == listed["global_shape"]
    assert [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks] == listed["chunks"]
    numbers = listing["bytes_contents"]["optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1"]
    assert numbers == [[{"(torch.float32, torch.float32)": ["int: 312960"]}]], "padded to 128 elements"


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buckets_are_filled_and_found_as_upstream_fills_them(layout: str, replicas: int) -> None:
    """What we write for upstream, and what we read, against the rules of the tests' own writer."""
    flags, base, changes = LAYOUTS[layout]
    writer, full = type(base)(**{**vars(base), **changes, "dp": replicas}), draw(flags)
    padding = BucketPadding(replicas)
    for stage, chunk in itertools.product(range(writer.pp), range(writer.vpp)):
        for params in writer.separate(writer.registered(stage, chunk, 0)):
            shapes = {param.local: tuple(writer.shard(param, full["param"][param.full], 0).shape) for param in params}
            placed, buckets = writer.lay_out(params, shapes, stage, chunk)
            limit = writer.bucket_size if (stage, chunk) == (0, 0) else None
            ours = [Parameter(p.local, shapes[p.local], is_alone=p.shared) for p in params]
            slots, sizes = fill_buckets(ours, limit, padding)
            assert sizes == [end - start for start, end, _ in buckets]
            assert [padding.pad(size) for size in sizes] == [padded - start for start, _, padded in buckets]
            expected = [BucketSlot(bucket, start - buckets[bucket][0]) for _, start, _, bucket in placed]
            assert slots[::-1] == expected
            assert place_in_buckets(ours, sizes) == slots


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: path.with_name("distrib_optim.pt").unlink(), "distrib_optim.pt is missing"),
        (lambda path: torch.save({0: {"f": {"param": torch.ones(64)}}}, path.with_name("distrib_optim.pt")),
         "does not fill the flat buffers as upstream lays them out; save it there with --dist-ckpt-optim"),
        (lambda path: torch.save({0: {"f": {"param": torch.ones(8, 8)}}}, path.with_name("distrib_optim.pt")),
         "buffer 0 holds no flat tensors of one length"),
        (lambda path: torch.save("text", path.with_name("distrib_optim.pt")), "holds no optimizer state"),
    ],
)  # fmt: skip
def test_buffers_that_are_of_other_weights(change: Callable[[Path], Any], sentence: str, tmp_path: Path) -> None:
    write(tmp_path, "one rank", "torch with distrib_optim.pt", draw(DENSE))
    change(tmp_path / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match=sentence):
        prepare(*DENSE, "--bf16", "--load", tmp_path)
    prepare(*DENSE, "--bf16", "--load", tmp_path, "--no-load-optim")


def test_a_checkpoint_of_two_runs_is_refused(tmp_path: Path) -> None:
    """The main parameters in the buffers tell that the weights are of another run."""
    full, name = draw(DENSE), "decoder.layers.2.mlp.linear_fc1.weight"
    other = {**full, "": {**full[""], name: full[""][name] + 1}}
    for number, kind in enumerate(("torch with distrib_optim.pt", "dp_reshardable")):
        write(tmp_path / str(number), "tp 2", kind, other)
        with pytest.raises(CheckpointError, match=f"{name} differs from the main parameter in its flat buffers"):
            prepare(*DENSE, "--bf16", "--load", tmp_path / str(number))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(monkeypatch, capsys)


def test_tools_see_whole_tensors(tmp_path: Path, tool: Tool) -> None:
    full = draw(LATENT)
    write(tmp_path / "torch", "latent attention", "torch with distrib_optim.pt", full)
    write(tmp_path / "dist", "latent attention", "dp_reshardable", full)
    found = tool.read_json("inspect_checkpoint.py", tmp_path / "torch", "--norms")
    assert (found["format"], found["world_size"]) == ("torch (upstream)", 8)
    assert found["tensors"].keys() == full[""].keys()
    for name, tensor in full[""].items():
        assert found["tensors"][name]["shape"] == list(tensor.shape)
        assert found["tensors"][name]["norm"] == pytest.approx(float(tensor.double().norm()))
    found = tool.read_json("inspect_checkpoint.py", tmp_path / "dist")
    assert found["format"] == "torch_dist (upstream)" and "embedding.word_embeddings.weight" in found["tensors"]
    code, out, _ = tool("doctor.py", tmp_path / "torch")
    assert code == 1 and "takes it as it is" in out and "copy iter_0000010" not in out
    next((tmp_path / "torch" / "iter_0000010").glob("mp_rank_01*/model_optim_rng.pt")).unlink()
    (tmp_path / "dist" / "iter_0000010" / "__0_0.distcp").unlink()
    for name, sentence in (("torch", "files are missing or mixed up"), ("dist", "names '__0_0.distcp', which is not")):
        code, out, _ = tool("doctor.py", tmp_path / name)
        assert code == 1 and sentence in out and "copy iter_0000010 once more" in out


def test_formats_that_are_not_read_are_named(tmp_path: Path, tool: Tool) -> None:
    """Upstream's directories of wrapped modules, as torch.distributed.checkpoint writes them."""
    files = DistFiles(tmp_path / "iter_0000010")
    files.add("model.module.decoder.final_layernorm.weight", [0], torch.ones(24), [24])
    files.objects["args"] = {}
    files.finish()
    with pytest.raises(CheckpointError, match="upstream's format fsdp_dtensor, the only .* with --load hf:DIR"):
        prepare(*DENSE, "--load", tmp_path, "--no-load-optim", "--auto-detect-ckpt-format")
    code, out, _ = tool("doctor.py", tmp_path)
    assert code == 1 and "format fsdp_dtensor, which is not read" in out and "export it with Megatron-Bridge" in out
    found = tool.read_json("inspect_checkpoint.py", tmp_path)
    assert found["format"] == "fsdp_dtensor (upstream)" and len(found["tensors"]) == 1


def save_modules(root: Path, full: Full, *, is_plain: bool) -> Path:
    """The weights, as upstream's torch_dcp saves them through torch.distributed.checkpoint, or alone."""
    weights = {name_upstream(name): tensor.clone() for name, tensor in full[""].items()}
    content: dict[str, Any] = {
        "model": weights | {"decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(0, dtype=torch.uint8)},
        "args": argparse.Namespace(num_layers=4, hidden_size=24, consumed_train_samples=40),
        "checkpoint_version": 3.0, "iteration": 10,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3), "step": 10}}, "param_groups": [{"lr": 0.1}]},
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 40},
        "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
    }  # fmt: skip
    path = root / "iter_0000010"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no other processes
        torch.distributed.checkpoint.save(weights if is_plain else content, checkpoint_id=path, no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return path


@pytest.mark.parametrize("is_plain", [False, True])
def test_weights_that_torch_saved_of_upstreams_modules(is_plain: bool, tmp_path: Path, tool: Tool) -> None:
    full = draw(GATED)
    path = save_modules(tmp_path, full, is_plain=is_plain)
    flags = (*GATED, "--bf16", "--load", tmp_path)
    reason = "holds no optimizer state" if is_plain else "optimizer state has numbers in the place of the parameters' "
    with pytest.raises(CheckpointError, match=f"{reason}.*--no-load-optim or --finetune"):
        prepare(*flags)
    run = prepare(*flags, "--no-load-optim")
    found = dict(values(run))
    assert all(torch.equal(found[name], tensor) for name, tensor in full[""].items())
    assert (run.progress.iteration, run.progress.consumed_train_samples) == ((0, 0) if is_plain else (10, 40))
    assert prepare(*flags[:-2], "--pretrained-checkpoint", path).progress.iteration == 0
    if not is_plain:
        with pytest.raises(CheckpointError, match="--num-layers was 4 in the checkpoint, is 2 now"):
            prepare(*flags, "--no-load-optim", "--num-layers", "2")
    code, out, _ = tool("doctor.py", tmp_path)
    assert code == 1 and "takes it with --finetune" in out
    name = "state_dict" if is_plain else "torch_dcp"
    assert tool.read_json("inspect_checkpoint.py", tmp_path)["format"] == f"{name} (upstream)"


def test_files_of_ranks_may_have_more_than_the_model_where_that_is_tolerated() -> None:
    weights = {name: LazyTensor.of(torch.arange(4.0)) for name in ("decoder.a", "decoder.b")}
    tensor = ShardedTensor.whole("decoder.a", torch.zeros(4, dtype=torch.float64))
    fill = functools.partial(fill_from_full, {tensor.key: tensor}, weights, SingleRankGroup())
    with pytest.raises(ModelMismatchError, match="decoder.b is in the checkpoint only"):
        fill()
    assert fill(may_have_more=True).surplus == ("decoder.b",)
    assert tensor.data.tolist() == [0, 1, 2, 3]
