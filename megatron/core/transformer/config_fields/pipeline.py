"""How layers are dealt out to pipeline stages, and in which order stages work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import flag
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.architecture import ArchitectureFields

_INTERLEAVED = Needs(
    "the interleaved schedule, --num-virtual-stages-per-pipeline-rank",
    lambda run: run.virtual_pipeline_model_parallel_size is not None and run.pipeline_schedule != "zb-v",
)
_STAGES = Needs("--pipeline-model-parallel-size", lambda run: run.pipeline_model_parallel_size > 1)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class PipelineFields(ArchitectureFields):
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
    """Count the embedding as one layer when layers are dealt out: the first stage gets one less."""
    account_for_loss_in_pipeline_split: bool = flag(False, kind="layout")
    """Count output layer and loss as one layer when layers are dealt out: the last stage gets one less."""
    pipeline_model_parallel_layout: str | None = flag(None, kind="layout")
    """What lies on each stage: E embedding, t layer, L loss, stages divided by |, repetition as in Ett|(tt|)*2L."""
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
