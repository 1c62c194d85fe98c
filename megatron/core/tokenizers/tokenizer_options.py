# SPDX-License-Identifier: Apache-2.0
"""Settings that describe a tokenizer: the fields are flags of training and of the data tools alike."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import PathText

PROMPT_FORMATS = ("nemotron-h-aligned", "identity", "default")
UNSUPPORTED_FORMATS = ("nemotron-nano-v2",)
WORKING_TYPES = (
    "HuggingFaceTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer",
    "Llama2Tokenizer", "TikTokenizer", "BertWordPieceLowerCase", "BertWordPieceCase", "NullTokenizer", "SFTTokenizer",
)  # fmt: skip
UNSUPPORTED_TYPES = ("MultimodalTokenizer", "NullMultimodalTokenizer")
DEFAULT_TYPE = "GPT2BPETokenizer"
_NEEDED = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "NullTokenizer": ("vocab_size",),
}
"""Settings that a tokenizer is made from; other types are made from their --tokenizer-model."""


@dataclass(kw_only=True)
class TokenizerOptions(CheckedConfig):
    """Tokenizer."""

    usual_kind = "numerics"

    tokenizer_type: str | None = flag(
        None,
        choices=(*WORKING_TYPES, *UNSUPPORTED_TYPES),
        unsupported_choices=UNSUPPORTED_TYPES,
        kind="shape",
    )
    """Kind of tokenizer; GPT2BPETokenizer when not given. The three SentencePiece types are one and the same;
    SFTTokenizer is a HuggingFaceTokenizer with a prompt format for conversations."""
    tokenizer_model: PathText | None = flag(None, kind="shape")
    """File or directory of the tokenizer: tokenizer.json (HuggingFaceTokenizer), tokenizer.model (SentencePiece), or
    the directory that holds it; the vocabulary in JSON (TikTokenizer)."""
    vocab_file: PathText | None = flag(None, kind="shape")
    """vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPieceLowerCase and BertWordPieceCase."""
    merge_file: PathText | None = flag(None, kind="shape")
    """merges.txt of GPT2BPETokenizer."""
    vocab_size: int | None = flag(None, minimum=1, unit="tokens", kind="shape")
    """Vocabulary size before padding. NullTokenizer needs it; TikTokenizer keeps as many tokens of its file, special
    ones included; otherwise it is the tokenizer's."""
    vocab_extra_ids: int = flag(0, minimum=0, maximum=1_000_000, unit="tokens", kind="shape")
    """Tokens <extra_id_0>, <extra_id_1>, ... to add after the vocabulary."""
    metadata_path: PathText | None = flag(None, names=("--tokenizer-metadata",), metavar="FILE")
    """tokenizer_metadata.json: the library says which tokenizer it is where --tokenizer-type is not given, and the chat
    template is used where --chat-template is not given."""
    special_tokens: list[str] | None = flag(None, names=("--tokenizer-special-tokens",), metavar="TOKEN")
    """Special tokens to add. TikTokenizer: all named special tokens in the order of their ids, <unk> <s> </s> <mask>
    <pad> <cls> <sep> among them."""
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """Pattern by which TikTokenizer cuts text into words; v2 when not given."""
    tiktoken_num_special_tokens: int = flag(1000, minimum=7, maximum=1_000_000, unit="tokens")
    """Ids that TikTokenizer keeps for special tokens, before all others."""
    tokenizer_sentencepiece_legacy: bool = False
    """SentencePiece: look for --tokenizer-special-tokens in the text and encode the text between them separately."""
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = True
    """SentencePiece: let a model that was trained so drop leading, trailing and repeated spaces."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Do not let the tokenizer add special tokens, such as a beginning of text, to every text."""
    trust_remote_code: bool = flag(False, kind="report")
    """Run the Python code in a Hugging Face tokenizer's directory if its tokenizer_config.json names some (auto_map).
    Without this flag no code is ever run."""
    use_gigatoken: bool = flag(False, kind="kernel")
    """Encode text by the fast encoder for byte-level BPE, which is tiktoken's over the converted vocabulary, with the
    tokenizer's ids; a tokenizer that cannot be converted is refused instead of being slow."""
    null_tokenizer_eod_id: int | None = flag(None, minimum=0)
    """End of document of NullTokenizer; its last id when not given."""
    null_tokenizer_pad_id: int = flag(-1, minimum=-1)
    """Padding of NullTokenizer."""
    chat_template: PathText | None = None
    """Jinja template for conversations, or the file that holds it, instead of the tokenizer's."""
    sft_tokenizer_prompt_format: str = flag(
        "nemotron-h-aligned", choices=(*PROMPT_FORMATS, *UNSUPPORTED_FORMATS), unsupported_choices=UNSUPPORTED_FORMATS
    )
    """Form in which SFTTokenizer writes conversations: nemotron-h-aligned, identity (only the contents), or default
    (the tokenizer's chat template)."""

    def list_missing(self) -> list[str]:
        """The flags that this type of tokenizer needs and that are not given."""
        fields = _NEEDED.get(self.tokenizer_type or DEFAULT_TYPE, ("tokenizer_model",))
        return [self.flag(field) for field in fields if getattr(self, field) is None]
