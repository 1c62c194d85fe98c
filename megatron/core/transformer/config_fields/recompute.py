"""What is computed again in backward instead of being kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import flag
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.pipeline import PipelineFields

_RECOMPUTATION = Needs("--recompute-granularity full", lambda run: run.recompute_granularity is not None)
_SELECTIVE = Needs("--recompute-granularity selective", lambda run: run.recompute_granularity == "selective")


@dataclass(kw_only=True)
class RecomputeFields(PipelineFields):
    """Recomputation of activations (Chen et al., 2016; Korthikanti et al., 2022)."""

    recompute_granularity: Literal["full", "selective"] | None = flag(None, kind="kernel")
    """What backward computes again: full, whole layers, of which only the input is kept; selective, the parts of every
    layer that --recompute-modules names."""
    recompute_method: Literal["uniform", "block"] | None = flag(None, kind="kernel", needs=_RECOMPUTATION)
    """With full: uniform, all layers in units of --recompute-num-layers, each computed again from its first layer's
    input; block, only the first --recompute-num-layers of each pipeline stage, or virtual stage, one by one."""
    recompute_num_layers: int | None = flag(None, minimum=1, unit="layers", kind="kernel", needs=_RECOMPUTATION)
    """With full: layers of a unit, or recomputed layers of a stage, as --recompute-method has it."""
    distribute_saved_activations: bool = flag(False, kind="layout")
    """With full: tensor-parallel ranks, which all have the same layer inputs, keep a part each and gather them in
    backward. Sequence parallelism divides them already."""
    recompute_modules: list[str] | None = flag(
        None,
        nargs="+",
        choices=("core_attn", "layernorm", "mlp", "mla_up_proj", "moe_act", "moe", "shared_experts"),
        planned_choices=("mla_up_proj", "moe_act", "moe", "shared_experts"),
        coming="recomputation of experts and multi-latent attention",
        metavar="PART",
        kind="kernel",
        needs=_SELECTIVE,
    )
    """With selective, what is computed again: core_attn, scores, softmax and their product with the values; layernorm,
    the output of the norms before attention and MLP; mlp, the whole MLP. core_attn when not given."""
