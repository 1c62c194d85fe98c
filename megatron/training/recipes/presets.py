# SPDX-License-Identifier: Apache-2.0
"""Published models by name, for `--preset`: what their config.json says, and how many parameters they have.

A preset is the family's table (families.py) read with the fields of one model, so that its flags are written nowhere
else. Fields are from the config.json of the published checkpoint; GPT-3 has none, and is described with GPT-2's fields.
Sources: the papers named with each block, and for later releases the published config.json. Shapes are proven by the
number of parameters (tests/unit/training/recipes/test_presets.py counts them); what no shape shows, such as the base of
rotary positions, an epsilon or the length of the context, is as published and could not be verified here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.training.recipes.families import find_family
from megatron.training.recipes.family_flags import build_flags


@dataclass(frozen=True)
class Preset:
    """A published model."""

    name: str
    model_type: str
    """Of its family, as in its config.json."""
    fields: Mapping[str, Any]
    """Of its config.json, as far as the family's table reads them; with vocab_size."""
    parameters: str
    """As published, or as its files count them: 8.03B."""
    active: str | None = None
    """Of them, those that work on one token; None where it is all."""

    def build_flags(self) -> list[str]:
        """The flags of the model, each with its values; its vocabulary and the tokenizer are not among them."""
        # The published models were trained without dropout; GPT-2's fields say how much they had.
        dropout = self.fields.get("attn_pdrop", 0), self.fields.get("resid_pdrop", 0)
        flags = build_flags(find_family(self.model_type), self.fields)
        return [*flags, f"--attention-dropout {dropout[0]}", f"--hidden-dropout {dropout[1]}"]

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that the model was published for."""
        length = self.fields.get("max_position_embeddings") or self.fields["n_positions"]
        return int(length)


LLAMA_31_POSITIONS = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GPT_OSS_POSITIONS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEEPSEEK_POSITIONS = {
    "rope_type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
K = 1024


def _size(layers: int, hidden: int, ffn: int, heads: str, vocab: int, context: int) -> dict[str, Any]:
    """Return sizes as fields of a config.json; heads: "32" or "32/8", the second being the number of KV heads."""
    queries, _, groups = heads.partition("/")
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": int(queries), "num_key_value_heads": int(groups or queries),
        "vocab_size": vocab, "max_position_embeddings": context,
    }  # fmt: skip


def _build_gpt() -> Iterator[Preset]:
    # Brown et al., arXiv 2005.14165, table 2.1, which calls the second one 350M. Its number of heads of the 1.3B model
    # and its width of the 13B one contradict its head widths; here are the values that fit.
    for name, parameters, layers, hidden, heads in (
        ("gpt3-125m", "125M", 12, 768, 12), ("gpt3-350m", "356M", 24, 1024, 16), ("gpt3-760m", "760M", 24, 1536, 16),
        ("gpt3-1.3b", "1.3B", 24, 2048, 16), ("gpt3-2.7b", "2.7B", 32, 2560, 32), ("gpt3-6.7b", "6.7B", 32, 4096, 32),
        ("gpt3-13b", "13B", 40, 5120, 40), ("gpt3-175b", "175B", 96, 12288, 96),
    ):  # fmt: skip
        fields: dict[str, Any] = {
            "n_layer": layers, "n_embd": hidden, "n_inner": 4 * hidden, "n_head": heads, "n_positions": 2048,
            "vocab_size": 50257,
        }  # fmt: skip
        yield Preset(name, "gpt2", fields, parameters)
    # Radford et al., 2019, and the published files.
    for name, parameters, layers, hidden, heads in (
        ("gpt2", "124M", 12, 768, 12), ("gpt2-medium", "355M", 24, 1024, 16), ("gpt2-large", "774M", 36, 1280, 20),
        ("gpt2-xl", "1.56B", 48, 1600, 25),
    ):  # fmt: skip
        fields = {
            "n_layer": layers, "n_embd": hidden, "n_inner": 4 * hidden, "n_head": heads, "n_positions": K,
            "vocab_size": 50257, "attn_pdrop": 0.1, "resid_pdrop": 0.1,
        }  # fmt: skip
        yield Preset(name, "gpt2", fields, parameters)
    # Biderman et al., arXiv 2304.01373; Black et al., arXiv 2204.06745.
    for name, parameters, size in (
        ("pythia-70m", "70.4M", _size(6, 512, 2048, "8", 50304, 2048)),
        ("pythia-160m", "162M", _size(12, 768, 3072, "12", 50304, 2048)),
        ("pythia-410m", "405M", _size(24, 1024, 4096, "16", 50304, 2048)),
        ("pythia-1.4b", "1.41B", _size(24, 2048, 8192, "16", 50304, 2048)),
        ("pythia-2.8b", "2.78B", _size(32, 2560, 10240, "32", 50304, 2048)),
        ("pythia-6.9b", "6.86B", _size(32, 4096, 16384, "32", 50432, 2048)),
        ("pythia-12b", "11.8B", _size(36, 5120, 20480, "40", 50688, 2048)),
        ("gpt-neox-20b", "20.6B", _size(44, 6144, 24576, "64", 50432, 2048)),
    ):
        yield Preset(name, "gpt_neox", size, parameters)


def _build_llama() -> Iterator[Preset]:
    # Touvron et al., arXiv 2307.09288.
    for name, parameters, size in (
        ("llama2-7b", "6.74B", _size(32, 4096, 11008, "32", 32000, 4 * K)),
        ("llama2-13b", "13.0B", _size(40, 5120, 13824, "40", 32000, 4 * K)),
        ("llama2-70b", "69.0B", _size(80, 8192, 28672, "64/8", 32000, 4 * K)),
    ):
        yield Preset(name, "llama", size | {"rms_norm_eps": 1e-5}, parameters)
    # Grattafiori et al., arXiv 2407.21783; Llama 3.3 has the shape of Llama 3.1 70B.
    for name, parameters, size, positions in (
        ("llama3-8b", "8.03B", _size(32, 4096, 14336, "32/8", 128256, 8 * K), None),
        ("llama3-70b", "70.6B", _size(80, 8192, 28672, "64/8", 128256, 8 * K), None),
        ("llama3.1-8b", "8.03B", _size(32, 4096, 14336, "32/8", 128256, 128 * K), 8.0),
        ("llama3.1-70b", "70.6B", _size(80, 8192, 28672, "64/8", 128256, 128 * K), 8.0),
        ("llama3.1-405b", "406B", _size(126, 16384, 53248, "128/8", 128256, 128 * K), 8.0),
        ("llama3.2-1b", "1.24B", _size(16, 2048, 8192, "32/8", 128256, 128 * K), 32.0),
        ("llama3.2-3b", "3.21B", _size(28, 3072, 8192, "24/8", 128256, 128 * K), 32.0),
    ):
        fields = size | {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": "3.2" in name}
        if positions is not None:
            fields["rope_scaling"] = LLAMA_31_POSITIONS | {"factor": positions}
        yield Preset(name, "llama", fields, parameters)


def _build_mistral() -> Iterator[Preset]:
    # Jiang et al., arXiv 2310.06825 and 2401.04088; the later ones by their config.json.
    size = _size(32, 4096, 14336, "32/8", 32000, 32 * K)
    yield Preset("mistral-7b-v0.1", "mistral", size | {"rms_norm_eps": 1e-5, "sliding_window": 4096}, "7.24B")
    size = _size(32, 4096, 14336, "32/8", 32768, 32 * K)
    fields = {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None}
    yield Preset("mistral-7b-v0.3", "mistral", size | fields, "7.25B")
    for name, parameters, active, size in (
        ("mixtral-8x7b", "46.7B", "12.9B", _size(32, 4096, 14336, "32/8", 32000, 32 * K)),
        ("mixtral-8x22b", "141B", "39B", _size(56, 6144, 16384, "48/8", 32000, 64 * K)),
    ):
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0}
        yield Preset(name, "mixtral", size | experts, parameters, active)


def _build_qwen() -> Iterator[Preset]:
    # Qwen team, arXiv 2412.15115 (Qwen 2.5) and 2505.09388 (Qwen 3).
    for name, parameters, size, epsilon in (
        ("qwen2.5-0.5b", "0.49B", _size(24, 896, 4864, "14/2", 151936, 32 * K), 1e-6),
        ("qwen2.5-1.5b", "1.54B", _size(28, 1536, 8960, "12/2", 151936, 128 * K), 1e-6),
        ("qwen2.5-3b", "3.09B", _size(36, 2048, 11008, "16/2", 151936, 32 * K), 1e-6),
        ("qwen2.5-7b", "7.62B", _size(28, 3584, 18944, "28/4", 152064, 128 * K), 1e-6),
        ("qwen2.5-14b", "14.8B", _size(48, 5120, 13824, "40/8", 152064, 128 * K), 1e-5),
        ("qwen2.5-32b", "32.8B", _size(64, 5120, 27648, "40/8", 152064, 128 * K), 1e-5),
        ("qwen2.5-72b", "72.7B", _size(80, 8192, 29568, "64/8", 152064, 128 * K), 1e-5),
    ):
        tied = name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")
        fields = {"rms_norm_eps": epsilon, "rope_theta": 1000000.0, "tie_word_embeddings": tied}
        yield Preset(name, "qwen2", size | fields, parameters)
    usual = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "head_dim": 128}
    for name, parameters, size in (
        ("qwen3-0.6b", "0.6B", _size(28, 1024, 3072, "16/8", 151936, 40 * K)),
        ("qwen3-1.7b", "1.7B", _size(28, 2048, 6144, "16/8", 151936, 40 * K)),
        ("qwen3-4b", "4.0B", _size(36, 2560, 9728, "32/8", 151936, 40 * K)),
        ("qwen3-8b", "8.2B", _size(36, 4096, 12288, "32/8", 151936, 40 * K)),
        ("qwen3-14b", "14.8B", _size(40, 5120, 17408, "40/8", 151936, 40 * K)),
        ("qwen3-32b", "32.8B", _size(64, 5120, 25600, "64/8", 151936, 40 * K)),
    ):
        yield Preset(name, "qwen3", size | usual | {"tie_word_embeddings": size["hidden_size"] < 4096}, parameters)
    for name, parameters, active, size, width in (
        ("qwen3-30b-a3b", "30.5B", "3.3B", _size(48, 2048, 6144, "32/4", 151936, 40 * K), 768),
        ("qwen3-235b-a22b", "235B", "22B", _size(94, 4096, 12288, "64/4", 151936, 40 * K), 1536),
    ):
        experts = {
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width, "norm_topk_prob": True,
        }  # fmt: skip
        yield Preset(name, "qwen3_moe", size | usual | experts, parameters, active)
    # Qwen team, arXiv 2407.10671, and the release of Qwen1.5-MoE.
    for name, parameters, active, size, numbers in (
        ("qwen1.5-moe-a2.7b", "14.3B", "2.7B", _size(24, 2048, 5632, "16", 151936, 8 * K), (60, 4, 1408, 5632)),
        ("qwen2-57b-a14b", "57.4B", "14B", _size(28, 3584, 18944, "28/4", 151936, 32 * K), (64, 8, 2560, 20480)),
    ):
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
        usual = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "norm_topk_prob": False}
        yield Preset(name, "qwen2_moe", size | usual | dict(zip(names, numbers, strict=True)), parameters, active)


def _build_gemma() -> Iterator[Preset]:
    usual = {"rms_norm_eps": 1e-6, "head_dim": 256}
    # Gemma team, arXiv 2403.08295, 2408.00118 and 2503.19786. The larger ones of Gemma 3 see images, too, and are not
    # here; their text models convert.
    yield Preset("gemma-2b", "gemma", _size(18, 2048, 16384, "8/1", 256000, 8 * K) | usual, "2.51B")
    yield Preset("gemma-7b", "gemma", _size(28, 3072, 24576, "16", 256000, 8 * K) | usual, "8.54B")
    for name, parameters, size, width, scalar in (
        ("gemma2-2b", "2.61B", _size(26, 2304, 9216, "8/4", 256000, 8 * K), 256, 256),
        ("gemma2-9b", "9.24B", _size(42, 3584, 14336, "16/8", 256000, 8 * K), 256, 256),
        ("gemma2-27b", "27.2B", _size(46, 4608, 36864, "32/16", 256000, 8 * K), 128, 144),
    ):
        fields = {
            "head_dim": width, "query_pre_attn_scalar": scalar, "sliding_window": 4096,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention"] * (size["num_hidden_layers"] // 2),
        }  # fmt: skip
        yield Preset(name, "gemma2", size | usual | fields, parameters)
    fields = {
        "query_pre_attn_scalar": 256, "sliding_window": 512, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "layer_types": [*([*["sliding_attention"] * 5, "full_attention"] * 4), *["sliding_attention"] * 2],
    }  # fmt: skip
    size = _size(26, 1152, 6912, "4/1", 262144, 32 * K)
    yield Preset("gemma3-1b", "gemma3_text", size | usual | fields, "1.00B")


def _build_others() -> Iterator[Preset]:
    # Abdin et al., arXiv 2404.14219.
    for name, parameters, size in (
        ("phi3-mini", "3.82B", _size(32, 3072, 8192, "32", 32064, 4 * K)),
        ("phi3-medium", "14.0B", _size(40, 5120, 17920, "40/10", 32064, 4 * K)),
    ):
        yield Preset(name, "phi3", size | {"rms_norm_eps": 1e-5, "sliding_window": 2047}, parameters)
    # OLMo team, arXiv 2501.00656.
    for name, parameters, size in (
        ("olmo2-1b", "1.48B", _size(16, 2048, 8192, "16", 100352, 4 * K)),
        ("olmo2-7b", "7.30B", _size(32, 4096, 11008, "32", 100352, 4 * K)),
        ("olmo2-13b", "13.7B", _size(40, 5120, 13824, "40", 100352, 4 * K)),
        ("olmo2-32b", "32.2B", _size(64, 5120, 27648, "40/8", 100352, 4 * K)),
    ):
        yield Preset(name, "olmo2", size | {"rms_norm_eps": 1e-6, "rope_theta": 500000.0}, parameters)
    # The release of SmolLM 3.
    size = _size(36, 2048, 11008, "16/4", 128256, 64 * K)
    fields = {
        "rms_norm_eps": 1e-6, "rope_theta": 5000000.0, "tie_word_embeddings": True, "no_rope_layers": [1, 1, 1, 0] * 9,
    }  # fmt: skip
    yield Preset("smollm3-3b", "smollm3", size | fields, "3.08B")
    # Parmar et al., arXiv 2402.16819; Adler et al., arXiv 2406.11704, which gives embedding and the rest apart.
    for name, parameters, size in (
        ("nemotron4-15b", "15.6B", _size(32, 6144, 24576, "48/8", 256000, 4 * K)),
        ("nemotron4-340b", "341B", _size(96, 18432, 73728, "96/8", 256000, 4 * K)),
    ):
        width = size["hidden_size"] // size["num_attention_heads"]
        yield Preset(name, "nemotron", size | {"partial_rotary_factor": 0.5, "head_dim": width}, parameters)
    # Muennighoff et al., arXiv 2409.02060.
    fields = {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "rms_norm_eps": 1e-5}
    yield Preset("olmoe-1b-7b", "olmoe", _size(16, 2048, 1024, "16", 50304, 4 * K) | fields, "6.92B", "1.3B")
    # GLM team, arXiv 2508.06471, which calls them 106B and 355B: it counts neither embedding nor output layer, but does
    # count the MTP layer of the larger one, which is not here.
    for name, parameters, active, size, layers, experts, width, has_norms, scale in (
        ("glm4.5-air", "107B", "12B", _size(46, 4096, 10944, "96/8", 151552, 128 * K), 1, 128, 1408, False, 1.0),
        ("glm4.5", "353B", "32B", _size(92, 5120, 12288, "96/8", 151552, 128 * K), 3, 160, 1536, True, 2.5),
    ):
        fields = {
            "head_dim": 128, "n_routed_experts": experts, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "moe_intermediate_size": width, "first_k_dense_replace": layers, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": scale, "attention_bias": True, "use_qk_norm": has_norms,
            "partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
        }  # fmt: skip
        yield Preset(name, "glm4_moe", size | fields, parameters, active)


def _build_latent() -> Iterator[Preset]:
    # DeepSeek-AI, arXiv 2405.04434 and 2412.19437; Kimi team, arXiv 2507.20534. Without the MTP layers, which their
    # numbers do not count either.
    def describe(
        size: dict[str, Any], ranks: tuple[int | None, int], experts: tuple[int, int, int, int], dense_layers: int
    ) -> dict[str, Any]:
        names = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
        return {
            **size, "q_lora_rank": ranks[0], "kv_lora_rank": ranks[1], "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, **dict(zip(names, experts, strict=True)), "first_k_dense_replace": dense_layers,
            "rms_norm_eps": 1e-6,
        }  # fmt: skip

    lite = describe(_size(27, 2048, 10944, "16", 102400, 160 * K), (None, 512), (64, 6, 1408, 2), 1)
    lite |= {"rope_scaling": DEEPSEEK_POSITIONS | {"mscale": 0.707, "mscale_all_dim": 0.707}}
    yield Preset("deepseek-v2-lite", "deepseek_v2", lite, "15.7B", "2.4B")
    groups = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "rope_scaling": DEEPSEEK_POSITIONS}
    size = _size(61, 7168, 18432, "128", 129280, 160 * K)
    yield Preset(
        "deepseek-v3", "deepseek_v3", describe(size, (1536, 512), (256, 8, 2048, 1), 3) | groups, "671B", "37B"
    )
    size = _size(61, 7168, 18432, "64", 163840, 128 * K)
    fields = {
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
        "rope_scaling": DEEPSEEK_POSITIONS | {"factor": 32.0, "beta_fast": 1.0},
    }  # fmt: skip
    yield Preset("kimi-k2", "kimi_k2", describe(size, (1536, 512), (384, 8, 2048, 1), 1) | fields, "1.03T", "32B")


def _build_gpt_oss() -> Iterator[Preset]:
    # OpenAI, arXiv 2508.10925, table 1.
    for name, parameters, active, layers, experts in (
        ("gpt-oss-20b", "20.91B", "3.61B", 24, 32), ("gpt-oss-120b", "116.83B", "5.13B", 36, 128),
    ):  # fmt: skip
        fields = {
            "num_local_experts": experts, "num_experts_per_tok": 4, "head_dim": 64, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "rope_theta": 150000.0,
            "rope_scaling": GPT_OSS_POSITIONS, "rms_norm_eps": 1e-5,
        }  # fmt: skip
        yield Preset(name, "gpt_oss", _size(layers, 2880, 2880, "64/8", 201088, 128 * K) | fields, parameters, active)


def _build_llama4() -> Iterator[Preset]:
    # Meta AI, the release of Llama 4, which counts the vision encoder of 0.9 billion with them: 109B and 400B in all.
    # What is here reads and writes text.
    for name, parameters, experts, step, positions, context in (
        ("llama4-scout", "107.8B", 16, 1, LLAMA_31_POSITIONS | {"factor": 16.0, "high_freq_factor": 1.0}, 10240 * K),
        ("llama4-maverick", "400.7B", 128, 2, None, 1024 * K),
    ):
        fields = {
            "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": experts,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": step, "use_qk_norm": positions is not None,
            "rope_theta": 500000.0, "rope_scaling": positions, "rms_norm_eps": 1e-5,
        }  # fmt: skip
        yield Preset(name, "llama4_text", _size(48, 5120, 8192, "40/8", 202048, context) | fields, parameters, "17B")


def _build_hybrids() -> Iterator[Preset]:
    # Qwen team, the release of Qwen3-Next, September 2025. The MTP layer is not here.
    fields: dict[str, Any] = {
        "head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000000.0, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    size = _size(48, 2048, 5120, "16/2", 151936, 256 * K)
    yield Preset("qwen3-next-80b-a3b", "qwen3_next", size | fields, "80B", "3B")
    # NVIDIA, arXiv 2504.03624, and the release of Nemotron 3 Nano, December 2025. Trained without a bound of the steps,
    # as Megatron-LM computes them.
    mamba = {
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "head_dim": 128,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "time_step_min": 0,
        "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    yield Preset("nemotron-h-8b", "nemotron_h", _size(52, 4096, 21504, "32/8", 131072, 8 * K) | mamba, "8.1B")
    experts = {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    size = _size(52, 2688, 1856, "32/2", 131072, 256 * K)
    yield Preset("nemotron3-nano-30b-a3b", "nemotron_h", size | mamba | experts, "31.6B", "3.2B")


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for build in (
        _build_gpt,
        _build_llama,
        _build_mistral,
        _build_qwen,
        _build_gemma,
        _build_others,
        _build_latent,
        _build_gpt_oss,
        _build_llama4,
        _build_hybrids,
    )
    for preset in build()
}
"""Every preset by its name."""
