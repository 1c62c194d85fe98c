# SPDX-License-Identifier: Apache-2.0
"""Check token datasets and say what is in them: structure, token ids, checksums, statistics, the text of a document.

    python tools/verify_dataset.py --input data/corpus_text_document \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/tokenizer --decode 3

Every value of the index and every token is read once. With a tokenizer (flags as for pretrain_gpt.py) token ids must
belong to its vocabulary. --write-sum keeps checksums in PREFIX.sum; training verifies them from then on. The exit code
is 0 when all is well, 2 when a dataset cannot be used, 74 when it cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.datasets.checksums import get_sum_path, verify_checksums, write_checksums
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.inspection import DatasetFacts, check_vocabulary, document_tokens, inspect
from megatron.core.errors import DataError, MegatronError, command_line, report_error
from megatron.core.tokenizers.build import tokenizer_from
from megatron.training.config.data import TokenizerConfig
from megatron.training.flags.argument import ProgramParser, TokenizerFlags, ToolHelpFormatter, path_text

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import Tokenizer

_LONGEST_SHOWN = 400  # characters of a decoded document


def make_parser() -> ProgramParser:
    """Build the parser of the command line, without the flags of the tokenizer."""
    parser = ProgramParser(__doc__, formatter_class=ToolHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, type=path_text, metavar="PREFIX", help="paths without .bin/.idx"
    )
    parser.add_argument("--write-sum", action="store_true", help="write PREFIX.sum for data that is found good")
    parser.add_argument("--decode", type=int, metavar="N", default=0, help="show the first N documents as text")
    parser.add_argument("--document", type=int, metavar="N", help="show document N as text, counted from 0")
    parser.add_argument("--multimodal", action="store_true", help="the datasets hold a mode per sequence")
    return parser


def describe(facts: DatasetFacts, tokenizer: Tokenizer | None) -> list[str]:
    """Return the statistics of a dataset as lines of text."""
    documents, sequences = facts.document_lengths, facts.sequence_lengths
    empty = f", {facts.empty_documents} of them empty" if facts.empty_documents else ""
    lines = [
        f"documents        {facts.documents}{empty}",
        f"sequences        {facts.sequences}",
        f"tokens           {facts.tokens} ({facts.dtype})",
        f"document length  {documents.smallest} to {documents.largest} tokens, "
        f"median {documents.median}, mean {documents.mean:.1f}",
    ]
    if facts.sequences != facts.documents - facts.empty_documents:
        lines.append(
            f"sequence length  {sequences.smallest} to {sequences.largest} tokens, "
            f"median {sequences.median}, mean {sequences.mean:.1f}"
        )
    distinct = "" if facts.distinct_ids is None else f", {facts.distinct_ids} different ones"
    known = "" if tokenizer is None else f"; the vocabulary has {tokenizer.vocab_size}"
    lines.append(f"token ids        {facts.smallest_id} to {facts.largest_id}{distinct}{known}")
    if tokenizer is not None and tokenizer.eod is not None:
        lines.append(
            f"end of document  {facts.documents_ending} of {facts.documents - facts.empty_documents} documents end "
            f"with id {tokenizer.eod}"
        )
    return lines


def show_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> None:
    """Print the beginning of a document: its text, or its ids where no tokenizer is given."""
    tokens = document_tokens(dataset, number)
    # A character needs at most four tokens or so; the rest of a long document need not be decoded.
    some = tokens[: 4 * _LONGEST_SHOWN].tolist()
    text = str(some) if tokenizer is None else repr(tokenizer.detokenize(some))
    shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
    print(f"  document {number} ({len(tokens)} tokens): {shown}")


def compare_former(prefix: str) -> bool:
    """Before checksums are written again: say whether the earlier ones agree, and move them out of the way."""
    try:
        return verify_checksums(prefix)
    except DataError as error:
        print(f"warning: checksums that do not agree are replaced: {error}", file=sys.stderr)
        Path(get_sum_path(prefix)).unlink(missing_ok=True)
        return False


def verify(prefix: str, arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> None:
    """Check one dataset and report. Raises MegatronError for what is wrong with it."""
    # Checksums first: where they disagree, anything found afterwards is a consequence.
    has_sums = compare_former(prefix) if arguments.write_sum else verify_checksums(prefix)
    dataset = IndexedDataset(prefix, multimodal=arguments.multimodal)
    facts = inspect(dataset, None if tokenizer is None else tokenizer.eod)
    print(f"{prefix}: structure is good", *(f"  {line}" for line in describe(facts, tokenizer)), sep="\n")
    if tokenizer is not None:
        check_vocabulary(dataset, tokenizer.max_id + 1)
    numbers = list(range(min(arguments.decode, facts.documents)))
    for number in numbers if arguments.document is None else [*numbers, arguments.document]:
        show_document(dataset, number, tokenizer)
    if arguments.write_sum:
        print(f"  checksums        written to {write_checksums(prefix)}")
    else:
        print("  checksums        " + ("agree with PREFIX.sum" if has_sums else "none (--write-sum makes them)"))


@command_line
def main() -> int:
    parser = make_parser()
    tokenizer_flags = TokenizerFlags(parser)
    arguments = parser.parse_args(tokenizer_flags.translated(sys.argv[1:]))
    # No flag of a tokenizer given: token ids are then only described, not judged.
    settings = tokenizer_flags.config()
    tokenizer = None if settings == TokenizerConfig() else tokenizer_from(settings)
    worst = 0
    for prefix in arguments.input:
        try:
            verify(prefix, arguments, tokenizer)
        except MegatronError as error:
            # With several datasets one that is damaged must not keep the others from being checked.
            if arguments.traceback or len(arguments.input) == 1:
                raise
            report_error(error)
            worst = max(worst, error.exit_code)
    return worst
