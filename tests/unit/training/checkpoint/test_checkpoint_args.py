# SPDX-License-Identifier: Apache-2.0
"""--use-checkpoint-args and what comes with it, checkpoints that go again, and --deterministic-mode."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron.core.config_base import get_settings
from megatron.core.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.container import RunConfig
from megatron.training.flags.from_checkpoint import list_model_settings
from megatron.training.flags.read import read_run_config
from tests.support.tiny_training import FLAGS, differing, train_tiny

MODEL = (
    "--swiglu --normalization RMSNorm --num-layers 3 --position-embedding-type rope --ffn-hidden-size 48 "
    "--group-query-attention --num-query-groups 1 --untie-embeddings-and-output-weights --qk-layernorm "
    "--window-size 7,0 --hidden-dropout 0"
).split()
RUN = "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 6 --mock-data --eval-iters 0 --num-workers 0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoint")
    train_tiny(*MODEL, "--save", root, "--save-interval", "6")
    return root


def read(*flags: str | Path) -> RunConfig:
    return read_run_config([*RUN.split(), *map(str, flags)], {})


@pytest.mark.flags("--use-checkpoint-args")
def test_the_model_is_the_checkpoints(saved: Path) -> None:
    written = read_run_config([*FLAGS.split(), *MODEL], {})
    found = read("--load", saved, "--use-checkpoint-args", "--attention-dropout", "0.25")
    assert found.model.attention_dropout == 0.25, "the command line wins"
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_query_groups", "normalization", "hidden_dropout",
                 "gated_linear_unit", "qk_layernorm", "add_qkv_bias", "kv_channels"):  # fmt: skip
        assert getattr(found.model, name) == getattr(written.model, name), name
    for name in vars(written.gpt):
        assert getattr(found.gpt, name) == getattr(written.gpt, name), name
    assert found.data.seq_length == written.data.seq_length
    assert found.tokenizer == written.tokenizer
    assert found.sources["--num-layers"] == "checkpoint"
    assert found.sources["--lr"] == "command line"
    with pytest.raises(ConfigError, match="--num-layers"):
        read("--load", saved)


def test_the_model_is_the_pretrained_checkpoints_until_the_run_has_one(saved: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    flags = ("--pretrained-checkpoint", saved, "--load", tuned, "--save", tuned, "--use-checkpoint-args")
    assert read(*flags).model.num_layers == 3
    shutil.copytree(saved, tuned)
    assert read("--pretrained-checkpoint", tmp_path / "none", *flags[2:]).model.num_layers == 3
    with pytest.raises(ConfigError, match="--use-checkpoint-args: .*none does not exist; write the flags out$"):
        read("--pretrained-checkpoint", tmp_path / "none", "--load", tmp_path / "none2", "--use-checkpoint-args")


def test_no_setting_of_the_model_is_forgotten() -> None:
    """Without one of them the checkpoint would be refused as another model's."""
    settings = get_settings(TransformerConfig)
    model = {name for name, setting in settings.items() if setting.kind in ("shape", "function")}
    flags = {name for name in model if settings[name].name.startswith("--")}
    assert flags - list_model_settings() == set()


def test_a_run_goes_on_with_the_checkpoints_model(saved: Path, tmp_path: Path) -> None:
    """FLAGS say two layers and learned positions; without them the run is the saved one."""
    flags = ("--load", saved, "--use-checkpoint-args", "--num-layers", "3", "--train-iters", "6")
    again = train_tiny(*flags, "--max-position-embeddings", "16", "--hidden-dropout", "0")
    plain = train_tiny("--load", saved, *MODEL)
    assert again.progress.iteration == 6 and differing(again, plain) == []


@pytest.mark.flags("--use-tokenizer-model-from-checkpoint-args")
def test_the_tokenizer_is_the_checkpoints_unless_told_otherwise(saved: Path) -> None:
    flags = ("--load", saved, "--use-checkpoint-args", "--vocab-size", "70")
    assert read(*flags).tokenizer.tokenizer_type == "NullTokenizer"
    found = read(*flags, "--no-use-tokenizer-model-from-checkpoint-args")
    assert found.tokenizer.tokenizer_type == "GPT2BPETokenizer", "the default"


@pytest.mark.flags("--use-mp-args-from-checkpoint-args")
def test_sizes_are_the_command_lines_unless_told_otherwise(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "iter_0000006"
    path.mkdir()
    text = (saved / "iter_0000006" / "config.json").read_text()
    changed = text.replace('"tensor_model_parallel_size": 1', '"tensor_model_parallel_size": 2')
    assert changed != text
    (path / "config.json").write_text(changed)
    flags = [*RUN.split(), "--load", str(tmp_path), "--use-checkpoint-args", "--num-query-groups", "2"]
    assert read_run_config(flags, {"WORLD_SIZE": "2"}).model.tensor_model_parallel_size == 1
    flags.append("--use-mp-args-from-checkpoint-args")
    assert read_run_config(flags, {"WORLD_SIZE": "2"}).model.tensor_model_parallel_size == 2


def test_checkpoints_that_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    with pytest.raises(ConfigError, match="--use-checkpoint-args needs --load or --pretrained-checkpoint"):
        read("--use-checkpoint-args")
    with pytest.raises(ConfigError, match="holds no checkpoint with settings; write the flags out$"):
        read("--use-checkpoint-args", "--load", tmp_path)
    with pytest.raises(
        ConfigError, match="--use-checkpoint-args: .*none does not exist; write the flags out$"
    ) as found:
        read("--use-checkpoint-args", "--load", tmp_path / "none")
    assert len(found.value.problems) == 1, "what the checkpoint was to say is not asked of the user"
    for content in ("{", "[]", '{"model": 3}'):
        (tmp_path / "iter_0000001" / "config.json").write_text(content)
        with pytest.raises(ConfigError, match="holds no settings that can be used"):
            read("--use-checkpoint-args", "--load", tmp_path)
    fresh = read_run_config(
        [*FLAGS.split(), "--use-checkpoint-args", "--load", "/none", "--save", "/none", "--save-interval", "1"], {}
    )
    assert any("holds no checkpoint yet" in note for note in fresh.notes)


@pytest.mark.flags("--save-retain-interval")
def test_save_retain_interval(tmp_path: Path) -> None:
    flags = ("--save", tmp_path / "some", "--save-interval", "1", "--save-retain-interval", "3")
    train_tiny(*flags, "--load", tmp_path / "some", "--exit-interval", "5")
    names = lambda root: sorted(path.name for path in root.glob("iter_*"))  # noqa: E731
    assert names(tmp_path / "some") == ["iter_0000003", "iter_0000005"]
    train_tiny(*flags, "--load", tmp_path / "some")
    assert names(tmp_path / "some") == ["iter_0000003", "iter_0000006"]
    train_tiny("--save", tmp_path / "all", "--save-interval", "3")
    train_tiny("--save", tmp_path / "all", "--save-interval", "2", "--save-retain-interval", "4", "--load",
               tmp_path / "some", "--ckpt-step", "3")  # fmt: skip
    assert names(tmp_path / "all") == ["iter_0000003", "iter_0000004", "iter_0000006"], "not what another run saved"


@pytest.mark.flags("--keep-last")
def test_keep_last(tmp_path: Path) -> None:
    def names(root: Path) -> list[int]:
        return sorted(int(path.name.removeprefix("iter_")) for path in root.glob("iter_*") if "." not in path.name)

    root, elsewhere = tmp_path / "ckpt", tmp_path / "elsewhere"
    flags = ("--save", root, "--load", root, "--save-interval", "1")
    train_tiny(*flags, "--keep-last", "2", "--exit-interval", "3")
    assert names(root) == [2, 3]
    # A link, and a checkpoint that has lost the end of a file: neither counts, and both stay.
    shutil.move(root / "iter_0000002", elsewhere)
    (root / "iter_0000002").symlink_to(elsewhere)
    os.truncate(shutil.copytree(root / "iter_0000003", root / "iter_0000001") / "__0_0.distcp", 100)
    (root / "notes").mkdir()
    assert train_tiny(*flags, "--keep-last", "2", "--exit-interval", "4").progress.iteration == 4
    assert names(root) == [1, 2, 3, 4]
    train_tiny(*flags, "--keep-last", "1", "--save-retain-interval", "5")
    assert names(root) == [1, 2, 5, 6] and (root / "notes").is_dir()
    assert (root / "iter_0000002").is_symlink() and (elsewhere / "manifest.json").exists()
    train_tiny("--save", root, "--save-interval", "2", "--keep-last", "1", "--exit-interval", "4", "--start-over")
    assert names(root) == [1, 4, 5, 6], "another run's, and those beyond, are not ours to remove"
    assert (elsewhere / "manifest.json").exists(), "a save in the place of a link replaces the link"


@pytest.mark.flags("--deterministic-mode")
def test_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    plain = train_tiny("--train-iters", "3")
    assert not torch.are_deterministic_algorithms_enabled() and "NCCL_ALGO" not in os.environ
    try:
        run = train_tiny("--train-iters", "3", "--deterministic-mode")
        assert torch.are_deterministic_algorithms_enabled()
        assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
    finally:
        torch.use_deterministic_algorithms(False)
    assert differing(run, plain) == [], "on a CPU they are the usual ones"
