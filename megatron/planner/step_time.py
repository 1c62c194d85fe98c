# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step on a cluster, by formula, from the same tables as the memory of step_memory.py.

    products      2 x tokens x elements of the matrices over what the device reaches for their shape (`_rate`); twice in
                  backward, and there once more to add to the weights' gradients
    attention     products beyond matrices, at the rate of a flash kernel; 2.5 times in backward, which computes scores
                  again (Dao, 2023)
    elementwise   `_TOUCHES` times the bytes that a branch keeps for backward, over the memory's bandwidth
    collectives   links.py: each branch with tensor parallelism gathers and scatters its tokens once (Korthikanti et
                  al., 2022), experts dispatch and combine, context parallelism passes keys and values on
    recomputed    forward once more, of what full or selective recomputation leaves out
    bubble        the schedule's table, played with these times
    data parallel gradients and parameters over the replicas, less what the last backward and the first forward hide
    optimizer     bytes of a parameter's state over the memory's bandwidth

Each stage has its own times: the embedding, the output layer and uneven numbers of layers count where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.pipeline_parallel.timelines import Costs, simulate
from megatron.core.plan.branch_kind import count_bytes, count_connection
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import Branch, LayerPlan
from megatron.core.plan.read import read_plan
from megatron.core.plan.stages import StageContent, build_pipeline_layout, build_virtual_stages
from megatron.core.plan.state_exchange import StateInput
from megatron.core.plan.state_kinds import weigh_exchange
from megatron.core.transformer.execution.activation_policy import divide_layers
from megatron.planner.devices import Device
from megatron.planner.links import Link
from megatron.planner.memory import Workload
from megatron.planner.state_memory import Elements, count_gradient_bytes, count_rank_parameters
from megatron.planner.step_memory import build_model_tables, count_tokens, find_recomputed_parts
from megatron.planner.throughput import count_training_flops_per_token

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

_TOUCHES = 3.0
"""Reads and writes of a kept byte in forward, by fused kernels: 60 h + 14 f bytes of a token and layer."""
_BACKWARD_TOUCHES = 1.6
_FEW_BITS_SHARE = 0.75
"""Of the gain of FP8 products that rounding their operands leaves."""
_HIDDEN_BY_OVERLAP = 0.7
"""Of tensor-parallel communication that --tp-comm-overlap hides."""
_HIDDEN_BY_EXPERTS = 0.8
"""Fraction of one microbatch's computing that can hide another's dispatch and combine."""
_SKEW = 1.2
"""Tokens of the busiest expert-parallel rank over an average rank's."""
_SCORE_TOUCHES = 13
"""Bytes read and written for each attention score in forward where attention is written out."""
_KERNELS = (12, 20)
"""Of a branch, in forward and in backward."""
_FIRST_BUCKET = 0.05
"""Fraction of the reduced gradients, or gathered parameters, that nothing is left to hide."""


class Parts(dict[str, float]):
    """Part of a step -> seconds; 0 where a part is not there."""

    def __missing__(self, part: str) -> float:
        return 0.0

    def add(self, other: Mapping[str, float]) -> Parts:
        """Add another's seconds, part by part."""
        for part, seconds in other.items():
            self[part] += seconds
        return self


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest rank of the pipeline."""

    seconds: float
    parts: Mapping[str, float]
    """By part, in sum the seconds."""
    flops: float
    """Of the model in a step, over all devices; recomputation does not count."""
    mfu: float
    """Share of all devices' peak that these are."""
    tokens: int
    """Of a step."""

    @property
    def tokens_per_second(self) -> float:
        """Over all devices."""
        return self.tokens / self.seconds


class _Passes(NamedTuple):
    """Forward and backward of a microbatch."""

    forward: Parts
    backward: Parts

    def plus(self, other: _Passes) -> _Passes:
        return _Passes(Parts(self.forward).add(other.forward), Parts(self.backward).add(other.backward))


def predict_step_time(
    model: TransformerConfig,
    replicas: DistributedDataParallelConfig,
    optimizer: OptimizerConfig,
    workload: Workload,
    device: Device,
) -> StepTime:
    """Predict how long a step takes on devices of one kind. workload: with all microbatches of the step."""
    shape = build_virtual_stages(model)
    contents = build_pipeline_layout(model, shape)
    clock = _Clock(model, workload, device)
    chunks = [clock.time_chunk(content) for content in contents]
    defers = model.defers_weight_gradients
    per_stage = [_read_costs(chunk, clock.send_seconds, defers) for chunk in chunks]
    count = workload.num_microbatches
    few = shorten(model, count)
    timeline = simulate(build_model_tables(model, few), shape, per_stage)
    busy = [Parts() for _ in range(shape.stages)]
    for stage, chunk in enumerate(chunks):
        for part in (chunk.forward, chunk.backward):
            busy[shape.holder(stage)[0]].add(part)
    slowest = max(busy, key=lambda parts: sum(parts.values()))
    per_microbatch = sum(slowest.values())
    parts = Parts({part: seconds * count for part, seconds in slowest.items() if seconds})
    if shape.count > 1:
        parts["bubble"] = max(0.0, timeline.makespan - few * per_microbatch)
    on_ranks = [
        count_rank_parameters(model, workload, [contents[shape.index(rank, chunk)] for chunk in range(shape.chunks)])
        for rank in range(shape.stages)
    ]
    windows = [sum(sum(part.values()) for part in (chunk.forward, chunk.backward)) for chunk in chunks]
    ends = max(
        (clock.time_ends(replicas, optimizer, parameters, min(windows) * shape.chunks) for parameters in on_ranks),
        key=lambda found: sum(found.values()),
    )
    parts.add(ends)
    tokens = workload.seq_length * workload.micro_batch_size * count * workload.data_parallel_size
    flops = tokens * count_training_flops_per_token(
        model, seq_length=workload.seq_length, padded_vocab_size=workload.padded_vocab_size
    )
    seconds = sum(parts.values())
    devices = workload.data_parallel_size * model.context_parallel_size * model.tensor_model_parallel_size
    devices *= model.pipeline_model_parallel_size
    return StepTime(seconds, dict(parts), flops, flops / seconds / devices / device.peak_flops, tokens)


def shorten(model: TransformerConfig, microbatches: int) -> int:
    """Return a smaller number of microbatches with as many of them in flight: in between a pipeline repeats itself."""
    stages = model.pipeline_model_parallel_size
    group = model.microbatch_group_size_per_vp_stage or stages
    step = group if group % stages == 0 or not model.virtual_pipeline_model_parallel_size else microbatches
    least = 2 * max(stages, step)
    if model.pipeline_schedule == "gpipe" or microbatches <= least:
        return microbatches
    return least + microbatches % step


def _read_costs(chunk: _Passes, send: float, defers: bool) -> Costs:
    """The times of a chunk's actions. Where the gradients of weights are deferred, they are half of the products."""
    backward = sum(chunk.backward.values())
    weights = chunk.backward["products"] / 2 if defers else 0.0
    return Costs(sum(chunk.forward.values()), backward - weights, weights, send)


class _Clock:
    """Times of what a rank does for one microbatch."""

    def __init__(self, model: TransformerConfig, workload: Workload, device: Device) -> None:
        self.model, self.workload, self.device = model, workload, device
        # What written-out scores take is counted by itself.
        self.tokens = count_tokens(model, workload)._replace(scored=0.0)
        self.width = count_bytes(model)
        self.bandwidth = device.memory_bandwidth * device.memory_share
        self.tp_size, cp = model.tensor_model_parallel_size, model.context_parallel_size
        etp = model.expert_tensor_parallel_size or self.tp_size
        self.tp, self.cp = Link(device, self.tp_size), Link(device, cp, self.tp_size)
        self.etp, self.ep = Link(device, etp), Link(device, model.expert_model_parallel_size, etp)
        replicas = workload.data_parallel_size * cp
        self.dp = Link(device, replicas, self.tp_size)
        on_stage = replicas * self.tp_size
        expert_ranks = etp * model.expert_model_parallel_size
        self.edp = Link(device, max(1, on_stage // expert_ranks), expert_ranks)
        self.pp = Link(device, model.pipeline_model_parallel_size, on_stage)
        self._seen: dict[Branch, _Passes] = {}
        self.recomputed = find_recomputed_parts(model)
        self.writes_scores = model.attention_backend in ("unfused", "local")

    @property
    def send_seconds(self) -> float:
        """From a stage to the next one."""
        return self.pp.send(self.tokens.own * self.model.stream_width * self.width)

    def time_chunk(self, content: StageContent) -> _Passes:
        """Forward and backward of a virtual stage, what is recomputed included."""
        plan = read_plan(self.model)
        layers = plan.decoder[content.layers.start : content.layers.stop]
        found = _Passes(Parts(), Parts())
        for unit in divide_layers(self.model, len(layers)):
            for layer in (layers[index] for index in unit.layers):
                passes = self._time_layer(layer)
                found = found.plus(passes)
                if unit.is_recomputed:
                    found.backward["recomputed"] += sum(passes.forward.values())
        if content.has_embedding:
            found = found.plus(self._time_ends_of_model(is_head=False))
        if content.has_prediction:
            depths = self.model.mtp_num_layers or 0
            for layers in (plan.list_depths() * depths)[:depths]:
                for layer in layers:
                    found = found.plus(self._time_layer(layer))
                found = found.plus(self._time_ends_of_model(is_head=True))
        if content.has_loss:
            found = found.plus(self._time_ends_of_model(is_head=True))
        launches = self.device.launch_seconds * sum(len(layer.branches) for layer in layers)
        for parts, kernels in zip(found, _KERNELS, strict=True):
            exchanged = parts["expert parallel"]
            if exchanged and self.model.overlap_moe_expert_parallel_comm:
                # Hidden by what another microbatch computes meanwhile.
                computed = sum(parts.values()) - exchanged
                hidden = _HIDDEN_BY_EXPERTS * self.device.hidden_share * computed
                parts["expert parallel"] = max(0.0, exchanged - hidden)
            parts["host"] = max(0.0, launches * kernels - sum(parts.values()))
        return found

    def time_ends(
        self, replicas: DistributedDataParallelConfig, optimizer: OptimizerConfig, parameters: Elements,
        window: float,
    ) -> Parts:  # fmt: skip
        """Once in a step: replicas exchange gradients and parameters, and the optimizer updates. window: seconds of one
        microbatch, which can hide the exchange."""
        parts = Parts()
        gradient = count_gradient_bytes(self.model, replicas)
        shards = replicas.use_distributed_optimizer or replicas.use_torch_fsdp2
        state_bytes = 0.0
        for elements, link in ((parameters.dense, self.dp), (parameters.experts, self.edp)):
            if link.size > 1 and elements:
                reduced = link.scatter(gradient * elements) if shards else link.reduce(gradient * elements)
                # Fully sharded, weights are gathered for each microbatch's forward and backward.
                again = 2 * self.workload.num_microbatches if replicas.use_torch_fsdp2 else 1
                gathered = again * link.gather(self.width * elements) if shards else 0.0
                for seconds, hides in (
                    (reduced, replicas.overlap_grad_reduce or replicas.use_torch_fsdp2),
                    (gathered, replicas.overlap_param_gather or replicas.use_torch_fsdp2),
                ):
                    hides = hides and self.device.hidden_share > 0
                    hidden = window * (again if seconds is gathered else 1) * 0.5 if hides else 0.0
                    hidden *= self.device.hidden_share
                    parts["data parallel"] += max(seconds * (_FIRST_BUCKET if hides else 1.0), seconds - hidden)
            # Gradient, main weight and two moments are read, all but the gradient written, and the 16-bit weight.
            state_bytes += elements / (link.size if shards else 1) * (gradient + 24 + self.width)
        parts["optimizer"] = state_bytes / self.bandwidth
        return parts

    # ---- one layer, one branch

    def _time_layer(self, layer: LayerPlan) -> _Passes:
        found = _Passes(Parts(), Parts())
        for branch in layer.branches:
            if branch not in self._seen:
                self._seen[branch] = self._time_branch(branch)
            found = found.plus(self._seen[branch])
        return found

    def _time_branch(self, branch: Branch) -> _Passes:
        model, tokens, kind = self.model, self.tokens, find_kind(branch.kind)
        counts, ranks, hidden = kind.count(model, branch), self.tp_size, model.hidden_size
        few_bits = branch.low_precision
        # Packed matrices are about half, or a third, of a branch.
        narrow = counts.matrices / ranks / hidden / (3 if branch.kind in ("mlp", "experts") else 2)
        products = self._multiply(tokens.all, counts.matrices / ranks, narrow, few_bits)
        products += self._multiply(tokens.own, counts.projections, counts.projections / hidden / 2, few_bits)
        forward = Parts()
        of_streams = count_connection(model).projections
        products += self._multiply(tokens.own, of_streams, of_streams / model.stream_width, few_bits=False)
        if counts.active_expert_matrices:
            own = tokens.all / ranks
            rows = own * model.moe_router_topk * self.ep.size * self.etp.size / (model.num_moe_experts or 1)
            inner = (model.moe_ffn_hidden_size or hidden) / self.etp.size
            products += self._multiply(own, counts.active_expert_matrices, inner, few_bits, rows)
            sent = own * model.moe_router_topk * model.expert_channels * self.width * _SKEW
            forward["expert parallel"] = 2 * self.ep.exchange(sent) + self._gather_and_scatter(
                self.etp, sent * self.etp.size
            )
        # Gradients are added to float32 sums for each microbatch.
        local = counts.matrices / ranks + counts.expert_matrices / self.ep.size / self.etp.size
        forward["products"] = products
        backward = Parts({"products": 2 * products + 8 * local / self.bandwidth})
        scores = 2 * tokens.all * kind.work(model, branch, self.workload.seq_length) / ranks
        attention = scores / (self.device.peak_flops * self.device.attention_share)
        if self.writes_scores and "attention" in branch.kind:
            pairs = tokens.all * self.workload.seq_length * model.num_attention_heads / ranks
            attention = 2 * scores / (self.device.peak_flops * self.device.product_share)
            attention += pairs * _SCORE_TOUCHES / self.bandwidth
        forward["attention"], backward["attention"] = attention, attention * (2.0 if self.writes_scores else 2.5)
        rows_kept = list(kind.kept(model, branch, tokens))
        kept = sum(row.bytes for row in rows_kept)
        forward["elementwise"] = _TOUCHES * kept / self.bandwidth
        backward["elementwise"] = _BACKWARD_TOUCHES * forward["elementwise"]
        if counts.matrices:
            around = self._gather_and_scatter(self.tp, tokens.all * hidden * self.width)
            overlapped = _HIDDEN_BY_OVERLAP * self.device.hidden_share if model.tp_comm_overlap else 0.0
            forward["tensor parallel"] = around * (1 - overlapped)
        if self.cp.size > 1 and kind.state == "per token":
            forward["context parallel"] = self._exchange_context(branch, attention)
        if self.cp.size > 1 and kind.inputs is not None:
            forward["context parallel"] += self._share_states(kind.inputs(model))
        for part in ("tensor parallel", "context parallel", "expert parallel"):
            backward[part] = forward[part]
        if counts.matrices and model.sequence_parallel:
            # The input is gathered once more for the weights' gradients, overlapped with the product of the input's.
            again = self.tp.gather(tokens.all * hidden * self.width)
            backward["tensor parallel"] += again * (1 - self.device.hidden_share)
        again = sum(row.bytes for row in rows_kept if row.part in self.recomputed)
        backward["recomputed"] = self._time_recomputed(branch, forward) or _TOUCHES * again / self.bandwidth
        return _Passes(forward, backward)

    def _time_recomputed(self, branch: Branch, forward: Parts) -> float:
        """Seconds of what selective recomputation computes again as a whole; 0 where it is elementwise only."""
        if "core_attn" in self.recomputed and "attention" in branch.kind:
            return forward["attention"]
        if {"mlp": "mlp", "experts": "moe"}.get(branch.kind) in self.recomputed:
            return sum(forward.values())
        return 0.0

    def _exchange_context(self, branch: Branch, attention: float) -> float:
        """Time to get what attention needs of other context-parallel ranks: their keys and values, less what attention
        to the ranks before hides, or their tokens of some heads."""
        model, ranks = self.model, self.cp.size
        groups = max(1.0, model.num_query_groups / self.tp_size)
        block = 2 * self.tokens.all * groups * model.query_width * self.width
        kind = branch.options.context_exchange
        if kind == "p2p":
            hidden = self.device.hidden_share * attention / ranks
            return (ranks - 1) * max(self.device.link_seconds, self.cp.send(block) - hidden)
        if kind == "all_gather":
            return self.cp.gather(block * ranks)
        # Of a hierarchy the ring among few ranks is left out.
        of_heads = self.tokens.all * model.num_attention_heads / self.tp_size * self.width
        return self.cp.exchange(block + of_heads * model.query_width) + self.cp.exchange(of_heads * model.value_width)

    def _share_states(self, inputs: list[StateInput]) -> float:
        """Tokens of linear attention that are exchanged for heads and back, or states that are gathered."""
        exchange = weigh_exchange(self.model, inputs, self.tokens)
        assert exchange is not None
        if exchange.moves_heads:
            there_and_back = exchange.heads_bytes * self.cp.size
            return 2 * self.cp.exchange(there_and_back / 2)
        return self.cp.gather(exchange.states_bytes * self.cp.size)

    @staticmethod
    def _gather_and_scatter(link: Link, whole: float) -> float:
        return link.gather(whole) + link.scatter(whole)

    def _multiply(
        self, rows: float, elements: float, narrow: float, few_bits: bool, rows_at_once: float | None = None
    ) -> float:
        """Seconds of the products of so many rows with matrices of so many elements; narrow: their shortest side.
        rows_at_once: of one product, where the rows go to several matrices."""
        if not elements:
            return 0.0
        device, at_once = self.device, max(1.0, rows_at_once or rows)
        peak = device.peak_flops
        if few_bits and self.model.fp8 and device.fp8_peak_flops:
            peak += (device.fp8_peak_flops - peak) * _FEW_BITS_SHARE
        shape = at_once / (at_once + device.half_rows) * narrow / (narrow + device.half_width)
        return 2 * rows * elements / (peak * device.product_share * shape)

    def _time_ends_of_model(self, *, is_head: bool) -> _Passes:
        """The embedding, or the output layer with the loss."""
        model, ranks, tokens = self.model, self.tp_size, self.tokens
        hidden = tokens.own * model.hidden_size * self.width
        around = self.tp.gather(tokens.all * model.hidden_size * self.width)
        if not is_head:
            touched = 3 * hidden / self.bandwidth
            parts = Parts({"elementwise": touched, "tensor parallel": around})
            return _Passes(parts, parts)
        rows = self.workload.padded_vocab_size / ranks
        product = self._multiply(tokens.all, rows * model.hidden_size, min(rows, model.hidden_size), False)
        logits = tokens.all * rows * self.width / self.bandwidth
        forward = Parts({"output layer": product + 5 * logits, "tensor parallel": around})
        backward = Parts({"output layer": 2 * product + 3 * logits, "tensor parallel": around})
        return _Passes(forward, backward)
