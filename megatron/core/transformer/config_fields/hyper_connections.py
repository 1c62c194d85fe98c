# SPDX-License-Identifier: Apache-2.0
"""Settings of hyper-connections: several residual streams, which every branch mixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.cuda_graphs import CudaGraphFields
from megatron.core.transformer.config_fields.pipeline import PipelineFields

_MEAN = Needs("--enable-mhc-connections", lambda run: run.enable_mhc_connections)
_LEARNED = Needs("--enable-hyper-connections", lambda run: run.enable_hyper_connections)
_EITHER = Needs(
    "--enable-hyper-connections or --enable-mhc-connections",
    lambda run: run.enable_hyper_connections or run.enable_mhc_connections,
)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class HyperConnectionFields(CudaGraphFields, PipelineFields):
    """The streams, their number, and the projection of the matrices that mix them."""

    enable_hyper_connections: bool = flag(False, kind="shape")
    """Several residual streams: each branch reads a sum of them and mixes them again, with weights that depend on the
    token. As DeepSeek-V4 has it: the last layer is followed by a sum that is learned, too."""
    num_residual_streams: int = flag(4, minimum=1, maximum=64, kind="shape", needs=_LEARNED)
    """Residual streams of --enable-hyper-connections."""
    enable_mhc_connections: bool = flag(False, kind="shape")
    """Several residual streams as upstream's main branch has them: the model ends with their mean. The mixing matrices
    of the two forms are each other's transposes; weights of one are another model in the other."""
    mhc_num_residual_streams: int = flag(4, minimum=1, maximum=64, kind="shape", needs=_MEAN)
    """Residual streams of --enable-mhc-connections."""
    mhc_sinkhorn_iterations: int = flag(20, minimum=1, maximum=1000, kind="function", needs=_EITHER)
    """Rounds in which rows and columns of a mixing matrix are divided by their sums."""
    mhc_init_gating_factor: float = flag(0.01, minimum=0, kind="numerics", needs=_EITHER)
    """Initial factor on what the weights of streams depend on the token for."""

    mhc_recompute_layer_num: int | None = flag(None, minimum=1, unit="layers", kind="kernel", needs=_EITHER)
    """Of the streams of so many layers those before the first one are kept, and backward mixes the others again. Not
    given: the streams before every branch are kept."""

    @property
    def num_streams(self) -> int | None:
        """Residual streams of hyper-connections; None without."""
        if self.enable_hyper_connections:
            return self.num_residual_streams
        return self.mhc_num_residual_streams if self.enable_mhc_connections else None

    @property
    def stream_width(self) -> int:
        """Channels of what layers and pipeline stages pass on: the hidden states of all streams, side by side."""
        return self.hidden_size * (self.num_streams or 1)

    def rules(self) -> Iterator[str]:
        if self.enable_hyper_connections and self.enable_mhc_connections:
            yield "--enable-hyper-connections and --enable-mhc-connections are two forms of one thing; keep one"
        if self.num_streams is None:
            return
        asked = "--enable-hyper-connections" if self.enable_hyper_connections else "--enable-mhc-connections"
        for is_asked, what, remedy in (
            (self.parallel_residual, "--parallel-residual, whose branches read and write one stream", "leave it out"),
            (self.apply_residual_connection_post_layernorm, "--apply-residual-connection-post-layernorm",
             "leave it out"),
            (self.mtp_num_layers is not None and self.enable_mhc_connections, self.say("mtp_num_layers"),
             "leave it out, or take --enable-hyper-connections, whose depths go on from the streams"),
            (self.predicts_apart, f"{self.say('pipeline_model_parallel_layout')}, whose m lies before the stage of the "
             "loss", "write m and L in one stage"),
            (self.cuda_graph_impl != "none", self.say("cuda_graph_impl"), "leave it out"),
        ):  # fmt: skip
            if is_asked:
                yield f"{asked} does not work with {what}; {remedy}"
        if self.mhc_recompute_layer_num is not None:
            yield from self._streams_can_be_left_out()

    def _streams_can_be_left_out(self) -> Iterator[str]:
        if self.recompute_granularity == "full":
            yield (
                f"{self.say('mhc_recompute_layer_num')} mixes again what --recompute-granularity full leaves out with "
                "whole layers; leave one of them out"
            )
        if self.cpu_offloading_num_layers:
            yield (
                f"{self.say('mhc_recompute_layer_num')} needs on the device what "
                f"{self.say('cpu_offloading_num_layers')} takes to the host; leave one of them out"
            )
