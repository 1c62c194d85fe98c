# SPDX-License-Identifier: Apache-2.0
"""Bytes that a training step of this program holds on each stage of the pipeline, counted tensor by tensor.

memory.py gives the figures of the reference system, which users compare; this is what our own layers keep, so that a
plan can say what fits. It is proven within 3 % against steps on a device that counts memory (tests/fake_device).

    state         weight, gradient, main weight and moments in their number formats, divided over the replicas by the
                  distributed optimizer or FSDP2, which also gathers weights (`_count_state_bytes`)
    kept          what one layer keeps of one microbatch for backward (`list_kept`): a table by tensor, of which
                  recomputation leaves rows out
    in flight     the schedule's own table of forwards and backwards is walked through
    temporaries   the gradients within the layer that is in backward, or the logits beside the loss, whichever is more
    graphs        what recorded layers keep and their temporaries, as often as microbatches are in flight, for good

Tensors are those of GPU kernels: no attention scores, unless attention is written out. Not counted: CUDA's context,
communicators, the allocator's gaps, buckets of gradients under way, what the driver needs for a CUDA graph itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.pipeline_parallel.schedules import build_tables
from megatron.core.transformer.execution.activation_policy import divide_layers
from megatron.core.transformer.layer_patterns import has_experts
from megatron.core.transformer.pipeline_layout import StageContent, build_pipeline_layout, build_virtual_stages
from megatron.planner.memory import Workload, count_layers

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

_MEGABYTE = 1024 * 1024
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_STATE_TENSORS = {"sgd": 1, "lion": 1, "muon": 1}
"""Tensors of the parameters' size that an update rule keeps; two for every other one."""


class Kept(NamedTuple):
    """A tensor, or several of one kind, that a layer keeps of one microbatch for backward."""

    name: str
    bytes: float
    part: str | None = None
    """The entry of --recompute-modules that leaves it out."""
    place: str | None = None
    """The entry of --offload-modules that lets it wait on the host."""
    is_factor: bool = False
    """A product's input, or as large as its output: there until the weight has its gradient, where that is deferred."""
    is_of_mlp: bool = False
    """Of the MLP or the experts with their norm, not of attention with its."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one stage of the pipeline."""

    parameters: float
    """Elements that a process of the stage holds, or with FSDP2 all replicas together."""
    state: float
    """Bytes of weights, gradients and optimizer state."""
    activations: float
    """Bytes of activations and temporaries at the moment with the most."""

    @property
    def total(self) -> float:
        """Bytes of both."""
        return self.state + self.activations


def predict_step_memory(
    model: TransformerConfig,
    replicas: DistributedDataParallelConfig,
    optimizer: OptimizerConfig,
    workload: Workload,
) -> list[StepMemory]:
    """Rank in the pipeline -> what a process of that stage holds in a step."""
    shape = build_virtual_stages(model)
    contents = build_pipeline_layout(model, shape)
    name = model.pipeline_schedule or ("1f1b" if shape.chunks == 1 else "interleaved")
    tables = build_tables(
        name, shape, workload.num_microbatches, model.microbatch_group_size_per_vp_stage if shape.chunks > 1 else None,
        side_by_side=model.overlap_moe_expert_parallel_comm, delays_weights=model.delay_wgrad_compute,
    )  # fmt: skip
    found = []
    for rank, table in enumerate(tables):
        chunks = [contents[shape.index(rank, chunk)] for chunk in range(shape.chunks)]
        dense, experts = _count_parameters(model, workload, chunks)
        state = _count_state_bytes(model, replicas, optimizer, workload, dense, experts)
        stages = [_describe_chunk(model, replicas, workload, content) for content in chunks]
        found.append(StepMemory(dense + experts, state, _walk(table, stages)))
    return found


def describe_step_memory(stages: Sequence[StepMemory]) -> str:
    """The fullest stage in one line; MB are 1024 x 1024 bytes."""
    fullest = max(range(len(stages)), key=lambda rank: stages[rank].total)
    found = stages[fullest]
    where = f" on stage {fullest} of {len(stages)}" if len(stages) > 1 else ""
    return (
        f"A step of this program holds at most{where}: weight and optimizer={found.state / _MEGABYTE:.2f} MB, "
        f"activation={found.activations / _MEGABYTE:.2f} MB, total={found.total / _MEGABYTE:.2f} MB"
    )


# ---- state


def _count_parameters(
    model: TransformerConfig, workload: Workload, chunks: Sequence[StageContent]
) -> tuple[float, float]:
    """Elements on a process: outside of experts, and of experts. Biases and positions are left out."""
    ranks = model.tensor_model_parallel_size
    table = workload.padded_vocab_size * model.hidden_size / ranks
    dense = experts = 0.0
    has_table = False
    for content in chunks:
        numbers = range(content.layers.start + 1, content.layers.stop + 1)
        counts = [count_layers(model, numbers, has_final_norm=content.ends_decoder)]
        if content.has_prediction:
            first = model.num_layers + 1
            counts.append(count_layers(model, range(first, first + model.count_layers_with_weights())))
        for count in counts:
            dense += count.layer_matrices / ranks + count.replicated
            experts += count.expert_matrices
        for is_there, is_own in (
            (content.has_embedding or content.has_prediction, False),
            (content.has_loss, workload.has_output_layer),
        ):
            # Tied tables are one where they meet on a process.
            if is_there and (is_own or not has_table):
                dense += table
                has_table = has_table or not is_own
    return dense, experts / (model.expert_model_parallel_size * (model.expert_tensor_parallel_size or ranks))


def _count_state_bytes(
    model: TransformerConfig,
    replicas: DistributedDataParallelConfig,
    optimizer: OptimizerConfig,
    workload: Workload,
    dense: float,
    experts: float,
) -> float:
    """Bytes of weights, gradients and optimizer state of a process with so many parameters."""
    weight = 2 if model.bf16 or model.fp16 else 4
    gradient = 2 if replicas.grad_reduce_in_bf16 or optimizer.main_grads_dtype == "bf16" else 4
    moments = [_BYTES[optimizer.exp_avg_dtype], _BYTES[optimizer.exp_avg_sq_dtype]]
    kept: float = sum(moments[: _STATE_TENSORS.get(optimizer.optimizer, 2)])
    # In float32 the weights themselves are what the optimizer updates.
    kept += _BYTES[optimizer.main_params_dtype] if weight == 2 else 0
    kept *= 1 - workload.offloaded_state
    num_replicas = workload.data_parallel_size * model.context_parallel_size
    ranks = model.tensor_model_parallel_size
    expert_ranks = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or ranks)
    total = 0.0
    for elements, copies in ((dense, num_replicas), (experts, num_replicas * ranks / expert_ranks)):
        if replicas.use_torch_fsdp2:
            # The optimizer's float32 shards are the only ones: 16-bit weights exist gathered, and in no other form.
            total += elements * (4 + gradient + sum(moments) * (1 - workload.offloaded_state)) / copies
        elif replicas.use_distributed_optimizer:
            total += elements * (weight + gradient + kept / copies)
        else:
            total += elements * (weight + gradient + kept)
    return total


# ---- activations


def list_kept(model: TransformerConfig, workload: Workload, layer_number: int) -> Iterator[Kept]:
    """List what a layer, counted from 1, keeps of one microbatch on this process when nothing is recomputed or
    offloaded."""
    width = 2 if model.bf16 or model.fp16 else 4
    ranks, tokens = model.tensor_model_parallel_size, _count_tokens(model, workload)
    own = tokens / (ranks if model.sequence_parallel else 1)  # tokens of hidden states outside of products
    hidden = own * model.hidden_size * width
    stream = own * model.hidden_size * 4 if model.fp32_residual_connection else hidden
    # Inputs of products in FP8 wait in 8 bits, with their scales.
    rounds = model.rounded_input_bytes is not None and model.is_fp8_layer(layer_number)
    rounded = (model.rounded_input_bytes or width) / width if rounds else 1.0
    yield Kept("the layer's input", stream, place="attn_norm")
    yield Kept("the attention norm's output", hidden * rounded, "layernorm", "qkv_linear", is_factor=True)
    yield from _list_kept_by_attention(model, tokens, own, width)
    yield Kept("the MLP's input", stream, place="mlp_norm")
    yield Kept("the MLP norm's output", hidden * rounded, "layernorm", "mlp_fc1", is_factor=True)
    if model.hidden_dropout:
        yield Kept("which elements are dropped", 2 * own * model.hidden_size)
    if has_experts(model, layer_number):
        yield from _list_kept_by_experts(model, tokens, own, width)
        return
    assert model.ffn_hidden_size is not None
    inner = tokens * model.ffn_hidden_size * width / ranks
    sides = 2 if model.gated_linear_unit else 1
    yield Kept("the first product", inner * sides, "mlp", "mlp_act", is_factor=True)
    yield Kept("the activation", inner * rounded, "mlp_act", "mlp_act", is_factor=True)


def _list_kept_by_attention(model: TransformerConfig, tokens: float, own: float, width: int) -> Iterator[Kept]:
    ranks, heads = model.tensor_model_parallel_size, model.num_attention_heads
    assert model.num_query_groups is not None
    groups = max(model.num_query_groups, ranks)  # with fewer groups than ranks, each has one whole
    per_head = tokens * width / ranks
    queries, values = per_head * heads * model.query_width, per_head * heads * model.value_width
    if model.multi_latent_attention:
        # Of a latent vector that is normalised both sides are kept.
        latents = (model.kv_lora_rank + (model.q_lora_rank or 0)) * (2 if model.qk_layernorm else 1)
        yield Kept("latent vectors", own * (latents + model.qk_pos_emb_head_dim) * width, place="qkv_linear")
        yield Kept("queries and keys", 2 * queries, "mla_up_proj", "core_attn")
        yield Kept("values", values, "mla_up_proj", "core_attn")
    else:
        packed = per_head * (heads + 2 * groups) * model.query_width
        yield Kept("packed queries, keys, values", packed, place="core_attn", is_factor=True)
        # Queries of several heads lie between the keys of their groups; kernels want them without gaps.
        if heads > model.num_query_groups:
            yield Kept("queries by heads", queries, place="core_attn")
    yield Kept("attention's output", values, place="attn_proj", is_factor=True)
    yield Kept("its log-sum-exp", tokens * heads * 4 / ranks)


def _list_kept_by_experts(model: TransformerConfig, tokens: float, own: float, width: int) -> Iterator[Kept]:
    ranks, sharers = model.tensor_model_parallel_size, model.expert_tensor_parallel_size or 1
    experts, inner = model.num_moe_experts, model.moe_ffn_hidden_size
    assert experts is not None and inner is not None
    if not model.sequence_parallel:
        own = tokens / ranks  # tensor-parallel ranks divide the tokens for their experts
    # Even routing; ranks that share an expert have the rows of all of them.
    rows = own * model.moe_router_topk * sharers
    product = rows * inner / sharers * width
    sides = 2 if model.gated_linear_unit else 1
    yield Kept("the router's scores", own * experts * 4 * 4, "moe")
    yield Kept("tokens sorted by expert", rows * model.expert_channels * width, "moe", "expert_fc1", is_factor=True)
    yield Kept("the experts' first product", product * sides, "moe", "moe_act", is_factor=True)
    yield Kept("the experts' activation, weighted", product, "moe_act", "moe_act", is_factor=True)
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None:
        yield Kept("the shared expert", tokens * shared * width / ranks * (sides + 1), "shared_experts")


def _count_tokens(model: TransformerConfig, workload: Workload) -> float:
    """Tokens of a microbatch on one process, of which sequence parallelism has a part outside of products."""
    return workload.seq_length / model.context_parallel_size * workload.micro_batch_size


class _Chunk(NamedTuple):
    """What the microbatches of a virtual stage need."""

    kept: float
    """From forward to backward."""
    waiting: float
    """From backward to the deferred gradients of weights."""
    forward: float
    """Beside it at the end of forward."""
    backward: float
    """Beside it in backward, at most."""
    recorded: float
    """In CUDA graphs, which keep their memory: for each microbatch that is ever in flight."""


def _describe_chunk(
    model: TransformerConfig, replicas: DistributedDataParallelConfig, workload: Workload, content: StageContent
) -> _Chunk:
    width = 2 if model.bf16 or model.fp16 else 4
    tokens, ranks = _count_tokens(model, workload), model.tensor_model_parallel_size
    hidden = tokens / (ranks if model.sequence_parallel else 1) * model.hidden_size * width
    numbers = [index + 1 for index in content.layers]
    layers = {number: list(list_kept(model, workload, number)) for number in numbers}
    in_graphs = {number: _find_recorded(model, number, rows) for number, rows in layers.items()}
    kept = computed_again = waiting = recorded = 0.0
    on_host = range(model.cpu_offloading_num_layers or 0)  # the first layers of the stage, whole
    units = divide_layers(model, len(content.layers))
    for unit in units:
        of_unit = [layers[numbers[index]] for index in unit.layers]
        if unit.is_recomputed:
            (unit_input,) = _leave_out(model, [Kept("the unit's input", hidden, place="attn_norm")])
            of_input = unit_input.bytes / (ranks if model.distribute_saved_activations else 1)
            computed_again = max(computed_again, sum(row.bytes for rows in of_unit for row in rows))
            kept, recorded = (kept, recorded + of_input) if in_graphs[numbers[0]] else (kept + of_input, recorded)
            continue
        for index, rows in zip(unit.layers, of_unit, strict=True):
            left = [row for row in _leave_out(model, rows) if index not in on_host]
            of_graphs = sum(row.bytes for row in left if row.name in in_graphs[numbers[index]])
            kept, recorded = kept + sum(row.bytes for row in left) - of_graphs, recorded + of_graphs
            computed_again = max(computed_again, _count_restored(model, rows))
    if recorded:
        # The gradients of the inputs of layers that are computed again, which free nothing of it, pile up.
        piled_up = hidden * (len(units) - 1) if all(unit.is_recomputed for unit in units) else 0.0
        recorded += _count_beside_recorded(model, layers, hidden) + computed_again + piled_up
    # Products whose weights get their gradients later keep their inputs, and the gradients of their outputs.
    if model.defers_weight_gradients or model.delays_weight_gradients:
        waiting = sum(2 * hidden + sum(row.bytes for row in rows if row.is_factor) for rows in layers.values())
    chunks = model.mlp_chunks_for_training
    gradients = max((_count_gradients(rows, chunks) for rows in layers.values()), default=0.0)
    if recorded and model.records("mlp"):
        gradients, computed_again = 2 * hidden, 0.0
    forward = 0.0
    if content.ends_decoder:
        kept += 2 * hidden  # the last layer's output, and what the final norm makes of it
    if content.has_loss:
        # Their gradient is written over them.
        logits = tokens * workload.padded_vocab_size / ranks * width
        forward = logits * _find_chunk(model, workload)
        waiting += logits + hidden if waiting else 0.0
        head = workload.padded_vocab_size * model.hidden_size / ranks * width
        if replicas.use_torch_fsdp2 and workload.has_output_layer:
            forward += 2 * head  # gathered, and in backward its gradient before that is divided
    # Hidden states and gradients on their way from and to other stages.
    under_way = 2 * hidden if model.pipeline_model_parallel_size > 1 else 0.0
    return _Chunk(kept, waiting, forward + under_way, max(computed_again + gradients, forward) + under_way, recorded)


def _find_chunk(model: TransformerConfig, workload: Workload) -> float:
    """The share of a microbatch's logits that exists at once."""
    positions = workload.seq_length // model.context_parallel_size
    if model.sequence_parallel:
        positions //= model.tensor_model_parallel_size
    return min(1.0, (model.loss_chunk_size or positions) / positions)


def _find_recomputed_parts(model: TransformerConfig) -> set[str]:
    """The entries of --recompute-modules, with those that lie inside of others."""
    parts = set(model.recompute_modules or ()) if model.recompute_granularity == "selective" else set()
    if "moe" in parts:
        parts |= {"moe_act", "shared_experts"}
    if "mlp" in parts:
        parts.add("mlp_act")
    return parts


def _leave_out(model: TransformerConfig, rows: Sequence[Kept]) -> Iterator[Kept]:
    """The rows that selective recomputation keeps, less what waits on the host."""
    parts = _find_recomputed_parts(model)
    moved = set(model.offload_modules) if model.fine_grained_activation_offloading else set()
    for row in rows:
        if row.part not in parts:
            share = model.activation_offload_fraction if row.place in moved else 0.0
            yield row._replace(bytes=row.bytes * (1 - share))


def _count_restored(model: TransformerConfig, rows: Sequence[Kept]) -> float:
    """Bytes of what selective recomputation restores while a layer's MLP is in backward."""
    parts, chunks = _find_recomputed_parts(model), model.mlp_chunks_for_training
    inner = ("mlp_act", "expert_fc1", "moe_act")
    return sum(row.bytes for row in rows if row.part in parts and row.place in inner) / chunks


def _find_recorded(model: TransformerConfig, number: int, rows: Sequence[Kept]) -> set[str]:
    """Names of what CUDA graphs hold of a layer; what a recorded part passes on is its graph's, whoever keeps it."""
    names = [row.name for row in rows]
    mlp = names.index("the MLP's input")
    found: set[str] = set()
    if model.records("attn"):
        found.update(names[: mlp + 1])
    if has_experts(model, number):
        if model.records("moe_router"):
            found |= {*names[mlp : mlp + 2], "the router's scores"}
    elif model.records("mlp"):
        found.update(names[mlp:], names[:1])
    return found


def _count_beside_recorded(model: TransformerConfig, layers: Mapping[int, Sequence[Kept]], hidden: float) -> float:
    """Bytes that graphs hold for one microbatch beside what waits for backward: where gradients come in, the output of
    the last layer, and the most that backward of a part needs for itself."""
    passes_on: list[bool] = []  # part after part, whether it is recorded
    grads = temporaries = 0.0
    for number, rows in layers.items():
        routes, by_name = has_experts(model, number), {row.name: row.bytes for row in rows}
        second = model.records("moe_router" if routes else "mlp")
        passes_on += [model.records("attn"), second, *([False] if routes else [])]
        grads += hidden if routes and second else 0.0  # beside the residual stream's that of what the router has read
        if model.records("attn"):
            of_heads = ("attention's output", "packed queries, keys, values", "queries and keys", "values")
            temporaries = max(temporaries, sum(by_name.get(name, 0.0) for name in of_heads))
        if second and not routes:
            temporaries = max(temporaries, by_name["the activation"] / model.mlp_chunks_for_training)
    ends = sum(is_recorded and not is_next for is_recorded, is_next in itertools.zip_longest(passes_on, passes_on[1:]))
    return hidden * (ends + all(passes_on)) + grads + temporaries


def _count_gradients(rows: Sequence[Kept], chunks: int) -> float:
    """Bytes of the gradients that live at once while the widest part of a layer, its MLP, is in backward: of its output
    and of its input, and of the activation, a dense MLP's of one of its chunks; that of the first product takes the
    product's place."""
    by_name = {row.name: row.bytes for row in rows}
    inner = by_name.get("the activation", 0.0) / chunks or by_name.get("the experts' activation, weighted", 0.0)
    return 2 * by_name["the MLP norm's output"] + by_name.get("tokens sorted by expert", 0.0) + inner


def _walk(table: Sequence[tuple[str, int, int, bool]], chunks: Sequence[_Chunk]) -> float:
    """The most that lives at one moment of a rank's schedule."""
    most = 0.0
    in_flight, recorded = [0] * len(chunks), [0] * len(chunks)
    for kind, _, number, _ in table:
        in_flight[number] += {"F": 1, "B": -1}.get(kind, 0)
        recorded[number] = max(recorded[number], in_flight[number])
    now = sum(times * chunk.recorded for times, chunk in zip(recorded, chunks, strict=True))
    for kind, _, number, _ in table:
        chunk = chunks[number]
        if kind == "F":
            now += chunk.kept
            most = max(most, now + chunk.forward)
        elif kind == "B":
            most = max(most, now + chunk.backward)
            now += chunk.waiting - chunk.kept
        else:
            now -= chunk.waiting
    return most
