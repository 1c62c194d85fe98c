# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from a converted model: rows beyond the tokenizer's tokens, special tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.directory import find_directory
from megatron.core.errors import CheckpointError, ConfigError
from megatron.hf.conversion import import_model, open_source
from megatron.hf.running import HuggingFaceFiles
from megatron.training.checkpoint.foreign_files import save_foreign
from megatron.training.flags.read import read_run_config
from megatron.training.loop import train
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.recipes.hf_config import list_model_flags, read_model_fields
from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size
from megatron.training.run import Run
from megatron.training.verify.parity import open_local_run
from tests.preprocess_runs import DATA
from tests.unit.training.recipes.test_model_families import make

pytest.importorskip("transformers")

TOKENIZER = DATA / "tok" / "hf_bpe1k"
RUN = (
    "--seq-length 16 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --eval-iters 0 --mock-data --num-workers 0 "
    f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {TOKENIZER}"
).split()
ROWS = 1100


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 1100 rows for a tokenizer of 1000 tokens, which names no end of a text; converted."""
    root = tmp_path_factory.mktemp("model")
    make("Llama", vocab_size=ROWS, eos_token_id=None, bos_token_id=None).save_pretrained(root / "hf")
    for file in TOKENIZER.glob("*.json"):
        shutil.copy(file, root / "hf")
    import_model(open_source(root / "hf"), root / "ours")
    return root


@contextlib.contextmanager
def open_run(*flags: str | Path) -> Iterator[Run]:
    config = read_run_config([*RUN, *map(str, flags)], {})
    recipe = dataclasses.replace(build_gpt_recipe(config), foreign_files=HuggingFaceFiles())
    with open_local_run(config, recipe, 0) as run:
        yield run


@pytest.mark.flags("--use-checkpoint-args")
@pytest.mark.parametrize("form", ["ours", "hf"])
def test_a_tokenizer_that_fits_takes_the_rows_of_the_checkpoint(form: str, converted: Path) -> None:
    place = str(converted / "ours") if form == "ours" else f"hf:{converted / 'hf'}"
    load = ["--pretrained-checkpoint", place, "--use-checkpoint-args"]
    with open_run(*load) as run:
        assert run.recipe.vocab_size == ROWS
        train(run)
    # They are no multiple of 128; 8 ranks need 4 more, and other padding is for those who ask for it.
    asked = ["--make-vocab-size-divisible-by", "128"]
    for ranks, more, rows in ((1, [], 1100), (2, [], 1100), (4, [], 1100), (8, [], 1104), (2, asked, 1280)):
        flags = [*RUN, *load, "--tensor-model-parallel-size", str(ranks), "--num-attention-heads", "8", *more]
        config = read_run_config(
            [*flags, "--num-query-groups", "8"] if ranks > 2 else flags, {"WORLD_SIZE": str(ranks)}
        )
        assert compute_padded_vocab_size(config, build_tokenizer(config)) == rows


def test_without_the_flag_the_refusal_names_it(converted: Path) -> None:
    where = converted / "hf" / "config.json"
    flags = list_model_flags(read_model_fields(where), where)
    flags = flags[: flags.index("--tokenizer-type")]
    with (
        pytest.raises(CheckpointError, match=r"\(--use-checkpoint-args, or --vocab-size 1100, takes all rows of the"),
        open_run("--pretrained-checkpoint", converted / "ours", *flags),
    ):
        pass


def test_a_tokenizer_that_does_not_fit(converted: Path) -> None:
    config = read_run_config(
        [*RUN, "--load", str(converted / "ours"), "--use-checkpoint-args", "--vocab-extra-ids", "200"], {}
    )
    with pytest.raises(ConfigError, match="the checkpoint has rows for 1100 tokens, and the tokenizer has 1200"):
        compute_padded_vocab_size(config, build_tokenizer(config))


@pytest.mark.flags("--save-hf")
def test_null_stays_null(converted: Path, tmp_path: Path) -> None:
    """Also behind a checkpoint of the run's own, and one more."""
    more = ("--use-checkpoint-args", "--save", tmp_path / "ours", "--override-opt-param-scheduler")
    before = json.loads((converted / "hf" / "config.json").read_text())
    assert before["eos_token_id"] is None
    for number, flags in enumerate(
        (
            ("--pretrained-checkpoint", converted / "ours"),
            ("--load", tmp_path / "ours", "--train-iters", "2"),
        )
    ):
        result = tmp_path / f"hf{number}"
        with open_run(*more, *flags, "--save-hf", result, "--save-interval", "1") as run:
            train(run)
            save_foreign(run)
        assert json.loads((result / "config.json").read_text()) == before
        assert (result / "generation_config.json").is_file()
    saved = find_directory(tmp_path / "ours")
    assert saved is not None and saved.name == "iter_0000002"


@pytest.mark.flags("--save-hf")
def test_null_stays_null_with_as_many_rows_as_tokens(tmp_path: Path) -> None:
    """Where nothing but the way through a checkpoint of ours could change it."""
    make("Llama", vocab_size=1000, eos_token_id=None, bos_token_id=None).save_pretrained(tmp_path / "hf")
    for file in TOKENIZER.glob("*.json"):
        shutil.copy(file, tmp_path / "hf")
    import_model(open_source(tmp_path / "hf"), tmp_path / "ours")
    flags = ["--pretrained-checkpoint", tmp_path / "ours", "--use-checkpoint-args"]
    with open_run(*flags, "--make-vocab-size-divisible-by", "8", "--save-hf", tmp_path / "result") as run:
        train(run)
        save_foreign(run)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "result"))
    assert before["eos_token_id"] is None and after == before
