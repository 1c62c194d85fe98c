# SPDX-License-Identifier: Apache-2.0
"""--load hf:DIR and --save-hf on one process: the same run as from a converted checkpoint, what is refused, and parts
of tensors read from files."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.errors import CheckpointError, ConfigError, MegatronError
from megatron.hf.conversion import import_model, open_source
from megatron.hf.running import HuggingFaceFiles
from megatron.hf.tensor_files import open_tensors
from megatron.training.checkpoint.foreign_files import save_foreign
from megatron.training.checkpoint.restore import load_checkpoint
from megatron.training.checkpoint.save import convert_checkpoint
from megatron.training.flags.read import examine, read_run_config
from megatron.training.loop import train
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.run import Run
from megatron.training.verify.parity import open_local_run
from tests.functional.pretrain_runs import run as run_program
from tests.functional.pretrain_runs import run_ranks
from tests.support.family_models import ODD, TOKENIZER, make_model
from tests.unit.hf.test_bridge import assert_same_tensors, read_all
from tests.unit.hf.test_converted_prediction import save_with_prediction
from tests.unit.hf.test_refused_conversions import BAD
from tests.unit.training.recipes.test_model_families import make

transformers = pytest.importorskip("transformers")

RUN = (
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 1 --mock-data --eval-iters 0 "
    "--num-workers 0 --log-interval 1"
).split()


@contextlib.contextmanager
def open_run(*flags: str | Path) -> Iterator[Run]:
    config = read_run_config([*RUN, *map(str, flags)], {})
    recipe = dataclasses.replace(build_gpt_recipe(config), foreign_files=HuggingFaceFiles())
    with open_local_run(config, recipe, 0) as run:
        yield run


@pytest.fixture(scope="module")
def hf_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16, in several shards, with a tokenizer."""
    directory = tmp_path_factory.mktemp("llama") / "hf"
    make("Llama", **ODD | {"vocab_size": 1009}).to(torch.bfloat16).save_pretrained(directory, max_shard_size="100KB")
    for file in TOKENIZER.glob("*.json"):
        shutil.copy(file, directory)
    return directory


# ---- runs


@pytest.mark.flags("--load", "--pretrained-checkpoint", "--use-checkpoint-args", "--save-hf")
def test_a_run_from_a_directory_is_the_run_from_its_checkpoint(hf_directory: Path, tmp_path: Path) -> None:
    """Weights, settings and tokenizer; and what it leaves behind opens in transformers, and is replaced by the next."""
    import_model(open_source(hf_directory), tmp_path / "ours", verify=False)
    hf = f"hf:{hf_directory}"
    new = tmp_path / "new"
    starts: list[tuple[str | Path, ...]] = [
        ("--load", hf),
        ("--pretrained-checkpoint", hf),
        ("--pretrained-checkpoint", hf, "--load", new, "--save", new),
        ("--pretrained-checkpoint", tmp_path / "ours"),
    ]
    results = []
    for number, start in enumerate(starts):
        with open_run(*start, "--use-checkpoint-args", "--bf16", "--save-hf", tmp_path / "result") as run:
            assert run.recipe.vocab_size == 1009 and run.recipe.tokenizer.tokenize("def main") != []
            assert run.progress.iteration == 0
            if number == 0:
                held = {name: value.clone() for name, value in run.model[0].module.state_dict().items()}
            assert all(torch.equal(held[name], value) for name, value in run.model[0].module.state_dict().items())
            train(run)
            save_foreign(run)
        results.append(read_all(tmp_path / "result"))
    for result in results[1:]:
        assert_same_tensors(result, results[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert model.dtype == torch.bfloat16
    assert_same_tensors(dict(model.state_dict()), results[0])
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "result")("def main")["input_ids"]) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "ours", "result"]


def test_the_directory_it_started_from_describes_the_result(hf_directory: Path, tmp_path: Path) -> None:
    """Fields of config.json that nothing here reads are kept. Loaded, converted, nothing trained."""
    flags = ("--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", tmp_path / "ours", "--bf16")
    with open_run("--load", f"hf:{hf_directory}", "--use-checkpoint-args", *flags, "--save-hf", tmp_path / "hf") as run:
        convert_checkpoint(run)
        save_foreign(run)
    assert_same_tensors(read_all(tmp_path / "hf"), read_all(hf_directory))
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "hf" / name).read_text()) == json.loads((hf_directory / name).read_text())
    assert len(list((tmp_path / "ours").glob("**/iter_0000000"))) == 1


def test_a_run_with_or_without_the_layers_that_predict_further_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = save_with_prediction("GLM 4.5", tmp_path / "hf")
    flags = ("--load", f"hf:{tmp_path / 'hf'}", "--use-checkpoint-args", "--lr", "0", "--weight-decay", "0")
    for further, kept in (
        ((), expected),
        (("--mtp-num-layers", "0"), {n: x for n, x in expected.items() if not n.startswith("model.layers.4.")}),
    ):
        with open_run(*flags, *further, "--moe-router-bias-update-rate", "0", "--save-hf", tmp_path / "result") as run:
            train(run)
            save_foreign(run)
        assert_same_tensors(read_all(tmp_path / "result"), kept)
    left_out = len(expected) - len(kept)
    assert f"note: {left_out} tensors of layers behind the 4 of the model are left out" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["GPT-2, GPT-3", "Phi-3", "Qwen 2 MoE", "Llama, tied"])
def test_main_parameters_come_from_the_files(name: str, tmp_path: Path) -> None:
    """Every form of a row is read by parts; float32 values stay whole behind 16-bit weights where that is asked for."""
    make_model(name).save_pretrained(tmp_path / "hf")
    values = read_all(tmp_path / "hf")
    flags = ("--load", f"hf:{tmp_path}/hf", "--use-checkpoint-args", "--bf16", "--make-vocab-size-divisible-by", "64")
    for further, exact in (((), False), (("--load-main-params-from-ckpt",), True)):
        with open_run(*flags, *further, "--train-iters", "1", "--lr", "0", "--weight-decay", "0") as run:
            source = open_source(tmp_path / "hf")
            main = {
                key: state["main_param"] for key, state in run.optimizer.named_state().items() if "main_param" in state
            }
            for entry in source.entries:
                whole = entry.join(values.__getitem__)
                if entry.key in main:
                    found = main[entry.key].view(-1, *whole.shape[1:])[: len(whole)]
                    assert torch.equal(found, whole if exact else whole.bfloat16().float()), entry.key
            assert len(main) > 10


def test_without_initialization_padding_is_no_garbage(hf_directory: Path) -> None:
    flags = ("--use-checkpoint-args", "--no-initialization", "--make-vocab-size-divisible-by", "64")
    with open_run("--load", f"hf:{hf_directory}", *flags) as run:
        table = run.model[0].module.embedding.word_embeddings.weight
        assert len(table) > 1009 and not table[1009:].any()


# ---- refusals


def problems_of(*flags: str | Path) -> str:
    return " | ".join(problem.text for problem in examine([*RUN, *map(str, flags)], {}).problems)


def test_flags_that_contradict(hf_directory: Path, tmp_path: Path) -> None:
    hf = ("--load", f"hf:{hf_directory}", "--use-checkpoint-args")
    assert problems_of(*hf) == ""
    for flags, message in (
        (("--ckpt-step", "3"), "--ckpt-step 3: --load hf:.* has no iterations; leave it out"),
        (("--override-ckpt-iteration", "3"), "--override-ckpt-iteration 3: --load hf:.* has no iterations"),
        (("--pretrained-checkpoint", tmp_path), "has weights, so that --pretrained-checkpoint would never be read"),
        (("--save", "hf:x"), "--save hf:x: hf: belongs to --load; --save-hf names a directory to write"),
        (("--save-hf", "hf:x"), "--save-hf hf:x: hf: belongs to --load"),
        (("--geglu",), "--geglu"),
    ):
        assert re.search(message, problems_of(*hf, *flags)), message
    assert "nowhere does not exist" in problems_of("--load", "hf:nowhere", "--use-checkpoint-args")


def test_other_settings_than_those_of_the_directory(hf_directory: Path) -> None:
    """The command line wins, with a note; then the weights do not fit, and the flags that differ are named."""
    hf = ("--load", f"hf:{hf_directory}", "--use-checkpoint-args")
    noted = examine([*RUN, *map(str, hf), "--num-layers", "2"], {}).config.notes
    assert any(re.search("--num-layers 2 is given; .*config.json has 4", note) for note in noted)
    for flags, message in (
        (("--num-layers", "2"), "settings: --num-layers was 4 in the checkpoint, is 2 now"),
        (("--rotary-base", "500"), "is of another model: --rotary-base was 10000 in the checkpoint, is 500 now"),
        (("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"), "embedding.* is .1009, 72.* in the checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=message), open_run(*hf, *flags):
            pass
    with open_run(*hf, "--rotary-base", "500", "--override-model-settings"):
        pass


@pytest.mark.parametrize("name", BAD)
def test_bad_directories(name: str, hf_directory: Path, tmp_path: Path) -> None:
    """The sentences of the converter; nothing is executed or written."""
    spoil, message = BAD[name]
    bad = Path(shutil.copytree(hf_directory, tmp_path / "hf"))
    flags = ("--load", f"hf:{bad}", "--use-checkpoint-args", "--save-hf", tmp_path / "result")
    spoil(bad)
    with pytest.raises(MegatronError, match=message), open_run(*flags):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert not (bad / "executed").exists()


def test_the_program_says_it_in_one_line(hf_directory: Path, tmp_path: Path) -> None:
    result = run_program([*RUN, "--load", f"hf:{hf_directory}", "--use-checkpoint-args", "--rotary-base", "500"])
    assert result.returncode == 2
    assert len(re.findall("^error: ", result.stderr, flags=re.MULTILINE)) == 1 and "Traceback" not in result.stderr
    assert "--rotary-base was 10000 in the checkpoint, is 500 now" in result.stderr


def test_documented_command(hf_directory: Path, tmp_path: Path) -> None:
    """The one of docs/conversion.md that trains, on two processes."""
    make("Llama").save_pretrained(tmp_path / "Llama-3.1-8B")
    text = (Path(__file__).parents[3] / "docs" / "conversion.md").read_text(encoding="utf-8")
    command = re.search(r"^torchrun --nproc_per_node 2 pretrain_gpt.py (.*)$", text, flags=re.MULTILINE)
    assert command is not None
    words = command[1].replace("Llama-3.1-8B", f"{tmp_path}/Llama-3.1-8B").replace("tuned", f"{tmp_path}/tuned").split()
    done = run_ranks(words, 2)
    assert done.returncode == 0 and f"--save-hf: wrote {tmp_path}/tuned" in done.stdout, done.stderr
    trained = read_all(tmp_path / "tuned")
    for name, tensor in read_all(tmp_path / "Llama-3.1-8B").items():
        assert trained[name].shape == tensor.shape and not torch.equal(trained[name], tensor), name


def test_where_nothing_may_be_written(hf_directory: Path, tmp_path: Path) -> None:
    """A model and a place that --save-hf cannot use are refused before anything is built."""
    hf = ("--load", f"hf:{hf_directory}", "--use-checkpoint-args")
    copy = shutil.copytree(hf_directory, tmp_path / "published")
    (tmp_path / "file").touch()
    for flags, message in (
        (("--save-hf", copy), "holds files that no --save-hf has written"),
        (("--save-hf", tmp_path / "file"), "is a file, not a directory"),
        (("--save-hf", tmp_path / "a" / "b"), "the directory above it, .*, does not exist"),
        (("--save-hf", tmp_path / "x", "--parallel-residual"), "no model of Hugging Face transformers"),
    ):
        with pytest.raises(ConfigError, match=f"--save-hf .*{message}"), open_run(*hf, *flags):
            pass
    with open_run(*hf, "--save-hf", tmp_path / "hf") as run:
        train(run)
        save_foreign(run)
    with pytest.raises(ConfigError, match="is what the run starts from"), \
            open_run("--load", f"hf:{tmp_path}/hf", "--use-checkpoint-args", "--save-hf", tmp_path / "hf"):  # fmt: skip
        pass


def test_a_program_without_the_bridge(hf_directory: Path, tmp_path: Path) -> None:
    """A script of the user's own that hands over no reader."""
    with open_run("--load", f"hf:{hf_directory}", "--use-checkpoint-args") as run:
        run.recipe = dataclasses.replace(run.recipe, foreign_files=None)
        with pytest.raises(CheckpointError, match="this program reads no Hugging Face directories; start pretrain_gpt"):
            load_checkpoint(run)
    config = read_run_config([*RUN, "--load", f"hf:{hf_directory}", "--use-checkpoint-args", "--save-hf", "x"], {})
    with pytest.raises(ConfigError, match="this program writes no Hugging Face directories"), \
            open_local_run(config, build_gpt_recipe(config), 0):  # fmt: skip
        pass


def test_a_run_that_stops_early_writes_nothing(
    hf_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train-iters", "5", "--exit-interval", "2", "--save-hf", tmp_path / "hf")
    with open_run("--load", f"hf:{hf_directory}", "--use-checkpoint-args", *flags) as run:
        train(run)
        save_foreign(run)
    assert "hf is not written, as the run stops before its last iteration" in capsys.readouterr().out
    assert not (tmp_path / "hf").exists()


# ---- parts of tensors


def test_any_part_of_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long and short runs, from safetensors and from torch's files."""
    from megatron.hf.tensor_files import write_tensors

    random_numbers = random.Random(1)
    tensors = {"a": torch.randn(7), "b": torch.randn(6, 40), "c": torch.randn(4, 5, 30).bfloat16()}
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    for kind in ("safetensors", "bin"):
        (tmp_path / kind).mkdir()
    write_tensors(tmp_path / "safetensors", shapes, iter(tensors.items()))
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    for kind, smallest in itertools.product(("safetensors", "bin"), (1, 64, 4096)):
        monkeypatch.setattr("megatron.hf.tensor_files._SMALLEST_READ", smallest)
        monkeypatch.setattr("megatron.hf.tensor_files._LARGEST_READ", 200)
        opened = open_tensors(tmp_path / kind)
        for name, tensor in tensors.items():
            for _ in range(10):
                box = choose_box(tensor.shape, random_numbers)
                expected = tensor[tuple(slice(start, start + length) for start, length in box)]
                assert torch.equal(opened.read_box(name, box), expected), (kind, name, box)


def choose_box(shape: Sequence[int], random_numbers: random.Random) -> tuple[tuple[int, int], ...]:
    box = []
    for length in shape:
        start = random_numbers.choice([0, random_numbers.randrange(length)])
        box.append((start, random_numbers.choice([length - start, random_numbers.randint(1, length - start)])))
    return tuple(box)


@pytest.mark.parametrize("name", ["GPT-2, GPT-3", "Phi-3", "Qwen 2", "Qwen 2 MoE", "Qwen3-Next", "Qwen 3.5"])
def test_any_part_of_a_parameter_is_read(name: str, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    random_numbers = random.Random(1)
    for entry in source.entries:
        whole = entry.join(source.read)
        for _ in range(4):
            box = choose_box(whole.shape, random_numbers)
            expected: Any = whole[tuple(slice(start, start + length) for start, length in box)]
            assert torch.equal(entry.read_box(box, source.read_box), expected), (entry.key, box)
