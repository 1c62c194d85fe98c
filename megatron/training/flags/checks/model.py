"""Shape of the model. TransformerConfig itself checks widths, heads and number formats."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.flags.settings import Settings


def sequence_is_given(s: Settings) -> Iterator[str]:
    if s.seq_length is None:
        yield "--seq-length is missing; give the tokens per sequence, for example --seq-length 1024"


def positions_reach_the_sequence(s: Settings) -> Iterator[str]:
    positions, length = s.max_position_embeddings, s.seq_length
    if positions is None and s.position_embedding_type == "learned_absolute":
        example = length or 1024
        yield (
            f"--max-position-embeddings is missing; give at least the sequence length, --max-position-embeddings "
            f"{example}"
        )
    if positions is not None and length is not None and positions < length:
        yield f"{s.say('max_position_embeddings')} is less than {s.say('seq_length')}; use {length} or more"


def one_activation(s: Settings) -> Iterator[str]:
    exclusive = ["swiglu", "quick_geglu", "squared_relu"] + ["geglu" if s.geglu else "openai_gelu"]
    chosen = [s.say(dest) for dest in exclusive if getattr(s, dest)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} contradict each other; keep one activation"


def latent_attention_stands_alone(s: Settings) -> Iterator[str]:
    if s.multi_latent_attention and s.group_query_attention:
        yield "--multi-latent-attention and --group-query-attention contradict each other; keep one"


def queries_have_one_norm(s: Settings) -> Iterator[str]:
    if s.qk_layernorm and s.qk_l2_norm:
        yield "--qk-layernorm and --qk-l2-norm contradict each other; keep one norm of queries and keys"


def scores_are_known(s: Settings) -> Iterator[str]:
    """Where the largest attention scores can be measured, and clipping lasts."""
    asked = "--qk-clip" if s.qk_clip else "--log-max-attention-logit"
    if s.qk_clip or s.log_max_attention_logit:
        if s.context_parallel_size > 1:
            yield f"{asked} needs whole sequences on each rank; leave {s.say('context_parallel_size')} out"
        if s.overlap_param_gather_with_optimizer_step:
            yield f"{asked} acts when all chunks are updated; leave --overlap-param-gather-with-optimizer-step out"
        if s.compile:
            yield f"{asked} measures inside of the layers that --compile compiles; leave one of the two out"
    if s.qk_clip:
        for dest in ("qk_layernorm", "qk_l2_norm"):
            if getattr(s, dest):
                yield f"--qk-clip scales weights, which {s.say(dest)} makes good again; leave one of the two out"
        if s.use_torch_fsdp2:
            yield "--qk-clip needs whole rows, which --use-torch-fsdp2 may cut; use --use-distributed-optimizer"


def further_tokens_have_positions(s: Settings) -> Iterator[str]:
    if s.mtp_num_layers and s.position_embedding_type not in ("rope", "yarn", "none"):
        yield (
            f"{s.say('mtp_num_layers')} works with --position-embedding-type rope or none, not "
            f"{s.position_embedding_type}"
        )


def spec_names_a_function(s: Settings) -> Iterator[str]:
    if s.spec is not None and len(s.spec) != 2 and s.spec != ["local"]:
        yield f"{s.say('spec').strip()} is not a module and the name of a function in it, such as my_layers layer_spec"


def scaling_with_the_width_is_defined(s: Settings) -> Iterator[str]:
    if not s.use_mup:
        return
    if s.mup_base_hidden_size is not None and "mup_width_mult" in s.given:
        yield f"{s.say('mup_width_mult')} and {s.say('mup_base_hidden_size')} both say the width; keep the latter"
    if s.init_method_xavier_uniform:
        yield "--init-method-xavier-uniform and --use-mup both say how weights scale with the width; keep one"
    if s.optimizer not in ("adam", "lion"):
        yield f"--use-mup scales the learning rates of Adam and Lion, not of {s.say('optimizer')}; use adam"


def cross_entropy_is_ours(s: Settings) -> Iterator[str]:
    if s.cross_entropy_loss_fusion and s.cross_entropy_fusion_impl == "te":
        yield f"{s.say('cross_entropy_fusion_impl')} is Transformer Engine's, which is not used; use native"


def determinism_is_possible(s: Settings) -> Iterator[str]:
    if not s.deterministic_mode:
        return
    for dest in ("cross_entropy_loss_fusion", "tp_comm_overlap"):
        if getattr(s, dest):
            yield f"{s.say(dest)} is not deterministic; leave it out with --deterministic-mode"
    if s.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0") != "0":
        yield "NVTE_ALLOW_NONDETERMINISTIC_ALGO in the environment contradicts --deterministic-mode; set it to 0"


def rotation_takes_pairs(s: Settings) -> Iterator[str]:
    if s.position_embedding_type not in ("rope", "yarn") or not (s.num_attention_heads and s.hidden_size):
        return
    width = s.kv_channels or s.hidden_size // s.num_attention_heads
    rotated = int(width * s.rotary_percent)
    if rotated < 2 or rotated % 2:
        yield (
            f"{s.say('position_embedding_type')} rotates pairs of channels, but {s.say('rotary_percent')} of {width} "
            "channels "
            f"per head is {rotated}; use an even number, through --kv-channels or --rotary-percent"
        )


def rotary_kinds_agree(s: Settings) -> Iterator[str]:
    if s.position_embedding_type != "yarn":
        return
    if s.rope_type == "rope":
        yield "--rope-type rope and --position-embedding-type yarn contradict each other; keep one"
    if s.use_rope_scaling:
        yield "--use-rope-scaling and --position-embedding-type yarn both scale rotary frequencies; keep one"
    if s.yarn_original_max_position_embeddings is None:
        yield (
            "--position-embedding-type yarn needs --yarn-original-max-position-embeddings, the longest sequence of the "
            "training before, such as 4096"
        )


CHECKS = (
    sequence_is_given, positions_reach_the_sequence, one_activation, queries_have_one_norm,
    scores_are_known,
    latent_attention_stands_alone, further_tokens_have_positions, rotation_takes_pairs, rotary_kinds_agree,
    cross_entropy_is_ours,
    determinism_is_possible, spec_names_a_function, scaling_with_the_width_is_defined,
)  # fmt: skip
