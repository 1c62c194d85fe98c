# SPDX-License-Identifier: Apache-2.0
"""Elements of low-rank adapters on a process: of attention, latent attention and MLPs; of other layers, which have one
only where --lora-target-modules names them, none are counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.plan.model_plan import Branch
from megatron.core.plan.read import read_plan
from megatron.core.plan.stages import StageContent

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class _Linear(NamedTuple):
    """A linear layer on one process."""

    path: str
    """Of its module in the layer's."""
    inputs: float
    outputs: Mapping[str, float]
    """Projection -> its rows of the weight."""
    stack: float = 1
    """Matrices of this shape: experts of the process."""


def count_adapters(model: TransformerConfig, chunks: Sequence[StageContent]) -> tuple[float, float]:
    """Elements that a process with these chunks trains instead of weights, outside of experts and of experts; 0 without
    --lora-rank."""
    elements = [0.0, 0.0]
    if model.lora_rank is None:
        return 0.0, 0.0
    plan = read_plan(model)
    for content in chunks:
        layers = plan.decoder[content.layers.start : content.layers.stop]
        layers += plan.prediction if content.has_prediction else ()
        for name, branch in ((layer.name, branch) for layer in layers for branch in layer.branches):
            for linear in _list_linears(model, branch):
                chosen = model.list_adapted(f"{name}.{linear.path}", tuple(linear.outputs))
                if chosen:
                    rows = sum(linear.outputs.values())
                    count = model.lora_rank * (len(chosen) * linear.inputs + rows)
                    count += rows if model.lora_type == "dora" else 0
                    elements[linear.stack != 1] += count * linear.stack
    return elements[0], elements[1]


def _list_linears(model: TransformerConfig, branch: Branch) -> Iterator[_Linear]:
    hidden, ranks, heads = model.hidden_size, model.tensor_model_parallel_size, model.num_attention_heads
    if branch.kind in ("attention", "parallel"):
        width = model.query_width / ranks
        groups = max(branch.options.query_groups or model.num_query_groups or heads, ranks)
        queries = heads * (2 if model.attention_output_gate else 1) * width
        projections = {"q_proj": queries, "k_proj": groups * width, "v_proj": groups * model.value_width / ranks}
        yield _Linear("self_attention.linear_qkv", hidden, projections)
    elif branch.kind == "latent_attention":
        queries, latents = heads * model.query_width / ranks, model.kv_lora_rank + model.qk_pos_emb_head_dim
        if model.q_lora_rank is None:
            yield _Linear("self_attention.linear_q_proj", hidden, {"q_proj": queries})
        else:
            yield _Linear("self_attention.linear_q_down_proj", hidden, {"q_a_proj": model.q_lora_rank})
            yield _Linear("self_attention.linear_q_up_proj", model.q_lora_rank, {"q_b_proj": queries})
        yield _Linear("self_attention.linear_kv_down_proj", hidden, {"kv_a_proj_with_mqa": latents})
        expanded = heads * (model.qk_head_dim + model.v_head_dim) / ranks
        yield _Linear("self_attention.linear_kv_up_proj", model.kv_lora_rank, {"kv_b_proj": expanded})
    if branch.kind in ("attention", "parallel", "latent_attention"):
        yield _Linear("self_attention.linear_proj", heads * model.value_width / ranks, {"o_proj": hidden})
    if branch.kind in ("mlp", "parallel"):
        yield from _list_mlp(model, "mlp", (branch.options.ffn_hidden_size or model.ffn_hidden_size or 0) / ranks)
    elif branch.kind == "experts":
        inside = model.expert_tensor_parallel_size or ranks
        experts = (model.num_moe_experts or 0) / model.expert_model_parallel_size
        for linear in _list_mlp(model, "mlp.experts", (model.moe_ffn_hidden_size or 0) / inside, model.expert_channels):
            yield linear._replace(stack=experts)
        if model.moe_shared_expert_intermediate_size:
            yield from _list_mlp(model, "mlp.shared_experts", model.moe_shared_expert_intermediate_size / ranks)


def _list_mlp(model: TransformerConfig, path: str, width: float, outer: int | None = None) -> Iterator[_Linear]:
    outer = outer or model.hidden_size
    names = ("gate_proj", "up_proj") if model.gated_linear_unit else ("up_proj",)
    yield _Linear(f"{path}.linear_fc1", outer, dict.fromkeys(names, width))
    yield _Linear(f"{path}.linear_fc2", width, {"down_proj": outer})
