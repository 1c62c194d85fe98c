# SPDX-License-Identifier: Apache-2.0
"""Each checkpoint flag through the real setup: what is saved, what comes back, what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.errors import CheckpointError, ConfigError
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.run import Run
from megatron.training.training import run_recipe
from tests.support.tiny_training import FLAGS, RandomTokens, differing, finish, prepare, train_tiny, values


def saving(directory: Path, interval: int = 3) -> tuple[str | Path, ...]:
    return ("--save", directory, "--save-interval", str(interval))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 3 and 6."""
    root = tmp_path_factory.mktemp("trained") / "checkpoints"
    train_tiny(*saving(root))
    return root


def documents(checkpoint: Path, name: str) -> dict:
    return json.loads((checkpoint / f"{name}.json").read_text())


_DEEPSEEK_V4 = """--multi-latent-attention --experimental-attention-variant dsv4_hybrid --csa-compress-ratios [0,4,4]
    --q-lora-rank 13 --qk-pos-emb-head-dim 4 --v-head-dim 10 --csa-window-size 5 --o-groups 2 --o-lora-rank 6
    --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 2 --dsa-indexer-loss-coeff 0.5
    --enable-hyper-connections --mtp-num-layers 1 --position-embedding-type rope --normalization RMSNorm
    --disable-bias-linear --attention-dropout 0 --ffn-hidden-size 24 --swiglu --num-experts 4
    --moe-router-score-function sqrtsoftplus --moe-router-enable-expert-bias --moe-n-hash-layers 1
    --actual-vocab-size 64"""
_CHOSEN = """--multi-latent-attention --position-embedding-type rope --kv-lora-rank 8 --qk-head-dim 6 --v-head-dim 5
    --qk-pos-emb-head-dim 4 --disable-bias-linear --normalization RMSNorm --experimental-attention-variant dsa
    --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --dsa-indexer-loss-coeff 0.5
    --attention-dropout 0"""


@pytest.mark.flags("--save", "--save-interval", "--load")
@pytest.mark.parametrize("model", ["", _DEEPSEEK_V4, "--enable-mhc-connections --bf16", _CHOSEN])
def test_resumed_run_is_bit_identical_with_dropout(tmp_path: Path, model: str) -> None:
    flags = model.split()
    whole = train_tiny(*flags, "--metrics-dir", tmp_path / "whole")
    parts = (*flags, *saving(tmp_path / "ckpt"), "--metrics-dir", tmp_path / "parts")
    train_tiny(*parts, "--exit-interval", "3")
    resumed = train_tiny(*parts, "--load", tmp_path / "ckpt")
    assert differing(whole, resumed) == []
    assert whole.progress == resumed.progress
    assert whole.optimizer.step_count == resumed.optimizer.step_count
    assert whole.scheduler.state_dict() == resumed.scheduler.state_dict()
    rows = [
        [
            {key: row[key] for key in ("iteration", "consumed_samples", "lm loss", "grad_norm", "lr")}
            for row in map(json.loads, (tmp_path / part / "metrics.jsonl").read_text().splitlines())
        ]
        for part in ("whole", "parts")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 6


@pytest.mark.flags("--save", "--save-interval", "--ckpt-format")
def test_save_interval_and_format(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    train_tiny(*saving(root, 4), "--ckpt-format", "torch_dist")
    assert sorted(path.name for path in root.iterdir()) == [
        "iter_0000004", "iter_0000006", "latest_checkpointed_iteration.txt", "ledger.jsonl",
    ]  # fmt: skip
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert documents(root / "iter_0000006", "metadata")["sharded_backend"] == "torch_dist"
    config = read_run_config([*FLAGS.split(), "--ckpt-format", "torch_dcp"], {})
    assert any("--ckpt-format torch_dcp is not written; checkpoints are saved as" in note for note in config.notes)


@pytest.mark.flags("--save")
def test_save_without_an_interval_saves_where_the_run_ends(tmp_path: Path) -> None:
    flags = ("--save", tmp_path, "--load", tmp_path)
    assert train_tiny(*flags, "--exit-interval", "2").progress.iteration == 2
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002"]
    resumed = train_tiny(*flags)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000006"]
    assert differing(resumed, train_tiny()) == []


@pytest.mark.flags("--ckpt-step")
def test_L10_ckpt_step(trained: Path) -> None:
    assert prepare("--load", trained).progress.iteration == 6
    assert prepare("--load", trained, "--ckpt-step", "3").progress.iteration == 3
    with pytest.raises(CheckpointError, match="--ckpt-step 4: .*saved iterations: 6, 3"):
        prepare("--load", trained, "--ckpt-step", "4")


@pytest.mark.flags("--no-load-optim")
def test_L10_no_load_optim(trained: Path) -> None:
    loaded = prepare("--load", trained, "--ckpt-step", "3", "--no-load-optim")
    assert loaded.progress.iteration == 3 and loaded.optimizer.step_count == 0
    assert loaded.scheduler.num_steps == 0
    assert not any(tensor.any() for name, tensor in values(loaded) if name.startswith("exp_avg"))
    assert prepare("--load", trained, "--ckpt-step", "3").optimizer.step_count == 3


@pytest.mark.flags("--load-main-params-from-ckpt")
def test_load_main_params_from_ckpt(trained: Path, tmp_path: Path) -> None:
    """From a checkpoint in float32, and from the main parameters of one in bfloat16."""
    name = "decoder.final_layernorm.weight"
    train_tiny(*saving(tmp_path, 6), "--bf16", "--use-distributed-optimizer")
    fp32, in_bf16 = dict(values(prepare("--load", trained)))[name], prepare("--load", tmp_path, "--bf16")
    for root, main in ((trained, fp32), (tmp_path, dict(values(in_bf16))[f"main_param of {name}"])):
        assert not torch.equal(main, main.bfloat16().float()), "rounding would show"
        for flags in (("--no-load-optim",), ("--finetune",), ("--no-load-optim", "--use-distributed-optimizer")):
            with_flag, without = (
                dict(values(prepare("--load", root, "--bf16", *flags, *more)))
                for more in (("--load-main-params-from-ckpt",), ())
            )
            assert torch.equal(with_flag[f"main_param of {name}"].view(-1), main.view(-1))
            assert torch.equal(with_flag[name], main.bfloat16())
            assert torch.equal(without[f"main_param of {name}"].view(-1), main.bfloat16().float().view(-1))


@pytest.mark.flags("--override-ckpt-iteration")
def test_override_ckpt_iteration(trained: Path, tmp_path: Path) -> None:
    flags = ("--load", trained, "--ckpt-step", "3", "--override-ckpt-iteration")
    run = train_tiny(*flags, "5", *saving(tmp_path, 1))
    assert (run.progress.iteration, run.progress.consumed_train_samples, run.optimizer.step_count) == (6, 16, 4)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000006"]
    with pytest.raises(CheckpointError, match="--override-ckpt-iteration 2 is below the checkpoint's iteration, 3; to"):
        prepare(*flags, "2")
    with pytest.raises(ConfigError, match="--override-ckpt-iteration 5 contradicts --finetune, which starts at"):
        prepare(*flags, "5", "--finetune")


@pytest.mark.flags("--ckpt-convert-format", "--ckpt-convert-save")
def test_ckpt_convert_format(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load", trained, "--ckpt-step", "3", "--ckpt-convert-format", "torch_dist"]
    config = read_run_config([*FLAGS.split(), *map(str, flags), "--ckpt-convert-save", str(tmp_path / "new")], {})
    assert not any("--save" in note for note in config.notes)
    datasets = lambda counts: [RandomTokens(n) if n else None for n in counts]  # noqa: E731
    run = run_recipe(config, dataclasses.replace(build_gpt_recipe(config), build_datasets=datasets))
    assert run.progress.iteration == 3 and "/new/torch_dist/iter_0000003; nothing is tr" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "new" / "torch_dist").glob("iter_*")] == ["iter_0000003"]
    converted = prepare("--load", tmp_path / "new" / "torch_dist")
    assert differing(converted, prepare("--load", trained, "--ckpt-step", "3")) == []
    with pytest.raises(
        ConfigError, match="--ckpt-convert-format torch_dist needs --load, what to convert, and --ckpt-"
    ):
        prepare(*flags)


@pytest.mark.flags("--no-save-optim")
def test_no_save_optim(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    train_tiny(*saving(root, 6), "--no-save-optim")
    with pytest.raises(CheckpointError, match="was saved with --no-save-optim; pass --no-load-optim or --finetune"):
        prepare("--load", root)
    assert prepare("--load", root, "--no-load-optim").progress.iteration == 6


@pytest.mark.flags("--no-load-rng")
def test_L10_no_load_rng(trained: Path) -> None:
    prepare("--load", trained)
    continued = torch.get_rng_state(), np.random.random()
    prepare()
    fresh = torch.get_rng_state(), np.random.random()
    prepare("--load", trained, "--no-load-rng")
    assert torch.equal(torch.get_rng_state(), fresh[0])
    assert not torch.equal(torch.get_rng_state(), continued[0])


@pytest.mark.flags("--no-save-rng")
def test_no_save_rng(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    train_tiny(*saving(root, 6), "--no-save-rng")
    assert not (root / "iter_0000006" / "rng.json").exists()
    with pytest.raises(CheckpointError, match="was saved with --no-save-rng; pass --no-load-rng or --finetune"):
        prepare("--load", root)
    assert prepare("--load", root, "--no-load-rng").progress.iteration == 6


@pytest.mark.flags("--finetune")
def test_L10_finetune_takes_weights_only(trained: Path) -> None:
    tuned = prepare("--load", trained, "--finetune")
    assert (tuned.progress.iteration, tuned.progress.consumed_train_samples) == (0, 0)
    assert tuned.optimizer.step_count == 0 and tuned.scheduler.num_steps == 0
    whole = prepare("--load", trained)
    weights = [name for name, _ in values(whole) if not name.startswith("exp_avg")]
    assert not set(weights) & set(differing(whole, tuned)) and set(differing(whole, prepare())) & set(weights)


@pytest.mark.flags("--pretrained-checkpoint")
def test_pretrained_checkpoint_of_ours(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "ckpt"
    flags = (*saving(root), "--load", root, "--pretrained-checkpoint", trained, "--train-iters", "2")
    tuned = prepare(*flags)
    assert tuned.progress.iteration == 0 and "starting from --pretrained-checkpoint" in capsys.readouterr().out
    whole = prepare("--load", trained)
    assert not [name for name in differing(whole, tuned) if not name.startswith("exp_avg")]
    finish(tuned)
    assert prepare(*flags).progress.iteration == 2, "--load wins once it holds something"
    with pytest.raises(CheckpointError, match="--pretrained-checkpoint .*absent does not exist"):
        prepare("--pretrained-checkpoint", tmp_path / "absent")


@pytest.mark.flags("--exit-on-missing-checkpoint", "--load")
def test_F8_missing_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "ckpt"
    assert prepare(*saving(root), "--load", root).progress.iteration == 0
    assert "starting from the beginning, with random weights" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="--exit-on-missing-checkpoint"):
        prepare(*saving(root), "--load", root, "--exit-on-missing-checkpoint")
    fresh = prepare("--exit-on-missing-checkpoint")
    assert fresh.progress.iteration == 0, "nothing was to be loaded"
    assert any("--exit-on-missing-checkpoint has no effect without --load" in note for note in fresh.config.notes)
    for flags in ((), saving(root)):
        with pytest.raises(CheckpointError, match="--load .*other does not exist"):
            prepare(*flags, "--load", tmp_path / "other")
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="--load .*other holds no checkpoint"):
        prepare("--load", tmp_path / "other")
    (tmp_path / "other" / "run" / "iter_0000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds no checkpoint itself, .*other/run does; give .*run$"):
        prepare("--load", tmp_path / "other")
    (tmp_path / "other" / "sun" / "iter_0000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="these directories do: .*/run, .*/sun; give one of them$"):
        prepare("--load", tmp_path / "other")
    for name in ("run", "sun"):
        shutil.rmtree(tmp_path / "other" / name)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "other" / name).write_text("")
    with pytest.raises(CheckpointError, match="--load .*other is a model of Hugging Face.* with --load hf:.*other;"):
        prepare("--load", tmp_path / "other", "--save", tmp_path / "other")
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, words in (("file", "is a file, not a directory"), ("loop", "a symbolic link that leads back to itself")):
        for flag in ("--load", "--pretrained-checkpoint"):
            with pytest.raises(CheckpointError, match=f"{flag} .*{name} {'is ' * (name == 'loop')}{words}"):
                prepare(flag, tmp_path / name)


@pytest.mark.flags("--save")
def test_F7_save_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, words in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "dangling", "symbolic link"),
        (tmp_path / "a" / "b", "the directory above it, .*a, does not exist; make it first"),
        (tmp_path / "loop", "leads back to itself"),
        (tmp_path / "loop" / "b", "does not exist: .*loop is a symbolic link that leads back to itself"),
        (tmp_path / "file" / "b", "does not exist: .*file is a file"),
        (Path("/proc/checkpoints"), "cannot be written to"),
    ):
        with pytest.raises(ConfigError, match=f"--save {path}.*{words}"):
            prepare(*saving(path))
    assert not (tmp_path / "a").exists() and not (tmp_path / "nowhere").exists()


@pytest.mark.flags("--no-save-tokenizer-assets")
def test_tokenizer_files_go_along(tmp_path: Path, golden_dir: Path) -> None:
    model = golden_dir / "tok" / "hf_bpe1k"
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model, "--vocab-size", "1000")
    train_tiny(*saving(tmp_path / "with", 6), *flags)
    copy = tmp_path / "with" / "iter_0000006" / "tokenizer" / "tokenizer.json"
    assert copy.read_bytes() == (model / "tokenizer.json").read_bytes()
    assert "tokenizer/tokenizer.json" in documents(copy.parent.parent, "manifest")["content"]["files"]
    train_tiny(*saving(tmp_path / "without", 6), *flags, "--no-save-tokenizer-assets")
    assert not (tmp_path / "without" / "iter_0000006" / "tokenizer").exists()


def test_L9_other_model_lists_tensors_and_flags(trained: Path) -> None:
    with pytest.raises(CheckpointError) as found:
        prepare("--load", trained, "--num-layers", "1", "--ffn-hidden-size", "24")
    text = str(found.value)
    assert "decoder.layers.0.mlp.linear_fc1.weight is (64, 16) in the checkpoint, (24, 16) in the model" in text
    assert "--num-layers was 2 in the checkpoint, is 1 now" in text
    with pytest.raises(CheckpointError, match="decoder.layers.1.mlp.linear_fc1.weight is in the checkpoint only"):
        prepare("--load", trained, "--num-layers", "1")
    with pytest.raises(CheckpointError, match="embedding.word_embeddings.weight is .*50 rows used.*47 rows used"):
        prepare("--load", trained, "--vocab-size", "47")


@pytest.mark.flags("--dist-ckpt-strictness")
def test_dist_ckpt_strictness(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What only the checkpoint has (a model of one layer), and what only the model has (one of four)."""

    def load(level: str, layers: int, *flags: str) -> tuple[Run | None, str, str]:
        capsys.readouterr()
        try:
            run = prepare("--load", trained, "--dist-ckpt-strictness", level, "--num-layers", str(layers), *flags)
        except CheckpointError as error:
            return None, str(error), ""
        return run, "", capsys.readouterr().err

    for level in ("assume_ok_unexpected", "raise_all"):
        assert "decoder.layers.1.mlp.linear_fc1.weight is in the checkpoint only" in load(level, 1)[1]
        assert "decoder.layers.2-3.mlp.linear_fc1.weight is missing" in load(level, 4)[1]
    assert "decoder.layers.2-3.mlp.linear_fc1.weight is missing" in load("raise_unexpected", 4)[1]
    for level in ("raise_unexpected", "log_unexpected", "return_unexpected", "ignore_all"):
        assert load(level, 1)[1:] == ("", "")
    for level in ("log_all", "return_all"):
        shorter, _, said = load(level, 1)
        assert "warning: " in said and "these tensors in it have no place in this model and were left out:\n" in said
        assert "\n    decoder.layers.1.mlp.linear_fc1.weight\n" in said and shorter is not None
    whole = prepare("--load", trained)
    fresh = prepare("--num-layers", "4")
    old, new = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc1.weight"
    for level in ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all"):
        longer, _, said = load(level, 4)
        assert "these tensors of this model are not in it and begin with their initial values:\n" in said
        assert "\n    decoder.layers.2-3.mlp.linear_fc1.weight (64, 16)\n" in said and longer is not None
        weights = dict(values(longer))
        assert torch.equal(weights[old], dict(values(whole))[old])
        assert torch.equal(weights[new], dict(values(fresh))[new])
        assert not weights[f"exp_avg of {new}"].any() and weights[f"exp_avg of {old}"].any()
    assert "(64, 16) in the checkpoint, (24, 16) in the model" in load("ignore_all", 2, "--ffn-hidden-size", "24")[1]
    assert "linear_fc1.weight is missing" in load("ignore_all", 4, "--no-initialization")[1], "they have no values"


def test_other_padding_of_the_vocabulary(trained: Path) -> None:
    narrow, wide = (
        dict(values(prepare("--load", trained, "--finetune", "--make-vocab-size-divisible-by", n)))
        for n in ("1", "128")
    )
    name = "embedding.word_embeddings.weight"
    assert (narrow[name].shape[0], wide[name].shape[0]) == (50, 128)
    assert torch.equal(narrow[name], wide[name][:50])


def test_a_run_goes_on_where_a_passed_batch_size_would_not_divide(tmp_path: Path) -> None:
    """2 samples an iteration until 8 are trained on, then 4: with microbatches of 4 only the second size is shared."""
    flags = ("--rampup-batch-size", "2", "2", "8", "--lr-decay-style", "constant", *saving(tmp_path, 2))
    assert train_tiny(*flags, "--train-iters", "4").progress.consumed_train_samples == 8
    wider = (*flags, "--load", tmp_path, "--micro-batch-size", "4", "--train-iters", "6")
    with pytest.raises(ConfigError, match="global batch size 2 is not divisible by --micro-batch-size 4"):
        prepare(*wider, "--ckpt-step", "2")
    assert train_tiny(*wider).progress.consumed_train_samples == 16


def test_changed_settings_are_named_on_resume(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare("--load", trained, "--seed", "77", "--attention-dropout", "0")
    said = capsys.readouterr().out
    assert "    --seed was 1234 in the checkpoint, is 77 now\n" in said
    assert "    --attention-dropout was 0.1 in the checkpoint, is 0.0 now\n" in said
    prepare("--load", trained, "--override-opt_param-scheduler")
    assert "settings that changed" not in capsys.readouterr().out


@pytest.mark.flags("--override-model-settings")
def test_another_function_of_the_same_weights_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resuming, taking the weights alone, and evaluating."""
    other = ("--num-attention-heads", "4", "--squared-relu", "--norm-epsilon", "1e-3")
    changed = "--norm-epsilon was 1e-05 in the checkpoint, is 0.001 now; --num-attention-heads was 2 .*; --squared-relu"
    said = f"iter_0000006 is of another model: {changed} was .*--override-model-settings"
    load = ("--load", trained)
    for way in (load, (*load, "--finetune"), ("--pretrained-checkpoint", trained), (*load, "--skip-train")):
        with pytest.raises(CheckpointError, match=said):
            prepare(*way, *other)
    assert prepare("--load", trained, *other, "--override-model-settings").progress.iteration == 6
    assert "    --num-attention-heads was 2 in the checkpoint, is 4 now\n" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="--norm-epsilon was 1e-05"):
        prepare("--load", trained, "--use-checkpoint-args", "--norm-epsilon", "1e-3")


def test_settings_that_cannot_be_compared_are_said(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "ckpt"
    shutil.copytree(trained / "iter_0000006", root / "iter_0000006")
    settings = documents(root / "iter_0000006", "config") | {"model": {"num_layers": "two"}}
    (root / "iter_0000006" / "config.json").write_text(json.dumps(settings))
    try:
        prepare("--load", root)
    except CheckpointError as error:
        assert "config.json" in str(error), "the manifest has its checksum"
    else:
        assert "config.json cannot be compared with this run's settings" in capsys.readouterr().err


def test_bf16_keeps_main_parameters(tmp_path: Path) -> None:
    flags = (*saving(tmp_path / "ckpt"), "--bf16")
    whole = train_tiny("--bf16")
    train_tiny(*flags, "--exit-interval", "3")
    resumed = train_tiny(*flags, "--load", tmp_path / "ckpt")
    assert any(name.startswith("main_param") for name, _ in values(resumed))
    assert differing(whole, resumed) == []


def test_fp32_checkpoint_into_bf16_run(trained: Path) -> None:
    fp32, bf16 = dict(values(prepare("--load", trained))), dict(values(prepare("--load", trained, "--bf16")))
    name = "decoder.final_layernorm.weight"
    assert torch.equal(bf16[f"main_param of {name}"], fp32[name]), "main parameters come from the fp32 weights"
    assert torch.equal(bf16[name], fp32[name].bfloat16())


def test_falls_back_with_one_warning(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = shutil.copytree(trained, tmp_path / "ckpt")
    (root / "iter_0000006" / "__0_0.distcp").unlink()
    assert prepare("--load", root).progress.iteration == 3
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and "iter_0000006/__0_0.distcp is missing" in warnings[0]
