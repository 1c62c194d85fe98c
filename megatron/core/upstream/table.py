"""Upstream's names below megatron.core that are not where upstream has them: see names.py."""

from __future__ import annotations

from megatron.core.upstream.names import UpstreamNames

_PIPELINE = "megatron.core.pipeline_parallel.forward_backward"
_TOKENIZERS = "megatron.core.upstream.tokenizers"

DEFINED: dict[str, dict[str, str]] = {
    "megatron.core.datasets.utils": {"compile_helpers": "megatron.core.datasets.index_builders"},
    "megatron.core.pipeline_parallel.schedules": {"get_forward_backward_func": _PIPELINE},
    "megatron.core.tokenizers": {"MegatronTokenizer": _TOKENIZERS},
    "megatron.core.tokenizers.text": {"MegatronTokenizerText": _TOKENIZERS},
    "megatron.core.tokenizers.utils.build_tokenizer": {
        "build_tokenizer": _TOKENIZERS,
        "vocab_size_with_padding": _TOKENIZERS,
    },
}

ABSENT: dict[str, str] = {}

CORE_NAMES = UpstreamNames(DEFINED, ABSENT)
