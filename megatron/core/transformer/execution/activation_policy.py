# SPDX-License-Identifier: Apache-2.0
"""Policy for the activations of a stage's layers: which are saved for backward, and where; which are computed or
gathered again there.

| setting                      | kept until backward                                                             |
|------------------------------|---------------------------------------------------------------------------------|
| none                         | everything; under sequence parallelism of the inputs of column layers only its  |
|                              | local tokens (tensor_parallel/communication_plans.py)                           |
| full uniform n               | the input of every n-th layer                                                   |
| full block n                 | the inputs of the first n layers of a stage; of the others everything           |
| selective core_attn          | all but what attention keeps beside query, key and value: the probabilities,    |
|                              | unless a flash kernel does without them                                         |
| selective layernorm          | all but the outputs of the norms before attention and MLP                       |
| selective mlp                | all but what lies inside the MLP of layers without experts                      |
| selective mlp_act            | all but the input of the MLP's second product                                   |
| selective moe                | all but what lies between a layer's router and its experts' sum, shared ones    |
|                              | included                                                                        |
| selective moe_act            | all but the input of the experts' second product                                |
| selective shared_experts     | all but what lies inside the shared expert                                      |
| selective mla_up_proj        | all but queries, keys and values of latent attention; of these what a kernel or |
|                              | an exchange copies is kept                                                      |
| fp8_format                   | of the inputs of linear layers in FP8 their 8 bits and scales, where the weight |
|                              | gradient reads those and nobody keeps the input beside them                     |
| distribute_saved_activations | of the inputs that full recomputation keeps, this rank's part                   |
| offload_modules              | on the host what these parts keep and do not recompute                          |
| cpu_offloading_num_layers    | on the host all that the first layers of a stage keep                           |

They go together: what is recomputed is not kept; of the rest, what is offloaded waits on the host, in the dtype in
which it is kept (FP8 where a product keeps its input so); what it is recomputed from may be offloaded as well.

Where routing is repeated, it finds what it found before, and nothing is counted twice (`decide_once` in
tensor_parallel/random.py, `is_recomputing` in auxiliary_loss.py).

While backward is in a unit of full recomputation, all of that unit is there. The means: `checkpoint` in
tensor_parallel/random.py, `keep_as` in tensor_parallel/kept_activations.py, and `offload` in
tensor_parallel/offloaded_activations.py. Source: Korthikanti et al., 2022,
sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from megatron.core.tensor_parallel.offloaded_activations import OffloadChoice
from megatron.core.transformer.config_fields.offload import OffloadFields
from megatron.core.transformer.config_fields.recompute import RecomputeFields


class Unit(NamedTuple):
    """Consecutive layers of a stage, counted from 0 there."""

    layers: range
    is_recomputed: bool


def divide_layers(config: RecomputeFields, layers: int) -> list[Unit]:
    """The units that the layers of a pipeline stage, or of a chunk of it, are run in."""
    # One unit that is kept: the layers run one after the other as if there were no units.
    if config.recompute_granularity != "full":
        return [Unit(range(layers), False)]
    count = config.recompute_num_layers
    assert count is not None, "full recomputation needs recompute_num_layers"
    # The last unit may be shorter than the others.
    if config.recompute_method == "uniform":
        return [Unit(range(first, min(first + count, layers)), True) for first in range(0, layers, count)]
    assert config.recompute_method == "block", f"recompute_method {config.recompute_method} of full recomputation"
    first_layers = [Unit(range(index, index + 1), True) for index in range(min(count, layers))]
    return [*first_layers, Unit(range(len(first_layers), layers), False)]


class ActivationPolicy:
    """The decisions of a config, which Execution hands on when layers are built."""

    def __init__(self, config: OffloadFields) -> None:
        self.config = config
        self.offloads_parts = config.fine_grained_activation_offloading
        # Without a granularity the other fields say nothing.
        is_selective = config.recompute_granularity == "selective"
        self._parts = frozenset(config.recompute_modules or ["core_attn"]) if is_selective else frozenset()

    def recomputes(self, part: str, within: Collection[str] = ()) -> bool:
        """Return whether backward computes a part again. within: parts that it lies in: computed again themselves, they
        keep nothing that could be left out."""
        return part in self._parts and self._parts.isdisjoint(within)

    def keeps_rounded_input(self, layer: str) -> bool:
        """Return whether a linear layer that multiplies in 8 bits keeps its input in them. layer: its name in the
        transformer layer."""
        # What attention returns it keeps itself, unless it is computed again: another form would come on top.
        return layer != "self_attention.linear_proj" or self.recomputes("core_attn")

    def choose_offload(self, stage: int) -> OffloadChoice | None:
        """Return what a pipeline stage, from 0, moves to the host; None where nothing goes."""
        config = self.config
        if config.cpu_offloading_num_layers:
            return OffloadChoice(
                whole_layers=config.cpu_offloading_num_layers,
                keeps_buffers=config.cpu_offloading_retain_pinned_cpu_buffers,
            )
        if not config.fine_grained_activation_offloading:
            return None
        return OffloadChoice(
            frozenset(config.offload_modules),
            smallest_numel=config.min_offloaded_tensor_size,
            fraction=config.activation_offload_fraction,
            kept_bytes=stage * config.delta_offload_bytes_across_pp_ranks,
            most_groups_in_flight=config.fine_grained_offloading_max_inflight_offloads,
        )
