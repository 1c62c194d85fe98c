# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of the Hugging Face `tokenizers` library, read from local files without `transformers`.

HuggingFaceTokenizer reads `tokenizer.json`, and the names of the special tokens from `tokenizer_config.json` next to
it. GPT2BPETokenizer is the same byte-level BPE from `vocab.json` and `merges.txt`. No code from a tokenizer directory
is ever run, and nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.base import Tokenizer

LARGEST_ID = 2**31 - 1
"""Tokens are stored as int32 at most."""
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a tokenizer_config.json can name, in the order in which new ones get their ids."""

_CLASS_DEFAULTS = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
"""Special tokens that come with a `tokenizer_class` where the configuration does not name them."""

_GPT2_TOKENS = _CLASS_DEFAULTS["GPT2Tokenizer"]


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` with roles for its special tokens.

    backend                  what does the work
    special_tokens           role (see ROLES) to token text; tokens the vocabulary lacks must have been added to it
    include_special_tokens   let the post-processor add its tokens, such as Llama 3's <|begin_of_text|>, to every text
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        *,
        source: str = "",
        digest: str = "",
        include_special_tokens: bool = True,
    ) -> None:
        # Settings that the tokenizer was saved with: they would cut documents, or fill them up.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.include_special_tokens = include_special_tokens
        self.source = source
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._max_id = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.special_token_texts = dict(special_tokens)
        ids = {role: backend.token_to_id(token) for role, token in special_tokens.items()}
        # BERT-like vocabularies have no end of sequence: their separator ends documents.
        self.eod = _first_of(ids, "eos_token", "sep_token")
        self.bos = _first_of(ids, "bos_token", "cls_token")
        self.pad = _first_of(ids, "pad_token")
        self.unique_identifiers = {
            "class": type(self).__name__, "content": digest, "include_special_tokens": str(include_special_tokens),
        }  # fmt: skip

    @property
    def max_id(self) -> int:
        return self._max_id

    def tokenize(self, text: str) -> list[int]:
        return cast("list[int]", self._encode(text, self.include_special_tokens).ids)

    def tokenize_as_is(self, text: str) -> list[int]:
        return cast("list[int]", self._encode(text, False).ids)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=self.include_special_tokens)
        except Exception:
            # One text is at fault: tokenize() says what is wrong with it.
            return [self.tokenize(text) for text in texts]
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        # What the model writes is shown as it is: a special token that vanished would hide a fault.
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def _encode(self, text: str, include_special_tokens: bool) -> Any:
        try:
            return self.backend.encode(text, add_special_tokens=include_special_tokens)
        except Exception as error:
            raise DataError(f"the tokenizer {self.source} cannot encode the text {text[:40]!r}: {error}") from error


def _first_of(ids: Mapping[str, int | None], *roles: str) -> int | None:
    """The id of the first of these roles that a tokenizer has a token for; None where it has none."""
    return next((ids[role] for role in roles if ids.get(role) is not None), None)


def huggingface_tokenizer(
    model: str, *, include_special_tokens: bool = True, more_special_tokens: Sequence[str] = ()
) -> HuggingFaceTokenizer:
    """Read a tokenizer.json, or the directory that holds it, and its chat template if it has one.

    more_special_tokens   added after the vocabulary where it lacks them

    Raises ConfigError when there is no such file, DataError for a file that cannot be used.
    """
    path = Path(model)
    json_path = path / "tokenizer.json" if path.is_dir() else path
    if not json_path.is_file():
        raise ConfigError(_missing(model, json_path))
    _check_ids(json_path)
    backend = read(json_path, lambda: tokenizers.Tokenizer.from_file(str(json_path)))
    config = {
        **_read_json_object(json_path.with_name("special_tokens_map.json")),
        **_read_json_object(json_path.with_name("tokenizer_config.json")),
    }
    special_tokens = _name_special_tokens(backend, config, json_path)
    add_special(backend, more_special_tokens)
    tokenizer = HuggingFaceTokenizer(
        backend,
        special_tokens,
        source=str(json_path),
        digest=digest_files(json_path) + json.dumps([special_tokens, *more_special_tokens], sort_keys=True),
        include_special_tokens=include_special_tokens,
    )
    tokenizer.chat_template = _own_chat_template(json_path, config)
    return tokenizer


def gpt2_bpe_tokenizer(
    vocab_file: str,
    merge_file: str,
    *,
    include_special_tokens: bool = True,
    more_special_tokens: Sequence[str] = (),
) -> HuggingFaceTokenizer:
    """GPT-2's byte-level BPE from vocab.json and merges.txt; `<|endoftext|>` begins and ends documents.

    Raises ConfigError when a file is missing, DataError for one that cannot be used.
    """
    for flag, name in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if not Path(name).is_file():
            raise ConfigError(f"{flag} {name}: no such file; GPT2BPETokenizer reads vocab.json and merges.txt")
    _check_ids(Path(vocab_file))
    model = read(Path(vocab_file), lambda: tokenizers.models.BPE.from_file(vocab_file, merge_file), f" or {merge_file}")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = tokenizers.decoders.ByteLevel()
    add_special(backend, [*_GPT2_TOKENS.values(), *more_special_tokens])
    return HuggingFaceTokenizer(
        backend,
        _GPT2_TOKENS,
        source=vocab_file,
        digest=f"{digest_files(Path(vocab_file), Path(merge_file))} {list(more_special_tokens)}",
        include_special_tokens=include_special_tokens,
    )


def _check_ids(path: Path) -> None:
    """Raise DataError for a token id that no dataset can hold: the libraries abort the process, wait, or leave the
    token out. What is no JSON object is left to them."""
    try:
        content = json.loads(path.read_bytes())
        model = content.get("model")
    except (OSError, ValueError, RecursionError, AttributeError):
        return
    # A vocab.json may have a token of that name; a tokenizer.json without a model is the library's to refuse.
    if isinstance(model, dict):
        vocabulary, added = model.get("vocab", {}), content.get("added_tokens")
    else:
        vocabulary, added = ({} if path.name == "tokenizer.json" else content), ()
    numbered = list(vocabulary.items()) if isinstance(vocabulary, dict) else []
    added = added if isinstance(added, list) else ()
    numbered += [(each.get("content"), each.get("id")) for each in added if isinstance(each, dict)]
    for token, number in numbered:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= LARGEST_ID:
            raise DataError(
                f"{path}: the token {str(token)[:40]!r} has the id {str(number)[:40]}; ids are whole numbers from 0 to "
                f"{LARGEST_ID}: fetch or train the tokenizer again"
            )
    if isinstance(model, dict):
        _check_merges(path, model.get("continuing_subword_prefix"), model.get("merges"))


def _check_merges(path: Path, prefix: Any, merges: Any) -> None:
    """Raise DataError for a merge whose second part does not begin with the prefix of such parts: the library cuts as
    many bytes from it, and ends the process where it has fewer."""
    for merge in merges if isinstance(prefix, str) and isinstance(merges, list) else ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        second = parts[-1] if isinstance(parts, list) and parts else prefix
        if isinstance(second, str) and not second.startswith(prefix):
            raise DataError(
                f"{path}: continuing_subword_prefix is {prefix[:40]!r}, and the merge {str(merge)[:40]} does not have "
                "it; fetch or train the tokenizer again"
            )


def _missing(model: str, json_path: Path) -> str:
    if Path(model).exists():
        return f"--tokenizer-model {model}: the directory holds no tokenizer.json; HuggingFaceTokenizer reads that file"
    hint = ""
    # It looks like a name on the hub, which is never contacted from here.
    if model.count("/") == 1 and not model.startswith((".", "/")):
        hint = f"; fetch it from the Hugging Face hub first: hf download {model} --include 'tokenizer*' --local-dir DIR"
    return f"--tokenizer-model {model}: no such file or directory ({json_path.name} or its directory is expected){hint}"


def read(path: Path, reader: Callable[[], Any], or_path: str = "") -> Any:
    """Return what `reader` returns; whatever the library says about a broken file becomes a DataError."""
    try:
        return reader()
    except Exception as error:
        raise DataError(
            f"{path}{or_path}: not a usable tokenizer file ({str(error)[:200]}); fetch or train it again"
        ) from error


def _read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file that may be missing."""
    if not path.is_file():
        return {}
    content = read(path, lambda: json.loads(path.read_text(encoding="utf-8")))
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(content).__name__}; fetch or write it again")
    return content


def _name_special_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], json_path: Path) -> dict[str, str]:
    """Role to token text, after adding the tokens that the vocabulary lacks."""
    tokenizer_class = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    # What the configuration names itself comes later and wins.
    special_tokens = dict(_CLASS_DEFAULTS.get(tokenizer_class, {}))
    for role in ROLES:
        token = _token_text(config.get(role), role, json_path)
        if token is not None:
            special_tokens[role] = token
    ordered = {role: special_tokens[role] for role in ROLES if role in special_tokens}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    if not isinstance(extra, list):
        raise DataError(f"{json_path.parent}: additional_special_tokens must be a list of tokens, found {extra!r}")
    extra_tokens = [_token_text(token, "additional_special_tokens", json_path) for token in extra]
    add_special(backend, [*ordered.values(), *(token for token in extra_tokens if token)])
    return ordered


def _own_chat_template(json_path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja next to the tokenizer, else the configuration's; of several, the one named default."""
    path = json_path.with_name("chat_template.jinja")
    if path.is_file():
        return str(read(path, lambda: path.read_text(encoding="utf-8")))
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: Any, role: str, json_path: Path) -> str | None:
    """The text of a token given as such or as {"content": text}."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise DataError(f"{json_path.parent}: {role} in tokenizer_config.json must be a token's text, found {value!r}")
    return value


def add_special(backend: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Register special tokens that are not registered yet, so that their text becomes one id."""
    registered = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in dict.fromkeys(tokens):
        # Adding a registered token again would change how it strips spaces.
        if token not in registered:
            backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])


def digest_files(*paths: Path) -> str:
    """Return what tells the content of these files from any other."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
