# SPDX-License-Identifier: Apache-2.0
"""Bytes that a training step of this program holds on each stage of the pipeline, counted tensor by tensor.

memory.py gives the figures of the reference system, which users compare; this is what our layers keep, so that a plan
can say what fits. It is proven within 3 % against steps on a device that counts memory (tests/fake_device).

    state         weights, gradients and optimizer state (state_memory.py), and weights rounded to 8 bits (few_bits.py)
    kept          what one layer keeps of one microbatch for backward (`list_kept`): a table by tensor, of which
                  recomputation leaves rows out
    in flight     the schedule's table of forwards and backwards is walked through
    temporaries   the gradients within the layer that is in backward, or the logits with the loss, whichever is more
    graphs        what recorded layers keep and their temporaries, as often as microbatches are in flight, for good

Tensors are the ones of GPU kernels: no attention scores, unless attention is written out. Not counted: CUDA's context,
communicators, the allocator's gaps, buckets of gradients under way, what the driver needs for a CUDA graph itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.pipeline_parallel.programs import Pipeline
from megatron.core.pipeline_parallel.schedules import Action
from megatron.core.plan.branch_kind import Kept, Tokens, count_bytes
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import Branch, LayerPlan
from megatron.core.plan.stages import StageContent, build_pipeline_layout, build_virtual_stages
from megatron.core.tensor_parallel.offloaded_activations import PREFETCHED_GROUPS
from megatron.core.transformer.execution.activation_policy import divide_layers
from megatron.planner.adapter_memory import count_adapters
from megatron.planner.few_bits import count_head_temporaries, count_product_temporaries, count_rounded_weights
from megatron.planner.memory import Workload, count_layers
from megatron.planner.program_memory import ChunkMemory, walk_program
from megatron.planner.state_memory import count_rank_parameters, count_state_bytes, divide_parameters, list_layers

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

_MEGABYTE = 1024 * 1024
_READ_FIRST = ("core_attn", "attn_proj", "mlp_act", "moe_act")
"""Parts whose tensors backward of a branch begins with."""


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
    pipeline = describe_pipeline(model)
    found = []
    for rank in range(shape.stages):
        chunks = [contents[shape.index(rank, chunk)] for chunk in range(shape.chunks)]
        elements, adapters = count_rank_parameters(model, workload, chunks), count_adapters(model, chunks)
        state = count_state_bytes(model, replicas, optimizer, workload, elements, adapters)
        stages = [_describe_chunk(model, replicas, workload, content) for content in chunks]
        program = pipeline.program(rank, workload.num_microbatches)
        # Divided weights are gone after each product, and what they were rounded to with them.
        rounded = 0.0 if replicas.use_torch_fsdp2 else count_rounded_weights(model, chunks, workload)
        found.append(
            StepMemory(
                sum(elements) + sum(adapters),
                state,
                rounded + walk_program(program, stages, overlaps=pipeline.overlap),
            )  # fmt: skip
        )
    return found


def describe_pipeline(model: TransformerConfig) -> Pipeline:
    """The pipeline that the settings describe."""
    return Pipeline.of_stages(
        model, model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    )


def build_model_tables(model: TransformerConfig, microbatches: int) -> list[list[Action]]:
    """Build the actions of each rank of the pipeline that the settings describe; raises as build_tables."""
    return describe_pipeline(model).tables(microbatches)


def find_fullest(stages: Sequence[StepMemory]) -> StepMemory:
    """Return the stage that holds most."""
    return max(stages, key=lambda stage: stage.total)


def describe_step_memory(stages: Sequence[StepMemory]) -> str:
    """The fullest stage in one line; MB are 1024 x 1024 bytes."""
    found = find_fullest(stages)
    where = f" on stage {stages.index(found)} of {len(stages)}" if len(stages) > 1 else ""
    return (
        f"A step of this program holds at most{where}: weight and optimizer={found.state / _MEGABYTE:.2f} MB, "
        f"activation={found.activations / _MEGABYTE:.2f} MB, total={found.total / _MEGABYTE:.2f} MB"
    )


# ---- activations


def list_kept(model: TransformerConfig, workload: Workload, layer: LayerPlan) -> list[list[Kept]]:
    """List what each branch of a layer keeps of one microbatch on this process when nothing is recomputed or
    offloaded."""
    tokens = count_tokens(model, workload)
    return [list(find_kind(branch.kind).kept(model, branch, tokens)) for branch in layer.branches]


def count_tokens(model: TransformerConfig, workload: Workload) -> Tokens:
    """Tokens of a microbatch on one process."""
    tokens = workload.seq_length / model.context_parallel_size * workload.micro_batch_size
    own = tokens / (model.tensor_model_parallel_size if model.sequence_parallel else 1)
    scored = workload.seq_length if model.attention_backend in ("unfused", "local") else 0.0
    return Tokens(tokens, own, workload.micro_batch_size, scored)


def find_recomputed_parts(model: TransformerConfig) -> set[str]:
    """Find the entries of --recompute-modules, with those that lie inside of others."""
    parts = set(model.recompute_modules or ()) if model.recompute_granularity == "selective" else set()
    if "moe" in parts:
        parts |= {"moe_act", "shared_experts"}
    if "mlp" in parts:
        parts.add("mlp_act")
    return parts


def _describe_chunk(
    model: TransformerConfig, replicas: DistributedDataParallelConfig, workload: Workload, content: StageContent
) -> ChunkMemory:
    tokens, ranks = count_tokens(model, workload), model.tensor_model_parallel_size
    hidden = tokens.own * model.hidden_size * count_bytes(model)
    stream = tokens.own * model.stream_width * (4 if model.fp32_residual_connection else count_bytes(model))
    plans, depths = list_layers(model, content)
    branches = [list_kept(model, workload, layer) for layer in plans]
    described = list(zip(plans, branches, strict=True))
    in_graphs = [_find_recorded(model, *layer) for layer in described]
    left: list[list[list[float]]] = []  # bytes of each row of each branch of each layer
    kept = recorded = entering = 0.0
    on_host = range(model.cpu_offloading_num_layers or 0)  # the first layers of the stage, whole
    units = divide_layers(model, len(plans))
    for unit in units:
        for index in unit.layers:
            stays = 0.0 if unit.is_recomputed or index in on_host else 1.0
            left.append([[row.bytes * stays for row in _leave_out(model, rows)] for rows in branches[index]])
        if unit.is_recomputed:
            # Of its layers nothing is left but the input of the first one.
            (unit_input,) = _leave_out(model, [Kept("the unit's input", stream, place="attn_norm")])
            of_input = unit_input.bytes / (ranks if model.distribute_saved_activations else 1)
            left[unit.layers.start][0][0] = of_input
    for index, of_layer in enumerate(left):
        for rows in of_layer[index % model.mhc_recompute_layer_num == 0 :] if model.mhc_recompute_layer_num else ():
            rows[0] = 0.0  # mixed again from the streams before the first of these layers
    for index, rows_of_layer in enumerate(left):
        rows = [row for rows in rows_of_layer for row in rows]
        of_graphs = sum(itertools.compress(rows, in_graphs[index]))
        kept, recorded = kept + sum(rows) - of_graphs, recorded + of_graphs
    if not content.has_embedding:
        # The stage holds what it was sent to the end of its backward, wherever its first layer keeps it.
        entering = stream
        kept -= left[0][0][0] if left and not in_graphs[0][0] else 0.0
    backward = _walk_back(
        model, replicas, described, left, tokens, has_next=not content.has_loss, in_graphs=bool(recorded)
    )
    if content.ends_decoder and model.enable_hyper_connections:
        backward = max(backward, _count_gradients_of_sum(model, tokens))
    if recorded:
        restored = max(_count_restored(model, rows) for layer in branches for rows in layer)
        for unit in units:
            if unit.is_recomputed:
                of_unit = [row.bytes for index in unit.layers for rows in branches[index] for row in rows]
                restored = max(restored, sum(of_unit))
        # The gradients of the inputs of layers that are computed again, which free nothing of it, pile up.
        piled_up = hidden * (len(units) - 1) if all(unit.is_recomputed for unit in units) else 0.0
        recorded += _count_beside_recorded(model, plans, branches, tokens) + restored + piled_up
        backward = 2 * hidden if model.records("mlp") else backward
    if replicas.use_torch_fsdp2:
        backward += _count_gathered(model, replicas, plans)
    # Products whose weights get their gradients later keep their inputs, and the gradients of their outputs.
    waiting = 0.0
    if model.defers_weight_gradients or model.delays_weight_gradients:
        of_grads = tokens.all * model.hidden_size * count_bytes(model)
        waiting = sum(
            of_grads + sum(row.bytes for row in rows if row.is_factor) for layer in branches for rows in layer
        )
    if content.has_embedding and model.hidden_dropout:
        kept += tokens.own * model.hidden_size  # which elements are dropped
    kept += _count_ends(model, content.ends_decoder, depths, hidden, stream)
    forward = 0.0 if recorded else max(0.0, _walk_forward(model, described, left, tokens) - kept)
    if content.has_loss:
        # Their gradient is written over them.
        logits = tokens.all * workload.padded_vocab_size / ranks * count_bytes(model)
        in_flight = _list_in_flight(model, [_list_moved(model, *layer) for layer in enumerate(branches)])
        of_loss = logits * (1 + (model.mtp_num_layers or 0)) * _find_chunk(model, workload) + sum(in_flight)
        if model.defers_weight_gradients:
            waiting, backward = waiting + logits + hidden, backward + logits + hidden
        head = workload.padded_vocab_size * model.hidden_size / ranks * count_bytes(model)
        if replicas.use_torch_fsdp2 and workload.has_output_layer:
            of_loss += 2 * head  # gathered, and in backward its gradient before that is divided
        # The gradient of its input; with sequence parallelism of all tokens, with all tokens' input.
        whole = tokens.all * model.hidden_size * count_bytes(model)
        rounding = count_head_temporaries(model, replicas, tokens, workload)
        backward = max(backward, of_loss + rounding + whole + (whole + hidden if model.sequence_parallel else 0.0))
        forward = max(forward, of_loss)
    return ChunkMemory(
        kept, waiting, forward, max(backward, forward), recorded, entering, 0.0 if content.has_loss else stream
    )


def _count_gradients_of_sum(model: TransformerConfig, tokens: Tokens) -> float:
    """Bytes of the streams' gradient behind the last layer, where their sum is learned; in 16 bits also of the streams
    and of their gradient in float32, of which it is made."""
    width = count_bytes(model)
    return tokens.own * model.stream_width * (width if width == 4 else 2 * 4 + width)


def _count_ends(model: TransformerConfig, ends_decoder: bool, depths: int, hidden: float, stream: float) -> float:
    """Bytes kept behind the decoder and around layers of multi-token prediction."""
    of_streams = model.num_streams is not None
    # The last layer's output and what the final norm makes of it, and the streams of which that output is a sum.
    decoder = (2 * hidden + stream * of_streams) * ends_decoder
    # Of a depth the token's embedding, what is joined and normed before its layer, that one's output, and its norm's.
    return decoder + depths * (4 * hidden + 2 * stream if of_streams else 5 * hidden)


def _count_gathered(
    model: TransformerConfig, replicas: DistributedDataParallelConfig, layers: Sequence[LayerPlan]
) -> float:
    """Bytes of weights that FSDP2 has gathered in backward: of a layer and of the next one, or of all."""
    sizes = [sum(divide_parameters(model, count_layers(model, [layer]))) * count_bytes(model) for layer in layers]
    frees = replicas.torch_fsdp2_reshard_after_forward and replicas.data_parallel_sharding_strategy != "optim_grads"
    return sum(sorted(sizes)[-2:] if frees else sizes)


def _walk_forward(
    model: TransformerConfig,
    layers: Sequence[tuple[LayerPlan, Sequence[Sequence[Kept]]]],
    left: Sequence[Sequence[Sequence[float]]] | None,
    tokens: Tokens,
) -> float:
    """The most that lives while a branch needs more in forward than it keeps. left: see `_walk_back`; None for all."""
    most = before = 0.0
    for index, (plan, branches) in enumerate(layers):
        for number, (branch, of_branch) in enumerate(zip(plan.branches, branches, strict=True)):
            rows = sum(row.bytes for row in of_branch)
            if under_way := find_kind(branch.kind).under_way(model, branch, tokens):
                most = max(most, before + rows + under_way)
            before += rows if left is None else sum(left[index][number])
    return most


def _walk_back(
    model: TransformerConfig,
    replicas: DistributedDataParallelConfig,
    layers: Sequence[tuple[LayerPlan, Sequence[Sequence[Kept]]]],
    left: Sequence[Sequence[Sequence[float]]],
    tokens: Tokens,
    *,
    has_next: bool,
    in_graphs: bool,
) -> float:
    """The most that backward of a virtual stage takes in addition to what it has saved, which it frees branch by
    branch.

    layers: with the rows of each branch. left: bytes of each row until backward. has_next: the gradient that it begins
    with has come from another one. in_graphs: graphs keep their memory.
    """
    keeps_factors = model.defers_weight_gradients or model.delays_weight_gradients
    width = model.hidden_size * count_bytes(model)
    of_streams = tokens.own * model.stream_width * count_bytes(model)
    most, beside = 0.0, -of_streams if has_next else 0.0
    fetched = _count_fetched(model, [branches for _, branches in layers])
    for unit in reversed(divide_layers(model, len(layers))):
        if unit.is_recomputed:
            of_unit = layers[unit.layers.start : unit.layers.stop]
            beside -= left[unit.layers.start][0][0]
            most = max(most, beside + _walk_forward(model, of_unit, None, tokens))
            beside += sum(row.bytes for _, branches in of_unit for rows in branches for row in rows)
        for index in reversed(unit.layers):
            plan, branches = layers[index]
            mixed_again = model.mhc_recompute_layer_num
            if mixed_again and (index == len(layers) - 1 or (index + 1) % mixed_again == 0):
                # Backward of the last branch brings back what all of them have read.
                first = index - index % mixed_again
                beside += sum(rows[0].bytes for _, each in layers[first : index + 1] for rows in each)
                beside -= layers[first][1][0][0].bytes
            for number in reversed(range(len(branches))):
                branch, of_branch, stays = plan.branches[number], branches[number], left[index][number]
                again = 0.0 if unit.is_recomputed else _count_restored(model, of_branch) + fetched[index][number]
                most = max(most, beside + again + _count_gradients(model, replicas, branch, of_branch, tokens))
                if in_graphs:
                    continue
                sizes = [row.bytes for row in of_branch] if unit.is_recomputed else stays
                sizes = [of_branch[0].bytes, *sizes[1:]] if mixed_again else sizes
                waits = [keeps_factors and row.is_factor for row in of_branch]
                beside -= sum(0.0 if late else size for late, size in zip(waits, sizes, strict=True))
                beside += width * (tokens.all if keeps_factors else 0.0)
    return most


def _count_fetched(model: TransformerConfig, layers: Sequence[Sequence[Sequence[Kept]]]) -> list[list[float]]:
    """Bytes of each branch of each layer that are on the device when its backward begins, though they were sent to the
    host: what has not left it yet, the part that is read first, and the parts that backward reads next."""
    on_host, moved = model.cpu_offloading_num_layers or 0, [_list_moved(model, *layer) for layer in enumerate(layers)]
    groups = [size for of_layer in moved for of_branch in of_layer for size in of_branch.values()]
    first_in_flight = len(groups) - len(_list_in_flight(model, moved))
    fetched: list[list[float]] = []
    end = 0
    for index, of_layer in enumerate(moved):
        fetched.append([])
        for of_branch in of_layer:
            end = end + len(of_branch)
            reads = index < on_host or any(place in _READ_FIRST for place in of_branch)
            first = max(0, min(first_in_flight, end - PREFETCHED_GROUPS - reads))
            fetched[-1].append(sum(groups[first:end]) if reads or end < len(groups) or first_in_flight < end else 0.0)
    return fetched


def _list_moved(model: TransformerConfig, index: int, layer: Sequence[Sequence[Kept]]) -> list[dict[str, float]]:
    """Bytes of each part that each branch of a stage's layer sends to the host; of a whole layer with its first one."""
    parts = find_recomputed_parts(model)
    if index < (model.cpu_offloading_num_layers or 0):
        return [{"": sum(row.bytes for rows in layer for row in rows)}, *({} for _ in layer[1:])]
    moved: list[dict[str, float]] = []
    for rows in layer:
        moved.append({})
        for row in rows:
            if row.part not in parts and (share := _find_moved_share(model, row)):
                moved[-1][row.place or ""] = moved[-1].get(row.place or "", 0.0) + row.bytes * share
    return moved


def _list_in_flight(model: TransformerConfig, moved: Sequence[Sequence[dict[str, float]]]) -> list[float]:
    """Bytes of each part that has not left the device when the layers' forward pass ends: the last layer's."""
    groups = [size for of_branch in moved[-1] for size in of_branch.values()] if moved else []
    most = model.fine_grained_offloading_max_inflight_offloads
    return groups if most is None else groups[-most:]


def _find_chunk(model: TransformerConfig, workload: Workload) -> float:
    """The share of a microbatch's logits that exists at once."""
    positions = workload.seq_length // model.context_parallel_size
    if model.sequence_parallel:
        positions //= model.tensor_model_parallel_size
    return min(1.0, (model.loss_chunk_size or positions) / positions)


def _leave_out(model: TransformerConfig, rows: Sequence[Kept]) -> Iterator[Kept]:
    """The rows, of which nothing is left where selective recomputation leaves one out, less what waits on the host."""
    parts = find_recomputed_parts(model)
    for row in rows:
        yield row._replace(bytes=0.0 if row.part in parts else row.bytes * (1 - _find_moved_share(model, row)))


def _find_moved_share(model: TransformerConfig, row: Kept) -> float:
    """The share of a row that waits on the host: none of what is too small for a copy."""
    is_moved = model.fine_grained_activation_offloading and row.place in model.offload_modules
    elements = row.bytes / count_bytes(model)
    return model.activation_offload_fraction if is_moved and elements >= model.min_offloaded_tensor_size else 0.0


def _count_restored(model: TransformerConfig, rows: Sequence[Kept]) -> float:
    """Bytes of what selective recomputation restores while a layer's MLP is in backward."""
    parts, chunks = find_recomputed_parts(model), model.mlp_chunks_for_training
    inner = ("mlp_act", "expert_fc1", "moe_act")
    return sum(row.bytes for row in rows if row.part in parts and row.place in inner) / chunks


def _is_recorded(model: TransformerConfig, branch: Branch) -> bool:
    """Return True if CUDA graphs launch a branch: attention, an MLP, or the router of experts."""
    return model.records({"mlp": "mlp", "experts": "moe_router"}.get(branch.kind, "attn"))


def _find_recorded(model: TransformerConfig, layer: LayerPlan, branches: Sequence[Sequence[Kept]]) -> list[bool]:
    """Return for each row of a layer whether CUDA graphs hold it; what a recorded branch passes on is its graph's,
    whichever branch saves it."""
    found = []
    for index, (branch, rows) in enumerate(zip(layer.branches, branches, strict=True)):
        before = layer.branches[index - 1]
        is_passed_on = _is_recorded(model, before) and before.kind != "experts"
        # Of experts the norm and the router, whose scores have no other place.
        of_router = [row.place in ("mlp_norm", "mlp_fc1") or (row.part, row.place) == ("moe", None) for row in rows]
        of_branch = [_is_recorded(model, branch) and (branch.kind != "experts" or is_part) for is_part in of_router]
        found += [of_branch[0] or is_passed_on, *of_branch[1:]]
    return found


def _count_beside_recorded(
    model: TransformerConfig, layers: Sequence[LayerPlan], kept: Sequence[Sequence[Sequence[Kept]]], tokens: Tokens
) -> float:
    """Bytes that graphs hold for one microbatch in addition to what is saved for backward: where gradients come in, the
    output of the last layer, and the most that backward of a part needs. kept: rows of each branch of each layer."""
    passes_on: list[bool] = []  # part after part, whether it is recorded
    grads = temporaries = 0.0
    hidden = tokens.own * model.hidden_size * count_bytes(model)
    for layer, of_layer in zip(layers, kept, strict=True):
        for branch, rows in zip(layer.branches, of_layer, strict=True):
            routes, is_recorded = branch.kind == "experts", _is_recorded(model, branch)
            passes_on += [is_recorded, *([False] if routes else [])]
            if is_recorded and routes:
                grads += hidden  # in addition to the residual stream's, the gradient of the router's input
            elif is_recorded:
                temporaries = max(temporaries, _count_inner_gradients(model, branch, rows, tokens))
    ends = sum(is_recorded and not is_next for is_recorded, is_next in itertools.zip_longest(passes_on, passes_on[1:]))
    return hidden * (ends + all(passes_on)) + grads + temporaries


def _count_inner_gradients(model: TransformerConfig, branch: Branch, rows: Sequence[Kept], tokens: Tokens) -> float:
    """Bytes of the gradients that live at once inside of a branch, and of temporaries of its backward; a dense MLP may
    need only one chunk's."""
    chunks = model.mlp_chunks_for_training if branch.kind == "mlp" else 1
    beside = find_kind(branch.kind).beside(model, branch, tokens)
    return beside + sum(row.bytes for row in rows if row.has_gradient) / chunks


def _count_gradients(
    model: TransformerConfig,
    replicas: DistributedDataParallelConfig,
    branch: Branch,
    rows: Sequence[Kept],
    tokens: Tokens,
) -> float:
    """Bytes that live at most while a branch is in backward, in addition to what it has saved.

    In its last product there is the gradient of its output, with sequence parallelism also of all tokens, and what
    lives inside; the gradient of an MLP's first product replaces the product. In its first product, when everything
    after it is freed, sequence parallelism holds the input of all tokens and its gradient.
    """
    width = model.hidden_size * count_bytes(model)
    of_first, of_last = count_product_temporaries(model, replicas, branch, tokens)
    most = (tokens.own + tokens.all) * width + _count_inner_gradients(model, branch, rows, tokens) + of_last
    if branch.kind in ("attention", "mlp"):
        at_ends = (2 if model.sequence_parallel else 1) * (tokens.own + tokens.all) * width
        first = next(row.bytes for row in rows if row.name in ("packed queries, keys, values", "the first product"))
        freed = sum(row.bytes for row in rows if row.place not in ("attn_norm", "mlp_norm", "qkv_linear", "mlp_fc1"))
        most = max(most, at_ends + first - freed + of_first)
    return most if model.num_streams is None else _add_gradients_of_streams(model, rows, tokens, most)


def _add_gradients_of_streams(
    model: TransformerConfig, rows: Sequence[Kept], tokens: Tokens, of_branch: float
) -> float:
    """The same where a branch mixes residual streams, whose gradient waits until the branch's is there; then there are
    two of them, and one under way, with the streams, in the format of what they are multiplied with."""
    elements = tokens.own * model.stream_width
    width, wide = count_bytes(model), 4 if model.enable_hyper_connections else count_bytes(model)
    under_way = wide * (2 if wide > width else 1)
    late = model.defers_weight_gradients or model.delays_weight_gradients  # products then keep what they multiply
    freed = sum(row.bytes for row in rows if row.name != "the residual streams" and not (late and row.is_factor))
    freed -= tokens.all * model.hidden_size * width * late
    return max(of_branch + elements * width, elements * (2 * width + under_way) - freed)
