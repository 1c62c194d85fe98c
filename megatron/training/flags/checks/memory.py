"""Recomputation of activations, and offloading."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.flags.settings import Settings


def recomputation_is_complete(s: Settings) -> Iterator[str]:
    kind, method, layers = s.recompute_granularity, s.recompute_method, s.recompute_num_layers
    if kind == "full":
        if method is None:
            yield "--recompute-granularity full needs --recompute-method uniform or block"
        if layers is None:
            yield "--recompute-granularity full needs --recompute-num-layers"
        layers_per_stage = max(1, (s.num_layers or 0) // s.pipeline_model_parallel_size)
        if layers is not None and s.num_layers and not 1 <= layers <= layers_per_stage:
            yield f"{s.say('recompute_num_layers')} is not from 1 to {layers_per_stage}, the layers of a pipeline stage"
    if kind == "selective":
        for dest in ("recompute_method", "recompute_num_layers"):
            if getattr(s, dest) is not None:
                yield f"{s.say(dest)} belongs to --recompute-granularity full; leave it out with selective"
        if s.compile:
            yield (
                "--recompute-granularity selective cannot be combined with --compile, which plans that itself; "
                "use --recompute-granularity full, or leave one out"
            )
    if s.recompute_activations and kind == "full":
        yield "--recompute-activations means --recompute-granularity selective, which contradicts full; keep one"


def saved_activations_can_be_distributed(s: Settings) -> Iterator[str]:
    if not s.distribute_saved_activations:
        return
    if s.tensor_model_parallel_size == 1 or s.recompute_granularity != "full":
        yield "--distribute-saved-activations needs a tensor-parallel size above 1 and --recompute-granularity full"
    if s.sequence_parallel:
        yield "--distribute-saved-activations has nothing to do with --sequence-parallel; keep one"


def offloading_has_its_optimizer(s: Settings) -> Iterator[str]:
    if s.optimizer_cpu_offload and not s.use_precision_aware_optimizer:
        yield "--optimizer-cpu-offload needs --use-precision-aware-optimizer"


CHECKS = (recomputation_is_complete, saved_activations_can_be_distributed, offloading_has_its_optimizer)
