# SPDX-License-Identifier: Apache-2.0
"""A training run small enough for eight processes on two cores: real flags, real data pipeline, any layout."""

from __future__ import annotations

import json

import torch.distributed as dist

from megatron.training.config.container import RunConfig
from megatron.training.flags.read import read_run_config
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.recipes.recipe import Recipe
from megatron.training.verify.parity_layouts import parse_layout

COMMON = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 12 --lr 1e-3 --train-iters 10 --lr-warmup-iters 3 --weight-decay 0.1
    --clip-grad 1.0 --adam-eps 1e-6 --hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 125 --make-vocab-size-divisible-by 128 --eval-iters 0 --num-workers 0
"""
STYLES = {
    # Learned positions, LayerNorm, gelu, biases, embedding tied to the output layer.
    "gpt2": "",
    # RoPE, RMSNorm, SwiGLU, two key-value heads, norms of queries and keys, no biases, untied.
    "llama": """--position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 48
        --group-query-attention --num-query-groups 2 --qk-layernorm --disable-bias-linear
        --untie-embeddings-and-output-weights""",
}

# Experts in every second layer beside a gated shared one, with three losses; experts that drop tokens, whose router has
# biases that learn; and experts with biases that work on narrow vectors.
EXPERTS = {
    "moe": """--position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 48 --disable-bias-linear
        --untie-embeddings-and-output-weights --num-experts 4 --moe-layer-freq 2 --moe-ffn-hidden-size 24
        --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.1 --moe-z-loss-coeff 0.01
        --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate""",
    "picky": """--swiglu --ffn-hidden-size 48 --disable-bias-linear --num-experts 4 --moe-layer-freq 2
        --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-bias-update-rate 0.01 --moe-router-add-bias
        --moe-expert-capacity-factor 0.9 --moe-aux-loss-coeff 0.1
        --moe-z-loss-coeff 0.01 --moe-permute-fusion --moe-grouped-gemm""",
    "narrow": """--squared-relu --ffn-hidden-size 48 --num-experts 4 --moe-layer-freq 2 --moe-ffn-hidden-size 24
        --moe-latent-size 12 --use-fused-weighted-squared-relu --moe-expert-capacity-factor 0.9
        --moe-pad-expert-input-to-capacity
        --moe-router-load-balancing-type aux_loss quantile_balancing --moe-aux-loss-coeff 0.1 0
        --moe-shared-expert-intermediate-size 24""",
}

# Multi-token prediction: two further tokens, tied and with biases; one, untied and without; and with experts whose
# router has biases that learn.
FURTHER = {
    "tied": """--position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 48 --mtp-num-layers 2
        --mtp-loss-scaling-factor 0.5""",
    "untied": """--position-embedding-type rope --group-query-attention --num-query-groups 2 --disable-bias-linear
        --untie-embeddings-and-output-weights --mtp-num-layers 1 --mtp-loss-scaling-factor 0.5""",
    "experts": EXPERTS["moe"].replace("--moe-layer-freq 2", "--moe-layer-freq ([0]+[1]*3)")
    + """ --mtp-num-layers 1 --mtp-loss-scaling-factor 0.5 --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01""",
    "streams": """--position-embedding-type rope --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5
        --enable-hyper-connections --num-residual-streams 3 --mhc-init-gating-factor 0.5 --mhc-recompute-layer-num 2""",
}

# Styles that combine many options of the model; each with the layouts that its options concern.
OPTIONS = {
    # Latent attention with norms of the latent vectors, YaRN, values narrower than keys; widths that nothing divides.
    "latent": """--multi-latent-attention --q-lora-rank 13 --kv-lora-rank 11 --qk-head-dim 6 --qk-pos-emb-head-dim 4
        --v-head-dim 5 --qk-layernorm --position-embedding-type rope --rotary-scaling-factor 4 --mscale 0.8
        --mscale-all-dim 0.9 --normalization RMSNorm --swiglu --ffn-hidden-size 48 --disable-bias-linear
        --untie-embeddings-and-output-weights""",
    # The same without latent vectors of queries and norms, and with learned positions as well, beside experts as in
    # DeepSeek-V3: groups of them, a bias.
    "deepseek": """--multi-latent-attention --kv-lora-rank 11 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5
        --position-embedding-type learned_absolute --normalization RMSNorm --swiglu --ffn-hidden-size 48
        --disable-bias-linear
        --untie-embeddings-and-output-weights --num-experts 4 --moe-layer-freq ([0]+[1]*3) --moe-ffn-hidden-size 24
        --moe-shared-expert-intermediate-size 24 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5
        --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1""",
    # Mamba-2, a gated delta net, Kimi delta attention and attention, a layer each; two further tokens are predicted.
    "states": """--hybrid-layer-pattern MGK*/M-/M- --position-embedding-type rope --normalization RMSNorm
        --disable-bias-linear --untie-embeddings-and-output-weights --mamba-num-heads 6 --mamba-head-dim 5
        --mamba-num-groups 2 --mamba-state-dim 7 --linear-num-key-heads 4 --linear-num-value-heads 4
        --linear-key-head-dim 6 --linear-value-head-dim 6 --linear-conv-kernel-dim 3""",
    # Attention and Mamba-2 side by side, with all factors of Falcon-H1.
    "beside": """--mamba-beside-attention --position-embedding-type rope --normalization RMSNorm --swiglu
        --ffn-hidden-size 48 --add-mlp-bias --mamba-proj-bias --mamba-num-heads 6 --mamba-head-dim 5
        --mamba-num-groups 2 --mamba-state-dim 7 --attention-input-multiplier 1.4 --attention-output-multiplier 0.6
        --mamba-input-multiplier 0.8 --mamba-output-multiplier 1.3 --mamba-section-multipliers 0.6 1.2 0.8 1.5 0.5
        --activation-input-multiplier 0.9 --mlp-output-multiplier 0.7 --key-multiplier 0.7""",
    # As in Kimi Linear and OLMo Hybrid: gates of narrow vectors, no positions, norms on the outputs of some layers.
    "kimi": """--hybrid-layer-pattern K-+G --position-embedding-type rope --no-rope-freq 1 --normalization RMSNorm
        --swiglu --ffn-hidden-size 48 --disable-bias-linear --untie-embeddings-and-output-weights --kv-lora-rank 11
        --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5 --qk-layernorm --latent-norm-epsilon 1e-3
        --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 6
        --linear-gate-rank 5 --linear-allow-neg-eigval --output-norm-freq [0,1,0,1]""",
    # Keys chosen by every second layer, and its loss, in both forms of letters and flags.
    "sparse": """--multi-latent-attention --experimental-attention-variant dsa --q-lora-rank 13 --kv-lora-rank 11
        --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5 --qk-layernorm --position-embedding-type rope
        --rotary-scaling-factor 4 --normalization RMSNorm --swiglu --ffn-hidden-size 48 --disable-bias-linear
        --untie-embeddings-and-output-weights --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5
        --dsa-indexer-topk-freq 2 --dsa-indexer-loss-coeff 0.5 --dsa-indexer-use-sparse-loss""",
    "chosen": """--hybrid-layer-pattern D-DE --position-embedding-type rope --normalization RMSNorm --swiglu
        --ffn-hidden-size 48 --disable-bias-linear --untie-embeddings-and-output-weights --kv-lora-rank 11
        --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5 --num-experts 4 --moe-ffn-hidden-size 24
        --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 --dsa-indexer-topk 3 --dsa-indexer-loss-coeff 0.5""",
    # DeepSeek-V4: a window, chosen entries and all, streams, experts by a table, and one more token.
    "compressed": """--multi-latent-attention --experimental-attention-variant dsv4_hybrid
        --csa-compress-ratios [0,4,5,4,4] --mtp-num-layers 1 --q-lora-rank 13 --qk-pos-emb-head-dim 4 --v-head-dim 10
        --csa-window-size 5 --o-groups 2 --o-lora-rank 6 --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8
        --dsa-indexer-topk 2 --dsa-indexer-loss-coeff 0.5 --dsa-indexer-use-sparse-loss --enable-hyper-connections
        --num-residual-streams 2 --position-embedding-type rope --normalization RMSNorm --swiglu
        --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 4 --moe-ffn-hidden-size 24
        --moe-shared-expert-intermediate-size 24 --moe-router-score-function sqrtsoftplus
        --moe-router-enable-expert-bias --moe-n-hash-layers 1 --actual-vocab-size 128""",
    # Residual streams of both forms, of branches with norms on both sides, experts among them, and in letters.
    "streams": """--enable-hyper-connections --num-residual-streams 3 --norm-placement both --residual-multiplier 0.7
        --normalization RMSNorm --swiglu --ffn-hidden-size 48 --position-embedding-type rope --num-experts 4
        --moe-layer-freq ([0]+[1]*3) --moe-ffn-hidden-size 24 --untie-embeddings-and-output-weights
        --mhc-init-gating-factor 0.5""",
    "mean": """--enable-mhc-connections --mhc-num-residual-streams 2 --hybrid-layer-pattern M-*- --normalization RMSNorm
        --position-embedding-type rope --disable-bias-linear --mamba-num-heads 6 --mamba-head-dim 5
        --mamba-num-groups 2 --mamba-state-dim 7 --mhc-init-gating-factor 0.5""",
    # Layers of different shapes: none or a matrix in place of attention and of the MLP; other widths.
    "shapes": """--position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 48
        --group-query-attention --num-query-groups 2 --heterogeneous-layers-config-encoded-json """
    + json.dumps(
        {
            "block_configs": [
                {"attention": {"num_query_groups": None}, "ffn": {"ffn_hidden_size": 20}},
                {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
                {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
                {"attention": {"num_query_groups": 2}, "ffn": {"ffn_mult": None}},
            ]
        },
        separators=(",", ":"),
    ),
    "sandwich": """--disable-bias-linear --norm-placement both --normalization RMSNorm --apply-layernorm-1p
        --geglu --openai-gelu --activation-func-clamp-value 0.05 --glu-linear-offset 1 --embedding-multiplier 4
        --residual-multiplier 0.7 --logit-multiplier 0.8 --use-mup --mup-base-hidden-size 16
        --embedding-init-method-std 0.1 --cross-entropy-loss-fusion --qk-layernorm --qk-norm-scope all
        --position-embedding-type rope --spec examples.custom_layer layer_spec""",
    # One norm without a bias for both branches, and at the ends what Phi-2, nanochat and OPT have.
    "phi": """--parallel-residual --parallel-residual-shares-norm --norm-parameters weight --add-output-layer-bias
        --add-embedding-norm --learned-position-offset 2 --relu --untie-embeddings-and-output-weights""",
    "parallel": """--clip-grad 0 --init-method-xavier-uniform --parallel-residual --bf16 --fp32-residual-connection
        --cross-entropy-loss-fusion --untie-embeddings-and-output-weights""",
}


def training(flags: str, layout_text: str) -> tuple[RunConfig, Recipe]:
    """Settings and recipe of the run under a layout; flags given later win."""
    layout = parse_layout(layout_text)
    # 128 rows whatever the tensor-parallel size: rows of padding take part in the softmax.
    padding = ["--make-vocab-size-divisible-by", str(128 // layout.sizes["tp"])]
    argv = [*COMMON.split(), *padding, *flags.split(), *layout.flags]
    config = read_run_config(argv, {"WORLD_SIZE": str(layout.world_size)})
    recipe = build_gpt_recipe(config)
    return config, recipe


def own_rank(config: RunConfig) -> int:
    """This process's rank; 0 where it trains alone."""
    return dist.get_rank() if config.world_size > 1 else 0
