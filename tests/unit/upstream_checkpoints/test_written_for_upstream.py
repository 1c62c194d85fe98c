# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for upstream on one process: names and order of its modules, settings, damage, refusals."""

from __future__ import annotations

import dataclasses
import io
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli import convert_checkpoint as convert
from megatron.core.dist_checkpointing.safe_pickle import read_metadata, read_restricted
from megatron.core.errors import CheckpointError, ConfigError, StorageError
from megatron.core.plan.model_plan import Branch, LayerPlan
from megatron.core.upstream_checkpoints.pickles import UpstreamObject, write_pickle
from megatron.core.upstream_checkpoints.stored_tensors import open_checkpoint
from megatron.core.upstream_checkpoints.write_rank_files import RankTensor, arrange, build_models, name_rank_directory
from megatron.hf.convert import convert as bridge_convert
from megatron.hf.convert import parse_arguments
from megatron.training.checkpoint.averaging import average_checkpoints
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.training import run_recipe
from tests.support.run_flags import run_config
from tests.support.tiny_training import FLAGS, RandomTokens, differing, prepare, train_tiny, values

FILES = {"torch": "mp_rank_00/model_optim_rng.pt", "upstream_torch_dist": "__0_0.distcp"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 3 and 6 in the format of upstream's ranks."""
    root = tmp_path_factory.mktemp("trained") / "checkpoints"
    train_tiny("--save", root, "--save-interval", "3", "--ckpt-format", "torch", "--hidden-dropout", "0")
    return root


def read_file(root: Path, iteration: int) -> dict[str, Any]:
    path = root / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt"
    content: dict[str, Any] = read_restricted(path, str(path))
    return content


def test_names_of_upstream_s_classes_are_written() -> None:
    backend = UpstreamObject("megatron.core.transformer.enums", "AttnBackend", (3,))
    other = UpstreamObject("megatron.nowhere", "Nothing", ("text", 2))
    file = io.BytesIO()
    write_pickle({"first": backend, "again": backend, "other": other, "tensor": torch.arange(3)}, file)
    # By Python's own unpickler: ours has the class under the same name.
    file.seek(0)
    with pytest.raises(ModuleNotFoundError, match="megatron.nowhere"):
        torch.load(file, weights_only=False)
    file = io.BytesIO()
    write_pickle({"first": backend, "again": backend, "tensor": torch.arange(3)}, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert found["first"].name == "unfused" and found["again"] is found["first"]
    assert found["tensor"].tolist() == [0, 1, 2]


def test_names_of_ranks() -> None:
    assert name_rank_directory(3, None, None) == "mp_rank_03"
    assert name_rank_directory(3, 12, None) == "mp_rank_03_012"
    assert name_rank_directory(3, None, 5) == "mp_rank_03_005"
    assert name_rank_directory(100, 12, 5) == "mp_rank_100_012_005"


LAYER = (
    "input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias",
    "self_attention.linear_proj.weight", "self_attention.q_layernorm.weight", "pre_mlp_layernorm.weight",
)  # fmt: skip
DENSE = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
EXPERTS = ("mlp.router.weight", "mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight")


@pytest.mark.parametrize(
    ("parts", "options", "expected"),
    [
        (DENSE, {}, ["input_layernorm.weight", "self_attention.linear_proj.weight",
                     "self_attention.linear_proj._extra_state", "self_attention.linear_qkv.weight",
                     "self_attention.linear_qkv.bias", "self_attention.linear_qkv._extra_state",
                     "self_attention.q_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight",
                     "mlp.linear_fc1._extra_state", "mlp.linear_fc2.weight", "mlp.linear_fc2._extra_state"]),
        (DENSE, {"fused": True}, ["self_attention.linear_proj.weight", "self_attention.linear_proj._extra_state",
                                  "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight",
                                  "self_attention.linear_qkv.bias", "self_attention.linear_qkv._extra_state",
                                  "self_attention.q_layernorm.weight", "mlp.linear_fc1.layer_norm_weight",
                                  "mlp.linear_fc1.weight", "mlp.linear_fc1._extra_state", "mlp.linear_fc2.weight",
                                  "mlp.linear_fc2._extra_state"]),
        (EXPERTS, {}, ["pre_mlp_layernorm.weight", "mlp.router.weight",
                       "mlp.experts.local_experts.0.linear_fc1.weight",
                       "mlp.experts.local_experts.0.linear_fc1._extra_state",
                       "mlp.experts.local_experts.0.linear_fc2.weight",
                       "mlp.experts.local_experts.0.linear_fc2._extra_state",
                       "mlp.experts.local_experts.1.linear_fc1.weight",
                       "mlp.experts.local_experts.1.linear_fc1._extra_state",
                       "mlp.experts.local_experts.1.linear_fc2.weight",
                       "mlp.experts.local_experts.1.linear_fc2._extra_state"]),
        (EXPERTS, {"grouped": True, "fused": True}, [
            "pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.experts.linear_fc1.weight0",
            "mlp.experts.linear_fc1.weight1", "mlp.experts.linear_fc1._extra_state", "mlp.experts.linear_fc2.weight0",
            "mlp.experts.linear_fc2.weight1", "mlp.experts.linear_fc2._extra_state"]),
    ],
)  # fmt: skip
def test_modules_in_upstream_s_order(parts: tuple[str, ...], options: dict[str, bool], expected: list[str]) -> None:
    names = [f"decoder.layers.4.{part}" for part in (*LAYER, *parts)]
    kinds = (Branch("attention"), Branch("experts" if parts == EXPERTS else "mlp"))
    layer = LayerPlan(5, "decoder.layers.4", kinds)
    chunk = [RankTensor(name, torch.full((2, 3), index), {}, 0, layer) for index, name in enumerate(names)]
    arranged = arrange(chunk, **{"fused": False, "grouped": False} | options)
    model = build_models([arranged])["model"]
    assert [name.removeprefix("decoder.layers.4.") for name in model][-len(expected) :] == expected
    assert model["decoder.layers.4.self_attention.linear_proj.weight"].unique().tolist() == [3]
    # Every expert has its own matrix.
    shapes = {tuple(tensor.shape) for name, tensor in model.items() if ".experts." in name and tensor is not None}
    assert shapes <= {(3,)}


def test_a_file_holds_upstream_s_settings(trained: Path) -> None:
    args = read_file(trained, 3)["args"].state
    assert args["num_layers"] == 2 and args["num_experts"] is None
    assert args["accumulate_allreduce_grads_in_fp32"] is False
    assert args["params_dtype"] == torch.float32 and args["main_grads_dtype"] == torch.float32
    assert args["padded_vocab_size"] == 64 and args["consumed_train_samples"] == 12 and args["iteration"] == 3
    assert args["attention_backend"].values == (5,) and args["exit_signal"].values == (15,)
    assert args["tensor_model_parallel_size"] == args["world_size"] == args["data_parallel_size"] == 1
    assert args["add_bias_linear"] is True and "disable_bias_linear" not in args
    given = ["--use-checkpoint-args", "--load", str(trained), "--hidden-dropout", "0.3"]
    required = "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 6 --mock-data"
    config = read_run_config([*required.split(), *given], {})
    assert config.model.hidden_size == 16 and config.data.seq_length == 16 and config.model.hidden_dropout == 0.3
    assert config.tokenizer.vocab_size == 50


def test_a_resumed_run_is_the_uninterrupted_one(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumed = train_tiny("--load", trained, "--ckpt-step", "3", "--hidden-dropout", "0", "--attention-dropout", "0.1")
    output = capsys.readouterr().out
    assert "model_optim_rng.pt, after 12 samples; random numbers start from --seed" in output
    assert resumed.progress.iteration == 6
    whole = prepare("--load", trained, "--hidden-dropout", "0")
    assert whole.progress.iteration == 6 and whole.optimizer.step_count == 6


@pytest.mark.parametrize("file_format", FILES)
def test_resumed_without_dropout_it_is_the_same_run(file_format: str, tmp_path: Path) -> None:
    dropout = ("--hidden-dropout", "0", "--attention-dropout", "0")
    whole = train_tiny(*dropout)
    saved = ("--save", tmp_path, "--ckpt-format", file_format, "--load", tmp_path)
    train_tiny(*dropout, *saved, "--exit-interval", "3")
    resumed = train_tiny(*dropout, *saved)
    assert differing(whole, resumed) == [] and resumed.progress == whole.progress


@pytest.mark.flags("--use-checkpoint-args")
def test_settings_are_taken_from_upstream_s_torch_dist(tmp_path: Path) -> None:
    train_tiny("--save", tmp_path, "--ckpt-format", "upstream_torch_dist", "--num-layers", "1", "--exit-interval", "1")
    required = "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 6 --mock-data --use-checkpoint-args"
    config = read_run_config([*required.split(), "--load", str(tmp_path)], {})
    assert config.model.num_layers == 1 and config.model.hidden_size == 16 and config.data.seq_length == 16


@pytest.mark.parametrize("file_format", FILES)
def test_a_damaged_file_is_passed_over(file_format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--save", tmp_path, "--save-interval", "3", "--ckpt-format", file_format, "--exit-interval", "6")
    train_tiny(*flags)
    file = tmp_path / "iter_0000006" / FILES[file_format]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{FILES[file_format]} is damaged: its checksum is"):
        prepare("--load", tmp_path, "--ckpt-step", "6")
    assert prepare("--load", tmp_path).progress.iteration == 3
    assert "is damaged: its checksum is" in capsys.readouterr().err
    # It has a manifest, as ours have, and not the rest of theirs.
    found = open_checkpoint(tmp_path, 3)
    assert found.format == f"{file_format.removeprefix('upstream_')} (upstream)"
    assert {"embedding.word_embeddings.weight"} <= {tensor.key for tensor in found.tensors}
    with pytest.raises(CheckpointError, match=r"\(upstream\), and only this program's own is averaged; convert each"):
        average_checkpoints(tmp_path, [3, 6], None, tmp_path / "averaged")


DEEPSEEK = """--swiglu --ffn-hidden-size 32 --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8
    --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --mtp-num-layers 1 --num-experts 2 --moe-router-topk 2
    --moe-layer-freq ([0]+[1]) --moe-ffn-hidden-size 16 --exit-interval 1"""


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("file_format", FILES)
def test_latent_attention_and_multi_token_prediction(file_format: str, implementation: str, tmp_path: Path) -> None:
    flags = (*DEEPSEEK.split(), "--transformer-impl", implementation)
    run = train_tiny("--save", tmp_path, "--ckpt-format", file_format, *flags)
    assert differing(run, prepare("--load", tmp_path, *flags)) == []
    if file_format == "torch":
        names = list(read_file(tmp_path, 1)["model"])
        norm = "linear_q_up_proj.layer_norm_weight" if implementation != "local" else "q_layernorm.weight"
        assert f"mtp.layers.0.mtp_model_layer.self_attention.{norm}" in names
        assert "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.1.linear_fc2.weight" in names
        assert names.index("mtp.layers.0.eh_proj.weight") + 1 == names.index("mtp.layers.0.eh_proj._extra_state")
        return
    keys = read_metadata(tmp_path / "iter_0000001" / ".metadata").state_dict_metadata
    assert keys["mtp.layers.0.mtp_model_layer.mlp.experts.experts.linear_fc1.weight"].size == (2, 32, 16)
    assert "mtp.layers.0.mtp_model_layer.mlp.experts.experts.linear_fc1._extra_state/shard_1_2" in keys
    assert "decoder.layers.1.self_attention.linear_proj._extra_state/shard_0_1" in keys
    assert ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in keys) == (implementation != "local")


@pytest.mark.flags("--no-save-optim", "--no-save-rng")
def test_parts_can_be_left_out(tmp_path: Path) -> None:
    train_tiny("--save", tmp_path, "--ckpt-format", "torch", "--no-save-optim", "--no-save-rng")
    content = read_file(tmp_path, 6)
    assert not {"optimizer", "opt_param_scheduler", "rng_state"} & content.keys()
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        prepare("--load", tmp_path)
    assert prepare("--load", tmp_path, "--no-load-optim").progress.iteration == 6


def test_an_optimizer_with_16_bit_parameters(tmp_path: Path) -> None:
    run = train_tiny("--save", tmp_path, "--ckpt-format", "torch", "--fp16", "--initial-loss-scale", "256")
    optimizer = read_file(tmp_path, 6)["optimizer"]
    assert optimizer["grad_scaler"]["scale"].tolist() == [256.0] and optimizer["grad_scaler"]["growth_tracker"] == 6
    main, groups = optimizer["fp32_from_fp16_params"], optimizer["optimizer"]["param_groups"]
    assert [len(group) for group in main] == [len(group["params"]) for group in groups]
    assert {tensor.dtype for group in main for tensor in group} == {torch.float32}
    assert differing(run, prepare("--load", tmp_path, "--fp16")) == []


@pytest.mark.flags("--ckpt-convert-format")
def test_conversion_there_and_back(tmp_path: Path) -> None:
    run = train_tiny("--save", tmp_path / "first")
    steps = (("first", "torch"), ("there/torch", "upstream_torch_dist"), ("there/upstream_torch_dist", "torch_dist"))
    for source, target in steps:
        place = "back" if target == "torch_dist" else "there"
        convert = ("--ckpt-convert-format", target, "--ckpt-convert-save", tmp_path / place)
        config = read_run_config([*FLAGS.split(), *map(str, ("--load", tmp_path / source, *convert))], {})
        datasets = lambda counts: [RandomTokens(n) if n else None for n in counts]  # noqa: E731
        run_recipe(config, dataclasses.replace(build_gpt_recipe(config), build_datasets=datasets))
    assert (tmp_path / "there" / "torch" / "iter_0000006" / "mp_rank_00").is_dir()
    assert differing(run, prepare("--load", tmp_path / "back" / "torch_dist")) == []


def test_a_full_disk_costs_no_earlier_checkpoint(tmp_path: Path) -> None:
    flags = ("--save", tmp_path, "--ckpt-format", "torch", "--load", tmp_path)
    train_tiny(*flags, "--exit-interval", "3")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(StorageError, match=r"mp_rank_00/model_optim_rng.pt: File too large"):
            train_tiny(*flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "failures.jsonl", "iter_0000003", "latest_checkpointed_iteration.txt", "ledger.jsonl",
    ]  # fmt: skip
    assert prepare(*flags).progress.iteration == 3


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("output", [(), ("--untie-embeddings-and-output-weights", "--use-distributed-optimizer")])
def test_learning_rates_of_their_own(form: str, output: tuple[str, ...], tmp_path: Path) -> None:
    """The state of embedding and output layer is in a group of its own, and comes back from there."""
    flags = (*output, "--decoupled-lr", "3e-3", "--decoupled-min-lr", "1e-4", "--hidden-dropout", "0",
             "--attention-dropout", "0")  # fmt: skip
    both = (*flags, "--save", tmp_path, "--load", tmp_path, "--ckpt-format", form)
    train_tiny(*both, "--exit-interval", "3")
    if form == "torch":
        groups = read_file(tmp_path, 3)["optimizer"]["param_groups"]
        found = [(g["is_decoupled_lr"], g["wd_mult"], g["max_lr"], g["min_lr"], len(g["params"])) for g in groups]
        assert found[1] == (True, 1.0, 3e-3, 1e-4, 2 if output else 1)
        assert [(row[0], row[1], row[2]) for row in (found[0], found[2])] == [(False, 1.0, 1e-2), (False, 0.0, 1e-2)]
        assert groups[1]["lr"] < 3e-3 and groups[1]["default_config"] is False
    assert differing(train_tiny(*both), train_tiny(*flags)) == []


REFUSED = [
    ("--async-save --save x", "--ckpt-format torch is written while training waits; leave out --async-save"),
    ("--optimizer muon", "--ckpt-format torch has no place for the optimizer's state with --optimizer muon"),
    (
        "--hybrid-layer-pattern G --apply-layernorm-1p --no-linear-norm-1p",
        "--ckpt-format torch stores norms of delta nets less one; leave out --no-linear-norm-1p",
    ),
    ("--hybrid-layer-pattern MK", r"--ckpt-format torch has no names for Kimi delta attention \(letter K\)"),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_what_upstream_has_no_place_for_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_config(f"{flags} --ckpt-format torch")


def test_layouts_that_upstream_s_ranks_do_not_have(tmp_path: Path) -> None:
    experts = "--num-experts 4 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    with pytest.raises(ConfigError, match="--expert-tensor-parallel-size 1 divides experts otherwise; use the size 2"):
        run_config(f"{experts} --expert-tensor-parallel-size 1 --ckpt-format torch", world_size=2)
    with pytest.raises(ConfigError, match="--pipeline-schedule zb-v lays them out otherwise"):
        run_config(
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers 4 --ckpt-format torch", world_size=2
        )


def run_convert(monkeypatch: pytest.MonkeyPatch, command: str) -> int:
    """tools/checkpoint/convert.py with this command line, in this process."""
    program = ["python", "tools/checkpoint/convert.py"]
    words = command.split()
    assert words[:2] == program
    monkeypatch.setattr(sys, "argv", words[1:])
    code: int = convert.main()
    return code


LLAMA = ("--swiglu", "--ffn-hidden-size", "32", "--disable-bias-linear", "--normalization", "RMSNorm",
         "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights")  # fmt: skip


def test_upstream_s_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"
    trained = train_tiny("--save", tmp_path / "ours", "--exit-interval", "2", *LLAMA)
    program = "python tools/checkpoint/convert.py --model-type GPT"
    places = f"--load-dir {tmp_path}/ours --save-dir {tmp_path}/ranks"
    assert run_convert(monkeypatch, f"{program} --loader core --saver core {places} {layout}") == 0
    assert "the optimizer's state is left out" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "ranks" / "iter_0000002").iterdir())
    assert names == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    loaded = prepare("--load", tmp_path / "ranks", "--no-load-optim", *LLAMA)
    assert loaded.progress.iteration == 2
    weights = {name: tensor for name, tensor in values(trained) if " of " not in name}
    assert_weights(loaded, weights)

    # To Hugging Face's programs, and from there to the ranks of upstream.
    places = f"--load-dir {tmp_path}/ours --save-dir {tmp_path}/hf"
    assert run_convert(monkeypatch, f"{program} --saver hf --no-checking {places}") == 0
    places = f"--load-dir {tmp_path}/hf --save-dir {tmp_path}/release"
    assert run_convert(monkeypatch, f"{program} --loader llama_mistral --no-checking {places} {layout}") == 0
    assert (tmp_path / "release" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert len(list((tmp_path / "release" / "release").iterdir())) == 4
    assert_weights(prepare("--pretrained-checkpoint", tmp_path / "release", *LLAMA), weights)
    places = f"--load-dir {tmp_path}/hf --save-dir {tmp_path}/dist"
    assert run_convert(monkeypatch, f"{program} --loader hf --saver torch_dist --no-checking {places}") == 0
    assert_weights(prepare("--pretrained-checkpoint", tmp_path / "dist", *LLAMA), weights)


def assert_weights(run: Any, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in values(run):
        if " of " not in name:
            rows = 50 if len(tensor) == 64 and name.startswith(("embedding.", "output_layer.")) else len(tensor)
            assert torch.equal(tensor[:rows], expected[name][:rows]), name


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--model-type BERT", "--model-type BERT is not converted; give GPT"),
        (
            "--model-type GPT --loader legacy",
            "--loader legacy is not known: the layers before Megatron-Core's are",
        ),
        ("--model-type GPT --saver picture", "--saver picture is not known; give one of core, mcore"),
        ("--model-type GPT --checkpoint-type meta", "--checkpoint-type meta is not read"),
        ("--model-type GPT --target-expert-parallel-size 2", "--target-expert-parallel-size 2 is not written here"),
        ("--model-type GPT --target-tensor-parallel-size 0", "must be at least 1"),
        ("--model-type GPT --nothing", "unrecognized arguments: --nothing; see python tools/checkpoint/convert.py"),
    ],
)
def test_what_upstream_s_converter_is_told(command: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_arguments(convert.translate([*command.split(), "--load-dir", "a", "--save-dir", "b"]))


def test_its_errors_name_its_own_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "python tools/checkpoint/convert.py --model-type GPT"
    for flags, sentence in (
        (f"--loader hf --load-dir {tmp_path}/no--input-path", f"error: --load-dir {tmp_path}/no--input-path does not"),
        ("--load-dir a --target-tensor-parallel-size 0", "error: --target-tensor-parallel-size 0 must be at least 1"),
    ):
        assert run_convert(monkeypatch, f"{program} {flags} --save-dir {tmp_path}/new") == 2
        assert capsys.readouterr().err.startswith(sentence)


def test_a_layout_that_the_model_cannot_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_tiny("--save", tmp_path / "ours", "--exit-interval", "1")
    arguments = ["--source", "megatron", "--target", "megatron", "--ckpt-format", "torch", "--target-tp", "3"]
    arguments += ["--input-path", str(tmp_path / "ours"), "--output-path", str(tmp_path / "new")]
    with pytest.raises(ConfigError, match="--num-attention-heads 2"):
        bridge_convert(parse_arguments(arguments))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="--ckpt-format torch is a format of --target megatron"):
        parse_arguments(["--source", "megatron", "--target", "hf", "--ckpt-format", "torch", *arguments[8:]])
