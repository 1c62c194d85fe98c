# SPDX-License-Identifier: Apache-2.0
"""Arguments and fields of upstream's layers, datasets and packed sequences, each obeyed or refused in a sentence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import AttnMaskType
from megatron.core.errors import ConfigError, DataError, UnsupportedError
from megatron.core.extensions import transformer_engine as te
from megatron.core.mesh import RankGrid
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.null import NullTokenizer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.sparse_attention import SparseCore, SparseSelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import WrappedTensor
from tests.support.pretend_groups import pretend
from tests.unit.upstream.test_upstream_core import use

CONFIG = TransformerConfig(num_layers=1, hidden_size=24, num_attention_heads=6, kv_channels=4, attention_dropout=0.0)
ALONE = ProcessGroupCollection.single()
COLUMN: dict[str, Any] = {
    "bias": False, "gather_output": False, "stride": 1, "keep_master_weight_for_test": False, "skip_bias_add": True,
    "skip_weight_param_allocation": False, "embedding_activation_buffer": None, "grad_output_buffer": None,
    "is_expert": False, "tp_comm_buffer_name": "qkv", "disable_grad_reduce": False, "tp_group": None, "name": "q",
    "output_dtype": None, "pg_collection": ALONE,
}  # fmt: skip
ROW: dict[str, Any] = {
    "bias": True, "input_is_parallel": True, "skip_bias_add": False, "stride": 1, "keep_master_weight_for_test": False,
    "is_expert": True, "tp_comm_buffer_name": "proj", "tp_group": ALONE.tp, "name": None, "pg_collection": None,
}  # fmt: skip
LAYERS = [
    (tensor_parallel.ColumnParallelLinear, COLUMN), (tensor_parallel.RowParallelLinear, ROW),
    (te.TEColumnParallelLinear, COLUMN), (te.TERowParallelLinear, ROW), (te.TELayerNormColumnParallelLinear, COLUMN),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_groups() -> Iterator[None]:
    ProcessGroupCollection.clear_current()
    yield
    ProcessGroupCollection.clear_current()


def ones(weight: torch.Tensor) -> None:
    torch.nn.init.ones_(weight)


@pytest.mark.parametrize(("layer", "options"), LAYERS)
def test_layers_take_all_arguments_and_are_filled(layer: Any, options: dict[str, Any]) -> None:
    made = layer(24, 12, config=CONFIG, init_method=ones, **options)
    x = torch.randn(3, 1, 24, generator=torch.Generator().manual_seed(2))
    output, bias = made(x)
    rows = x if layer is not te.TELayerNormColumnParallelLinear else F.layer_norm(x, (24,))
    torch.testing.assert_close(output, rows.sum(-1, keepdim=True).expand(3, 1, 12))
    assert bias is None and torch.equal(made.weight, torch.ones(12, 24))
    # Without any of upstream's: the layer stands alone, too.
    assert torch.equal(layer(24, 12, config=CONFIG, init_method=ones).weight, torch.ones(12, 24))


@pytest.mark.parametrize(("layer", "options"), LAYERS)
@pytest.mark.parametrize(
    "refused",
    [{"stride": 2}, {"keep_master_weight_for_test": True}, {"embedding_activation_buffer": []},
     {"grad_output_buffer": []}, {"disable_grad_reduce": True}, {"output_dtype": torch.float32}],
)  # fmt: skip
def test_layers_refuse_what_is_not_done(layer: Any, options: dict[str, Any], refused: dict[str, Any]) -> None:
    if layer in (te.TERowParallelLinear, tensor_parallel.RowParallelLinear) and not set(refused) & set(ROW):
        return
    with pytest.raises(ConfigError, match=rf"{layer.__name__}\(\) has no {next(iter(refused))} .*leave it out"):
        layer(24, 12, config=CONFIG, init_method=ones, **options | refused)
    with pytest.raises(TypeError, match="unexpected keyword argument 'strides'"):
        layer(24, 12, config=CONFIG, init_method=ones, strides=1)


def test_the_group_is_the_given_one_or_that_of_the_collection() -> None:
    grid = RankGrid(4, tp=2)
    groups = ProcessGroupCollection.pretend(grid, 3)
    column = tensor_parallel.ColumnParallelLinear(24, 12, config=CONFIG, init_method=ones, pg_collection=groups)
    row = te.TERowParallelLinear(24, 12, config=CONFIG, init_method=ones, tp_group=groups.tp, is_expert=False)
    table = tensor_parallel.VocabParallelEmbedding(10, 24, init_method=ones, config=CONFIG, pg_collection=groups)
    assert (column.weight.shape, row.weight.shape, table.weight.shape) == ((6, 24), (12, 12), (5, 24))
    assert table.weight.sum() == 120
    expert = tensor_parallel.ColumnParallelLinear(
        24, 12, config=CONFIG, init_method=ones, pg_collection=ProcessGroupCollection.pretend(grid, 0), is_expert=True
    )
    assert expert.weight.shape == (6, 24)
    for sizes in ({"ep": 2}, {"tp": 2, "etp": 1}):
        with pytest.raises(ConfigError, match=r"is_expert=True.*built whole, by MoELayer"):
            tensor_parallel.RowParallelLinear(
                24, 12, config=CONFIG, init_method=ones, is_expert=True,
                pg_collection=ProcessGroupCollection.pretend(RankGrid(4, **sizes), 0),
            )  # fmt: skip


def test_attention_by_the_width_of_a_key() -> None:
    q, k, v = torch.randn(3, 5, 1, 6, 8, generator=torch.Generator().manual_seed(4))
    mask = AttnMaskType.causal
    attend = te.TEDotProductAttention(
        CONFIG, 1, mask, "self", k_channels=8, v_channels=8, num_splits=1, cp_comm_type="p2p", pg_collection=ALONE
    )
    found = attend(q, k, v, None)
    expected = F.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(found, expected.permute(2, 0, 1, 3).flatten(2))
    scaled = te.TEDotProductAttention(CONFIG, 1, mask, "self", softmax_scale=0.5, k_channels=8, pg_collection=ALONE)
    assert scaled.options.scale == 0.5 and attend.options.scale == 8**-0.5


def dataset_config(**fields: Any) -> GPTDatasetConfig:
    return GPTDatasetConfig(random_seed=1, sequence_length=16, tokenizer=NullTokenizer(101), **fields)


def test_fields_of_a_dataset() -> None:
    plain, told = dataset_config(), dataset_config(
        context_parallel_size=2, data_parallel_size=3, sequence_parallel_size=2, hybrid_context_parallel=False,
        full_validation=True, sequences_per_dataset=None,
    )  # fmt: skip
    # None: one pass over the documents.
    for config, expected in ((plain, [10, 7, 0]), (told, [10, None, 0])):
        assert BlendedMegatronDatasetBuilder(MockGPTDataset, [10, 7, 0], lambda: True, config).sizes == expected
    with pytest.raises(ConfigError, match=r"hybrid_context_parallel=True.*leave it out"):
        dataset_config(hybrid_context_parallel=True)
    with pytest.raises(ConfigError, match=r"sequences_per_dataset.*read_sequence_counts"):
        dataset_config(sequences_per_dataset={"a": 3})


def test_fields_of_packed_sequences() -> None:
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    rows = torch.tensor([[0, 0, 0, 1, 1, 2]])
    told = PackedSeqParams(cu_seqlens_q=bounds, total_tokens=6, seq_idx=rows, pad_between_seqs=False, local_cp_size=1,
                           cp_group=ALONE.cp)  # fmt: skip
    expected = PackedSeqParams(cu_seqlens_q=bounds).layout(6)
    for params in (told, PackedSeqParams(seq_idx=rows)):
        assert torch.equal(params.layout(6).positions, expected.positions)
    with pytest.raises(DataError, match=r"total_tokens=7.*6 tokens"):
        PackedSeqParams(cu_seqlens_q=bounds, total_tokens=7).layout(6)
    with pytest.raises(DataError, match=r"documents from \[0, 2, 6\], cu_seqlens from \[0, 3, 5\]"):
        PackedSeqParams(cu_seqlens_q=bounds, seq_idx=torch.tensor([0, 0, 1, 1, 1, 1])).layout(6)
    with pytest.raises(DataError, match="5 tokens, the sequence has 6"):
        PackedSeqParams(seq_idx=rows[:, :5]).layout(6)
    for group in (None, SimpleNamespace(size=lambda: 4)):
        with pytest.raises(ConfigError, match=r"local_cp_size=2.*as many ranks"):
            PackedSeqParams(cu_seqlens_q=bounds, local_cp_size=2, cp_group=group)
    with pytest.raises(ConfigError, match=r"tokens_per_sample.*leave it out"):
        PackedSeqParams(cu_seqlens_q=bounds, tokens_per_sample=3)


def test_getters_of_groups_take_upstreams_keywords() -> None:
    getters = [name for name in dir(mpu) if name.startswith("get_") and name.endswith("_parallel_group")]
    assert len(getters) > 8 and {getattr(mpu, name)(check_initialized=False) for name in getters} == {None}
    pretend(3, pp=2, tp=2, dp=2).set_current()
    mpu.set_virtual_pipeline_model_parallel_world_size(2)
    held = [mpu.is_rank_in_embedding_group(ignore_virtual=False, vp_stage=stage) for stage in (0, 1)]
    mpu.set_virtual_pipeline_model_parallel_world_size(None)
    assert mpu.is_rank_in_embedding_group() and held in ([True, False], [False, True])
    options: dict[str, Any] = {"with_gtp_remat": False}
    sizes = [mpu.get_data_parallel_world_size(True, partial_data_parallel=part, **options) for part in (False, True)]
    of_experts = mpu.get_expert_data_parallel_world_size(partial_expert_data_parallel=True, **options)
    assert [*sizes, of_experts] == [2, 2, 2]
    assert mpu.get_data_parallel_rank(**options) == mpu.get_expert_data_parallel_rank(**options)


def test_arguments_by_upstreams_places() -> None:
    """By position in upstream's order, also where ours is another."""
    parts = get_gpt_layer_local_spec().submodules
    mlp = MLP(CONFIG, parts.mlp.submodules, False, 12, 20, None, name="mine")
    assert mlp.linear_fc1.weight.shape == (20, 12) and mlp.linear_fc2.weight.shape == (24, 20)
    expert = MLP(CONFIG, parts.mlp.submodules, is_expert=True, tp_group=ProcessGroupCollection.current().tp)
    assert expert(torch.ones(2, 1, 24))[0].shape == (2, 1, 24)
    layer = TransformerLayer(CONFIG, parts, 1, CONFIG.hidden_dropout, None, 0, is_mtp_layer=False, name="layer")
    assert layer.layer_number == 1
    for wrong in ({"hidden_dropout": 0.7}, {"pp_layer_offset": 2}, {"add_layer_offset": True}):
        with pytest.raises(ConfigError, match=rf"TransformerLayer\(\) has no {next(iter(wrong))} .+; leave it out"):
            TransformerLayer(CONFIG, parts, 1, **wrong)
    with pytest.raises(TypeError, match="multiple values for argument 'hidden_dropout'"):
        TransformerLayer(CONFIG, parts, 1, None, hidden_dropout=None)
    theirs = {"first_val_step", "adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection", "force_all_reduce"}
    assert theirs <= set(inspect.signature(get_forward_backward_func()).parameters)
    angles = RotaryEmbedding(8, 1.0)
    assert torch.equal(angles(6, offset=2, packed_seq=True, cp_group=None), angles(8)[2:])
    with pytest.raises(ConfigError, match="not divided over a cp_group of 2"):
        angles(6, cp_group=SimpleNamespace(size=lambda: 2))
    with pytest.raises(ConfigError, match=r"get_megatron_optimizer\(config, model_chunks\) makes"):
        ChainedOptimizer([object()])


def test_a_block_takes_what_another_stage_has_sent() -> None:
    block = TransformerBlock(CONFIG, get_gpt_layer_local_spec(), True, False, True).eval()
    for param in block.parameters():
        torch.nn.init.normal_(param, std=0.1)
    whole = TransformerBlock(CONFIG, get_gpt_layer_local_spec()).eval()
    whole.load_state_dict(block.state_dict())
    sent = torch.randn(3, 1, 24)
    block.set_input_tensor(sent)
    expected = whole(sent)
    assert torch.equal(block(None), expected) and torch.equal(whole(WrappedTensor(sent)), expected)


def test_names_of_sparse_attention() -> None:
    rotate = use("transformer.experimental_attention_variant.dsa", "rotate_activation")
    x = torch.randn(3, 8, dtype=torch.float64)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    torch.testing.assert_close(rotate(x), x @ torch.kron(two, torch.kron(two, two)))
    with pytest.raises(ConfigError, match="72 channels"):
        rotate(torch.zeros(1, 72))
    find_spec = use("models.gpt.experimental_attention_variant_module_specs", "get_dsa_module_spec_for_backend")
    config = TransformerConfig(num_layers=1, hidden_size=72, num_attention_heads=6)
    for arguments in ((config,), (config, SimpleNamespace())):
        spec = find_spec(*arguments)
        assert (spec.module, spec.submodules.core_attention) == (SparseSelfAttention, SparseCore)
    variants = "models.gpt.experimental_attention_variant_module_specs"
    of_block = use(variants, "get_transformer_block_with_experimental_attention_variant_spec")(config, vp_stage=None)
    of_layers = use(variants, "get_transformer_layer_with_experimental_attention_variant_spec")(config, None)
    assert [spec.module for spec in (*of_block.layer_specs, *of_layers)] == [TransformerLayer] * 2
    for name in ("is_linear_attention_variant", "is_gated_delta_net_variant"):
        assert [use(variants, name)(each) for each in ("gated_delta_net", "dsa", None)] == [True, False, False]
    with pytest.raises(UnsupportedError, match="get_dsa_module_spec_for_backend"):
        use("models.gpt.experimental_attention_variant_module_specs", "DSAIndexer")(config)
