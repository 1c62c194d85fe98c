# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4, whose layers attend to compressed entries; see `families.py`."""

from __future__ import annotations

from megatron.training.recipes.compressed_layers import COMPRESSED_BASE, complete_compressed
from megatron.training.recipes.family import ConfigKey, Family, Row
from megatron.training.recipes.family_defaults import Fields, size, without
from megatron.training.recipes.family_rows import OURS, THEIRS, build_gated_rows, build_rows, rename_rows
from megatron.training.recipes.family_settings import EXPERT_WIDTH, LLAMA_FLAGS, TOP_K, USUAL, build_family, build_sizes

_CORE = "self_attention.core_attention."
_NORMS = {"input_layernorm": "attn_norm", "pre_mlp_layernorm": "ffn_norm"}
_ATTENTION = {
    "self_attention.linear_q_down_proj": "attn.wq_a", "self_attention.q_layernorm": "attn.q_norm",
    "self_attention.linear_q_up_proj": "attn.wq_b", "self_attention.linear_kv_proj": "attn.wkv",
    "self_attention.kv_layernorm": "attn.norm", "self_attention.linear_proj": "attn.wo_b",
    f"{_CORE}indexer.linear_wq_b": "attn.indexer.wq_b",
    f"{_CORE}indexer.linear_weights_proj": "attn.indexer.weights_proj",
}  # fmt: skip
_COMPRESSORS = {f"{_CORE}compressor.": "attn.compressor.", f"{_CORE}indexer.compressor.": "attn.indexer.compressor."}
_STREAMS = {"self_attention_hyper_connection.": "hc_attn_", "mlp_hyper_connection.": "hc_ffn_"}
_ROWS = {
    **rename_rows("", "", {
        "embedding.word_embeddings": "model.embed_tokens", "decoder.final_layernorm": "model.norm",
        "output_layer": "head",
    }),
    **rename_rows(OURS, THEIRS, _NORMS | _ATTENTION | {"mlp.router": "ffn.gate"}),
    **build_gated_rows("mlp.experts", "ffn.experts.{expert}", "w1", "w3", "w2"),
    **build_gated_rows("mlp.shared_experts", "ffn.shared_experts", "w1", "w3", "w2"),
    **build_rows(
        Row(f"{OURS}{_CORE}attn_sink", (f"{THEIRS}attn.attn_sink",)),
        Row(f"{OURS}self_attention.linear_o_group_proj", (f"{THEIRS}attn.wo_a.weight",)),
        Row(f"{OURS}mlp.router.expert_bias", (f"{THEIRS}ffn.gate.bias",)),
        Row(f"{OURS}mlp.router.tid2eid", (f"{THEIRS}ffn.gate.tid2eid",)),
        *(Row(f"decoder.hc_head_{part}", (f"model.hc_head.hc_{part}",)) for part in ("fn", "base", "scale")),
        *(
            Row(f"{OURS}{ours}{part}", (f"{THEIRS}{theirs}{their_part}",))
            for ours, theirs in _COMPRESSORS.items()
            for part, their_part in {
                "linear_wkv.weight": "wkv.weight", "linear_wgate.weight": "wgate.weight", "ape": "ape",
                "norm.weight": "norm.weight",
            }.items()
        ),
        *(
            Row(f"{OURS}{ours}{part}", (f"{THEIRS}{theirs}{their_part}",))
            for ours, theirs in _STREAMS.items()
            for part, their_part in {
                "mapping_proj.weight": "fn", "bias": "base", "alpha_pre": "scale[0]", "alpha_post": "scale[1]",
                "alpha_res": "scale[2]",
            }.items()
        ),
    ),
}  # fmt: skip
_DEFAULTS: Fields = without(size(43, 4096, 0, 64, 1, 1048576), "intermediate_size") | {
    "moe_intermediate_size": 2048, "head_dim": 512, "q_lora_rank": 1024, "num_experts_per_tok": 6,
    "n_routed_experts": 256, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "rope_theta": 10000.0, "layer_types": None, "compress_rates": None,
    "compress_rope_theta": 160000.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "mlp_layer_types": None,
    "swiglu_limit": 10.0, "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 512, "partial_rotary_factor": None, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip
COMPRESSED_FAMILIES: tuple[Family, ...] = (
    build_family(
        "DeepSeek V4", "deepseek_v4", "DeepseekV4ForCausalLM",
        flags=f"--multi-latent-attention --experimental-attention-variant dsv4_hybrid {LLAMA_FLAGS} "
        "--no-dsa-indexer-rotate-activation --moe-router-score-function sqrtsoftplus --moe-router-enable-expert-bias "
        "--enable-hyper-connections",
        sizes=tuple(setting for setting in build_sizes() if setting.theirs != "intermediate_size"),
        settings=(
            *USUAL,
            ConfigKey("compress_rope_theta", "--csa-compress-rotary-base", default=COMPRESSED_BASE),
            ConfigKey("q_lora_rank", "--q-lora-rank", needed=True),
            ConfigKey("head_dim", "--v-head-dim", needed=True),
            ConfigKey("qk_rope_head_dim", "--qk-pos-emb-head-dim"),
            ConfigKey("sliding_window", "--csa-window-size", default=128),
            ConfigKey("layer_types|compress_rates", "--csa-compress-ratios", "compressed layers"),
            ConfigKey("o_groups", "--o-groups", default=8),
            ConfigKey("o_lora_rank", "--o-lora-rank", default=1024),
            ConfigKey("index_n_heads", "--dsa-indexer-n-heads", needed=True),
            ConfigKey("index_head_dim", "--dsa-indexer-head-dim", needed=True),
            ConfigKey("index_topk", "--dsa-indexer-topk", needed=True),
            ConfigKey("n_routed_experts", "--num-experts", needed=True),
            TOP_K, EXPERT_WIDTH,
            ConfigKey("moe_intermediate_size", "--moe-shared-expert-intermediate-size"),
            ConfigKey("routed_scaling_factor", "--moe-router-topk-scaling-factor", default=1.0),
            ConfigKey("mlp_layer_types", "--moe-n-hash-layers", "hashed layers"),
            ConfigKey("swiglu_limit", "--activation-func-clamp-value", needed=True),
            ConfigKey("hc_mult", "--num-residual-streams", default=4),
            ConfigKey("hc_sinkhorn_iters", "--mhc-sinkhorn-iterations", default=20),
        ),
        rows=_ROWS,
        # As published; transformers reads no multi-token prediction of these files.
        published={
            "model.embed_tokens": "embed", "model.norm": "norm", "model.layers.": "layers.",
            "model.hc_head.hc_": "hc_head_",
        },
        left_out=("mtp.",),
        other_names={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
        idle=frozenset(("num_nextn_predict_layers", "expert_dtype")),
        complete=complete_compressed, defaults=_DEFAULTS,
    ),
)  # fmt: skip
