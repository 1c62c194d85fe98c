# SPDX-License-Identifier: Apache-2.0
"""Division of layers among pipeline stages, and the order in which stages work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import flag, name_divisors, name_multiples
from megatron.core.mesh import DEFERS_WEIGHT_GRADIENTS, VirtualStages, schedule_problem, side_by_side_problem
from megatron.core.plan.letters import split_letters
from megatron.core.plan.stages import find_decoder_end, layout_problem, parse_layout
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.mtp import MTPFields

_INTERLEAVED = Needs(
    "the interleaved schedule, --num-virtual-stages-per-pipeline-rank",
    lambda run: run.virtual_pipeline_model_parallel_size is not None and run.pipeline_schedule != "zb-v",
)
_STAGES = Needs("--pipeline-model-parallel-size", lambda run: run.pipeline_model_parallel_size > 1)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class PipelineFields(MTPFields):
    """Pipeline stages and schedule."""

    pipeline_schedule: Literal["1f1b", "interleaved", "gpipe", "zb-h1", "zb-v"] | None = flag(None, kind="layout")
    """Order of forwards and backwards on the stages. When not given: interleaved where stages have several chunks of
    layers, else 1f1b. zb-h1 and zb-v fill the pipeline's idle time with deferred weight gradients; zb-v lays two chunks
    on each stage, the second in reverse order, so that the first stage also has the loss."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, minimum=1, unit="layers", kind="layout")
    """Divide each stage into chunks of so many layers and interleave them."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, minimum=1, kind="layout")
    """Divide each stage into so many chunks and interleave them."""
    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        minimum=1,
        names=("--microbatch-group-size-per-virtual-pipeline-stage",),
        unit="microbatches",
        kind="layout",
        needs=_INTERLEAVED,
    )
    """Consecutive microbatches that a chunk runs before the next chunk's turn; the number of stages when not given."""
    decoder_first_pipeline_num_layers: int | None = flag(None, minimum=0, unit="layers", kind="layout")
    """Layers of the first stage; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = flag(None, minimum=0, unit="layers", kind="layout")
    """Layers of the last stage; the others share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = flag(False, kind="layout")
    """Count the embedding as one layer when layers are assigned to stages: the first stage gets one less."""
    account_for_loss_in_pipeline_split: bool = flag(False, kind="layout")
    """Count output layer and loss as one layer when layers are assigned to stages: the last stage gets one less."""
    pipeline_model_parallel_layout: str | None = flag(None, kind="layout")
    """Contents of each stage: E embedding, t layer, m multi-token prediction, L loss, stages divided by |, repetition
    as in Ett|(tt|)*2mL."""
    overlap_p2p_comm: bool = flag(
        True,
        names=("--overlap-p2p-communication",),
        off_names=("--no-overlap-p2p-communication",),
        kind="layout",
        needs=_STAGES,
    )
    """Post receives early and go on computing while tensors travel between stages."""
    overlap_p2p_comm_warmup_flush: bool = flag(
        False, names=("--overlap-p2p-communication-warmup-flush",), kind="layout"
    )
    """Overlap transfers also while the pipeline fills and empties. Part of --overlap-p2p-communication here, as a
    note says."""
    defer_embedding_wgrad_compute: bool = flag(False, kind="layout")
    """Compute the weight gradient of the output layer after the last stage's backwards, while earlier stages still
    work, instead of making all stages wait for it in every microbatch."""
    wgrad_deferral_limit: int = flag(0, minimum=0, unit="microbatches", kind="layout")
    """With --defer-embedding-wgrad-compute, the first so many microbatches of a step, whose activations then stay; all
    when 0."""
    overlap_moe_expert_parallel_comm: bool = flag(False, kind="layout")
    """Overlap each backward with a forward, so that each computes while the other's tokens travel to experts on other
    ranks and back (DeepSeek-V3, 2024, section 3.2.1). With pipeline stages, 1f1b then has twice as many microbatches in
    flight."""
    delay_wgrad_compute: bool = flag(False, kind="layout")
    """With --overlap-moe-expert-parallel-comm, compute weight gradients while the input gradients travel."""
    overlap_dispatch_backward_with_experts_wgrad: bool = flag(False, kind="layout")
    """Compute the experts' weight gradients while the gradients of their inputs travel back (alltoall), with or without
    another micro-batch at their side."""
    ep_overlap_early_attn_memory_release: bool = flag(
        False,
        kind="layout",
        needs=Needs("--overlap-moe-expert-parallel-comm", lambda run: run.overlap_moe_expert_parallel_comm),
    )
    """Free what attention keeps earlier in each pair of micro-batches. Not needed here, as a note says."""

    @property
    def delays_weight_gradients(self) -> bool:
        """True if weight gradients are computed while the backward's gradients travel to other ranks."""
        return self.delay_wgrad_compute or self.overlap_dispatch_backward_with_experts_wgrad

    @property
    def defers_weight_gradients(self) -> bool:
        """True if the schedule computes weight gradients apart from input gradients."""
        return self.pipeline_schedule in DEFERS_WEIGHT_GRADIENTS

    def count_states_between_stages(self, shape: VirtualStages) -> list[int]:
        """Return how many hidden states [s, b, h] travel together, one below the other, from each virtual stage to the
        next: one, and after multi-token prediction one more for each MTP depth."""
        end = find_decoder_end(self, shape)
        return [1 + (self.mtp_num_layers or 0) if stage >= end else 1 for stage in range(shape.count - 1)]

    def derive(self) -> None:
        super().derive()
        # The size of the virtual pipeline follows from whichever of four flags says it; None stands for one chunk.
        chunks = self._chunks_per_stage()
        if chunks is not None:
            self.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
        if self.predicts_apart:
            self.mtp_standalone = True

    def _chunks_per_stage(self) -> int | None:
        """Return what the other fields say about it; None where they say nothing, or numbers that do not fit."""
        stages, per_chunk = self.pipeline_model_parallel_size, self.num_layers_per_virtual_pipeline_stage
        # From the most to the least explicit; contradictions between them are reported by `rules`.
        if self.num_virtual_stages_per_pipeline_rank:
            return self.num_virtual_stages_per_pipeline_rank
        if self.pipeline_model_parallel_layout:
            return len(parse_layout(self.pipeline_model_parallel_layout)) // stages
        if self._has_cuts:
            return len(split_letters(self.hybrid_layer_pattern or "").segments) // stages
        if self.pipeline_schedule == "zb-v":
            return 2
        per_stage = (self.num_layers or 0) // stages
        return per_stage // per_chunk if per_chunk and per_stage and per_stage % per_chunk == 0 else None

    def rules(self) -> Iterator[str]:
        chunks = self.virtual_pipeline_model_parallel_size or 1
        yield from self.division_problems(self.pipeline_model_parallel_size, chunks)
        yield from self._layout_says_all()
        yield from self._predictions_have_a_place()
        yield from self._chunks_are_possible()
        yield from self._schedule_fits_the_stages()
        yield from self._weight_gradients_can_wait()
        yield from self._backward_runs_beside_forward()
        if self.overlap_p2p_comm_warmup_flush and not self.overlap_p2p_comm:
            yield "--overlap-p2p-communication-warmup-flush contradicts --no-overlap-p2p-communication; keep one"
        # A group must be long enough for its first microbatch to come round before the next chunk's turn.
        group, stages = self.microbatch_group_size_per_vp_stage, self.pipeline_model_parallel_size
        if chunks > 1 and self.pipeline_schedule != "zb-v" and group is not None and group < stages:
            yield (
                f"{self.say('microbatch_group_size_per_vp_stage')} is below "
                f"{self.say('pipeline_model_parallel_size')}; use {stages} or more"
            )

    def division_problems(self, stages: int, chunks: int) -> Iterator[str]:
        """Yield what stands against assigning the layers to so many stages: as configured, or as many as real groups
        have.

        chunks: pieces of each stage (interleaved schedule, Narayanan et al., 2021).
        """
        if self.num_layers is None:
            return
        if self.pipeline_model_parallel_layout:
            yield from self._written_layout_fits(self.pipeline_model_parallel_layout, stages, chunks)
        elif self._has_cuts:
            segments = split_letters(self.hybrid_layer_pattern or "").segments
            yield from self._written_stages_fit("hybrid_layer_pattern", len(segments), stages, chunks)
        elif self._has_uneven_ends:
            yield from self._middle_divides_evenly(stages, chunks)
        else:
            yield from self._layers_divide_evenly(stages, chunks)

    @property
    def _has_uneven_ends(self) -> bool:
        return self.decoder_first_pipeline_num_layers is not None or self.decoder_last_pipeline_num_layers is not None

    @property
    def _has_cuts(self) -> bool:
        return "|" in (self.hybrid_layer_pattern or "").partition("/")[0]

    @property
    def _counts_ends(self) -> bool:
        return self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split

    def _stages_written(self, stages: int) -> str:
        return f"{self.flag('pipeline_model_parallel_size')} {stages}"

    def _layers_divide_evenly(self, stages: int, chunks: int) -> Iterator[str]:
        layers = self.num_layers
        # The embedding and the loss each take the place of one layer (True counts as 1).
        counted = layers + self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split
        extra = f" (with embedding and loss counted: {counted})" if counted != layers else ""
        if counted % stages:
            yield (
                f"{self.say('num_layers')}{extra} does not divide over {self._stages_written(stages)}; "
                f"use {name_multiples(layers, stages)} layers, or {name_divisors(counted, stages)} stages, or say the "
                "uneven stages with --decoder-first-pipeline-num-layers"
            )
        parts, spelled = self._chunks_written()
        if self.pipeline_schedule == "zb-v" and stages > 1 and not self._counts_ends and layers % (2 * stages):
            yield (
                f"{self.say('num_layers')} cannot be divided over the {stages} stages x 2 chunks of "
                f"--pipeline-schedule zb-v; use {name_multiples(layers, 2 * stages)} layers"
            )
        # Before the general rule below: this sentence can name the flag that is wrong.
        elif parts and not self._counts_ends and layers // stages and layers // stages % parts:
            yield (
                f"{spelled} does not divide the {layers // stages} layers of a stage ({self.say('num_layers')} / "
                f"{self._stages_written(stages)}); use {name_divisors(layers // stages, parts)}"
            )
        elif counted % stages == 0 and counted % (stages * chunks):
            yield (
                f"{self.say('num_layers')}{extra} cannot be divided over {stages} pipeline stages x {chunks} "
                f"chunks; use a multiple of {stages * chunks} layers"
            )

    def _middle_divides_evenly(self, stages: int, chunks: int) -> Iterator[str]:
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        # A first or last stage of 0 layers is allowed: it has only the embedding or the loss.
        rest = self.num_layers - (first or 0) - (last or 0)
        middle = max(0, stages - (first is not None) - (last is not None))
        if rest < 0 or (rest % middle if middle else rest):
            yield (
                f"{self.say('num_layers')} less those of the first and last stage ({first or 0} and {last or 0}) "
                f"leaves {rest} layers, which do not divide over the {middle} other stages of "
                f"{self._stages_written(stages)}"
            )
            return
        counts = [count for count in (first, last, rest // middle if middle else None) if count is not None]
        for count in counts:
            if count % chunks:
                yield (
                    f"{self.say('num_layers')}: a stage of {count} layers cannot be divided into {chunks} chunks; "
                    f"use multiples of {chunks} layers"
                )
                return

    def _written_layout_fits(self, layout: str, stages: int, chunks: int) -> Iterator[str]:
        parts = parse_layout(layout)
        problem = layout_problem(parts)
        if problem is not None:
            yield f"{self.say('pipeline_model_parallel_layout')} {problem}"
            return
        yield from self._written_stages_fit("pipeline_model_parallel_layout", len(parts), stages, chunks)
        layers = sum(part.count("t") for part in parts)
        if layers != self.num_layers:
            yield f"{self.say('pipeline_model_parallel_layout')} has {layers} layers (t), but {self.say('num_layers')}"

    def _written_stages_fit(self, name: str, written: int, stages: int, chunks: int) -> Iterator[str]:
        if written % stages:
            yield (
                f"{self.say(name)} has {written} stages, which is not a multiple of {self._stages_written(stages)}; "
                f"use {name_multiples(written, stages)} stages"
            )
        elif written != stages * chunks:
            yield f"{self.say(name)} has {written} stages, not {stages} x {chunks} chunks"

    def _predictions_have_a_place(self) -> Iterator[str]:
        """--mtp-num-layers and --mtp-standalone beside the m of a written layout."""
        layout = self.pipeline_model_parallel_layout
        written = 0 if layout is None else sum(part.count("m") for part in parse_layout(layout))
        asked = self.mtp_num_layers or 0
        if layout is not None and written != asked:
            yield (
                f"{self.say('pipeline_model_parallel_layout')} has {written} layers of multi-token prediction (m), but "
                f"{self.say('mtp_num_layers') if asked else '--mtp-num-layers is not given'}; write one m for each"
            )
        elif self.mtp_standalone and not self.predicts_apart:
            yield (
                "--mtp-standalone needs a --pipeline-model-parallel-layout with the m before the stage of the loss, "
                "such as Ettt|m|L"
            )

    @property
    def predicts_apart(self) -> bool:
        """Return whether the written layout has multi-token prediction on another virtual stage than the loss."""
        return "m" in "".join(parse_layout(self.pipeline_model_parallel_layout or "")[:-1])

    def _layout_says_all(self) -> Iterator[str]:
        layout, letters = "pipeline_model_parallel_layout", "hybrid_layer_pattern"
        written = next((name for name in (layout, letters) if getattr(self, name)), None)
        others = [
            "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
            "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
        ]  # fmt: skip
        if written == layout:
            others.append(letters)
        # Letters without cuts are assigned like other layers.
        if written == layout or self._has_cuts:
            others += ["decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"]
        # A layout is complete, so that any second word about stages could only contradict it.
        for name in others if written else ():
            if getattr(self, name):
                yield f"{self.say(name)} contradicts {self.flag(written or '')}, which says all about stages; keep one"

    def _chunks_written(self) -> tuple[int | None, str]:
        """The number that divides a stage into chunks, in either way of saying it, and the flag that says it."""
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank, self.say("num_virtual_stages_per_pipeline_rank")
        return self.num_layers_per_virtual_pipeline_stage, self.say("num_layers_per_virtual_pipeline_stage")

    def _chunks_are_possible(self) -> Iterator[str]:
        per_chunk, stages = self.num_layers_per_virtual_pipeline_stage, self.pipeline_model_parallel_size
        parts, spelled = self._chunks_written()
        if parts is None:
            return
        if per_chunk is not None and self.num_virtual_stages_per_pipeline_rank is not None:
            yield (
                f"{self.say('num_layers_per_virtual_pipeline_stage')} and "
                f"{self.say('num_virtual_stages_per_pipeline_rank')} say the same thing in two ways; keep one"
            )
        # With blocking transfers two neighbours that both send to each other, as in a ring of two, would wait for ever.
        smallest = 2 if self.overlap_p2p_comm else 3
        if stages < smallest:
            without = "" if self.overlap_p2p_comm else " with --no-overlap-p2p-communication"
            yield f"{spelled}{without} needs --pipeline-model-parallel-size of at least {smallest}, not {stages}"
        # So many layers to a chunk leave stages of different length with different numbers of chunks.
        if self._has_uneven_ends and per_chunk is not None:
            yield f"{spelled} contradicts uneven first or last stages; use --num-virtual-stages-per-pipeline-rank"

    def _schedule_fits_the_stages(self) -> Iterator[str]:
        if self.pipeline_schedule is None:
            return
        if self.pipeline_model_parallel_size == 1:
            yield f"{self.say('pipeline_schedule')} needs --pipeline-model-parallel-size of at least 2, not 1"
            return
        problem = schedule_problem(self.pipeline_schedule, self.virtual_pipeline_model_parallel_size or 1)
        if problem is not None:
            yield problem

    def _weight_gradients_can_wait(self) -> Iterator[str]:
        # Deferred gradients are added into the buffer when they are computed: autograd has forgotten the weight by
        # then.
        if not self.gradient_accumulation_fusion:
            yield from self.deferral_problems("--no-gradient-accumulation-fusion")
        if not self.defer_embedding_wgrad_compute:
            if self.wgrad_deferral_limit:
                yield f"{self.say('wgrad_deferral_limit')} needs --defer-embedding-wgrad-compute"
            return
        if self.pipeline_model_parallel_size == 1:
            yield "--defer-embedding-wgrad-compute needs --pipeline-model-parallel-size of at least 2, not 1"
        if self.defers_weight_gradients:
            yield (
                f"{self.say('pipeline_schedule')} defers all weight gradients; leave out "
                "--defer-embedding-wgrad-compute"
            )

    def _backward_runs_beside_forward(self) -> Iterator[str]:
        hides = self.overlap_moe_expert_parallel_comm or self.overlap_dispatch_backward_with_experts_wgrad
        if self.delay_wgrad_compute and not hides:
            yield (
                "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm, or "
                "--overlap-dispatch-backward-with-experts-wgrad"
            )
        asked = (
            "--delay-wgrad-compute" if self.delay_wgrad_compute else "--overlap-dispatch-backward-with-experts-wgrad"
        )
        if self.delays_weight_gradients and self.defers_weight_gradients:
            yield f"{self.say('pipeline_schedule')} defers weight gradients already; leave out {asked}"
        if self.overlap_moe_expert_parallel_comm and self.pipeline_schedule is not None:
            problem = side_by_side_problem(self.pipeline_schedule)
            if problem is not None:
                yield problem

    def deferral_problems(self, flag: str) -> Iterator[str]:
        """Yield what a flag rules out under which the layers' products cannot be split into two halves."""
        if self.defers_weight_gradients:
            yield f"{self.say('pipeline_schedule')} computes weight gradients later, which {flag} rules out; keep one"
        if self.defer_embedding_wgrad_compute:
            yield (f"--defer-embedding-wgrad-compute computes weight gradients later, which {flag} rules out; keep one")
