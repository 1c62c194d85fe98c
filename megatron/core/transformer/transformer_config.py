# SPDX-License-Identifier: Apache-2.0
"""TransformerConfig: everything the layers of a transformer need to know, flat for users, grouped by concern inside."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import derived, flag, get_settings, name_multiples, restore
from megatron.core.errors import ConfigError
from megatron.core.plan.patterns import pattern_problems
from megatron.core.plan.read import block_problems, letter_problems, read_plan
from megatron.core.plan.stages import build_pipeline_layout, build_virtual_stages
from megatron.core.transformer.config_fields.adapters import AdapterFields
from megatron.core.transformer.config_fields.attention import AttentionFields
from megatron.core.transformer.config_fields.compressed_attention import CompressedAttentionFields
from megatron.core.transformer.config_fields.cuda_graphs import CudaGraphFields
from megatron.core.transformer.config_fields.hyper_connections import HyperConnectionFields
from megatron.core.transformer.config_fields.initialization import InitializationFields
from megatron.core.transformer.config_fields.latent_attention import LatentAttentionFields
from megatron.core.transformer.config_fields.moe import MoEFields
from megatron.core.transformer.config_fields.mup import MuPFields
from megatron.core.transformer.config_fields.offload import OF_EXPERTS
from megatron.core.transformer.config_fields.pipeline import PipelineFields
from megatron.core.transformer.config_fields.positions import compute_yarn_magnitude
from megatron.core.transformer.config_fields.precision import (
    ATTENTION_LAYERS,
    LAST_BLOCK,
    LINEAR_LAYERS,
    MULTIPLES,
    PrecisionFields,
)
from megatron.core.transformer.config_fields.program_fields import ProgramFields
from megatron.core.transformer.config_fields.sparse_attention import SparseAttentionFields
from megatron.core.transformer.config_fields.state_mixers import StateMixerFields


@dataclass(kw_only=True)
class TransformerConfig(
    AdapterFields,
    HyperConnectionFields,
    CompressedAttentionFields,
    SparseAttentionFields,
    CudaGraphFields,
    PipelineFields,
    MoEFields,
    MuPFields,
    InitializationFields,
    PrecisionFields,
    StateMixerFields,
    LatentAttentionFields,
    ProgramFields,
    AttentionFields,
):
    """Shape, dtypes and kernels of a transformer.

    Fields left None that have a derived value (ffn_hidden_size, kv_channels, num_query_groups) are filled in on
    construction. Raises ConfigError with every problem: values out of range, and fields that contradict each other.
    """

    compile: bool = flag(False, names=("--compile", "--use-transformer-engine-op-fuser"), kind="kernel")
    """Compile what lies between a layer's matrix products (norms, activation, rotary positions, residual, router) with
    torch.compile: slower start, faster steps. The second name is upstream's for the fused operations of Transformer
    Engine."""

    def has_kind(self, kind: str) -> bool:
        """Return True if a layer has a branch of this kind (plan/kinds.py)."""
        plan = read_plan(self)
        # Without --num-layers, which is complained about, no rule is to be silent.
        return not plan.decoder or any(plan.branches(kind))

    def with_query_groups(self, groups: int | None) -> TransformerConfig:
        """The config of a layer with so many key-value heads: this one where that is None, else a copy of it."""
        if groups in (None, self.num_query_groups):
            return self
        of_layer = copy.copy(self)
        of_layer.num_query_groups = groups
        return of_layer

    @property
    def has_windows(self) -> bool:
        """True where a layer has a sliding window."""
        return any(branch.options.window is not None for branch in read_plan(self).branches())

    @property
    def embedding_scale(self) -> float:
        """Factor on the output of the embedding."""
        return self.embedding_multiplier * (self.mup_embedding_mult if self.use_mup else 1.0)

    @property
    def query_width(self) -> int:
        """Channels of a query and of a key head."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        assert self.kv_channels is not None
        return self.kv_channels

    @property
    def value_width(self) -> int:
        """Channels of a value head."""
        return self.v_head_dim if self.multi_latent_attention else self.query_width

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores: softmax_scale, muP's, or 1 / sqrt(width of a head), times key_multiplier."""
        if self.softmax_scale is not None:
            return self.softmax_scale * self.key_multiplier
        # muP divides by the width, not by its root: trained queries and keys are no longer independent of each other.
        scale = self.mup_attention_scale(self.query_width) if self.use_mup else self.query_width**-0.5
        scale *= self.key_multiplier
        if not self.multi_latent_attention:
            return scale
        # Only a part of a head is rotated here: YaRN's factor goes to the scores (DeepSeek-V2, section 3.1.4).
        return scale * compute_yarn_magnitude(self.rotary_scaling_factor, self.mscale_all_dim) ** 2

    @property
    def rotary_width(self) -> int:
        """Channels of a query or key head that rotary positions concern; of them --rotary-percent are rotated. A kind
        of attention that rotates a separate part of a head overrides it in its config."""
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else self.query_width

    @property
    def rotates_neighbours(self) -> bool:
        """True if rotary positions turn neighbouring channels instead of the two halves of a head."""
        return self.rotary_interleaved or self.multi_latent_attention

    def choose_rotary_base(self, base: float, percent: float) -> tuple[float, float]:
        """Return the base of rotary frequencies and the share of rotated channels, given those that a model was built
        with."""
        return base, percent

    @property
    def logit_scale(self) -> float:
        """Factor on the logits."""
        return self.logit_multiplier * (self.mup_output_mult / self.width_multiplier if self.use_mup else 1.0)

    def problems(self) -> Iterator[str]:
        if self.hybrid_layer_pattern is not None:
            # All rules that ask what a layer is read the letters.
            try:
                yield from letter_problems(self)
            except ConfigError as error:
                yield from error.problems
                return
        if self.heterogeneous_layers_config_encoded_json is not None:
            try:
                yield from block_problems(self)
            except ConfigError as error:
                yield from error.problems
                return
        yield from super().problems()
        # Here and not in one group of fields: the patterns read windows, positions and experts together.
        yield from pattern_problems(self)
        yield from self._inner_widths_divide_over_ranks()
        yield from self._widths_fit_fp8()
        yield from self._mlp_may_be_divided()
        yield from self._tables_see_tokens()
        yield from self.kernel_problems()
        yield from self._chosen_parts_exist()
        if self.few_bits_recipe is not None:
            yield from self._patterns_name_layers()
        if self.overlap_moe_expert_parallel_comm:
            yield from self._exchanges_can_be_hidden()
        elif self.overlap_dispatch_backward_with_experts_wgrad:
            yield from self.token_exchange_problems("--overlap-dispatch-backward-with-experts-wgrad")

    def _chosen_parts_exist(self) -> Iterator[str]:
        """What is recomputed or offloaded is in a layer of this model."""
        recomputed, offloads = self.recompute_modules or (), self.fine_grained_activation_offloading
        selective, is_dense = self.recompute_granularity == "selective", self.num_moe_experts is None
        for part in ("moe", "moe_act", "shared_experts") if selective else ():
            if part in recomputed and is_dense and not self.moe_layer_recompute:
                yield f"--recompute-modules {part} needs --num-experts; leave it out for a dense model"
        has_shared = self.moe_shared_expert_intermediate_size is not None
        if selective and "shared_experts" in recomputed and not is_dense and not has_shared:
            yield "--recompute-modules shared_experts needs --moe-shared-expert-intermediate-size"
        if "mla_up_proj" in recomputed and not self.multi_latent_attention:
            yield "--recompute-modules mla_up_proj needs --multi-latent-attention, which has that projection"
        kinds = {branch.kind for branch in read_plan(self).branches()}
        if "gdn_norm_out" in recomputed and not kinds & {"gated_delta_net", "gated_delta_net_2"}:
            yield (
                "--recompute-modules gdn_norm_out needs a gated delta net, the letter G or --linear-attention-freq; "
                "leave it out"
            )
        for part in OF_EXPERTS:
            if offloads and part in self.offload_modules and is_dense:
                yield f"--offload-modules {part} needs --num-experts; a dense MLP has mlp_fc1 and mlp_act"

    def _patterns_name_layers(self) -> Iterator[str]:
        """A pattern of --fp8-bf16-layers that no name can match is a mistake."""
        # Names of the plan, because a command line is checked before any model exists.
        plan = read_plan(self)
        names = [f"{layer.name}.{name}" for layer in plan.layers for name in LINEAR_LAYERS]
        inputs = ("eh_proj",) if self.num_streams is None else ("e_proj", "h_proj")
        depths = [layer.name.rpartition(".")[0] for layer in plan.prediction]
        names += ["output_layer", *(f"{depth}.{name}" for depth in depths for name in inputs)]
        for pattern in (plan.decoder and self.fp8_bf16_layers) or ():
            if not fnmatch.filter(names, pattern):
                yield (
                    f"--fp8-bf16-layers {pattern} matches no linear layer; names are such as {names[0]} and "
                    f"{names[len(ATTENTION_LAYERS) + 1]}, and * stands for any part of one"
                )

    def _inner_widths_divide_over_ranks(self) -> Iterator[str]:
        """Ranks that share an MLP, an expert or the shared expert have equal parts of its inner width."""
        shared = [
            ("moe_shared_expert_intermediate_size", "tensor_model_parallel_size"),
            ("moe_ffn_hidden_size", "expert_tensor_parallel_size"),
        ]
        widths = shared if self.num_moe_experts is not None else []
        if self.has_kind("mlp"):
            widths.insert(0, ("ffn_hidden_size", "tensor_model_parallel_size"))
        for width_name, ranks_name in widths:
            width, ranks = getattr(self, width_name), getattr(self, ranks_name) or 1
            if width and width % ranks:
                yield (
                    f"{self.say(width_name)} cannot be split over {self.say(ranks_name)}; "
                    f"use {name_multiples(width, ranks)}"
                )

    def _mlp_may_be_divided(self) -> Iterator[str]:
        """Stretches of tokens give the numbers, and spare the memory, that they are meant to."""
        if self.mlp_chunks_for_training == 1:
            return
        asked = self.say("mlp_chunks_for_training")
        selective = self.recompute_granularity == "selective"
        if not self.has_kind("mlp"):
            yield f"{asked} has nothing to divide, all layers have experts; leave it out"
        if self.few_bits_recipe is not None:
            yield f"{asked} would give each stretch of tokens scales of its own in FP8 and FP4; leave it out"
        if self.tp_comm_overlap:
            yield f"{asked} and --tp-comm-overlap both divide the tokens of a product; keep one of them"
        if selective and "layernorm" in (self.recompute_modules or ()):
            yield f"{asked} does not work with --recompute-modules layernorm, for all tokens at once; keep one of them"

    def _tables_see_tokens(self) -> Iterator[str]:
        """Layers whose experts a table chooses lie on the stage that reads the tokens."""
        count, shape = self.moe_n_hash_layers if self.num_moe_experts else 0, build_virtual_stages(self)
        if not count or any(self.division_problems(shape.stages, shape.chunks)):
            return
        hashed = [layer.number for layer in read_plan(self).decoder if layer.has("experts")][:count]
        held = len(build_pipeline_layout(self, shape)[0].layers)
        if hashed and hashed[-1] > held:
            yield (
                f"{self.say('moe_n_hash_layers')} needs the numbers of tokens in layer {hashed[-1]}, and the first "
                f"pipeline stage, which has them, has {held} layers; give it more (--decoder-first-pipeline-num-layers)"
            )

    def _widths_fit_fp8(self) -> Iterator[str]:
        """Check that what linear layers multiply on one rank is made of whole blocks, as kernels for 8 bits take
        them."""
        if self.few_bits_recipe not in MULTIPLES:
            return
        recipe = "fp8_recipe" if self.fp4 is None else "fp4_recipe"
        said = set()
        for name, width, ranks in self._linear_widths():
            multiple = MULTIPLES[self.few_bits_recipe] * ranks
            if not width or width % multiple == 0 or name in said:
                continue
            # Published models end in part of a block (576 columns of DeepSeek-V3). Ranks would cut blocks elsewhere.
            if self.few_bits_recipe == "blockwise" and ranks == 1 and width > multiple and width % LAST_BLOCK == 0:
                continue
            said.add(name)
            over = f" on {ranks} ranks" if ranks > 1 else ""
            found = self.say(name) + (
                "" if width == getattr(self, name) else f" makes a layer of {width} columns, which"
            )
            yield (
                f"{found} is no multiple of {multiple}, as {self.say(recipe)} needs it{over}; "
                f"use {name_multiples(width, multiple)} columns, or train with --bf16 alone"
            )

    def _linear_widths(self) -> Iterator[tuple[str, int, int]]:
        """The columns of inputs and outputs of all linear layers: the setting that they follow from, how many, and the
        ranks that share them."""
        tp, heads = self.tensor_model_parallel_size, self.num_attention_heads or 0
        yield "hidden_size", self.hidden_size or 0, 1
        if self.multi_latent_attention:
            positions, value = self.qk_pos_emb_head_dim, self.v_head_dim
            yield "q_lora_rank", self.q_lora_rank or 0, 1
            yield "kv_lora_rank", self.kv_lora_rank, 1
            yield "qk_pos_emb_head_dim", self.kv_lora_rank + positions, 1
            yield "qk_head_dim", heads * self.query_width, tp
            yield "v_head_dim", heads * value, tp
            yield "v_head_dim", heads * (self.qk_head_dim + value), tp
        elif self.kv_channels is not None:
            # Where ranks outnumber the groups of queries, several hold the same keys and values.
            groups = max(self.num_query_groups or heads, tp)
            yield "kv_channels", heads * self.kv_channels, tp
            yield "kv_channels", (heads + 2 * groups) * self.kv_channels, tp
        if self.has_kind("mlp"):
            yield "ffn_hidden_size", self.ffn_hidden_size or 0, tp
        if self.num_moe_experts is not None:
            yield "moe_ffn_hidden_size", self.moe_ffn_hidden_size or 0, self.expert_tensor_parallel_size or 1
            yield "moe_latent_size", self.moe_latent_size or 0, 1
            yield "moe_shared_expert_intermediate_size", self.moe_shared_expert_intermediate_size or 0, tp

    def kernel_problems(self) -> Iterator[str]:
        """Yield what --attention-backend names a kernel for that the kernel cannot do.

        Named backends are promises: what a kernel lacks is refused, never computed silently by another one.
        """
        backend, asked = self.attention_backend, self.say("attention_backend")
        kernel = {"flash": "the flash kernel", "fused": "the cuDNN kernel", "unfused": "torch's math kernel"}.get(
            backend
        )
        if kernel is None:
            return
        lacking = {
            # The flash kernel for GPUs has both; where it runs is not known here.
            "sliding window (--window-size)": backend == "fused" and self.has_windows,
            f"attention sinks ({self.say('softmax_type')})": backend != "flash" and self.softmax_type != "vanilla",
            f"bound on scores ({self.say('attn_logit_softcapping')})": self.attn_logit_softcapping is not None,
        }
        for what, is_asked_for in lacking.items():
            if is_asked_for:
                yield f"{asked}: {kernel} has no {what}; use --attention-backend auto, or local"
        problem = self.ring_problem() if self._has_rings() else None
        if problem is not None:
            yield problem

    def ring_problem(self) -> str | None:
        """Return why the kernel that --attention-backend names cannot attend to keys that come round a ring, block by
        block; None where it can."""
        # Merging blocks takes the logarithm of each one's sum, which this kernel does not return.
        if self.attention_backend != "fused":
            return None
        return (
            "--attention-backend fused cannot merge the blocks of --cp-comm-type p2p; use --attention-backend auto, "
            "or --cp-comm-type all_gather or a2a"
        )

    def _has_rings(self) -> bool:
        """Return whether keys and values of any layer travel round a ring of ranks."""
        kinds, levels = self.cp_comm_type or [], self.hierarchical_context_parallel_sizes
        if self.context_parallel_size == 1 and not self.hybrid_context_parallel:
            return False
        # The outer level of a hierarchy is a ring, unless it has one member.
        return "p2p" in kinds or ("a2a+p2p" in kinds and levels is not None and levels[-1] > 1)

    def _exchanges_can_be_hidden(self) -> Iterator[str]:
        """Yield what stands against running the exchanges of experts beside another micro-batch."""
        asked = "--overlap-moe-expert-parallel-comm"
        yield from self.token_exchange_problems(asked)
        if self.moe_shared_expert_overlap:
            yield f"{asked} and --moe-shared-expert-overlap hide the same exchanges; keep one"
        # Layers that are repeated in backward exchange their tokens once more, with nothing at their side.
        if self.recompute_granularity == "full":
            yield (
                f"{asked} does not work with --recompute-granularity full; use --recompute-granularity selective, or "
                "leave one out"
            )

    def on_one_process(self, **changes: Any) -> TransformerConfig:
        """The same model undivided: fields of kind "layout" have their defaults. changes: other fields.

        Not checked again: the model is one that was trained.
        """
        kept = {
            name: getattr(self, name) for name, setting in get_settings(type(self)).items() if setting.kind != "layout"
        }
        # Settings of kind "layout" say how the model is divided, and never what it computes.
        return restore(type(self), kept | changes)


def _with_default(name: str, value: Any) -> Any:
    """A field of TransformerConfig with another default."""
    inherited = next(field for field in dataclasses.fields(TransformerConfig) if field.name == name)
    return dataclasses.field(default=value, metadata=inherited.metadata)


@dataclass(kw_only=True)
class MLATransformerConfig(TransformerConfig):
    """A TransformerConfig of latent attention with upstream's names and defaults for programs in Python; the command
    line has others, and makes a TransformerConfig."""

    multi_latent_attention: bool = _with_default("multi_latent_attention", True)
    normalization: str = _with_default("normalization", "RMSNorm")
    q_lora_rank: int | None = _with_default("q_lora_rank", 512)
    kv_lora_rank: int = _with_default("kv_lora_rank", 512)
    position_embedding_type: str = _with_default("position_embedding_type", "rope")
    rotary_scaling_factor: float = _with_default("rotary_scaling_factor", 40.0)
    rotary_base: float = derived(10000.0, kind="function")
    """Base of the rotary frequencies, in place of GPTModel's argument."""
    rotary_percent: float = derived(1.0, kind="function")
    """Share of the rotated channels that is rotated, in place of GPTModel's argument."""
    original_max_position_embeddings: int = derived(4096, kind="function")
    """yarn_original_max_position_embeddings, where that is not given."""
    beta_fast: float = derived(32.0, kind="function")
    """yarn_beta_fast, where that is not given."""
    beta_slow: float = derived(1.0, kind="function")
    """yarn_beta_slow, where that is not given."""
    cache_mla_latents: bool = derived(False, kind="kernel")
    """Says nothing: generation always keeps latent vectors."""
    mla_down_proj_fusion: bool = derived(False, kind="kernel")
    """Says nothing: the numbers are the same."""

    def derive(self) -> None:
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
            if getattr(self, f"yarn_{name}") is None:
                setattr(self, f"yarn_{name}", getattr(self, name))
        super().derive()

    def choose_rotary_base(self, base: float, percent: float) -> tuple[float, float]:
        """See TransformerConfig."""
        return self.rotary_base, self.rotary_percent
