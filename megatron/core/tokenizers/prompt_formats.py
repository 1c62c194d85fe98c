# SPDX-License-Identifier: Apache-2.0
"""The prompt formats of SFTTokenizer: which text a conversation becomes (--sft-tokenizer-prompt-format)."""

from __future__ import annotations

from megatron.core.errors import ConfigError
from megatron.core.tokenizers.base import Tokenizer

_NEMOTRON_H = """
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{ '<SPECIAL_10>System\n' }}
    {%- elif message.role == 'user' -%}
        {{ '<SPECIAL_11>User\n' }}
    {%- elif message.role == 'assistant' -%}
        {{ '<SPECIAL_11>Assistant\n' }}
    {%- else -%}
        {{ raise_exception('a message of role ' + message.role + ' has no place in the prompt format') }}
    {%- endif -%}
    {{ message.content | trim }}{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<SPECIAL_11>Assistant\n' }}{%- endif -%}
"""
_IDENTITY = "{%- for message in messages -%}{{ message.content }}{%- endfor -%}"
_NEMOTRON_H_TOKENS = ("<SPECIAL_10>", "<SPECIAL_11>")


def with_prompt_format(tokenizer: Tokenizer, prompt_format: str) -> Tokenizer:
    """The tokenizer with the chat template of a prompt format; "default" keeps the tokenizer's.

    Raises ConfigError where the vocabulary lacks the tokens of the format.
    """
    if prompt_format == "identity":
        tokenizer.chat_template = _IDENTITY
    elif prompt_format == "nemotron-h-aligned":
        lacking = [token for token in _NEMOTRON_H_TOKENS if len(tokenizer.tokenize_as_is(token)) != 1]
        if lacking:
            raise ConfigError(
                f"--sft-tokenizer-prompt-format {prompt_format} needs the tokens {' and '.join(lacking)} in the "
                "vocabulary; add them with --tokenizer-special-tokens, or use default for the tokenizer's own template"
            )
        tokenizer.chat_template = _NEMOTRON_H
    return tokenizer
