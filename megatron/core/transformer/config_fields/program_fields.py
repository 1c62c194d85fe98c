# SPDX-License-Identifier: Apache-2.0
"""Fields of upstream's TransformerConfig that programs in Python give, set or read; no flag sets them.

Those of a feature that does not exist here take upstream's default, and refuse any other value by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.config_base import CheckedConfig, derived
from megatron.core.enums import AttnBackend

if TYPE_CHECKING:
    import torch

_REFUSED: dict[str, tuple[Any, str]] = {
    "enable_autocast": (False, "bf16 and fp16 say in which number format is computed"),
    "fp8_param": (False, "parameters are kept in 16 or 32 bits; fp8 says that products are in 8"),
    "cpu_offloading": (False, "fine_grained_activation_offloading moves what backward needs"),
    "flash_decode": (False, "generation chooses its kernel itself"),
    "test_mode": (False, "there are no tests in a step; python -m megatron check_parity compares layouts"),
    "mrope_section": (None, "positions are of text only"),
    "moe_enable_deepep": (False, "experts exchange tokens by moe_token_dispatcher_type"),
    "heterogeneous_block_specs": (False, "layers of one kind have one shape"),
    "hetereogenous_dist_checkpoint": (False, "layers of one kind have one shape"),
    "use_kitchen": (False, "that package is not used"),
}
"""Name -> upstream's default, and what there is instead."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ProgramFields(CheckedConfig):
    """Fields that users' programs set while they run, and upstream's spellings."""

    no_sync_func: Any = derived(kind="report")
    """Says nothing: schedules sum gradients after a step's last backward only."""
    grad_sync_func: Any = derived(kind="report")
    """Says nothing: schedules start to sum a chunk's gradients by themselves."""
    param_sync_func: Any = derived(kind="report")
    """Says nothing: parameters are gathered after the update, or before the layer that needs them."""
    finalize_model_grads_func: Any = derived(kind="report")
    """Called by a schedule after the last backward with (chunks, tokens or None, pg_collection=groups)."""
    grad_scale_func: Any = derived(kind="report")
    """Function that a schedule applies to each loss before its backward."""
    timers: Any = derived(kind="report")
    """Says nothing in a model; a run has its own."""
    num_layers_in_first_pipeline_stage: int | None = derived(kind="layout")
    """decoder_first_pipeline_num_layers under upstream's name in Python."""
    num_layers_in_last_pipeline_stage: int | None = derived(kind="layout")
    """decoder_last_pipeline_num_layers under upstream's name in Python."""
    batch_p2p_comm: bool = derived(True, kind="layout")
    """Says nothing: transfers that stand side by side are posted together."""
    deallocate_pipeline_outputs: bool = derived(False, kind="layout")
    """Says nothing: an output is freed as soon as it has been sent."""
    pipeline_model_parallel_comm_backend: str | None = derived(kind="layout")
    """Says nothing: stages send over the groups of the process."""
    barrier_with_L1_time: bool = derived(True, kind="report")
    """Says nothing in a model; a run's stopwatches have it."""
    log_max_attention_logit: bool = derived(False, kind="report")
    """Says nothing in a model; --log-max-attention-logit makes a run log it."""
    moe_router_fusion: bool = derived(False, kind="kernel")
    """Says nothing: the numbers are the same."""
    cuda_graph_scope: Any = derived(kind="kernel")
    """Says nothing: cuda_graph_impl and cuda_graph_modules say what is recorded."""
    use_te_rng_tracker: bool = derived(False, kind="kernel")
    """Says nothing: random states are those of torch's generators."""
    inference_rng_tracker: bool = derived(False, kind="kernel")
    """Says nothing: sampling draws from a generator of its own."""
    transformer_impl: str = derived("transformer_engine", kind="kernel")
    """Says nothing in a model, whose layer spec says it; programs read which spec they are to ask for."""
    autocast_dtype: torch.dtype | None = derived(kind="numerics")
    """Says nothing without enable_autocast."""
    enable_autocast: bool = derived(False, kind="numerics")
    """Only False."""
    fp8_param: bool = derived(False, kind="numerics")
    """Only False."""
    cpu_offloading: bool = derived(False, kind="kernel")
    """Only False."""
    flash_decode: bool = derived(False, kind="kernel")
    """Only False."""
    test_mode: bool = derived(False, kind="report")
    """Only False."""
    mrope_section: list[int] | None = derived(kind="function")
    """Only None."""
    moe_enable_deepep: bool = derived(False, kind="kernel")
    """Only False."""
    heterogeneous_block_specs: bool = derived(False, kind="function")
    """Only False."""
    hetereogenous_dist_checkpoint: bool = derived(False, kind="layout")
    """Only False; the spelling is upstream's."""
    use_kitchen: bool = derived(False, kind="kernel")
    """Only False."""

    def normalize(self) -> None:
        super().normalize()
        asked: Any = self
        # Programs give upstream's member; everything here compares with its name.
        if isinstance(asked.attention_backend, AttnBackend):
            asked.attention_backend = asked.attention_backend.name
        for ours, theirs in (("first", "first"), ("last", "last")):
            value = getattr(asked, f"num_layers_in_{theirs}_pipeline_stage")
            if value is not None:
                setattr(asked, f"decoder_{ours}_pipeline_num_layers", value)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for name, (default, instead) in _REFUSED.items():
            if getattr(self, name) != default:
                yield f"{name}={getattr(self, name)!r} is not supported: {instead}; leave it out"
