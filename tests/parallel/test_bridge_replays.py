# SPDX-License-Identifier: Apache-2.0
"""The sequences of mbridge and mcore-bridge: a config of the program's own, GPTModel derived and its first and last
part overridden, chunks wrapped, weights of Hugging Face in by state_dict, padded batches scored, weights out again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TENorm
from megatron.core.fp8_utils import correct_amax_history_if_needed
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel, ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import RankGenerator, create_group
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.core_attention.interface import Visible
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import StragglerDetector, check_param_hashes_across_dp_replicas, get_model_config, unwrap_model
from tests.parallel.harness import run_distributed
from tests.parallel.test_program_replays import (
    GROUPS,
    HEADS,
    LAYERS,
    LOCAL_EXPERTS,
    VOCABULARY,
    WIDTH,
    export,
    make_theirs,
    rename,
    whole_name,
)

LENGTH, TEXTS = 8, 2
LAYOUTS = {"tp2": (2, 1, 1), "pp2": (1, 2, 1), "dp2": (1, 1, 1), "ep2": (1, 1, 2), "unequal": (1, 1, 2)}
"""In the last one experts get all tokens by allgather, and the ranks have different numbers of texts."""


@dataclasses.dataclass
class BridgeConfig(TransformerConfig):
    """A config with fields of the program's own, as mcore-bridge and verl's providers have them."""

    hf_model_type: str = "llama"
    padded_vocab_size: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.padded_vocab_size = self.padded_vocab_size or VOCABULARY


class BridgeModel(GPTModel):
    """mcore-bridge's: what enters the decoder, and what leaves it, go through methods of the program's own."""

    calls: list[str]

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        decoder_input, rotary_pos_emb, *others = super()._preprocess(*args, **kwargs)
        self.calls.append("preprocess")
        if decoder_input is not None and self.pre_process:
            decoder_input = decoder_input * self.config.extra.get("scale", 1.0)
        # Upstream's angles [s, 1, 1, channels] in place of what ours are.
        tokens = decoder_input.shape[0] * (
            self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        )
        if self.config.extra.get("angles"):
            rotary_pos_emb = self.rotary_pos_emb(tokens)
        return (decoder_input, rotary_pos_emb, *others)

    def _postprocess(
        self, hidden_states: Any, input_ids: Any, position_ids: Any, labels: Any, rotary_pos_emb: Any,
        rotary_pos_cos: Any, rotary_pos_sin: Any, mtp_in_postprocess: Any = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        self.calls.append("postprocess")
        given = (hidden_states, input_ids, position_ids, labels, rotary_pos_emb, rotary_pos_cos, rotary_pos_sin)
        others |= {"decoder_input": None, "sequence_len_offset": None, "extra_block_kwargs": None}
        return super()._postprocess(*given, mtp_in_postprocess, **others)


def fused_forward(model: GPTModel, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """verl's: logits without the model's own forward."""
    decoder_input, rotary_pos_emb, rotary_pos_cos, rotary_pos_sin, sequence_len_offset, *_ = model._preprocess(
        input_ids=input_ids, position_ids=position_ids, decoder_input=None, inference_context=None,
        packed_seq_params=None,
    )  # fmt: skip
    hidden_states = model.decoder(
        hidden_states=decoder_input, attention_mask=None, inference_context=None, rotary_pos_emb=rotary_pos_emb,
        rotary_pos_cos=rotary_pos_cos, rotary_pos_sin=rotary_pos_sin, packed_seq_params=None,
        sequence_len_offset=sequence_len_offset,
    )  # fmt: skip
    if not model.post_process:
        return hidden_states
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    logits, _ = model.output_layer(hidden_states, weight=weight)
    return logits.transpose(0, 1)


def check_groups(tp: int, pp: int, ep: int) -> None:
    """mcore-bridge makes groups of its own by the arithmetic of ranks."""
    ranks = RankGenerator(tp=tp, ep=1, dp=dist.get_world_size() // (tp * pp), pp=pp, cp=1, order="tp-cp-ep-dp-pp",
                          rank_offset=0)  # fmt: skip
    for token, group in (
        ("tp", mpu.get_tensor_model_parallel_group()),
        ("pp", mpu.get_pipeline_model_parallel_group()),
    ):
        lists = ranks.get_ranks(token)
        made = [create_group(members, group_desc=f"own_{token}") for members in lists]
        own = next(number for number, members in enumerate(lists) if dist.get_rank() in members)
        assert dist.get_process_group_ranks(made[own]) == dist.get_process_group_ranks(group) == lists[own]


def build(tp: int, pp: int, ep: int, dispatcher: str = "alltoall") -> tuple[BridgeConfig, Any]:
    fields: dict[str, Any] = {
        "num_layers": LAYERS, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "num_query_groups": GROUPS,
        "ffn_hidden_size": 40, "attention_dropout": 0.0, "hidden_dropout": 0.0, "kv_channels": None,
        "layernorm_epsilon": 1e-5, "activation_func": nn.functional.silu, "normalization": "RMSNorm",
        "gated_linear_unit": True, "pipeline_dtype": torch.float32, "params_dtype": torch.float32, "bf16": False,
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1 if ep > 1 else None, "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1, "sequence_parallel": tp > 1, "variable_seq_lengths": dispatcher == "alltoall",
        "attention_backend": AttnBackend.flash, "bias_activation_fusion": True, "masked_softmax_fusion": True,
        "persist_layer_norm": True, "bias_dropout_fusion": True, "add_bias_linear": False, "add_qkv_bias": False,
        "qk_layernorm": False, "moe_token_dispatcher_type": dispatcher, "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": True, "overlap_p2p_comm": False, "apply_rope_fusion": False,
        "use_cpu_initialization": False,
    }  # fmt: skip
    if ep > 1:
        fields |= {
            "num_moe_experts": LOCAL_EXPERTS * ep, "moe_router_topk": 2, "moe_ffn_hidden_size": 40, "moe_layer_freq": 1,
            "moe_router_load_balancing_type": "none", "moe_grouped_gemm": True, "moe_shared_expert_overlap": False,
            "moe_router_score_function": "softmax", "moe_router_pre_softmax": False, "moe_permute_fusion": False,
        }  # fmt: skip
    config = BridgeConfig(**fields, hf_model_type="mixtral" if ep > 1 else "llama")
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=None)
    assert isinstance(spec, TransformerBlockSubmodules) and spec.layer_norm in (TENorm, spec.layer_norm)
    config.no_rope_freq = None
    network = BridgeModel(
        config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=None),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=None), fp16_lm_cross_entropy=False,
        parallel_output=True, share_embeddings_and_output_weights=False, position_embedding_type="rope",
        rotary_percent=1.0, rotary_base=10000.0, scatter_embedding_sequence_parallel=True, vp_stage=None,
    )  # fmt: skip
    network.calls, network.model_type = [], ModelType.encoder_or_decoder
    for param in network.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    correct_amax_history_if_needed([network])
    if config.bf16:
        network = Float16Module(config, network)
    wrapped = DistributedDataParallel(
        config=get_model_config(network), module=network, disable_bucketing=True,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
    )  # fmt: skip
    wrapped.broadcast_params()
    wrapped.eval()
    return config, wrapped


def load_by_state_dict(model: Any, weights: dict[str, Tensor]) -> None:
    """mbridge's: every entry of the state dict but extra states; shards scattered over the group that divides it."""
    network = unwrap_model(model)
    state, params = network.state_dict(), dict(network.named_parameters())
    names = [name for name in state if not name.endswith("_extra_state")]
    assert set(names) == set(params)
    offset = get_transformer_layer_offset(network.config)
    assert offset == mpu.get_pipeline_model_parallel_rank() * (LAYERS // mpu.get_pipeline_model_parallel_world_size())
    for name in names:
        whole, param = weights[whole_name(name)], state[name]
        group = mpu.get_expert_tensor_parallel_group() if ".experts." in name else mpu.get_tensor_model_parallel_group()
        size, source = dist.get_world_size(group), dist.get_global_rank(group, 0)
        shards = [whole] * size
        if size > 1 and params[name].tensor_model_parallel:
            halves = whole.chunk(2) if "linear_fc1.weight" in name else [whole]
            cut = [half.chunk(size, dim=params[name].partition_dim) for half in halves]
            shards = [torch.cat(parts).contiguous() for parts in zip(*cut, strict=True)]
        received = torch.empty_like(param)
        dist.scatter(received, [shard.contiguous() for shard in shards] if dist.get_rank() == source else None,
                     src=source, group=group)  # fmt: skip
        param.copy_(received)


def list_texts(replica: int, unequal: bool) -> Tensor:
    """[texts, tokens]."""
    texts = (torch.arange(TEXTS * LENGTH).view(TEXTS, LENGTH) * (5 + 2 * replica) + replica) % VOCABULARY
    return texts[: TEXTS - replica] if unequal else texts


def score(model: Any, texts: Tensor, fused: bool) -> Tensor | None:
    """Log-probabilities of the last stage, [texts, tokens]."""
    count = len(texts)
    positions = torch.arange(LENGTH).expand(count, LENGTH)

    def forward_step(batches: Any, chunk: Any) -> Any:
        tokens = next(batches)
        if fused:
            output = fused_forward(unwrap_model(chunk), tokens, positions)
        else:  # a mask [b, s] of ones, as mbridge's example gives it
            output = chunk(tokens, positions, torch.ones(count, LENGTH, dtype=torch.int64))

        def keep(logits: Tensor, non_loss_data: bool = True) -> Tensor:
            parts = [torch.empty_like(logits) for _ in range(mpu.get_tensor_model_parallel_world_size())]
            dist.all_gather(parts, logits.contiguous(), group=mpu.get_tensor_model_parallel_group())
            return torch.cat(parts, dim=-1).log_softmax(-1).gather(2, tokens.roll(-1, 1)[..., None])[..., 0]

        return output, keep

    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter([texts]), model=model, num_microbatches=1,
            seq_length=LENGTH, micro_batch_size=count, forward_only=True, collect_non_loss_data=True,
        )  # fmt: skip
    return found[0] if found else None


def replay(tp: int, pp: int, ep: int, unequal: bool = False) -> Any:
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1, expert_model_parallel_size=ep, expert_tensor_parallel_size=1 if ep > 1 else None,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(0)
    check_groups(tp, pp, ep)
    config, model = build(tp, pp, ep, "allgather" if unequal else "alltoall")
    network = unwrap_model(model)
    experts = config.num_moe_experts or 0
    load_by_state_dict(model, rename(make_theirs(experts).state_dict()))
    assert check_param_hashes_across_dp_replicas([model], cross_check=True)
    texts = list_texts(mpu.get_data_parallel_rank(), unequal)
    with StragglerDetector()(bdata=True):
        scores = [score(model, texts, fused=False)]
    assert network.calls == ["preprocess", "postprocess"]
    scores.append(score(model, texts, fused=True))
    config.extra["angles"] = True
    scores += [score(model, texts, fused=False), score(model, texts, fused=True)]
    config.extra["scale"] = 2.0
    if pp == 1:
        changed = score(model, texts, fused=False)
        assert changed is not None and not torch.allclose(changed, scores[0], atol=1e-3), "an override has its effect"
    exported = export(model)
    mpu.destroy_model_parallel()
    return scores, exported


def patch_classes() -> dict[str, Any]:
    """mcore-bridge replaces methods of classes when it is imported: what it sets is what runs."""
    before = TELayerNormColumnParallelLinear.__repr__
    TELayerNormColumnParallelLinear.__repr__ = lambda self: f"{type(self).__name__} of mine"  # type: ignore[method-assign]
    try:
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
        options: dict[str, Any] = {"gather_output": False, "bias": False, "skip_bias_add": False, "is_expert": False}
        layer = TELayerNormColumnParallelLinear(8, 8, config=config, init_method=nn.init.zeros_, **options)
        return {"repr": repr(layer)}
    finally:
        TELayerNormColumnParallelLinear.__repr__ = before  # type: ignore[method-assign]


def replay_all() -> dict[str, Any]:
    if dist.get_world_size() == 1:
        return {"alone": replay(1, 1, 1)}
    return {name: replay(*sizes, unequal=name == "unequal") for name, sizes in LAYOUTS.items()}


@pytest.mark.filterwarnings("ignore:layers are those of the local spec")
def test_bridges(tmp_path: Path) -> None:
    together = run_distributed(replay_all, 2)
    for name, (tp, pp, ep) in {"alone": (1, 1, 1), **LAYOUTS}.items():
        found = run_distributed(replay_all, 1) if name == "alone" else together
        theirs = make_theirs(LOCAL_EXPERTS * ep if ep > 1 else 0)
        weights = rename(theirs.state_dict())
        for rank, results in enumerate(found):
            scores, exported = results[name]
            assert set(exported) == set(weights)
            assert all(torch.equal(exported[key], weights[key]) for key in weights)
            texts = list_texts(rank if tp == pp == 1 else 0, name == "unequal")
            expected = theirs(texts).logits.log_softmax(-1).gather(2, texts.roll(-1, 1)[..., None])[..., 0].detach()
            for ours in scores if pp == 1 or rank == 1 else ():
                torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_positions_that_a_model_needs() -> None:
    rotary = RotaryEmbedding(kv_channels=4, rotary_percent=1.0)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2,
                               sequence_parallel=True)  # fmt: skip
    assert rotary.get_rotary_seq_len(None, None, torch.zeros(3, 1, 8), config, None) == 6
    packed = PackedSeqParams(max_seqlen_q=torch.tensor(5), max_seqlen_kv=4)
    assert rotary.get_rotary_seq_len(None, None, None, config, packed) == 5
    with pytest.raises(ConfigError, match="inference_context"):
        rotary.get_rotary_seq_len(object(), None, None, config)


def test_a_mask_of_one_row_keeps_the_causal_rule() -> None:
    row = torch.tensor([False, False, True, False]).view(1, 1, 1, 4)
    mask = Visible.build(row, AttnMaskType.causal).build_mask(4, 4, row.device)
    later = torch.ones(4, 4, dtype=torch.bool).triu(1)
    assert mask is not None and torch.equal(mask[0, 0], later | row[0, 0])
    assert Visible.build(row, AttnMaskType.arbitrary).build_mask(4, 4, row.device) is row


def test_a_method_that_is_replaced_is_what_runs() -> None:
    assert run_distributed(patch_classes, 1)[0] == {"repr": "TELayerNormColumnParallelLinear of mine"}
