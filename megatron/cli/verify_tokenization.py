# SPDX-License-Identifier: Apache-2.0
"""Check that token datasets are what the tokenizer makes of the text: the command line of preprocess_data.py again.

    python tools/verify_tokenization.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/tokenizer --append-eod --documents 1000

Every document (or the first --documents) is tokenized again, without the fast encoder, and compared token by token.
The exit code is 0 when all are equal, 2 at the first difference, whose place is named.
"""

from __future__ import annotations

import os
import sys

from megatron.cli.preprocess_data import build_options, make_parser, parse_arguments
from megatron.core.datasets.preprocessing.verification import Verified, verify_tokenization
from megatron.core.errors import command_line
from megatron.core.tokenizers.build import tokenizer_from
from megatron.training.flags.argument import ProgramParser


def make_verification_parser() -> ProgramParser:
    """Build the parser of preprocess_data.py with --documents."""
    parser = make_parser()
    parser.prog, parser.description = "verify_tokenization.py", __doc__
    parser.usage = "%(prog)s --input FILE --output-prefix PREFIX [--documents N] [--flag value ...]"
    parser.add_argument("--documents", type=int, metavar="N", help="compare only the first N documents of the input")
    parser.set_defaults(workers=1)
    for action in parser._actions:
        if "--workers" in action.option_strings:
            action.required, action.help = False, "has no effect: one process compares"
    return parser


def report(verified: Verified) -> None:
    """Print what was compared."""
    for prefix in verified.prefixes:
        print(f"{prefix}: equal")
    print(
        f"{verified.documents} documents, {verified.sequences} sequences, {verified.tokens} tokens compared; "
        f"detokenizing gives back {verified.restored} of {verified.texts} texts to the letter"
    )
    if verified.bad_lines:
        print(f"warning: {verified.bad_lines} unusable lines were left out", file=sys.stderr)


@command_line
def main() -> int:
    arguments, tokenizer = parse_arguments(sys.argv[1:], make_verification_parser())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if tokenizer.use_gigatoken:
        print("note: --use-gigatoken has no effect: tokens are compared with the tokenizer's own", file=sys.stderr)
    report(verify_tokenization(build_options(arguments, tokenizer), tokenizer_from(tokenizer), arguments.documents))
    return 0
