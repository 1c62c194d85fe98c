# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: latent attention to the keys that an indexer chooses (DeepSeek-V3.2, 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import flag
from megatron.core.plan.read import read_plan
from megatron.core.plan.stages import build_pipeline_layout, build_virtual_stages
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.cuda_graphs import CudaGraphFields
from megatron.core.transformer.config_fields.latent_attention import LatentAttentionFields
from megatron.core.transformer.config_fields.pipeline import PipelineFields
from megatron.core.transformer.config_fields.state_mixers import StateMixerFields

_SPARSE = Needs(
    "--experimental-attention-variant dsa or the letter D in --hybrid-layer-pattern",
    lambda run: run.experimental_attention_variant == "dsa" or "D" in (run.hybrid_layer_pattern or ""),
)
# Compressed attention chooses among entries as sparse attention does among tokens.
INDEXED = Needs(
    "--experimental-attention-variant dsa or dsv4_hybrid, or the letter D or C in --hybrid-layer-pattern",
    lambda run: (
        run.experimental_attention_variant in ("dsa", "dsv4_hybrid")
        or bool({"D", "C"} & set(run.hybrid_layer_pattern or ""))
    ),
)
_LOSS = Needs("--dsa-indexer-loss-coeff", lambda run: bool(run.dsa_indexer_loss_coeff))
_SHARED = Needs("--dsa-indexer-topk-freq above 1", lambda run: run.dsa_indexer_topk_freq > 1)
_16_BITS = Needs("--bf16 or --fp16; in float32 it would change nothing", lambda run: run.bf16 or run.fp16)
_GATHERING = 2.0
"""Time per number that is gathered and multiplied, relative to one in a large product; measured on a CPU."""
_SIZES = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class SparseAttentionFields(CudaGraphFields, PipelineFields, StateMixerFields, LatentAttentionFields):
    """The indexer, its loss, and the layers that have one."""

    dsa_indexer_n_heads: int | None = flag(None, minimum=1, maximum=65536, kind="shape", needs=INDEXED)
    """Heads of the indexer, which scores for each token the ones before it; there is no default."""
    dsa_indexer_head_dim: int | None = flag(None, minimum=1, maximum=65536, kind="shape", needs=INDEXED)
    """Channels of a head of the indexer, of which the first --qk-pos-emb-head-dim are rotated; there is no default."""
    dsa_indexer_topk: int | None = flag(None, minimum=1, unit="tokens", kind="function", needs=INDEXED)
    """Tokens that attention of a token sees, those with the highest scores; there is no default. With as many as a
    sequence has attention is the usual one."""
    dsa_indexer_topk_freq: int = flag(1, minimum=1, unit="layers", kind="shape", needs=_SPARSE)
    """Every so many layers have an indexer; those behind one take its choice. Each pipeline stage begins with one."""
    dsa_indexer_skip_topk_offset: int = flag(0, minimum=0, kind="shape", needs=(_SPARSE, _SHARED))
    """The first layers, so many, have an indexer each, and the counting begins with the last of them."""
    dsa_indexer_loss_coeff: float | None = flag(None, minimum=0, kind="numerics", needs=INDEXED)
    """Weight of the indexer's loss, the distance of its scores from where attention looks. Nothing else trains it: it
    stays as it is when this is not given."""
    dsa_indexer_use_sparse_loss: bool = flag(False, kind="numerics", needs=(INDEXED, _LOSS))
    """The indexer's loss compares the chosen tokens alone, not all of the sequence: less work, for an indexer that has
    learned already."""
    dsa_kernel_backend: str = flag("none", choices=("none", "tilelang", "cudnn"), kind="kernel", needs=_SPARSE)
    """Kernels of upstream for sparse attention. All of them compute one function, which is computed here as with none;
    a note says so."""
    dsa_indexer_rope_interleaved: bool = flag(False, kind="function", needs=_SPARSE)
    """The indexer rotates neighbouring channels (GLM-5), instead of the two halves (DeepSeek-V3.2)."""
    dsa_indexer_rotate_activation: bool = flag(
        True, kind="numerics", needs=(INDEXED, _16_BITS),
        off_names=("--no-dsa-indexer-rotate-activation", "--disable-dsa-indexer-rotate-activation"),
    )  # fmt: skip
    """Queries and keys of the indexer are multiplied by a Hadamard matrix, which spreads large channels before they
    are rounded and leaves their products alone."""
    dsa_indexer_scoring_relu: bool = flag(
        True, kind="function", needs=INDEXED,
        off_names=("--no-dsa-indexer-scoring-relu", "--disable-dsa-indexer-scoring-relu"),
    )  # fmt: skip
    """Of the products of the indexer's heads only the positive ones add to a score."""
    dsa_indexer_k_norm_epsilon: float | None = flag(None, above=0, kind="function", needs=_SPARSE)
    """Added to the variance in the norm of the indexer's keys; --norm-epsilon when not given."""
    dsa_indexer_k_norm_fp32: bool = flag(False, kind="numerics", needs=(_SPARSE, _16_BITS))
    """The indexer's keys are rounded behind their norm only, which reads the product in float32."""

    @property
    def indexer_sizes(self) -> tuple[int, int, int]:
        """Heads of the indexer, their channels, and keys that a query chooses."""
        heads, width, keys = self.dsa_indexer_n_heads, self.dsa_indexer_head_dim, self.dsa_indexer_topk
        assert heads is not None and width is not None and keys is not None, "checked by problems()"
        return heads, width, keys

    def gathers_chosen_keys(self, keys: float) -> bool:
        """Return whether attention to chosen ones of so many keys gathers latent vectors: it takes less time then than
        heads of all keys of which those not chosen are hidden. The same in every layout."""
        hidden = (self.qk_head_dim + self.qk_pos_emb_head_dim + self.v_head_dim) * keys / 2
        gathered = 2 * (self.kv_lora_rank + self.qk_pos_emb_head_dim) * self.indexer_sizes[2]
        return _GATHERING * gathered < hidden

    def rules(self) -> Iterator[str]:
        if self.experimental_attention_variant == "dsa":
            yield from self._variant_problems()
        if any(read_plan(self).branches("sparse_attention")):
            yield from self.indexer_size_problems("sparse attention")
            yield from self._others_have_no_choice()
            yield from self._choices_stay_on_their_stage()

    def _variant_problems(self) -> Iterator[str]:
        asked = "--experimental-attention-variant dsa"
        if self.hybrid_layer_pattern is not None and "D" not in self.hybrid_layer_pattern:
            yield f"{asked} contradicts {self.say('hybrid_layer_pattern')}: write D for its layers, or leave one out"
        elif not self.multi_latent_attention:
            yield f"{asked} chooses among latent vectors; add --multi-latent-attention"
        if self.linear_attention_freq is not None:
            yield f"{asked} is for all layers, and {self.say('linear_attention_freq')} asks for others; leave one out"
        if self.mamba_beside_attention:
            yield f"{asked} and --mamba-beside-attention both say what attention is; leave one out"

    def indexer_size_problems(self, what: str) -> Iterator[str]:
        """Yield what is wrong with the sizes of an indexer. what: the kind of attention that has one."""
        missing = [self.flag(name) for name in _SIZES if getattr(self, name) is None]
        if missing:
            yield f"{what} has no sizes of its own; give {', '.join(missing)}"
        width = self.dsa_indexer_head_dim
        if width is not None and width < self.qk_pos_emb_head_dim:
            yield (
                f"{self.say('dsa_indexer_head_dim')} is below {self.say('qk_pos_emb_head_dim')}, the channels that are "
                f"rotated; use {self.qk_pos_emb_head_dim} or more"
            )
        if (
            width is not None
            and width & (width - 1)
            and self.dsa_indexer_rotate_activation
            and (self.bf16 or self.fp16)
        ):
            yield (
                f"{self.say('dsa_indexer_head_dim')} is no power of two, and there is no Hadamard matrix of its size; "
                "add --no-dsa-indexer-rotate-activation"
            )

    def _others_have_no_choice(self) -> Iterator[str]:
        """Yield settings of attention that sparse attention does not have."""
        is_shared = self.context_parallel_size > 1
        for is_asked, what, remedy in (
            (self.add_bias_linear, "biases of linear layers", "add --disable-bias-linear"),
            (self.window_size is not None, self.say("window_size"), "leave it out"),
            (self.attention_chunk_size is not None, self.say("attention_chunk_size"), "leave it out"),
            (self.softmax_type != "vanilla", self.say("softmax_type"), "leave it out"),
            (self.attn_logit_softcapping is not None, self.say("attn_logit_softcapping"), "leave it out"),
            (self.hybrid_context_parallel, "--hybrid-context-parallel", "use --context-parallel-size"),
            (is_shared and set(self.cp_comm_type or ["p2p"]) != {"all_gather"},
             f"--cp-comm-type {' '.join(self.cp_comm_type or ['p2p'])}", "use --cp-comm-type all_gather"),
            (self.cuda_graph_impl != "none", self.say("cuda_graph_impl"), "leave it out"),
        ):  # fmt: skip
            if is_asked:
                yield f"sparse attention has no {what}; {remedy}"

    def _choices_stay_on_their_stage(self) -> Iterator[str]:
        """Each stage has the layers whose choices its layers take, and these are layers of sparse attention."""
        layers = read_plan(self).decoder
        taking = [layer for layer in layers if layer.has("sparse_attention") and layer.options.chooser is not None]
        shape = build_virtual_stages(self)
        dealt = not any(self.division_problems(shape.stages, shape.chunks))
        stages = build_pipeline_layout(self, shape) if taking and dealt else []
        for layer in taking:
            chooser = layer.options.chooser or 0
            place = f"layer {layer.number} takes the choice of layer {chooser} ({self.say('dsa_indexer_topk_freq')})"
            if not layers[chooser - 1].has("sparse_attention"):
                yield f"{place}, which is no sparse attention; change the pattern, or leave the flag out"
            first = next((stage.layers.start for stage in stages if layer.number - 1 in stage.layers), 0)
            if chooser <= first:
                yield f"{place}, which is on another pipeline stage; let each stage begin with a layer that chooses"
