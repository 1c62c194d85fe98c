# SPDX-License-Identifier: Apache-2.0
"""--save-adapter-only: what is saved, how a run goes on from it, and where the rest of the model is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.state_dicts import load_tensors_metadata
from megatron.core.errors import CheckpointError, ConfigError
from megatron.hf.checkpoints import OpenCheckpoint
from megatron.training.checkpoint.trained_model import load_trained_model
from tests.support.tiny_training import differing, prepare, train_tiny

ADAPTED = ("--lora-rank", "2", "--lora-dropout", "0.1", "--save-adapter-only")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model in `base`, and three of six steps of its adapters in `adapted`."""
    directory = tmp_path_factory.mktemp("adapter-saves")
    train_tiny("--save", directory / "base", "--train-iters", "2")
    train_tiny(*adapting(directory), "--exit-interval", "3")
    return directory


def adapting(directory: Path, name: str = "adapted") -> tuple[str | Path, ...]:
    places = ("--pretrained-checkpoint", directory / "base", "--save", directory / name, "--load", directory / name)
    return (*ADAPTED, *places)


@pytest.mark.flags("--save-adapter-only")
def test_a_run_goes_on_from_adapters_alone(made: Path) -> None:
    saved = load_tensors_metadata(made / "adapted" / "iter_0000003")
    assert all(".adapter." in key or key.startswith("rng_state.") for key in saved)
    assert sum(key.startswith("optimizer.state.exp_avg.") for key in saved) == 2 * 4 * 2

    whole = train_tiny(*ADAPTED[:-1], "--pretrained-checkpoint", made / "base")
    parts = train_tiny(*adapting(made))
    assert parts.progress.iteration == 6 and differing(whole, parts) == []

    # Programs that use the checkpoint see the whole model.
    weights = dict(whole.model[0].module.named_parameters())
    used = dict(load_trained_model(made / "adapted").model.named_parameters())
    assert weights.keys() == used.keys() and all(torch.equal(used[name], weights[name]) for name in used)
    opened = OpenCheckpoint(made / "adapted")
    assert all(torch.equal(opened.read(name), weights[name][: opened.read_shape(name)[0]]) for name in opened.contents)


def test_the_rest_of_the_model_must_be_the_one_of_the_beginning(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "base", tmp_path / "here" / "base")
    train_tiny(*adapting(tmp_path / "here"), "--exit-interval", "1")
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(CheckpointError, match="has only adapters.* is no longer in .*here/base/iter_0000002"):
        load_trained_model(tmp_path / "there" / "adapted")
    # It has gone elsewhere, with --pretrained-checkpoint.
    train_tiny(*adapting(tmp_path / "there"), "--exit-interval", "2")
    shutil.rmtree(tmp_path / "there" / "base")
    train_tiny("--save", tmp_path / "there" / "base", "--train-iters", "2")
    with pytest.raises(CheckpointError, match="was saved by another run"):
        prepare(*adapting(tmp_path / "there"))


def test_a_run_that_could_not_name_its_model_is_refused(made: Path, tmp_path: Path) -> None:
    places = ("--save", tmp_path / "new", "--load", tmp_path / "new")
    for flags, said in (
        ((), "--save-adapter-only needs --pretrained-checkpoint DIR"),
        (("--pretrained-checkpoint", f"hf:{made}"), "a Hugging Face directory becomes one"),
        (
            ("--pretrained-checkpoint", made / "base", "--ckpt-format", "torch"),
            "for Megatron-LM, which has no adapters",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            prepare(*ADAPTED, *places, *flags)
    whole = adapting(made, "whole")
    train_tiny(*(flag for flag in whole if flag != "--save-adapter-only"), "--exit-interval", "1")
    with pytest.raises(
        CheckpointError, match="start it with --pretrained-checkpoint and one of this program, not from"
    ):
        prepare(*whole)
