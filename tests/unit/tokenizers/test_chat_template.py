# SPDX-License-Identifier: Apache-2.0
"""Conversations through chat templates: transformers' texts and ids, and what a template may not do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.sft_dataset import encode
from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.build import build_tokenizer
from tests.preprocess_runs import DATA
from tests.support.run_flags import run_config

pytest.importorskip("jinja2")
TEMPLATE = """{% for m in messages %}
    {% if loop.first and m.role == 'tool' %}{{ raise_exception('no tool first') }}{% endif %}
    {{- '<' + m.role + '>' + m.content | trim + eos_token }}{{ m.get('extra', {}) | tojson }}
    {%- if m.stop %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": " Hello <there> & you ", "extra": {"b": "é<", "a": [1, None]}},
    {"role": "assistant", "content": "naïve", "stop": True},
    {"role": "user", "content": "never seen"},
]


def model(folder: Path, **config: object) -> Path:
    directory = Path(shutil.copytree(DATA / "tok" / "hf_bpe1k", folder / "model"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("kept_in", ["configuration", "list", "file"])
def test_as_transformers(kept_in: str, add_generation_prompt: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    several = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": TEMPLATE}]
    stored: dict[str, Any] = {"configuration": {"chat_template": TEMPLATE}, "list": {"chat_template": several}}
    directory = model(tmp_path, **stored.get(kept_in, {}))
    if kept_in == "file":
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    expected = transformers.AutoTokenizer.from_pretrained(str(directory))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(directory))
    wanted = expected.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=add_generation_prompt) == wanted
    ids = expected.encode(wanted, add_special_tokens=False)
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=add_generation_prompt) == ids


@pytest.mark.flags("--chat-template")
@pytest.mark.parametrize("kind", ["text", "file"])
def test_template_of_the_flag(kind: str, tmp_path: Path) -> None:
    from megatron.training.flags.read import read_run_config
    from megatron.training.recipes.vocabulary import build_tokenizer
    from tests.support.run_flags import SMALLEST_RUN

    text = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text)
    value = text if kind == "text" else str(tmp_path / "chat.jinja")
    config = read_run_config(
        [*SMALLEST_RUN.split(), "--tokenizer-type", "HuggingFaceTokenizer", "--vocab-size", "1000", "--tokenizer-model",
         str(model(tmp_path, chat_template="own")), "--chat-template", value], {},
    )  # fmt: skip
    assert build_tokenizer(config).render_chat(MESSAGES[1:]) == "[naïve][never seen]"


def test_tokens_that_a_post_processor_adds_are_not_added(tmp_path: Path) -> None:
    directory = model(tmp_path, chat_template="{{ messages[0].content }}")
    content = json.loads((directory / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(directory))
    assert tokenizer.tokenize("naïve") == [0, *tokenizer.apply_chat_template(MESSAGES[1:])]


def test_special_tokens_of_sentencepiece() -> None:
    tokenizer = build_tokenizer(
        "SentencePieceTokenizer",
        tokenizer_model=str(DATA / "tok" / "sp_bpe800.model"),
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    )
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<s>hi</s>"


@pytest.mark.parametrize(("template", "message"), [
    ("{% for %}", "cannot be used: TemplateSyntaxError"),
    ("{{ raise_exception('no such role') }}", "no such role"),
    ("{{ messages[0].content.nothing.at_all }}", "UndefinedError"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
])  # fmt: skip
def test_templates_that_fail(template: str, message: str) -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=9, chat_template=template)
    with pytest.raises(DataError, match=message):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.flags("--chat-template")
def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template; give one with --chat-template"):
        build_tokenizer("NullTokenizer", vocab_size=9).render_chat([])
    with pytest.raises(ConfigError, match=r"--chat-template .*none\.jinja: No such file"):
        build_tokenizer("NullTokenizer", vocab_size=9, chat_template=str(tmp_path / "none.jinja"))
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        build_tokenizer("NullTokenizer", vocab_size=9, chat_template=str(tmp_path / "latin.jinja"))
    assert run_config("").tokenizer.chat_template is None


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": " Be kind. "},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]


@pytest.mark.flags("--sft-tokenizer-prompt-format")
def test_prompt_formats(tmp_path: Path) -> None:
    own = {"tokenizer_model": str(model(tmp_path, chat_template=TEMPLATE))}
    special = own | {"special_tokens": ["<SPECIAL_10>", "<SPECIAL_11>"]}
    nemotron = build_tokenizer("SFTTokenizer", **special)
    text = "<SPECIAL_10>System\nBe kind.\n<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\n"
    assert nemotron.render_chat(CONVERSATION[:2], add_generation_prompt=True) == text
    assert nemotron.render_chat(CONVERSATION) == text + "Hello\n"
    identity = build_tokenizer("SFTTokenizer", **own, sft_tokenizer_prompt_format="identity")
    assert identity.render_chat(CONVERSATION) == " Be kind. HiHello"
    default = build_tokenizer("SFTTokenizer", **own, sft_tokenizer_prompt_format="default")
    assert default.chat_template == TEMPLATE
    assert build_tokenizer("SFTTokenizer", **own, chat_template="{{ 1 }}").render_chat(CONVERSATION) == "1"


@pytest.mark.flags("--sft-tokenizer-prompt-format")
def test_loss_of_a_prompt_format_is_on_the_answers(tmp_path: Path) -> None:
    special = ["<SPECIAL_10>", "<SPECIAL_11>"]
    tokenizer = build_tokenizer("SFTTokenizer", tokenizer_model=str(model(tmp_path)), special_tokens=special)
    later = [*CONVERSATION, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Bye"}]
    ids, counts = encode(later, tokenizer, "here")
    learned = tokenizer.detokenize([token for token, counted in zip(ids, counts, strict=True) if counted])
    assert learned == "Hello\nBye\n<|endoftext|>" and ids[-1] == tokenizer.eod


@pytest.mark.flags("--sft-tokenizer-prompt-format")
@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("SFTTokenizer", {}, "needs the tokens <SPECIAL_10> and <SPECIAL_11> in the vocabulary"),
        ("SFTTokenizer", {"sft_tokenizer_prompt_format": "nemotron-nano-v2"}, "nemotron-nano-v2 is not supported"),
        ("SFTTokenizer", {"sft_tokenizer_prompt_format": "identity", "chat_template": "x{{1}}"}, "keep one"),
        ("HuggingFaceTokenizer", {"sft_tokenizer_prompt_format": "identity"}, "says nothing about --tokenizer-type"),
    ],
)
def test_prompt_formats_that_cannot_be(kind: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        build_tokenizer(kind, tokenizer_model=str(model(tmp_path)), **options)


def test_prompt_format_has_no_place_for_other_roles(tmp_path: Path) -> None:
    special = ["<SPECIAL_10>", "<SPECIAL_11>"]
    tokenizer = build_tokenizer("SFTTokenizer", tokenizer_model=str(model(tmp_path)), special_tokens=special)
    with pytest.raises(DataError, match="a message of role tool has no place in the prompt format"):
        tokenizer.render_chat([{"role": "tool", "content": "4"}])
