# SPDX-License-Identifier: Apache-2.0
"""Names of megatron.training that are defined in its room `upstream`: each is used."""

from __future__ import annotations

import dataclasses
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.enums import ModelType
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import parse_args
from tests.support.pretend_groups import pretend
from tests.unit.house.test_public_names import resolve

ARGV = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 0.01 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 32 --make-vocab-size-divisible-by 16 --eval-iters 2 --log-interval 2 --hidden-dropout 0 "
    "--attention-dropout 0"
).split()


def use(module: str, *names: str) -> Any:
    """What `from megatron.training<module> import <names>` binds."""
    found = [resolve(f"megatron.training{module}", name) for name in names]
    return found[0] if len(names) == 1 else found


@pytest.fixture
def args(request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """Arguments that get_args() returns, with tokenizer, timers and the number of microbatches."""
    args = parse_args(argv=[*ARGV, *getattr(request, "param", [])], environ={})
    use(".global_vars", "set_global_variables")(args=args, build_tokenizer=True)
    yield args
    use(".global_vars", "unset_global_variables")()
    ProcessGroupCollection.clear_current()


def build_gpt(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    from megatron.core.models.gpt.gpt_model import GPTModel

    args = use("", "get_args")()
    return GPTModel(
        config=resolve("megatron.training.arguments", "core_transformer_config_from_args")(args),
        transformer_layer_spec=resolve("megatron.core.models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec")(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )


def batches() -> Iterator[torch.Tensor]:
    while True:
        yield torch.arange(18).remainder(7).view(2, 9)


def forward_step(iterator: Any, model: nn.Module) -> Any:
    text = next(iterator)
    losses = model(text[:, :-1], torch.arange(8).expand(2, 8), None, labels=text[:, 1:])

    def loss(output: Any, non_loss_data: bool = False) -> Any:
        return {"shape": output.shape} if non_loss_data else (output.mean(), {"lm loss": output.mean()})

    return losses, loss


def setup() -> Any:
    return use(".training", "setup_model_and_optimizer")(ModelType.encoder_or_decoder, build_gpt)


# ---- settings


def test_globals_come_and_go(args: Namespace) -> None:
    get, put, forget, tokenizer = use(
        ".global_vars", "get_args", "set_args", "unset_global_variables", "_build_tokenizer"
    )
    assert get() is args and args.padded_vocab_size == 32
    assert use("", "get_tokenizer")().vocab_size == 32 and use("", "get_timers")() is not None
    assert tokenizer(args).vocab_size == 32
    assert resolve("megatron.core.num_microbatches_calculator", "get_num_microbatches")() == 2
    other = parse_args(argv=ARGV, environ={})
    put(args=other)
    assert get() is other
    forget()
    with pytest.raises(RuntimeError, match="outside of a run"):
        get()


def test_arguments_are_parsed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *ARGV])
    parse, check = use(".arguments", "parse_and_validate_args", "validate_args")
    try:
        args = parse(args_defaults={"clip_grad": 0.5})
        assert args.clip_grad == 0.5 and use("", "get_args")() is args
    finally:
        use(".global_vars", "unset_global_variables")()
    args.rampup_batch_size = None
    assert check(args, {"rampup_batch_size": [2, 2, 4]}).rampup_batch_size == [2, 2, 4]
    args.num_attention_heads = 3
    with pytest.raises(ConfigError, match="--num-attention-heads 3"):
        check(args=args, defaults={})


def test_configs_from_arguments(args: Namespace) -> None:
    model, container = use(".argument_utils", "gpt_config_from_args", "pretrain_cfg_container_from_args")
    expected = dataclasses.replace(args.run_config.model, transformer_impl="transformer_engine")
    assert model(args) == expected and model(args, config=args.run_config.model) is args.run_config.model
    assert container(args) is args.run_config
    other = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert container(args, model_cfg=other).model is other
    yaml = use(".yaml_arguments", "core_transformer_config_from_yaml")
    assert yaml(SimpleNamespace(language_model=args), transfomer_key="language_model") == expected


def test_the_job_is_joined(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    join = use(".initialize", "initialize_megatron")
    later = join(allow_no_cuda=True, skip_mpu_initialization=True)
    assert not ProcessGroupCollection.has_current()
    later()
    assert ProcessGroupCollection.current().world.size() == 1 and args.rank == 0
    assert join() is None
    with pytest.raises(ConfigError, match="get_embedding_ranks"):
        join(get_embedding_ranks=len)


def test_questions_about_the_run(args: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert use("", "get_train_valid_test_num_samples")()[0] == 16
    assert not use(".utils", "is_hybrid_model")(args) and use("", "is_last_rank")()
    use("", "print_rank_last")("last")
    use("", "print_rank_0")("first", rank=0)
    use("", "print_rank_0")("nobody", rank=1)
    assert capsys.readouterr().out == "last\nfirst\n"
    assert use(".utils", "get_blend_and_blend_per_split")(args) == (None, None)
    at_an_end = use(".utils", "is_first_or_last_pipeline_stage")
    assert at_an_end(vp_stage=None)
    pretend(1, pp=3).set_current()
    assert not at_an_end()
    args.train_iters = None
    args.run_config.training.train_iters, args.run_config.training.train_samples = None, 12
    use(".training", "update_train_iters")(args)
    assert args.train_iters == 3
    use(".theoretical_memory_usage", "report_theoretical_memory")(args, num_microbatches=2, verbose=True)
    assert "Theoretical memory footprints: weight and optimizer=" in capsys.readouterr().out
    assert use(".async_utils", "maybe_finalize_async_save")(blocking=True, terminate=True) is None
    assert use(".tokenizer.tokenizer", "_vocab_size_with_padding")(30, args, logging_enabled=False) == 32
    for module, name in (("fim_dataset", "GPTFIMDataset"), ("sft_dataset", "SFTDataset")):
        assert use(f".datasets.{module}", name) is resolve(f"megatron.core.datasets.{module}", name)


# ---- a loop of one's own


def test_a_loop_trains_logs_and_evaluates(args: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    train, log, evaluate = use(".training", "train_step", "training_log", "evaluate_and_print_results")
    model, optimizer, scheduler = setup()
    assert args.iteration == 0
    totals: dict[str, Any] = {}
    losses = []
    for iteration in range(1, 5):
        found, skipped, *_, grad_norm, _, _ = train(
            forward_step, batches(), model, optimizer, scheduler, args.run_config.model
        )
        losses.append(float(found["lm loss"]))
        log(found, totals, 0.01, iteration, 1.0, True, skipped, grad_norm, params_norm=1.0, num_zeros_in_grad=0)
    assert losses == sorted(losses, reverse=True) and scheduler.num_steps == 16
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and f"lm loss: {sum(losses[2:]) / 2:.6E}" in lines[1] and totals == {}
    found = evaluate("step 4", forward_step, batches(), model, iteration=4, process_non_loss_data_func=None)
    assert found["lm loss"] < losses[-1] and "validation loss at step 4" in capsys.readouterr().out
    assert all(chunk.training for chunk in model)
    seen: list[Any] = []
    options = {"verbose": True, "write_to_tensorboard": False, "config": None}
    evaluate("5", forward_step, batches(), model, 5, lambda *given: seen.append(given), **options)
    evaluate("6", forward_step, batches(), model, 6, lambda *given: seen.append(given), non_loss_data_func=len)
    (outputs, *first), (count, *second) = seen
    assert len(outputs) == 2 and set(outputs[0]) == {"shape"} and (first, count, second) == ([5, None], 1, [6, None])
    with pytest.raises(ConfigError, match="has no pg_collection"):
        evaluate("7", forward_step, batches(), model, 7, pg_collection=object())


def test_settings_may_come_first(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import training

    monkeypatch.setattr(training, "run_recipe", lambda config, recipe, hooks: (config, recipe))
    container = use(".argument_utils", "pretrain_cfg_container_from_args")(args)
    given = (list, ModelType.encoder_or_decoder, forward_step)
    for found in (
        training.pretrain(container, *given, store=None),
        training.pretrain(cfg_container=container, train_valid_test_dataset_provider=list, model_type=given[1],
                          forward_step_func=forward_step, model_provider=build_gpt, pg_collection=None),
    ):  # fmt: skip
        config, recipe = found  # type: ignore[misc]
        assert config is container and recipe.forward_step is forward_step and recipe.build_datasets is list
        named = getattr(recipe.build_model, "func", recipe.build_model).__name__
        assert named == ("build_gpt_model" if recipe.build_model is not build_gpt else "build_gpt")
    assert recipe.build_model is build_gpt
    with pytest.raises(ConfigError, match=r"has no store .+ leave it out"):
        training.pretrain(container, *given, store=object())


def test_models_with_and_without_a_wrapper(args: Namespace) -> None:
    for module in ("", ".training"):
        get_model = use(module, "get_model")
        config = get_model(build_gpt, ModelType.encoder_or_decoder)[0].module.config
        assert config == dataclasses.replace(args.run_config.model, transformer_impl="transformer_engine")
    (bare,) = get_model(model_provider_func=build_gpt, wrap_with_ddp=False)
    norm = use(".utils", "calc_params_l2_norm")
    assert norm([bare]) == pytest.approx(
        sum(float(p.detach().square().sum()) for p in bare.parameters()) ** 0.5, rel=1e-5
    )
    averaged = use(".utils", "average_losses_across_data_parallel_group")([torch.tensor(1.0), torch.tensor([3.0])])
    assert averaged.tolist() == [1.0, 3.0]


# ---- checkpoints


def test_names_of_checkpoints(tmp_path: Path, args: Namespace) -> None:
    name, tracker, read, is_file = use(
        ".checkpointing", "get_checkpoint_name", "get_checkpoint_tracker_filename", "read_metadata", "isfile"
    )
    assert (
        name("c", 10, return_base_dir=True) == "c/iter_0000010"
        and name("c", 0, True, return_base_dir=True) == "c/release"
    )
    assert name("c", 10) == "c/iter_0000010/mp_rank_00/model_optim_rng.pt"
    assert name("c", 1, pipeline_parallel=True, tensor_rank=1, pipeline_rank=2, basename="x").endswith(
        "mp_rank_01_002/x"
    )
    path = tracker(str(tmp_path))
    assert os.path.basename(path) == "latest_checkpointed_iteration.txt" and not is_file(path)
    for text, expected in (("12", (12, False)), ("release", (0, True))):
        Path(path).write_text(text)
        assert read(tracker_filename=path) == expected
    Path(path).write_text("soon")
    with pytest.raises(CheckpointError, match="names no iteration; found 'soon'"):
        read(path)


def test_a_loop_continues_from_its_checkpoint(tmp_path: Path, args: Namespace) -> None:
    train = use(".training", "train_step")
    save, load, where, settings = use(
        ".checkpointing", "save_checkpoint", "load_checkpoint", "get_load_checkpoint_path_by_args",
        "load_args_from_checkpoint",
    )  # fmt: skip
    args.run_config.checkpoint.save = args.run_config.checkpoint.load = args.load = str(tmp_path)
    args.run_config.checkpoint.load = None
    model, optimizer, scheduler = setup()
    step = lambda *parts: float(train(forward_step, batches(), *parts, args.run_config.model)[0]["lm loss"])  # noqa: E731
    for _ in range(2):
        step(model, optimizer, scheduler)
    save(2, model, optimizer, scheduler, num_floating_point_operations_so_far=5000)
    expected = step(model, optimizer, scheduler)
    assert where(args) == str(tmp_path / "iter_0000002")
    args.run_config.checkpoint.load = str(tmp_path)
    again = setup()
    assert (args.iteration, args.consumed_train_samples) == (2, 8)
    assert step(*again) == expected
    assert load(*again, load_arg="load", strict=True) == (2, 5000) == (2, args.num_floating_point_operations_so_far)
    with pytest.raises(CheckpointError, match="load_arg='pretrained'"):
        load(*again, load_arg="pretrained")
    # Whatever says which function the weights are for, by what the fields say of themselves.
    args.num_layers, args.layernorm_epsilon, args.rotary_base = 7, 1.0, 3
    shaped, saved = settings(args=args, load_arg="load")
    assert shaped.num_layers == saved.num_layers == 2
    assert (shaped.layernorm_epsilon, shaped.rotary_base) == (1e-5, 10000)


def test_a_loop_says_where_to_save_when_its_model_is_built(tmp_path: Path, args: Namespace) -> None:
    save, load = use(".checkpointing", "save_checkpoint", "load_checkpoint")
    parts = setup()
    with pytest.raises(
        ConfigError, match=r"save_checkpoint\(\) saves to args.save, which is None; set it, or give --save"
    ):
        save(1, *parts, num_floating_point_operations_so_far=0)
    for name in ("first", "second"):
        args.save = tmp_path / name
        assert save(2, *parts, num_floating_point_operations_so_far=0) == tmp_path / name / "iter_0000002"
    args.save = args.load = str(tmp_path / "first")
    assert save(3, *parts, num_floating_point_operations_so_far=0) == tmp_path / "first" / "iter_0000003"
    assert load(*parts) == (3, 0)
    args.save_interval = 0
    with pytest.raises(ConfigError, match="--save-interval 0 is out of range"):
        save(4, *parts, num_floating_point_operations_so_far=0)


@pytest.mark.parametrize("worker", [False, True])
def test_a_loop_goes_on_while_it_is_saved(
    worker: bool, tmp_path: Path, args: Namespace, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, finish = use(".checkpointing", "save_checkpoint"), use(".async_utils", "maybe_finalize_async_save")
    settings = args.run_config.checkpoint
    settings.save, settings.async_save, settings.use_persistent_ckpt_worker = str(tmp_path), True, worker
    parts = setup()
    finish()
    for iteration in (2, 4):
        assert save(iteration, *parts, num_floating_point_operations_so_far=0) is None
    assert (tmp_path / "iter_0000002").is_dir(), "the one before is waited for"
    finish(blocking=True)
    assert (tmp_path / "iter_0000004" / "manifest.json").exists()
    assert capsys.readouterr().out.count("training waited") == 2

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron.core.dist_checkpointing.async_save.write_contents", refuse)
    save(6, *parts, num_floating_point_operations_so_far=0)
    finish(terminate=True)
    assert "iteration 6 was not saved: " in capsys.readouterr().err


def test_a_loop_keeps_the_newest_of_its_non_persistent_checkpoints(tmp_path: Path, args: Namespace) -> None:
    save, load = use(".checkpointing", "save_checkpoint", "load_checkpoint")
    settings = args.run_config.checkpoint
    settings.save, parts = str(tmp_path), setup()
    with pytest.raises(ConfigError, match="needs --non-persistent-save-interval"):
        save(1, *parts, num_floating_point_operations_so_far=0, non_persistent_ckpt=True)
    settings.non_persistent_save_interval, settings.non_persistent_ckpt_type = 1, "global"
    del args._saves
    save(2, *parts, num_floating_point_operations_so_far=0)
    for iteration in (3, 4):
        save(iteration, *parts, num_floating_point_operations_so_far=0, non_persistent_ckpt=True)
    assert [path.name for path in (tmp_path / "non_persistent").glob("iter_*")] == ["iter_0000004"]
    settings.load = str(tmp_path)
    assert load(*parts) == (4, 0)
    settings.non_persistent_ckpt_type, settings.non_persistent_local_ckpt_dir = "local", str(tmp_path / "fast")
    del args._saves
    for iteration in (5, 6):
        save(iteration, *parts, num_floating_point_operations_so_far=0, non_persistent_ckpt=True)
    assert [path.name for path in tmp_path.glob("fast/*/rank_00000/iter_*")] == ["iter_0000006"]
    assert load(*parts) == (6, 0)


@pytest.mark.parametrize("args", [["--bf16"]], indirect=True)
def test_bare_models_are_saved_and_loaded_without_an_optimizer(args: Namespace, tmp_path: Path) -> None:
    save, load = use(".checkpointing", "save_checkpoint", "load_checkpoint")
    model = use(".training", "get_model")(build_gpt, wrap_with_ddp=False)
    tokens = torch.arange(8)[None]
    expected = model[0](tokens, tokens, None)
    assert expected.dtype == torch.float32 and model[0].vp_stage is None
    assert model[0].model_type == ModelType.encoder_or_decoder
    args.save = args.load = str(tmp_path)
    save(3, model, None, None, 0, checkpointing_context=None, pipeline_rank=None, release=False)
    args.no_load_rng, args.no_load_optim, args.seed = True, True, 77
    other = use(".training", "get_model")(build_gpt, wrap_with_ddp=False)
    with torch.no_grad():
        for param in other[0].parameters():
            param.zero_()
    assert load(other, None, None, strict=True, checkpointing_context={}) == (3, 0)
    assert torch.equal(other[0](tokens, tokens, None), expected)
    args.ckpt_format = "upstream_torch_dist"  # as a program that reads the files itself asks for
    args.save = args.load = str(tmp_path / "upstream")
    save(4, model, None, None, 0)
    assert load(other, None, None) == (4, 0) and torch.equal(other[0](tokens, tokens, None), expected)
    with pytest.raises(ConfigError, match="with its schedule"):
        save(4, model, object(), None, 0)
    head = other[0].module.value_head = nn.Linear(16, 1)
    value = head.weight.detach().clone()
    with pytest.raises(CheckpointError, match="value_head"):
        load(other, None, None)
    assert load(other, None, None, strict=False) == (4, 0) and torch.equal(head.weight, value)
    with pytest.raises(ConfigError, match="release"):
        save(3, model, None, None, 0, release=True)


def test_the_number_format_follows_from_what_a_script_sets() -> None:
    args = parse_args(argv=list(ARGV), environ={})
    validate, build = use(".arguments", "validate_args", "core_transformer_config_from_args")
    assert args.params_dtype == torch.float32
    args.bf16 = True
    validate(args)
    assert args.params_dtype == torch.bfloat16 and build(args).bf16
    args.params_dtype, args.bf16 = torch.float32, False
    assert validate(args).params_dtype == build(args).params_dtype == torch.float32


def test_what_follows_from_settings_that_a_script_changes() -> None:
    def change(**settings: Any) -> TransformerConfig:
        args = parse_args(argv=[*ARGV, "--seed", "5"], environ={})
        vars(args).update(settings)
        use(".arguments", "validate_args")(args)
        built: TransformerConfig = use(".arguments", "core_transformer_config_from_args")(args)
        assert {name: getattr(args, name) for name in ("ffn_hidden_size", "kv_channels")} == {
            "ffn_hidden_size": built.ffn_hidden_size, "kv_channels": built.kv_channels}  # fmt: skip
        return built

    wide = change(hidden_size=64)
    assert (wide.ffn_hidden_size, wide.kv_channels, wide.moe_ffn_hidden_size) == (256, 32, 256)
    assert change(hidden_size=64, ffn_hidden_size=96, kv_channels=8).ffn_hidden_size == 96
    gated = change(swiglu=True, hidden_size=48)
    assert gated.gated_linear_unit and gated.activation_func in ("silu", nn.functional.silu)
    assert gated.ffn_hidden_size == 128
    assert change(num_attention_heads=4).num_query_groups == 4
    assert change(group_query_attention=True).num_query_groups == 1
    assert change(recompute_activations=True).recompute_granularity == "selective"
    sizes = change(world_size=2, tensor_model_parallel_size=2)
    assert sizes.expert_tensor_parallel_size == 2


def test_arguments_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(parser: Any) -> None:
        group = parser.add_argument_group("mine")
        group.add_argument("--my-flag", type=int, default=3)
        parser.set_defaults(clip_grad=0.25)

    words = [word for word in ARGV if word not in ("--train-iters", "4", "--lr", "0.01", "--global-batch-size")]
    monkeypatch.setattr(sys, "argv", ["program", *words, "--engine-flag", "7", "--my-flag", "5"])
    args = use(".arguments", "parse_args")(add, ignore_unknown_args=True)
    assert (args.my_flag, args.clip_grad, args.lr, args.train_iters, args.iteration) == (5, 0.25, None, None, 0)
    for name in ("align_param_gather", "dist_ckpt_save_pre_mcore_014", "heterogeneous_layers_config_path", "yaml_cfg"):
        assert hasattr(args, name), name
    assert args.transformer_impl == "transformer_engine"  # programs then ask for its spec
    check = use(".arguments", "validate_args")
    args.world_size, args.variable_seq_lengths, args.tensor_model_parallel_size = 4, True, 2
    assert check(args).data_parallel_size == 2 and args.global_batch_size == 4
    config = resolve("megatron.training.arguments", "core_transformer_config_from_args")(args)
    assert config.variable_seq_lengths and config.tensor_model_parallel_size == 2
    args.mrope_section = "1"
    with pytest.raises(ConfigError, match="mrope_section"):
        check(args)
