# SPDX-License-Identifier: Apache-2.0
"""Attention options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config_base import derived, flag, name_divisors, name_multiples
from megatron.core.errors import ConfigError
from megatron.core.flag_texts import layer_pattern, window
from megatron.core.plan.read import read_plan
from megatron.core.setting import Needs, NeedsGPU
from megatron.core.transformer.config_fields.architecture import ArchitectureFields

_QK_NORM = Needs("--qk-layernorm", lambda run: run.qk_layernorm)
_QK_CLIP = Needs("--qk-clip", lambda run: run.qk_clip)
_WINDOW = Needs(
    "--window-size or --attention-chunk-size",
    lambda run: run.window_size is not None or run.attention_chunk_size is not None,
)
_QK_L2_NORM = Needs("--qk-l2-norm", lambda run: run.qk_l2_norm)
_HEAD_WIDTH = Needs(
    "attention other than --multi-latent-attention, whose widths are --qk-head-dim and --v-head-dim",
    lambda run: not run.multi_latent_attention,
)


def comm_type_problem(kind: str) -> str | None:
    """Return what is wrong with a word of --cp-comm-type; None where nothing is."""
    known = ("p2p", "all_gather", "a2a", "a2a+p2p")
    return None if kind in known else f"--cp-comm-type {kind} is unknown; use p2p, all_gather, a2a or a2a+p2p"


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class AttentionFields(ArchitectureFields):
    """Heads, windows, softmax, and which attention kernel."""

    num_attention_heads: int = flag(None, minimum=1, maximum=65536, example=12, kind="function")
    """Query heads."""
    num_query_groups: int = flag(None, minimum=0, maximum=65536, kind="shape")
    """Key-value heads (grouped-query attention); as many as query heads when not given or 0."""
    kv_channels: int = flag(None, minimum=1, maximum=65536, kind="shape", needs=_HEAD_WIDTH)
    """Width of one head; hidden size / heads when not given."""
    multi_latent_attention: bool = flag(False, kind="shape")
    """Make queries, keys and values of narrow latent vectors, of which generation keeps one for each token instead of
    all keys and values (MLA; DeepSeek-V2, 2024)."""
    attention_dropout: float = flag(0.1, minimum=0, maximum=1, kind="numerics")
    """Dropout on attention probabilities."""
    qk_layernorm: bool = flag(False, kind="shape")
    """Normalise each head's queries and keys."""
    qk_norm_scope: str = flag("head", choices=("head", "all"), kind="shape", needs=_QK_NORM)
    """With --qk-layernorm, what is normalised together: one head, or all heads of a token (OLMo 2, RMSNorm only)."""
    qk_l2_norm: bool = flag(False, kind="function")
    """Divide each head's queries and keys by their root mean square, without weights (Llama 4)."""
    qk_l2_norm_layers: str = flag("all", choices=("all", "rotary"), kind="function", needs=_QK_L2_NORM)
    """Layers with --qk-l2-norm: all, or only those with rotary positions, see --no-rope-freq (Llama 4)."""
    attention_softmax_in_fp32: bool = flag(False, kind="numerics")
    """Attention softmax in float32 in any dtype (the local backend; torch's kernels always do)."""
    apply_query_key_layer_scaling: bool = flag(False, kind="numerics")
    """Divide attention scores by the layer number and multiply them back inside the float32 softmax."""
    attention_backend: str = flag(
        "auto",
        choices=("auto", "flash", "fused", "unfused", "local"),
        kind="kernel",
        gpu=(
            NeedsGPU(
                lambda run: run.attention_backend == "fused",
                "--attention-backend auto takes its place",
                {"attention_backend": "auto"},
            ),
            NeedsGPU(
                lambda run: run.attention_backend == "flash" and run.attention_dropout > 0,
                "--attention-backend auto takes its place, because the CPU's flash kernel has no dropout",
                {"attention_backend": "auto"},
            ),
            NeedsGPU(
                lambda run: (
                    run.attention_backend == "flash"
                    and run.attention_dropout == 0
                    and (run.window_size is not None or run.softmax_type != "vanilla")
                ),
                "--attention-backend auto takes its place, because the CPU's flash kernel has no windows and no sinks",
                {"attention_backend": "auto"},
            ),
        ),
    )
    """Implementation of attention. auto: the kernel of torch that is made for the kind of attention, on a GPU the
    fastest; flash: only its flash kernel; fused: only its cuDNN kernel; unfused: torch's math kernel; local: the plain
    reference, scores and softmax written out. With unfused and local no package computes mixers with a state either."""
    flash_attention_version: int | None = flag(
        None,
        choices=(2, 3, 4),
        kind="kernel",
        needs=Needs("--attention-backend auto or flash", lambda run: run.attention_backend in ("auto", "flash")),
        gpu=NeedsGPU(
            lambda run: run.flash_attention_version is not None,
            "the CPU's own kernel takes its place",
            {"flash_attention_version": None},
        ),
    )
    """Flash kernel that --attention-backend flash, or auto where it chooses that one, means on a GPU: 2 is PyTorch's, 3
    and 4 need the package that brings them. When not given, the fastest way of attention that is there, by a short
    trial at start; PyTorch's with --deterministic-mode and with dropout."""
    masked_softmax_fusion: bool = flag(True, kind="kernel")
    """Scale, mask and softmax of the local backend as one operation that keeps only its output."""
    apply_rope_fusion: bool = flag(True, names=("--rope-fusion",), off_names=("--no-rope-fusion",), kind="kernel")
    """Rotary positions as one differentiable operation on queries and keys."""
    softmax_scale: float | None = flag(None, above=0, kind="function")
    """Factor on attention scores; 1 / sqrt(width of a head) when not given."""
    key_multiplier: float = flag(1.0, above=0, kind="function")
    """Factor on keys as queries meet them, in addition to --softmax-scale (Falcon-H1)."""
    softmax_type: str = flag("vanilla", choices=("vanilla", "off-by-one", "learnable"), kind="function")
    """Share of attention that may stay unspent: nothing; off-by-one: a further key with score 0 and without value;
    learnable: with a score that each head learns (attention sinks, gpt-oss)."""
    attn_logit_softcapping: float | None = flag(None, above=0, kind="function")
    """Bound on attention scores: score -> bound x tanh(score / bound) (Gemma 2)."""
    attention_output_gate: bool = flag(False, kind="shape")
    """Each head's output is multiplied by the sigmoid of a further projection of the layer's input (Qwen3-Next)."""
    cp_comm_type: list[str] = flag(default_factory=lambda: ["p2p"], metavar="TYPE", kind="layout")
    """Exchange of attention's inputs among ranks that share a sequence (--context-parallel-size), for all layers or one
    word for each: p2p passes keys and values round a ring; all_gather, or allgather, gathers them; a2a exchanges tokens
    for heads; a2a+p2p does so among neighbours and passes keys and values round a ring beyond them."""
    qk_clip: bool = flag(False, kind="numerics")
    """After each update, scale the weights of queries and keys of heads whose largest score was above
    --qk-clip-threshold (MuonClip, Kimi Team, 2025)."""
    qk_clip_alpha: float = flag(0.5, minimum=0, maximum=1, kind="numerics", needs=_QK_CLIP)
    """With --qk-clip: the queries' share of the factor threshold / score, as its power; the keys have the rest."""
    qk_clip_threshold: float = flag(100.0, above=0, kind="numerics", needs=_QK_CLIP)
    """With --qk-clip: score above which a head is scaled."""
    measures_attention_logits: bool = derived(False, kind="report")
    """The largest score of each head is noted (--qk-clip, --log-max-attention-logit)."""
    attention_way: str | None = derived(kind="kernel")
    """Row of `attention` in megatron/core/operation_table.py that a trial at start has found the fastest on a GPU."""
    window_size: tuple[int, int] | None = flag(None, parse=window, kind="function")
    """Sliding window: 127,0 lets a token see itself and the 127 tokens before it. A causal model sees nothing after
    it."""
    attention_chunk_size: int | None = flag(None, minimum=1, unit="tokens", kind="function")
    """Chunked attention: sequences, and packed documents, are divided into chunks of so many tokens, and a token sees
    only earlier tokens of its chunk (Llama 4)."""
    window_attn_skip_freq: int | list[int] | None = flag(None, parse=layer_pattern, kind="function", needs=_WINDOW)
    """Layers that see everything in spite of --window-size or --attention-chunk-size: every n-th, or one entry per
    layer, 0 for such a layer."""

    def normalize(self) -> None:
        super().normalize()
        if isinstance(self.window_size, list):  # as JSON has it
            self.window_size = tuple(self.window_size)
        self.cp_comm_type = self.cp_comm_type or ["p2p"]
        if isinstance(self.cp_comm_type, list):  # upstream's word for sparse attention
            self.cp_comm_type = ["all_gather" if word == "allgather" else word for word in self.cp_comm_type]

    def derive(self) -> None:
        super().derive()
        heads, width = self.num_attention_heads, self.hidden_size
        # Multi-head attention is the case in which every query head is a group.
        if self.num_query_groups in (None, 0):
            self.num_query_groups = heads
        # Left None where it does not divide: the check below then says so.
        if self.kv_channels is None and heads and width and width % heads == 0:
            self.kv_channels = width // heads
        # The factor is undone inside the softmax, which float16 could not hold.
        if self.apply_query_key_layer_scaling:
            self.attention_softmax_in_fp32 = True

    def rules(self) -> Iterator[str]:
        yield from self._heads_divide_the_width()
        yield from self.head_problems(self.tensor_model_parallel_size)
        yield from self._norms_of_queries_and_keys()
        yield from self._context_exchange_is_known()
        if self.qk_clip:
            yield from self.score_measuring_problems("--qk-clip")
            # A norm after the projection would divide the clipped weights' factor out again. Latent attention's norms
            # are before it.
            for name in ("qk_layernorm", "qk_l2_norm"):
                if getattr(self, name) and not self.multi_latent_attention:
                    yield f"--qk-clip scales weights, which {self.say(name)} makes good again; leave one of the two out"

    def _heads_divide_the_width(self) -> Iterator[str]:
        heads, groups, width = self.num_attention_heads, self.num_query_groups, self.hidden_size
        if heads and width and self.kv_channels is None and not self.multi_latent_attention:
            yield (
                f"{self.say('hidden_size')} is not divisible by {self.say('num_attention_heads')}; "
                f"use a multiple of {heads}, or give --kv-channels"
            )
        if heads and groups and heads % groups:
            yield (
                f"{self.say('num_query_groups')} does not divide {self.say('num_attention_heads')}; "
                f"use {name_divisors(heads, groups)}"
            )

    def head_problems(self, tp: int) -> Iterator[str]:
        """Yield what stands against sharing the heads among so many ranks: as configured, or as many as a real group
        has."""
        heads, groups = self.num_attention_heads, self.num_query_groups
        ranks = f"{self.flag('tensor_model_parallel_size')} {tp}"
        if heads and heads % tp:
            yield (
                f"{self.say('num_attention_heads')} cannot be split over {ranks}; "
                f"use {name_multiples(heads, tp)} heads, or a tensor-parallel size of {name_divisors(heads, tp)}"
            )
        # Either ranks share groups or groups share ranks; anything else would cut a key-value head.
        if groups and groups != heads and groups % tp and tp % groups:
            yield (
                f"{self.say('num_query_groups')} must be a multiple or a divisor of {ranks}; "
                f"use {name_divisors(tp, groups)} groups"
            )
        # Copies of one group's key on several ranks would count more than once in the mean over all heads.
        if self.qk_layernorm and self.qk_norm_scope == "all" and groups and groups % tp:
            yield (
                f"{self.say('qk_norm_scope')} cannot share {groups} key-value heads among {ranks}; "
                f"use a divisor of {groups}"
            )

    def _norms_of_queries_and_keys(self) -> Iterator[str]:
        if self.qk_layernorm and self.qk_l2_norm:
            yield "--qk-layernorm and --qk-l2-norm contradict each other; keep one norm of queries and keys"
        # A LayerNorm over heads that lie on several ranks would have to sum means as well.
        if self.qk_norm_scope == "all" and self.normalization != "RMSNorm":
            yield f"{self.say('qk_norm_scope')} is an RMSNorm, not {self.normalization}; add --normalization RMSNorm"

    def _context_exchange_is_known(self) -> Iterator[str]:
        kinds, cp = self.cp_comm_type or [], self.context_parallel_size
        yield from filter(None, map(comm_type_problem, kinds))
        if len(kinds) > 1 and self.num_layers and len(kinds) != self.num_layers:
            yield (
                f"{self.say('cp_comm_type')} names {len(kinds)} kinds for {self.say('num_layers')}; give one, or one "
                "for each layer"
            )
        # Exactly two levels: one exchange, and one ring around it.
        if cp > 1 and "a2a+p2p" in kinds and len(self.hierarchical_context_parallel_sizes or ()) != 2:
            yield (
                "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes, two numbers whose product is the "
                "CP size"
            )
        if self.hybrid_context_parallel and "a2a+p2p" in kinds:
            yield (
                "--hybrid-context-parallel cannot be combined with --cp-comm-type a2a+p2p, whose levels are for one "
                "number of ranks; use p2p, all_gather or a2a"
            )
        yield from self._heads_can_be_exchanged()

    def _heads_can_be_exchanged(self) -> Iterator[str]:
        tp, cp, levels = (
            self.tensor_model_parallel_size, self.context_parallel_size, self.hierarchical_context_parallel_sizes
        )  # fmt: skip
        if cp == 1 or not self.num_attention_heads or self.num_attention_heads % tp:
            return
        # In a hierarchy only the inner level exchanges heads; the ring beyond it passes them on whole.
        for kind, ranks in (("a2a", cp), ("a2a+p2p", levels[0] if levels else 1)):
            if kind in (self.cp_comm_type or []):
                yield from self.exchange_problems(kind, tp, ranks)

    def exchange_problems(self, kind: str, tp: int, ranks: int) -> Iterator[str]:
        """Ranks that exchange tokens for heads need a share of every tensor-parallel rank's query heads.

        kind: a2a or a2a+p2p. tp, ranks: of the config, or of real groups.
        """
        heads = self.num_attention_heads
        if heads // tp % ranks:
            sizes = f"--context-parallel-size {ranks}"
            written = sizes if kind == "a2a" else self.say("hierarchical_context_parallel_sizes")
            yield (
                f"--cp-comm-type {kind} with {written} needs a multiple of {ranks} query heads on each tensor-parallel "
                f"rank, and {self.say('num_attention_heads')} / --tensor-model-parallel-size {tp} is {heads // tp}; "
                f"use {name_multiples(heads, tp * ranks)} heads, or --cp-comm-type p2p"
            )

    def _attends_sparsely(self) -> bool:
        try:
            return "sparse_attention" in {branch.kind for branch in read_plan(self).branches()}
        except ConfigError:
            return False  # letters that describe no model, which another rule names

    def score_measuring_problems(self, asked: str) -> Iterator[str]:
        """Yield the cases in which the largest attention scores cannot be measured. asked: the flag that asks for
        it."""
        if self._attends_sparsely():
            yield f"{asked} is for scores of all keys, and sparse attention has those of a few; leave it out"
        # A ring sees scores block by block, and forgets them: no rank has a head's scores of a whole sequence.
        if self.context_parallel_size > 1:
            yield f"{asked} needs whole sequences on each rank; leave {self.say('context_parallel_size')} out"
