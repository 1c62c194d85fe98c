# SPDX-License-Identifier: Apache-2.0
"""Sizes of the parallel axes, dtypes and overlap switches that every layer may need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from megatron.core.config_base import CheckedConfig, derived, flag
from megatron.core.setting import Needs

# A command line is checked, and --help printed, without waiting seconds for torch.
if TYPE_CHECKING:
    import torch

# What a flag needs to have an effect: without it, a note says that it has none.
_TP_OVERLAP = Needs("--tp-comm-overlap", lambda run: run.tp_comm_overlap)
_HYBRID = Needs("--hybrid-context-parallel", lambda run: run.hybrid_context_parallel)

_REFUSED: dict[str, tuple[Any, str]] = {
    "enable_autocast": (False, "bf16 and fp16 say in which number format is computed"),
    "cpu_offloading": (False, "fine_grained_activation_offloading moves what backward needs"),
}
"""Name -> upstream's default, and what there is instead."""


def refuse_missing(config: Any, table: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    """Problems of fields whose feature is missing, other than their only value; table: name -> that value, and what
    there is instead."""
    for name, (default, instead) in table.items():
        if getattr(config, name) != default:
            yield f"{name}={getattr(config, name)!r} is not supported: {instead}; leave it out"


@dataclass(kw_only=True)
class ModelParallelConfig(CheckedConfig):
    """Division of the model over processes, and the dtype in which it computes."""

    tensor_model_parallel_size: int = flag(1, minimum=1, kind="layout")
    """Processes that share each layer (tensor parallelism)."""
    pipeline_model_parallel_size: int = flag(1, minimum=1, kind="layout")
    """Consecutive stages the layers are divided into (pipeline parallelism)."""
    virtual_pipeline_model_parallel_size: int | None = flag(None, minimum=0, hidden=True, kind="layout")
    """Chunks of layers per pipeline stage with the interleaved schedule."""
    context_parallel_size: int = flag(1, minimum=1, kind="layout")
    """Processes that share each sequence (context parallelism)."""
    hierarchical_context_parallel_sizes: list[int] | None = flag(None, minimum=1, kind="layout")
    """For --cp-comm-type a2a+p2p: processes that exchange tokens for heads, then processes of a ring; their product is
    the context-parallel size."""
    hybrid_context_parallel: bool = flag(False, kind="layout")
    """With --sft, choose for every conversation over how many of the data- and context-parallel processes it is
    divided: the fewest, a power of two, whose shares fit --max-seqlen-per-dp-cp-rank. Short ones run side by side on
    different processes, and each process gets about the same work. Evaluation keeps --context-parallel-size."""
    max_seqlen_per_dp_cp_rank: int | None = flag(None, minimum=1, unit="tokens", kind="layout", needs=_HYBRID)
    """With --hybrid-context-parallel, the most tokens of a microbatch on one process."""
    expert_model_parallel_size: int = flag(1, minimum=1, kind="layout")
    """Processes that share the experts of a layer (expert parallelism). They are carved out of the processes of a stage
    that tensor, context and data parallelism use elsewhere, and need no others."""
    expert_tensor_parallel_size: int | None = flag(None, minimum=1, kind="layout")
    """Processes that share each expert; the tensor-parallel size when not given."""
    sequence_parallel: bool = flag(False, kind="layout")
    """Divide norms and dropout along the sequence over the tensor-parallel processes."""
    tp_comm_overlap: bool = flag(False, kind="layout")
    """With --sequence-parallel, divide the tensor-parallel layers' tokens into chunks, and gather or scatter one chunk
    while the product of another is computed."""
    tp_comm_overlap_ag: bool = flag(True, kind="layout", needs=_TP_OVERLAP)
    """With --tp-comm-overlap, gather in chunks during the products that need them; switched off, all before."""
    tp_comm_overlap_rs: bool = flag(True, kind="layout", needs=_TP_OVERLAP)
    """With --tp-comm-overlap, scatter outputs in chunks during the products that make them; switched off, all after."""
    tp_comm_bulk_dgrad: bool = flag(True, kind="layout", needs=_TP_OVERLAP)
    """With --tp-comm-overlap, gather a column layer's inputs during the product that makes its input gradient."""
    tp_comm_bulk_wgrad: bool = flag(True, kind="layout", needs=_TP_OVERLAP)
    """With --tp-comm-overlap, scatter a column layer's input gradient during the product that makes its weight
    gradient."""
    tp_comm_overlap_rs_dgrad: bool = flag(False, kind="layout", needs=_TP_OVERLAP)
    """With --tp-comm-overlap, scatter a column layer's input gradient in chunks during the products that make it."""
    fp16: bool = flag(False, kind="numerics")
    """Compute in float16 with loss scaling; the optimizer keeps float32 main parameters."""
    bf16: bool = flag(False, kind="numerics")
    """Compute in bfloat16; the optimizer keeps float32 main parameters."""
    params_dtype: torch.dtype | None = derived(kind="numerics")
    """Dtype of the parameters; float32, or what bf16/fp16 select, when None."""
    pipeline_dtype: torch.dtype | None = derived(kind="layout")
    """Dtype of the hidden states that pipeline stages exchange; the parameters' dtype when None."""
    variable_seq_lengths: bool = derived(False, kind="layout")
    """Microbatches of a step may differ in length: pipeline stages send each other the shape of what follows."""
    gradient_accumulation_fusion: bool = flag(True, kind="kernel")
    """Weight-gradient products add straight into the main gradient buffer instead of into a temporary."""
    calculate_per_token_loss: bool = flag(False, kind="numerics")
    """Divide each step's gradients by the tokens of the whole global batch, so that every token counts alike; otherwise
    every microbatch counts alike, however many of its tokens do."""
    use_cpu_initialization: bool = flag(False, kind="kernel")
    """Draw initial weights on the CPU, so that a run on GPUs starts from the same numbers as one on CPUs, or on GPUs of
    another type. Each type of device gives other numbers; on any, a weight depends only on the seed, its name and its
    index."""
    clone_scatter_output_in_embedding: bool = flag(True, kind="layout")
    """With sequence parallelism and learned positions, copy a rank's part of the embedded sequence, so that the whole
    one can be freed."""
    disable_bf16_reduced_precision_matmul: bool = flag(False, kind="kernel")
    """Sum the parts of bfloat16 matrix products in float32 where a GPU's kernel splits them (torch's
    allow_bf16_reduced_precision_reduction, switched off)."""
    deterministic_mode: bool = flag(False, kind="kernel")
    """Use deterministic algorithms only (torch.use_deterministic_algorithms); an operation without one ends the run."""

    # Programs in Python give, set or read these; no flag sets them.
    no_sync_func: Any = derived(kind="report")
    """Ignored: schedules sum gradients only after a step's last backward."""
    grad_sync_func: Any = derived(kind="report")
    """Ignored: schedules start to sum a chunk's gradients by themselves."""
    param_sync_func: Any = derived(kind="report")
    """Ignored: parameters are gathered after the update, or before the layer that needs them."""
    finalize_model_grads_func: Any = derived(kind="report")
    """Called by a schedule after the last backward with (chunks, tokens or None, pg_collection=groups)."""
    grad_scale_func: Any = derived(kind="report")
    """Function that a schedule applies to each loss before its backward."""
    timers: Any = derived(kind="report")
    """Ignored by a model; a run has separate timers."""
    batch_p2p_comm: bool = derived(True, kind="layout")
    """Ignored: adjacent transfers are posted together."""
    deallocate_pipeline_outputs: bool = derived(False, kind="layout")
    """Ignored: an output is freed as soon as it has been sent."""
    pipeline_model_parallel_comm_backend: str | None = derived(kind="layout")
    """Ignored: stages send over the groups of the process."""
    barrier_with_L1_time: bool = derived(True, kind="report")
    """Ignored by a model; a run's stopwatches have it."""
    use_te_rng_tracker: bool = derived(False, kind="kernel")
    """Ignored: random states come from torch's generators."""
    autocast_dtype: torch.dtype | None = derived(kind="numerics")
    """Ignored without enable_autocast."""
    enable_autocast: bool = derived(False, kind="numerics")
    """Only False."""
    cpu_offloading: bool = derived(False, kind="kernel")
    """Only False."""

    def derive(self) -> None:
        super().derive()
        # Filled in before any check, so that rules and layouts never meet None.
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size

    def rules(self) -> Iterator[str]:
        yield from refuse_missing(self, _REFUSED)
        if self.fp16 and self.bf16:
            yield "--fp16 and --bf16 contradict each other; keep one"
        sizes = self.hierarchical_context_parallel_sizes
        if sizes is not None and prod(sizes) != self.context_parallel_size:
            yield (
                f"{self.say('hierarchical_context_parallel_sizes')} multiply to {prod(sizes)}, not to "
                f"{self.say('context_parallel_size')}"
            )
        if self.tp_comm_overlap and not (self.sequence_parallel and self.tensor_model_parallel_size > 1):
            yield (
                "--tp-comm-overlap needs --sequence-parallel and a tensor-parallel size above 1 "
                f"(now {self.say('tensor_model_parallel_size')})"
            )
        yield from self._planned_ranks_have_their_needs()

    def _planned_ranks_have_their_needs(self) -> Iterator[str]:
        """--hybrid-context-parallel: microbatches of different lengths, on different numbers of ranks."""
        if not self.hybrid_context_parallel:
            return
        if self.max_seqlen_per_dp_cp_rank is None:
            yield (
                "--hybrid-context-parallel needs --max-seqlen-per-dp-cp-rank, the most tokens of a microbatch on one "
                "process; start with the length of a sequence divided by --context-parallel-size"
            )
        if not self.calculate_per_token_loss:
            yield (
                "--hybrid-context-parallel needs --calculate-per-token-loss, because its microbatches have different "
                "numbers of tokens; add it"
            )
        if self.pipeline_model_parallel_size > 1:
            yield (
                f"--hybrid-context-parallel cannot be combined with {self.say('pipeline_model_parallel_size')}, whose "
                "stages exchange microbatches of one length; use 1 stage"
            )

    @property
    def compute_dtype_name(self) -> Literal["float32", "bfloat16", "float16"]:
        """Name of the dtype of parameters and activations."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"
