# SPDX-License-Identifier: Apache-2.0
"""Names of megatron.core that are defined in its room `upstream`: each is used."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.errors import CheckpointError, ConfigError, MegatronError, StorageError
from megatron.core.mesh import RankGrid
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.pretend_groups import pretend
from tests.unit.house.test_public_names import resolve

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


def use(module: str, *names: str) -> Any:
    """What `from megatron.core.<module> import <names>` binds."""
    found = [resolve(f"megatron.core.{module}", name) for name in names]
    return found[0] if len(names) == 1 else found


def gpt(spec: Any = None, **changes: Any) -> GPTModel:
    spec = spec or use("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec")()
    return GPTModel(TransformerConfig(**SHAPE | changes), spec, vocab_size=16, max_sequence_length=8)


@pytest.fixture
def pretended() -> Iterator[Any]:
    """Make a rank's view of a layout the current groups."""

    def show(rank: int, **sizes: Any) -> ProcessGroupCollection:
        groups = pretend(rank, **sizes)
        groups.set_current()
        return groups

    yield show
    ProcessGroupCollection.clear_current()


# ---- functions without models


def test_deprecated_functions_warn_and_work() -> None:
    for module in ("utils", "backwards_compatibility_decorators"):
        mark = use(module, "deprecated")
        twice = mark(version="0.1", removal_version="0.3", alternative="double", reason="of its name")(lambda x: 2 * x)
        with pytest.warns(DeprecationWarning, match="since version 0.1; .* in version 0.3; use double .*; of its name"):
            assert twice(3) == 6


def test_marks_on_functions() -> None:
    experimental, internal = use("utils", "experimental_api", "internal_api")

    def plain() -> int:
        return 1

    assert experimental(plain)() == internal(plain)() == 1
    switch, is_on = use("config", "set_experimental_flag", "is_experimental_enabled")
    switch(True)
    assert is_on()
    switch(False)
    assert not is_on()


def test_exceptions_of_tasks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    trace = use("utils", "trace_async_exceptions")

    @trace
    async def fails() -> None:
        raise ValueError("lost")

    @trace(verbose=True)
    async def works() -> int:
        return 3

    with caplog.at_level(logging.INFO):
        with pytest.raises(ValueError, match="lost"):
            asyncio.run(fails())
        assert asyncio.run(works()) == 3
    assert "fails failed" in caplog.text and "works begins" in caplog.text


def test_arithmetic_and_versions() -> None:
    divide, torch_version, te_version = use("utils", "divide", "get_torch_version", "get_te_version")
    assert divide(6, 3) == 2
    with pytest.raises(AssertionError, match="7 is not divisible by 3"):
        divide(7, 3)
    assert torch_version() > "2.0" and te_version() in (None, te_version())
    assert use("package_info", "__version__").count(".") == 2
    rows = use("tensor_parallel.utils", "VocabUtility")
    assert rows.vocab_range_from_global_vocab_size(64, 1, 4) == (16, 32)
    assert rows.vocab_range_from_per_partition_vocab_size(16, 3, 4) == (48, 64)
    flat = use("distributed.finalize_model_grads", "_flatten_dense_tensors")([torch.ones(2), torch.zeros(3)])
    parts = use("distributed.finalize_model_grads", "_unflatten_dense_tensors")(flat, [torch.ones(2), torch.zeros(3)])
    assert [part.tolist() for part in parts] == [[1, 1], [0, 0, 0]]


def test_gradients_and_divided_tensors() -> None:
    where, whole, divide = use(
        "distributed.finalize_model_grads", "_get_main_grad_attr", "_unshard_if_dtensor", "_reshard_if_dtensor"
    )
    param: Any = nn.Parameter(torch.ones(2))
    assert where(param) == "grad"
    param.main_grad = torch.zeros(2)
    assert where(param) == "main_grad"
    assert whole(param) is param and divide(tensor_to_shard=param, reference_tensor=param) is param


# ---- modules


def test_identities() -> None:
    op, function = use("transformer.identity_op", "IdentityOp", "IdentityFuncOp")
    x = torch.ones(2)
    assert op(SimpleNamespace(), 3)(x, "more") is x
    assert function()(1, 2)(x, "more") is x


def test_the_module_inside_wrappers() -> None:
    wrapper = use("transformer.module", "Float16Module")
    config = TransformerConfig(**SHAPE, bf16=True)
    inner = nn.Linear(2, 2)
    inner.config = config  # type: ignore[assignment]
    wrapped = wrapper(config=config, module=inner)
    for module in ("utils", "pipeline_parallel.utils"):
        unwrap = use(module, "unwrap_model")
        assert unwrap(wrapped) is inner and unwrap([wrapped, inner]) == [inner, inner]
    assert use("utils", "unwrap_model")(model=wrapped, module_instances=(nn.Linear,)) is wrapped
    assert use("utils", "get_model_config")(wrapped) is config
    for module in ("utils", "distributed.finalize_model_grads"):
        attribute = use(module, "get_attr_wrapped_model")
        assert attribute(wrapped, "in_features") == 2 and attribute(wrapped, "weight", return_model_obj=True) is inner
        with pytest.raises(RuntimeError, match="nowhere"):
            attribute(wrapped, "nowhere")
    output = wrapped(torch.ones(1, 2))
    assert (output.dtype, inner.weight.dtype) == (torch.float32, torch.bfloat16)
    assert wrapped(torch.ones(1, 2), fp32_output=False).dtype == torch.bfloat16
    assert list(wrapped.state_dict()) == ["weight", "bias"]


def test_specs_and_imports_by_name() -> None:
    find, parts = use("transformer.spec_utils", "import_module", "get_submodules")
    assert find(("torch.nn", "Linear")) is nn.Linear
    with pytest.raises(ImportError, match="cannot import 'Nothing' from 'torch.nn'"):
        find(module_path=("torch.nn", "Nothing"))
    spec = ModuleSpec(nn.Linear, params={"bias": False}, submodules=None)
    assert parts(spec=ModuleSpec(nn.Linear, submodules="parts")) == "parts" and parts(nn.Linear) is None
    assert build_module(spec_or_module=spec, in_features=2, out_features=3).bias is None


SPECS = {
    "get_gpt_layer_local_spec": {"num_experts": None, "moe_grouped_gemm": False, "qk_layernorm": False},
    "get_gpt_layer_with_transformer_engine_spec": {"num_experts": None, "moe_grouped_gemm": False},
    "get_gpt_layer_with_inference_spec": {"qk_layernorm": False},
    "get_gpt_decoder_block_spec": {"config": TransformerConfig(**SHAPE), "use_transformer_engine": False},
}


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_builds_the_same_model(name: str) -> None:
    tokens = torch.arange(8).view(1, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec = use("models.gpt.gpt_layer_specs", name)(**SPECS[name])
    assert [str(warning.message)[:33] for warning in caught] == ["layers are those of the local spec"[:33]] * (
        "transformer_engine" in name
    )
    model = gpt(spec)
    assert torch.equal(model.eval()(tokens, tokens), gpt().eval()(tokens, tokens))


def test_what_specs_refuse() -> None:
    specs = use("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec")
    with pytest.raises(ConfigError, match="leave it out"):
        specs(moe_use_legacy_grouped_gemm=True)
    with pytest.raises(ConfigError, match="made with fp8 'hybrid', the config says None"):
        gpt(specs(fp8="hybrid"))
    block, layers = use("models.gpt.gpt_layer_specs", "get_gpt_decoder_block_spec", "get_gpt_decoder_layer_specs")
    with pytest.raises(ConfigError, match="contradicts the config's LayerNorm"):
        block(TransformerConfig(**SHAPE), use_transformer_engine=False, normalization="RMSNorm")
    assert len(layers(TransformerConfig(**SHAPE), use_transformer_engine=False)) == 2


# ---- layers


def test_which_layers_a_stage_has(pretended: Any) -> None:
    config = TransformerConfig(**SHAPE | {"num_layers": 6}, pipeline_model_parallel_size=3)
    count, offset = use("transformer.transformer_block", "get_num_layers_to_build", "get_transformer_layer_offset")
    assert [count(config, pp_rank=rank) for rank in range(3)] == [2, 2, 2]
    assert [offset(config, vp_stage=None, pp_rank=rank) for rank in range(3)] == [0, 2, 4]
    pretended(1, pp=3)
    assert use("transformer.transformer_layer", "get_transformer_layer_offset")(config) == 2


def test_which_layers_have_a_window() -> None:
    has = use("transformer.utils", "is_layer_window_attention")
    assert [has((3, 0), 2, number) for number in (1, 2, 3)] == [True, False, True]
    assert [has((3, 0), [1, 0], number) for number in (1, 2)] == [True, False]
    assert has(window_size=(3, 0), window_attn_skip_freq=None, layer_number=1) and not has(None, None, 1)


def test_routing_of_tokens() -> None:
    route = use("transformer.moe.moe_utils", "topk_routing_with_score_function")
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 5.0]])
    weights, chosen = route(logits, 2)
    assert chosen.tolist() == [[False, True, True], [True, False, True]]
    torch.testing.assert_close(weights[0], torch.tensor([-1e9, 3.0, 2.0]).softmax(0))
    biased, experts = route(logits, topk=1, score_function="sigmoid", expert_bias=torch.tensor([9.0, 0, 0]),
                            dense_output=True)  # fmt: skip
    assert experts.tolist() == [[0], [0]]
    torch.testing.assert_close(biased, logits[:, :1].sigmoid())
    _, chosen = route(logits, 2, precomputed_indices=torch.tensor([[2, 0], [2, 1]]))
    assert chosen.tolist() == [[True, False, True], [False, True, True]]
    with pytest.raises(ConfigError, match="router_replay"):
        route(logits, 1, router_replay=object())


def test_embeddings_and_losses_under_their_packages(pretended: Any) -> None:
    rotary, yarn, scale = use("models.common.embeddings", "RotaryEmbedding", "YarnRotaryEmbedding", "_yarn_get_mscale")
    plain = rotary(kv_channels=8, rotary_percent=1.0).build_rotation(4, torch.device("cpu"))
    assert plain.cos.shape[0] == 4 and float(plain.cos[0].min()) == 1.0
    assert yarn(kv_channels=8, rotary_percent=1.0, scaling_factor=4.0).mscale > 1.0 and scale(1.0, 5.0) == 1.0
    rows = use("models.common.embeddings.rope_utils", "get_pos_emb_on_this_cp_rank")
    table = torch.arange(8).view(8, 1)
    assert rows(table, seq_dim=0, cp_group=pretend(1, cp=2).cp).flatten().tolist() == [2, 3, 4, 5]
    assert rows(table, 0) is table
    loss = use("fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy")
    logits, target = torch.randn(4, 1, 8), torch.randint(8, (4, 1))
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    found = loss(logits.clone(), target, tp_group=ProcessGroupCollection.single().tp)
    torch.testing.assert_close(found.flatten(), expected)
    module = use("models.common.language_module.language_module", "LanguageModule")
    assert issubclass(GPTModel, module)


def test_model_state_by_global_names() -> None:
    model = gpt()
    state = model.sharded_state_dict(prefix="model.")
    assert set(state) == {f"model.{name}" for name, _ in model.named_parameters()}
    assert state["model.decoder.layers.1.mlp.linear_fc1.weight"].global_shape == (32, 8)
    wrapped = DistributedDataParallel(config=model.config, ddp_config=DistributedDataParallelConfig(), module=model)
    assert set(wrapped.sharded_state_dict(prefix="")) == {name for name, _ in model.named_parameters()}


# ---- batches


def test_batches_for_ranks(pretended: Any) -> None:
    cut, share, pack = use(
        "utils", "get_batch_on_this_cp_rank", "get_batch_on_this_tp_rank", "flatten_batch_for_packed_sequences"
    )
    batch = {"tokens": torch.arange(8).view(1, 8)}
    assert cut(batch, cp_group=pretend(1, cp=2).cp)["tokens"].tolist() == [[2, 3, 4, 5]]
    assert cut(batch, is_hybrid_cp=True)["tokens"] is batch["tokens"]
    assert share(batch)["tokens"] is batch["tokens"]
    packed, bounds = pack({"tokens": torch.arange(8).view(2, 4), "cu_seqlens": torch.tensor([[0, 3, 4], [0, 4, 4]])})
    assert packed["tokens"].shape == (1, 8) and bounds.cu_seqlens_q.tolist() == [0, 3, 4, 4, 8, 8, 8]
    assert pack(batch)[1] is None


def test_the_number_of_microbatches() -> None:
    module = "num_microbatches_calculator"
    start, number, update, stop = use(
        module, "init_num_microbatches_calculator", "get_num_microbatches", "update_num_microbatches",
        "destroy_num_microbatches_calculator",
    )  # fmt: skip
    size, running, micro, again = use(
        module, "get_current_global_batch_size", "get_current_running_global_batch_size", "get_micro_batch_size",
        "reconfigure_num_microbatches_calculator",
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="call init_num_microbatches_calculator"):
        number()
    start(rank=0, rampup_batch_size=[4, 4, 8], global_batch_size=8, micro_batch_size=2, data_parallel_size=2)
    try:
        assert (number(), size(), running(), micro()) == (1, 4, 4, 2)
        update(consumed_samples=8, consistency_check=True)
        assert (number(), size()) == (2, 8)
        with pytest.raises(RuntimeError, match="set already"):
            start(0, None, 8, 2, 2)
        again(0, None, 16, 2, 2)
        assert number() == 4
    finally:
        stop()


# ---- process groups


def test_getters_of_groups(pretended: Any) -> None:
    assert parallel_state.get_context_parallel_group(check_initialized=False) is None
    ProcessGroupCollection.pretend(RankGrid(8, tp=2, cp=2, hybrid_cp=4), 3).set_current()
    group = parallel_state.get_context_parallel_group(check_initialized=True)
    assert group is not None and (group.size(), group.rank()) == (2, 1)
    sizes = [one.size() for one in parallel_state.get_hybrid_data_context_parallel_groups()]  # type: ignore[union-attr]
    assert sizes == [1, 2, 4]
    assert parallel_state.get_hybrid_data_context_parallel_groups(group_size=4).size() == 4  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="no group of 8"):
        parallel_state.get_hybrid_data_context_parallel_groups(True, group_size=8)
    pretended(3, pp=4)
    assert parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=1, vp_size=2)
    assert not parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=0, vp_size=2)
    assert not parallel_state.is_pipeline_first_stage(ignore_virtual=True)


def test_mappings_use_the_current_group() -> None:
    x = torch.ones(2)
    for name in ("gather_from_tensor_model_parallel_region", "scatter_to_tensor_model_parallel_region"):
        assert use("tensor_parallel", name)(input_=x) is x
    for name in ("gather_from_sequence_parallel_region", "scatter_to_sequence_parallel_region"):
        assert use("tensor_parallel.mappings", name)(input_=x, group=None) is x


# ---- checkpoints


def test_state_dictionaries_go_and_come(tmp_path: Path) -> None:
    path, model, other = tmp_path / "one", gpt(), gpt(seed=5)
    state = {"model": model.sharded_state_dict(), "iteration": 7, "nested": [1, {"rng": torch.arange(3)}]}
    dist_checkpointing.save(sharded_state_dict=state, checkpoint_dir=path)
    loaded = dist_checkpointing.load(sharded_state_dict={"model": other.sharded_state_dict()}, checkpoint_dir=str(path))
    other.load_state_dict(loaded["model"])
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert loaded["iteration"] == 7 and loaded["nested"][1]["rng"].tolist() == [0, 1, 2]
    common = dist_checkpointing.load_common_state_dict(path)
    assert common["nested"][1]["rng"].tolist() == [0, 1, 2]
    known = use("dist_checkpointing.serialization", "load_tensors_metadata")(checkpoint_dir=path)
    assert known["embedding.word_embeddings.weight"].global_shape == (16, 8)
    use("dist_checkpointing.validation", "verify_checkpoint")(path)
    dist_checkpointing.save({"iteration": 8}, path)
    assert dist_checkpointing.load_common_state_dict(path) == {"iteration": 8}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="not an empty directory"):
        dist_checkpointing.save(state, tmp_path / "mine")
    with pytest.raises(ConfigError, match="nested.0 is a list|object is a object"):
        dist_checkpointing.save({"object": object()}, tmp_path / "two")
    with pytest.raises(ConfigError, match="put them into a dictionary"):
        dist_checkpointing.save({"list": [state["model"]["decoder.layers.0.mlp.linear_fc1.bias"]]}, tmp_path / "two")
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_request_is_saved_beside_the_loop(persistent: bool, tmp_path: Path) -> None:
    queue_class, request_class = use("dist_checkpointing.strategies.async_utils", "AsyncCallsQueue", "AsyncRequest")
    queue, done, model = queue_class(persistent=persistent), [], gpt()
    bias = next(model.parameters())
    for number in range(2):
        path, step = tmp_path / str(number), {"count": number}
        request = dist_checkpointing.save(
            {"model": model.sharded_state_dict(), "step": step}, path, async_sharded_save=True
        )
        step["count"] = -1
        assert isinstance(request, request_class) and not path.exists(), "nothing is written before it is scheduled"
        request.add_finalize_fn(lambda path=path: done.append(path.exists()))
        expected = bias.detach().clone()
        assert queue.schedule_async_request(request) == number
        with torch.no_grad():
            bias.add_(1.0)
        assert queue.get_num_unfinalized_calls() == 1
        with pytest.raises(ConfigError, match="comes before"):
            request.add_finalize_fn(print)
        while not (finished := queue.maybe_finalize_async_calls()):
            time.sleep(0.01)
        assert finished == [number] and done == [True] * (number + 1)
        other = gpt(seed=5)
        loaded = dist_checkpointing.load({"model": other.sharded_state_dict()}, path)
        assert torch.equal(next(other.parameters()), expected) and loaded["step"] == {"count": number}
    with pytest.raises(ConfigError, match="scheduled before"):
        queue.schedule_async_request(request)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    again = dist_checkpointing.save(model.sharded_state_dict(), tmp_path / "mine", async_sharded_save=True)
    with pytest.raises(CheckpointError, match="not an empty directory"):
        queue.schedule_async_request(again)
    queue.close()
    dist_checkpointing.save(model.sharded_state_dict(), tmp_path / "now", async_sharded_save=True).execute_sync()
    assert (tmp_path / "now" / "manifest.json").exists()


def test_a_request_that_fails_is_told_by_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron.core.dist_checkpointing.async_save.write_contents", refuse)
    queue, done = use("dist_checkpointing.strategies.async_utils", "AsyncCallsQueue")(), []
    request = dist_checkpointing.save(gpt().sharded_state_dict(), tmp_path / "one", async_sharded_save=True)
    request.add_finalize_fn(lambda: done.append(1))
    queue.schedule_async_request(request)
    with pytest.raises(StorageError, match="No space left"):
        queue.close()
    assert done == [] and list(tmp_path.iterdir()) == [] and queue.get_num_unfinalized_calls() == 0


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    path, model = tmp_path / "one", gpt()
    dist_checkpointing.save(model.sharded_state_dict(), path)
    (path / "common.json").write_text("{}")
    for read in (
        lambda: dist_checkpointing.load(model.sharded_state_dict(), path),
        lambda: use("dist_checkpointing.validation", "verify_checkpoint")(path),
    ):
        with pytest.raises(CheckpointError, match="common.json"):
            read()


def test_strategies_and_formats(tmp_path: Path) -> None:
    path, model = tmp_path / "one", gpt()
    strategy = use("dist_checkpointing.strategies.torch", "TorchDistLoadShardedStrategy")()
    parallel = use("dist_checkpointing.strategies.fully_parallel", "FullyParallelLoadStrategyWrapper")(
        strategy, ProcessGroupCollection.single().dp
    )
    dist_checkpointing.save(model.sharded_state_dict(), path)
    for one in (strategy, parallel):
        assert set(one.load(model.sharded_state_dict(), path)) == set(model.state_dict())
        assert set(dist_checkpointing.load(model.sharded_state_dict(), path, one)) == set(model.state_dict())
    with pytest.raises(ConfigError, match="leave out the strategy"):
        dist_checkpointing.load(model.sharded_state_dict(), path, "zarr")
    config_class, read, write = use(
        "dist_checkpointing.core", "CheckpointingConfig", "maybe_load_config", "save_config"
    )
    assert read(path).sharded_backend == "torch_dist" and read(tmp_path) is None
    write(config=config_class(sharded_backend="torch_dist"), checkpoint_dir=tmp_path)
    assert read(tmp_path) == config_class("torch_dist", 1)
    save_common, load_common = use("dist_checkpointing.strategies.common", "save_common", "load_common")
    save_common(common_state_dict={"iteration": 3}, checkpoint_dir=tmp_path)
    assert load_common(tmp_path) == {"iteration": 3}


# ---- tokenizers


def test_tokenizers_from_metadata(tmp_path: Path) -> None:
    tokenizers = use("tokenizers", "MegatronTokenizer")
    tokenizer = tokenizers.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=64)
    assert tokenizer.tokenize("3 4") == [3, 4] and isinstance(
        tokenizer, use("tokenizers.text", "MegatronTokenizerText")
    )
    tokenizers.write_metadata(tokenizer_path=str(tmp_path), tokenizer_library="null-text")
    assert json.loads((tmp_path / "tokenizer_metadata.json").read_text()) == {"library": "null-text"}
    assert tokenizers.from_pretrained(str(tmp_path), vocab_size=8).vocab_size == 8
    with pytest.raises(OSError, match="from_pretrained"):
        tokenizers()
    for call in (
        lambda: tokenizers.write_metadata(str(tmp_path), "null-text"),
        lambda: tokenizers.write_metadata(str(tmp_path), "other"),
        lambda: tokenizers.from_pretrained(metadata_path={"library": "null-text"}, size=3),
        lambda: tokenizers.from_pretrained(metadata_path={"library": "unknown"}),
    ):
        with pytest.raises(MegatronError):
            call()


def test_tokenizers_from_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    build, pad = use("tokenizers.utils.build_tokenizer", "build_tokenizer", "vocab_size_with_padding")
    args = SimpleNamespace(
        tokenizer_type="NullTokenizer", vocab_size=50, make_vocab_size_divisible_by=16, tensor_model_parallel_size=2
    )
    assert build(args).vocab_size == 50
    assert pad(orig_vocab_size=50, args=args) == 64 and "with 14 dummy tokens" in capsys.readouterr().out
    pad(50, args, logging_enabled=False)
    assert capsys.readouterr().out == ""


def test_paths_of_a_dataset_and_the_config_of_fill_in_the_middle() -> None:
    bin_path, idx_path = use("datasets.indexed_dataset", "get_bin_path", "get_idx_path")
    assert (bin_path(path_prefix="a/b"), idx_path(path_prefix="a/b")) == ("a/b.bin", "a/b.idx")
    config_class = resolve("megatron.training.datasets.fim_dataset", "GPTFIMDatasetConfig")
    tokens = {"prefix": "<p>"}
    config = config_class(random_seed=1, sequence_length=8, fim_rate=0.5, fim_spm_rate=0.5, fim_extra_tokens=tokens)
    assert (config.fim_rate, config.mock) == (0.5, True)


def test_a_spec_that_contradicts_the_config_is_refused() -> None:
    sentence = "the layer spec was made with .* the config says .* give TransformerConfig"
    for given in ({"qk_layernorm": True}, {"qk_l2_norm": True}, {"num_experts": 4}, {"normalization": "RMSNorm"}):
        with pytest.raises(ConfigError, match=sentence):
            gpt(use("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec")(**given))
