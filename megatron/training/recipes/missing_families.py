# SPDX-License-Identifier: Apache-2.0
"""Types of popular models that do not convert, each with what there is no layer or option for."""

from __future__ import annotations

from collections.abc import Mapping

_SPARSE = "attention to tokens that an indexer chooses"
MISSING: Mapping[str, str] = {
    "gemma4_text": "embeddings per layer, values normed without a weight, keys and values that layers share, and heads "
    "of another width in layers without a window",
    "minimax": "linear attention with a fixed decay for each head",
    "phimoe": "experts chosen by sparse mixer routing",
    "gemma3n_text": "alternating updates of several streams, low-rank layers beside them, and embeddings per layer",
    "apertus": "an activation with learned numbers (xIELU)",
    "longcat_flash": "two attentions and two MLPs in a layer, and experts that do nothing",
    "mimo_v2_flash": "values of another width than keys outside of latent attention",
    "laguna": "gates of heads by softplus",
    "lfm3": "norms on both sides of short convolutions, and gates of attention of their own width",
    "minimax_m3_vl_text": "attention to blocks that an indexer chooses",
    "bailing_hybrid": "Kimi delta attention with a bounded decay",
    "phi4_multimodal": "parts for images and sound, which its only class has, too",
    "bloom": "positions as a bias on scores (ALiBi)",
    "mpt": "positions as a bias on scores (ALiBi)",
    "jamba": "Mamba-1",
    "hy_v4": f"{_SPARSE}, and several residual streams",
    "dbrx": "bounds on queries, keys and values; its class in transformers cannot be built",
    "qwen4_exp_text": f"{_SPARSE}, gated residual streams, and embeddings of several tokens",
}
"""`model_type` -> what is missing."""
