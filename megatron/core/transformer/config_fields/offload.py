# SPDX-License-Identifier: Apache-2.0
"""Choice of the activations that are saved for backward in the memory of the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.plan.stages import count_most_layers
from megatron.core.setting import Needs, NeedsGPU
from megatron.core.transformer.config_fields.recompute import RecomputeFields

_PARTS = Needs("--fine-grained-activation-offloading", lambda run: run.fine_grained_activation_offloading)
_LAYERS = Needs("--cpu-offloading-num-layers", lambda run: run.cpu_offloading_num_layers > 0)
_ONLY_COPIES = "activations are copied within the host's memory, which saves nothing"
OF_EXPERTS = ("expert_fc1", "moe_act")
OF_DENSE_LAYERS = ("mlp_fc1", "mlp_act")


@dataclass(kw_only=True)
class OffloadFields(RecomputeFields):
    """Offloading of activations (Rhu et al., vDNN, 2016)."""

    fine_grained_activation_offloading: bool = flag(
        False, kind="kernel", gpu=NeedsGPU(lambda run: run.fine_grained_activation_offloading, _ONLY_COPIES)
    )
    """Save what --offload-modules names for backward in the memory of the host."""
    offload_modules: list[str] = flag(
        default_factory=list,
        nargs="+",
        choices=("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", *OF_DENSE_LAYERS, *OF_EXPERTS),
        metavar="PART",
        kind="kernel",
        needs=_PARTS,
    )
    """Activations that wait on the host: attn_norm and mlp_norm, the inputs of these norms; qkv_linear, the input of
    the projection to queries, keys and values; core_attn, these; attn_proj, the input of the projection after
    attention; mlp_fc1 and expert_fc1, the input of the first product of a dense MLP and of experts; mlp_act and
    moe_act, what their activation and their second product keep. What is recomputed is not kept anywhere; of layers
    that are recomputed whole attn_norm is the input."""
    min_offloaded_tensor_size: int = flag(1024 * 1024, minimum=0, unit="elements", kind="kernel", needs=_PARTS)
    """Smaller tensors stay on the device."""
    activation_offload_fraction: float = flag(1.0, minimum=0, maximum=1, kind="kernel", needs=_PARTS)
    """Share of the bytes of each forward pass that goes to the host, from its beginning; counted by the first pass,
    of which all goes."""
    delta_offload_bytes_across_pp_ranks: int = flag(0, minimum=0, unit="bytes", kind="kernel", needs=_PARTS)
    """By how much less each pipeline stage offloads of a pass than the stage before it, which keeps more microbatches
    at once."""
    fine_grained_offloading_max_inflight_offloads: int | None = flag(
        None, minimum=1, unit="modules", kind="kernel", needs=_PARTS,
        gpu=NeedsGPU(lambda run: run.fine_grained_offloading_max_inflight_offloads is not None, "it has no effect"),
    )  # fmt: skip
    """Modules whose copies to the host may be under way before the computation waits for the oldest, so that their
    memory is free; in any case no more than one layer sends."""
    cpu_offloading_num_layers: int = flag(
        0,
        minimum=0,
        unit="layers",
        kind="kernel",
        gpu=NeedsGPU(lambda run: run.cpu_offloading_num_layers, _ONLY_COPIES),
    )
    """Save all that the first layers of each pipeline stage keep for backward in the memory of the host."""
    cpu_offloading_retain_pinned_cpu_buffers: bool = flag(False, kind="kernel", needs=_LAYERS)
    """Keep the host's memory for --cpu-offloading-num-layers between steps instead of giving it back."""

    def rules(self) -> Iterator[str]:
        parts = self.offload_modules if self.fine_grained_activation_offloading else []
        if self.fine_grained_activation_offloading and not parts:
            yield "--fine-grained-activation-offloading needs --offload-modules, for example core_attn attn_proj"
        if self.fine_grained_activation_offloading and self.cpu_offloading_num_layers:
            yield (
                f"{self.say('cpu_offloading_num_layers')} offloads whole layers, --fine-grained-activation-offloading "
                "parts of all; keep one"
            )
        most = count_most_layers(self)
        if most is not None and self.cpu_offloading_num_layers > most:
            yield f"{self.say('cpu_offloading_num_layers')} is not from 0 to {most}, the layers of a pipeline stage"
        recomputes_all = self.recompute_granularity == "full" and self.recompute_method == "uniform"
        if recomputes_all and self.cpu_offloading_num_layers:
            yield (
                f"{self.say('cpu_offloading_num_layers')} has nothing to offload where every layer is recomputed; use "
                "--fine-grained-activation-offloading --offload-modules attn_norm for the layers' inputs"
            )
        idle = [part for part in parts if part != "attn_norm"] if recomputes_all else []
        if idle:
            yield (
                f"--offload-modules {' '.join(idle)} lie inside of layers that --recompute-granularity full "
                "recomputes; attn_norm offloads their inputs"
            )
