# SPDX-License-Identifier: Apache-2.0
"""Recomputation in backward of what is not kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import flag
from megatron.core.plan.stages import count_most_layers
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.pipeline import PipelineFields

_RECOMPUTATION = Needs("--recompute-granularity full", lambda run: run.recompute_granularity is not None)
_SELECTIVE = Needs("--recompute-granularity selective", lambda run: run.recompute_granularity == "selective")


@dataclass(kw_only=True)
class RecomputeFields(PipelineFields):
    """Recomputation of activations (Chen et al., 2016; Korthikanti et al., 2022)."""

    recompute_granularity: Literal["full", "selective"] | None = flag(None, kind="kernel")
    """Parts that backward computes again: full, whole layers, of which only the input is kept; selective, the parts of
    every layer that --recompute-modules names."""
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
        choices=(
            "core_attn",
            "layernorm",
            "mlp",
            "mlp_act",
            "mla_up_proj",
            "moe_act",
            "moe",
            "shared_experts",
            "gdn_norm_out",
        ),
        metavar="PART",
        kind="kernel",
        needs=_SELECTIVE,
    )
    """With selective, what is computed again: core_attn, scores, softmax and their product with the values; layernorm,
    the output of the norms before attention and MLP; mlp, the whole MLP; mlp_act, what it multiplies second, SwiGLU of
    the first product's output, also of the shared expert; mla_up_proj, queries, keys and values of
    latent attention from its latent vectors; moe, the whole layer of experts; moe_act, what experts multiply second;
    shared_experts, the shared expert; gdn_norm_out, the gated output of a gated delta net, which is computed again in
    any case. core_attn when not given."""
    moe_layer_recompute: bool = flag(
        False, kind="kernel", needs=Needs("--num-experts", lambda run: run.num_moe_experts is not None)
    )
    """Short for --recompute-granularity selective with moe among --recompute-modules."""
    mlp_chunks_for_training: int = flag(1, minimum=1, kind="kernel")
    """In training the MLP of a layer without experts computes so many stretches of tokens, one after another. Backward
    holds the inner activations of one of them at a time with mlp among --recompute-modules, else their gradients."""

    def derive(self) -> None:
        super().derive()
        if self.moe_layer_recompute and self.recompute_granularity is None:
            self.recompute_granularity = "selective"
        # The default of upstream: what gives back the most memory for the least computation.
        if self.recompute_granularity == "selective" and self.recompute_modules is None:
            self.recompute_modules = ["core_attn"]
        # A new list: the given one may be the caller's.
        if self.moe_layer_recompute and self.recompute_granularity == "selective":
            self.recompute_modules = [*dict.fromkeys([*(self.recompute_modules or []), "moe"])]

    def rules(self) -> Iterator[str]:
        if self.recompute_granularity == "full":
            yield from self._full_recomputation_is_complete()
        if self.moe_layer_recompute and self.recompute_granularity == "full":
            yield "--moe-layer-recompute contradicts --recompute-granularity full; leave it out"
        if self.recompute_granularity == "selective":
            for name in ("recompute_method", "recompute_num_layers"):
                if getattr(self, name) is not None:
                    yield f"{self.say(name)} belongs to --recompute-granularity full; leave it out with selective"
        if self.distribute_saved_activations:
            # Only the inputs of whole layers are equal on all tensor-parallel ranks and kept for long.
            if self.tensor_model_parallel_size == 1 or self.recompute_granularity != "full":
                yield (
                    "--distribute-saved-activations needs a tensor-parallel size above 1 and --recompute-granularity "
                    "full"
                )
            # Ranks then hold different tokens: there is no common input left to divide.
            if self.sequence_parallel and self.tensor_model_parallel_size > 1:
                yield "--distribute-saved-activations has nothing to do with --sequence-parallel; keep one"

    def _full_recomputation_is_complete(self) -> Iterator[str]:
        layers, most = self.recompute_num_layers, count_most_layers(self)
        if self.recompute_method is None:
            yield "--recompute-granularity full needs --recompute-method uniform or block"
        if layers is None:
            yield "--recompute-granularity full needs --recompute-num-layers"
        elif most is not None and layers > most:
            yield f"{self.say('recompute_num_layers')} is not from 1 to {most}, the layers of a pipeline stage"
