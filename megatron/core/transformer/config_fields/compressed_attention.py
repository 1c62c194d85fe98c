# SPDX-License-Identifier: Apache-2.0
"""Compressed attention: a sliding window, and entries of compressed windows of tokens before it (DeepSeek-V4, 2026)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import flag, name_multiples
from megatron.core.flag_texts import layer_pattern, whole_or_decimal
from megatron.core.plan.compressed_kinds import COMPRESSED_KINDS
from megatron.core.plan.read import HEAVY_RATIO, SPARSE_RATIO, read_plan
from megatron.core.setting import Needs
from megatron.core.transformer.config_fields.sparse_attention import SparseAttentionFields

_LETTERS = frozenset(kind.letter for kind in COMPRESSED_KINDS)
_VARIANT = Needs(
    "--experimental-attention-variant dsv4_hybrid", lambda run: run.experimental_attention_variant == "dsv4_hybrid"
)
_COMPRESSED = Needs(
    "--experimental-attention-variant dsv4_hybrid, or the letter C, H or W in --hybrid-layer-pattern",
    lambda run: _VARIANT.met(run) or bool(_LETTERS & set(run.hybrid_layer_pattern or "")),
)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class CompressedAttentionFields(SparseAttentionFields):
    """The window, the ratios of layers, and the grouped projection of the output. A head has --v-head-dim channels, of
    which the last --qk-pos-emb-head-dim are rotated; --qk-head-dim and --kv-lora-rank follow."""

    csa_window_size: int = flag(128, minimum=1, unit="tokens", kind="function", needs=_COMPRESSED)
    """Tokens that a token sees as they are, itself among them."""
    csa_compress_ratios: int | list[int] | None = flag(None, parse=layer_pattern, kind="shape", needs=_VARIANT)
    """One entry per layer such as [0,0,4]+[128,4]*20: 0 for only a window; 4 for entries of so many tokens, of which an
    indexer chooses some; another number, 128 in DeepSeek-V4, for entries of which all are seen. Behind them one for
    each layer of multi-token prediction."""
    csa_compress_rotary_base: int = flag(40000, minimum=1, parse=whole_or_decimal, kind="function", needs=_COMPRESSED)
    """Base of rotary frequencies in layers with entries, which YaRN stretches; --rotary-base is for the others. 160000
    in the published DeepSeek-V4."""
    csa_dense_mode: bool = flag(False, kind="shape", needs=_COMPRESSED)
    """Layers of ratio 4 have no indexer and see all entries."""
    o_groups: int = flag(8, minimum=1, maximum=65536, kind="shape", needs=_COMPRESSED)
    """Groups of neighbouring heads, each with a separate projection to --o-lora-rank channels."""
    o_lora_rank: int = flag(1024, minimum=1, maximum=2**24, kind="shape", needs=_COMPRESSED)
    """Channels of a group's output, from all of which the layer's output is made."""

    @property
    def is_compressed(self) -> bool:
        """True if layers have compressed attention."""
        return any(kind.letter in (self.hybrid_layer_pattern or "") for kind in COMPRESSED_KINDS) or (
            self.experimental_attention_variant == "dsv4_hybrid"
        )

    def derive(self) -> None:
        if self.is_compressed and isinstance(self.v_head_dim, int) and isinstance(self.qk_pos_emb_head_dim, int):
            # A key is a value, too: one width, of which a part is rotated.
            self.kv_lora_rank = self.qk_head_dim = max(1, self.v_head_dim - self.qk_pos_emb_head_dim)
        super().derive()

    def rules(self) -> Iterator[str]:
        if self.experimental_attention_variant == "dsv4_hybrid":
            yield from self._ratio_problems()
        if self.is_compressed:
            yield from self._compressed_size_problems()
            yield from self._compressed_attention_stands_alone()

    def _ratio_problems(self) -> Iterator[str]:
        asked, ratios = "--experimental-attention-variant dsv4_hybrid", self.csa_compress_ratios
        if self.hybrid_layer_pattern is not None and not _LETTERS & set(self.hybrid_layer_pattern):
            yield f"{asked} contradicts {self.say('hybrid_layer_pattern')}: write C, H or W for its layers"
        if self.hybrid_layer_pattern is not None and ratios is not None:
            yield "--csa-compress-ratios and the letters of --hybrid-layer-pattern both say ratios; leave the list out"
        if self.linear_attention_freq is not None:
            yield f"{asked} is for all layers, and {self.say('linear_attention_freq')} asks for others; leave one out"
        if self.mamba_beside_attention:
            yield f"{asked} and --mamba-beside-attention both say what attention is; leave one out"
        if self.hybrid_layer_pattern is not None:
            return
        if not self.multi_latent_attention:
            yield f"{asked} makes queries of latent vectors; add --multi-latent-attention"
        if not isinstance(ratios, list):
            yield (
                f"{asked} has kinds of layers; give --csa-compress-ratios one of 0, {SPARSE_RATIO} and {HEAVY_RATIO} "
                "for each, such as [0,0,4]+[128,4]*20"
            )
            return
        depths = 1 if self.mtp_num_layers and self.mtp_use_repeated_layer else self.mtp_num_layers or 0
        if self.num_layers and len(ratios) < self.num_layers + depths:
            further = f" and {self.say('mtp_num_layers')}" if depths else ""
            yield (
                f"--csa-compress-ratios has {len(ratios)} entries, and {self.say('num_layers')}{further}; give one per "
                "layer"
            )
        odd = next((ratio for ratio in ratios if ratio and ratio < SPARSE_RATIO), None)
        if odd is not None:
            yield f"--csa-compress-ratios has the entry {odd}; use 0, {SPARSE_RATIO} or more, such as {HEAVY_RATIO}"

    def _compressed_size_problems(self) -> Iterator[str]:
        if self.q_lora_rank is None:
            yield "compressed attention makes queries of latent vectors; give --q-lora-rank"
        if self.v_head_dim <= self.qk_pos_emb_head_dim:
            yield (
                f"{self.say('v_head_dim')}, all channels of a head, is not above {self.say('qk_pos_emb_head_dim')}, "
                f"those that are rotated; use {self.qk_pos_emb_head_dim + 1} or more"
            )
        heads, ranks = self.num_attention_heads, self.tensor_model_parallel_size
        if heads and heads % self.o_groups:
            yield f"{self.say('o_groups')} does not divide {self.say('num_attention_heads')}; use a divisor"
        if self.o_groups % ranks:
            yield (
                f"{self.say('o_groups')} cannot be divided over {self.say('tensor_model_parallel_size')}; use "
                f"{name_multiples(self.o_groups, ranks)}"
            )
        if any(read_plan(self).branches("compressed_sparse")) and not self.csa_dense_mode:
            yield from self.indexer_size_problems("compressed attention of ratio 4")

    def _compressed_attention_stands_alone(self) -> Iterator[str]:
        """Yield settings of attention that compressed attention does not have."""
        for is_asked, what, remedy in (
            (self.add_bias_linear, "biases of linear layers", "add --disable-bias-linear"),
            (self.attention_dropout > 0, self.say("attention_dropout"), "use --attention-dropout 0"),
            (self.window_size is not None, self.say("window_size"), "use --csa-window-size"),
            (self.attention_chunk_size is not None, self.say("attention_chunk_size"), "leave it out"),
            (self.softmax_type != "vanilla", self.say("softmax_type"), "leave it out: each head has a sink"),
            (self.attn_logit_softcapping is not None, self.say("attn_logit_softcapping"), "leave it out"),
            (self.qk_layernorm, "--qk-layernorm", "leave it out: latent vectors and keys are always normalised"),
            (self.no_rope_freq is not None, self.say("no_rope_freq"), "leave it out"),
            (self.attn_temperature_scale is not None, self.say("attn_temperature_scale"), "leave it out"),
            (self.longrope_short_factors is not None, "--longrope-short-factors", "leave it out"),
            (self.rotary_base_local is not None, self.say("rotary_base_local"),
             "use --rotary-base and --csa-compress-rotary-base"),
            (self.mscale_all_dim != 0, self.say("mscale_all_dim"), "leave it out: scores have no factor"),
            (self.hybrid_context_parallel, "--hybrid-context-parallel", "use --context-parallel-size"),
            (self.cuda_graph_impl != "none", self.say("cuda_graph_impl"), "leave it out"),
        ):  # fmt: skip
            if is_asked:
                yield f"compressed attention (DeepSeek-V4) has no {what}; {remedy}"
