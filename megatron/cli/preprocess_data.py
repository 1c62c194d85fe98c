# SPDX-License-Identifier: Apache-2.0
"""Turn text (.jsonl, .jsonl.gz, .jsonl.zst) into a token dataset for pretraining: PREFIX_KEY_document.bin and .idx.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/tokenizer --append-eod --workers 8

Neither torch nor a network is needed. A line is a JSON object; every key of --json-keys becomes a separate dataset.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import signal
import sys
from types import FrameType

from megatron.core.datasets.preprocessing.job import (
    PreprocessOptions,
    Summary,
    find_fastest,
    preprocess,
)
from megatron.core.errors import ConfigError, command_line
from megatron.core.tokenizers.build import tokenizer_from
from megatron.training.config.data import TokenizerConfig
from megatron.training.flags.argument import ProgramParser, TokenizerFlags, ToolHelpFormatter, path_text

SEARCH_DOCUMENTS = 100_000
# Accepted, so that the flags of a training run can be handed over as they are.
WITHOUT_EFFECT = (
    "--padded-vocab-size",
    "--make-vocab-size-divisible-by",
    "--no-pad-vocab-size",
    "--disable-pad-vocab-size",
    "--chat-template",
)
"""Flags of the model and of conversations; token files do not depend on them."""


def _explain_unknown(parser: ProgramParser, arguments: list[str]) -> ConfigError:
    """The error for arguments that no flag takes, with the nearest known flag."""
    known, problems = sorted(parser._option_string_actions), []
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--"):
            # Flags written with underscores are the commonest mistake.
            near = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
            problems.append(f"{name} is not a flag of this tool" + (f"; did you mean {near[0]}?" if near else ""))
    return ConfigError(problems or f"{arguments[0]!r} does not belong to any flag")


def make_parser() -> ProgramParser:
    """Build the parser of the command line, without the flags of the tokenizer."""
    parser = ProgramParser(
        __doc__,
        see="--help",
        formatter_class=ToolHelpFormatter,
        usage="%(prog)s --input FILE --output-prefix PREFIX --workers N [--flag value ...]",
    )
    data = parser.add_argument_group("input")
    data.add_argument(
        "--input",
        required=True,
        type=path_text,
        metavar="FILE",
        help="a .jsonl, .jsonl.gz or .jsonl.zst file, or a quoted glob pattern",
    )
    data.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read, each a dataset (default: text)"
    )
    data.add_argument(
        "--on-bad-line",
        choices=("error", "skip"),
        default="error",
        help="at an unusable line, stop (default), or leave it out, count it, and list it at the end",
    )
    data.add_argument(
        "--max-bad", type=int, metavar="N", help="with --on-bad-line skip: stop at more than N unusable lines"
    )
    data.add_argument(
        "--max-line-bytes", type=int, default=1 << 26, metavar="BYTES", help="longest line (default: 64 MiB)"
    )

    text = parser.add_argument_group("sentences")
    text.add_argument(
        "--split-sentences", action="store_true", help="a sequence per sentence, with nltk and its local Punkt data"
    )
    text.add_argument(
        "--keep-newlines", action="store_true", help="with --split-sentences: keep white space behind a sentence"
    )
    text.add_argument(
        "--lang", default="english", metavar="LANGUAGE", help="with --split-sentences: the language (default: english)"
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--append-eod", action="store_true", help="end every document that is not empty with the end-of-document token"
    )
    output.add_argument(
        "--output-prefix", required=True, type=path_text, metavar="PREFIX", help="path without _KEY_document.bin"
    )
    output.add_argument("--overwrite", action="store_true", help="replace existing output")
    output.add_argument(
        "--partitions", type=int, default=1, metavar="N", help="also write N parts, lines dealt out in turn"
    )
    output.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="with --partitions: parts of consecutive lines, so that the whole keeps the order of the input",
    )

    run = parser.add_argument_group("running")
    run.add_argument(
        "--workers", type=int, required=True, metavar="N", help="processes that tokenize, a multiple of --partitions"
    )
    run.add_argument(
        "--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines (default: 1000)"
    )
    run.add_argument(
        "--find-optimal-num-workers",
        action="store_true",
        help="say which of --workers-to-check is fastest on the first --max-documents, and write nothing",
    )
    run.add_argument(
        "--workers-to-check", nargs="+", type=int, default=[16, 32, 64], metavar="N", help="(default: 16 32 64)"
    )
    run.add_argument("--max-documents", type=int, metavar="N", help="with the search for workers (default: 100000)")
    # Upstream's tool knows it; here it belongs to the model, and a note says that it has no effect.
    run.add_argument("--make-vocab-size-divisible-by", help=argparse.SUPPRESS)
    return parser


def parse_arguments(argv: list[str], parser: ProgramParser) -> tuple[argparse.Namespace, TokenizerConfig]:
    """Return the arguments, and the tokenizer's. Raises ConfigError for unknown and unusable ones."""
    tokenizer = TokenizerFlags(parser)
    argv = tokenizer.translated(argv)
    # Unknown flags come first: a missing --input matters less than a misspelt one.
    unknown = [
        item for item in argv if item.startswith("--") and item.partition("=")[0] not in parser._option_string_actions
    ]
    if unknown:
        raise _explain_unknown(parser, unknown)
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        raise _explain_unknown(parser, rest)
    given = {item.partition("=")[0] for item in argv}
    notes = [f"{name} has no effect here: token files do not depend on it" for name in WITHOUT_EFFECT if name in given]
    if not arguments.split_sentences:
        splitting = given & {"--keep-newlines", "--lang"}
        notes += [f"{name} has no effect without --split-sentences" for name in sorted(splitting)]
    if not arguments.find_optimal_num_workers:
        searching = given & {"--workers-to-check", "--max-documents"}
        notes += [f"{name} has no effect without --find-optimal-num-workers" for name in sorted(searching)]
    if arguments.keep_sequential_samples and arguments.partitions == 1:
        notes.append("--keep-sequential-samples has no effect without --partitions")
    for note in (*tokenizer.notes, *notes):
        print(f"note: {note}", file=sys.stderr)
    return arguments, tokenizer.config()


def build_options(arguments: argparse.Namespace, tokenizer: TokenizerConfig) -> PreprocessOptions:
    """Return the settings of the job."""
    names = {field.name for field in dataclasses.fields(PreprocessOptions)}
    options = {name: value for name, value in vars(arguments).items() if name in names}
    return PreprocessOptions(
        **options | {"json_keys": tuple(arguments.json_keys), "use_gigatoken": tokenizer.use_gigatoken}
    )


def report(summary: Summary) -> None:
    """Say what was written, and what was left out."""
    for key, prefix in zip(summary.tokens, summary.prefixes, strict=True):
        print(
            f"wrote {prefix}.bin and .idx: {summary.documents} documents, {summary.sequences[key]} sequences, "
            f"{summary.tokens[key]} tokens ({summary.dtype})"
        )
    if summary.blank_lines:
        print(f"note: {summary.blank_lines} blank lines were skipped", file=sys.stderr)
    if summary.bad_lines:
        print(f"warning: {summary.bad_lines} unusable lines were skipped:", file=sys.stderr)
        for problem in summary.problems:
            print(f"  {problem}", file=sys.stderr)
        if summary.bad_lines > len(summary.problems):
            print(f"  and {summary.bad_lines - len(summary.problems)} more", file=sys.stderr)


def end_on_sigterm(number: int, frame: FrameType | None) -> None:
    """Leave through the cleanup that removes unfinished files."""
    # The exit code that a shell gives a process ended by this signal.
    raise SystemExit(128 + number)


@command_line
def main() -> int:
    arguments, tokenizer = parse_arguments(sys.argv[1:], make_parser())
    # One thread per worker: the number of processes is the user's choice, and forked thread pools are a hazard.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGTERM, end_on_sigterm)
    options = build_options(arguments, tokenizer)
    if options.use_gigatoken:
        print(
            "note: --use-gigatoken: the fast encoder here is tiktoken's, over the converted vocabulary", file=sys.stderr
        )
    if arguments.find_optimal_num_workers:
        documents = SEARCH_DOCUMENTS if options.max_documents is None else options.max_documents
        fastest = find_fastest(options, tokenizer_from(tokenizer), arguments.workers_to_check, documents)
        print(f"fastest: --workers {fastest}")
        return 0
    # --max-documents is for the search for workers only; a dataset is always whole.
    report(preprocess(dataclasses.replace(options, max_documents=None), tokenizer_from(tokenizer)))
    return 0
