# SPDX-License-Identifier: Apache-2.0
"""Choice of the layers that are launched as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.config_base import flag
from megatron.core.setting import Needs, NeedsGPU
from megatron.core.transformer.config_fields.offload import OF_EXPERTS, OffloadFields

_GRAPHS = Needs("--cuda-graph-impl local", lambda run: run.cuda_graph_impl != "none")
_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
_UNSUPPORTED_MODULES = ("moe", "mamba")
# Modules of --offload-modules that lie inside of a part: what a graph keeps has a fixed address and never leaves it.
_OFFLOADED_BY = {
    "attn": ("attn_norm", "qkv_linear", "core_attn", "attn_proj"),
    "mlp": ("mlp_norm", "mlp_fc1", "mlp_act"),
    "moe_router": ("mlp_norm",),
}


@dataclass(kw_only=True)
class CudaGraphFields(OffloadFields):
    """Layers that are recorded once and launched as CUDA graphs; transformer/execution/cuda_graphs.py."""

    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = flag(
        "none",
        kind="kernel",
        unsupported_choices=("full_iteration",),
        gpu=NeedsGPU(
            lambda run: run.cuda_graph_impl != "none",
            "layers are launched one kernel at a time",
            {"cuda_graph_impl": "none"},
        ),
    )
    """Launch forward and backward of each layer as one CUDA graph: local, recorded by this system; transformer_engine,
    the same here, as a note says."""
    cuda_graph_modules: list[str] = flag(
        default_factory=list,
        nargs="+",
        choices=_MODULES,
        unsupported_choices=_UNSUPPORTED_MODULES,
        metavar="PART",
        kind="kernel",
        needs=_GRAPHS,
    )
    """Parts of each layer that become a graph: attn, attention with its norm and residual; mlp, the MLP with them in
    layers without experts; moe_router, the norm and the router before experts. moe_preprocess, what prepares their
    exchange, does not, as a note says. Whole layers when not given."""
    cuda_graph_scope_deprecated: list[str] | None = flag(
        None,
        names=("--cuda-graph-scope",),
        nargs="+",
        choices=("full", "full_iteration", *_MODULES),
        unsupported_choices=("full_iteration", *_UNSUPPORTED_MODULES),
        metavar="PART",
        kind="kernel",
        needs=_GRAPHS,
    )
    """Earlier name of --cuda-graph-modules; full stands for whole layers."""
    cuda_graph_warmup_steps: int = flag(3, minimum=0, unit="steps", kind="kernel", needs=_GRAPHS)
    """Training steps before layers are recorded; the first step is never recorded."""
    enable_cuda_graph: bool = flag(False, kind="kernel")
    """Earlier name of --cuda-graph-impl local."""
    external_cuda_graph: bool = flag(False, kind="kernel")
    """Earlier name of --cuda-graph-impl transformer_engine."""

    def derive(self) -> None:
        super().derive()
        if self.cuda_graph_impl == "none" and (self.enable_cuda_graph or self.external_cuda_graph):
            self.cuda_graph_impl = "local" if self.enable_cuda_graph else "transformer_engine"
        if self.cuda_graph_scope_deprecated and not self.cuda_graph_modules:
            # Whole layers are what no module at all stands for.
            self.cuda_graph_modules = [part for part in self.cuda_graph_scope_deprecated if part != "full"]

    def rules(self) -> Iterator[str]:
        if self.enable_cuda_graph and self.external_cuda_graph:
            yield "--enable-cuda-graph and --external-cuda-graph contradict each other; use --cuda-graph-impl"
        if self.cuda_graph_impl != "none":
            yield from self._layers_can_be_recorded()

    def records(self, part: str) -> bool:
        """Return whether attention (attn) or a dense MLP (mlp) is in a graph."""
        return self.cuda_graph_impl != "none" and (not self.cuda_graph_modules or part in self.cuda_graph_modules)

    def find_what_no_graph_repeats(self) -> str | None:
        """The setting, and why, with which layers are launched as ever because its numbers would be others in a graph;
        None where there is none. On a command line graphs are then left out with a note."""
        others: Any = self  # fields of other groups
        if others.few_bits_recipe is None:
            return None
        # Recorded, the rounding would be repeated in every micro-batch, or in none.
        given = "fp4" if others.fp4 is not None else "fp8"
        return f"{self.say(given)}, whose weights are rounded once in a step"

    def _layers_can_be_recorded(self) -> Iterator[str]:
        """Yield what a graph cannot do: it repeats its kernels, and nothing that the host did, or decided, between
        them."""
        asked, parts = self.say("cuda_graph_impl"), self.cuda_graph_modules
        others: Any = self
        if others.num_moe_experts is not None and not parts:
            yield (
                f"{asked} cannot record layers with experts as a whole: how many tokens an expert gets is only known "
                "while they run; add --cuda-graph-modules attn moe_router"
            )
        if parts and others.parallel_residual_shares_norm:
            yield (
                f"{asked} records parts of a layer with a norm each, and --parallel-residual-shares-norm has one for "
                "both; leave out --cuda-graph-modules"
            )
        if (what := self.find_what_no_graph_repeats()) is not None:
            yield f"{asked} cannot record layers of {what}; use --cuda-graph-impl none"
        if self.defers_weight_gradients or self.delays_weight_gradients or self.overlap_moe_expert_parallel_comm:
            yield (
                f"{asked} computes weight gradients with the others, which a schedule of deferred ones, or of two "
                "micro-batches side by side, takes apart; use --pipeline-schedule 1f1b or interleaved without "
                "--overlap-moe-expert-parallel-comm and --delay-wgrad-compute"
            )
        if self.cpu_offloading_num_layers:
            yield f"{self.say('cpu_offloading_num_layers')} cannot move what a CUDA graph keeps; leave out one of them"
        offloaded = self.offload_modules if self.fine_grained_activation_offloading else []
        kept = [part for name, inside in _OFFLOADED_BY.items() if self.records(name) for part in inside]
        idle = [part for part in offloaded if part in kept and part not in OF_EXPERTS]
        if idle:
            yield f"--offload-modules {' '.join(idle)}: {asked} cannot move what a CUDA graph keeps; leave them out"
        if self.tp_comm_overlap:
            yield f"{asked} cannot record --tp-comm-overlap; leave out one of them"
        yield from self._recomputation_can_be_recorded(asked)
        if self.records("attn"):
            yield from self._attention_can_be_recorded(asked)
        if "moe_router" in parts:
            yield from self._router_can_be_recorded()
        elif "moe_preprocess" in parts:
            yield "--cuda-graph-modules moe_preprocess belongs to moe_router; name both, or leave it out"

    def _recomputation_can_be_recorded(self, asked: str) -> Iterator[str]:
        others: Any = self
        if self.recompute_granularity == "full":
            if self.cuda_graph_modules:
                yield (
                    "--recompute-granularity full repeats whole layers, which --cuda-graph-modules "
                    f"{' '.join(self.cuda_graph_modules)} divides; leave out one of them"
                )
            elif self.recompute_method == "uniform" and (self.recompute_num_layers or 1) > 1:
                yield f"{asked} records layers one by one; use --recompute-num-layers 1"
            if self.distribute_saved_activations:
                yield f"{asked} cannot record --distribute-saved-activations; leave out one of them"
        # The random stream is set back on the host before a part is computed again; a replay only moves it on.
        draws_again = (
            others.attention_dropout > 0 and self.records("attn") and "core_attn" in (self.recompute_modules or ())
        )
        draws_again &= self.recompute_granularity == "selective"
        if draws_again or (
            self.recompute_granularity == "full" and max(others.hidden_dropout, others.attention_dropout) > 0
        ):
            yield (
                f"{asked} cannot draw the same dropout again for --recompute-granularity {self.recompute_granularity}; "
                "use --attention-dropout 0 --hidden-dropout 0, or leave out one of them"
            )

    def _attention_can_be_recorded(self, asked: str) -> Iterator[str]:
        others: Any = self
        if self.context_parallel_size > 1 or others.hybrid_context_parallel:
            yield (
                f"{asked} cannot record attention over {self.say('context_parallel_size')}; use "
                "--cuda-graph-modules mlp"
            )
        if others.attention_dropout > 0 and self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            yield (
                f"{asked} cannot switch between random streams inside of a layer, as {self.say('attention_dropout')} "
                "needs it on several tensor-parallel ranks; use --sequence-parallel or --attention-dropout 0"
            )
        bounded = others.attn_logit_softcapping is not None or others.softmax_type != "vanilla"
        if others.attention_dropout > 0 and bounded and others.attention_backend != "local":
            what = "softmax_type" if others.attn_logit_softcapping is None else "attn_logit_softcapping"
            yield (
                f"{asked} would repeat the same dropout in every step: the host draws its seed for {self.say(what)}; "
                "use --attention-dropout 0, --attention-backend local, or --cuda-graph-modules mlp"
            )
        if others.qk_clip or others.measures_attention_logits:
            yield f"{asked} cannot measure attention scores; leave out --qk-clip, or use --cuda-graph-modules mlp"

    def _router_can_be_recorded(self) -> Iterator[str]:
        others: Any = self
        asked = "--cuda-graph-modules moe_router"
        if others.num_moe_experts is None:
            yield f"{asked} needs --num-experts; leave it out for a dense model"
            return
        for name in ("moe_router_force_load_balancing", "moe_router_force_biased", "moe_input_jitter_eps"):
            if getattr(others, name):
                yield f"{asked} cannot draw from the experts' random stream, as {self.say(name)} does; leave out one"
        for kind in ("sinkhorn", "global_aux_loss"):
            if kind in others.moe_router_load_balancing_type:
                yield (
                    f"{asked} cannot record --moe-router-load-balancing-type {kind}, in which the host takes part; "
                    "leave out one of them"
                )
        if self.recompute_granularity == "selective" and "moe" in (self.recompute_modules or ()):
            yield f"{asked} cannot record a router that --recompute-modules moe repeats in backward; leave out one"
