# SPDX-License-Identifier: Apache-2.0
"""Merge token datasets into one: PREFIX.bin and PREFIX.idx with the documents of all parts, one part after another.

    python tools/merge_datasets.py --input parts/ --output-prefix data/corpus

The result has the bytes that preprocessing all the text at once would have written. Every part is checked first.
"""

from __future__ import annotations

import os
import sys

from megatron.core.datasets.merging import merge, order_surprise, prefixes_in
from megatron.core.datasets.preprocessing.output import output_lock
from megatron.core.errors import command_line
from megatron.training.flags.argument import ProgramParser, path_text


def make_parser() -> ProgramParser:
    """Build the parser of the command line."""
    parser = ProgramParser(__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        type=path_text,
        metavar="PATH",
        help="a directory, whose datasets are merged in the order of their names; or prefixes (paths without "
        ".bin/.idx), merged in the order given",
    )
    parser.add_argument(
        "--output-prefix", required=True, type=path_text, metavar="PREFIX", help="path without .bin/.idx"
    )
    parser.add_argument("--multimodal", action="store_true", help="the datasets hold a mode per sequence")
    parser.add_argument("--overwrite", action="store_true", help="replace existing output")
    return parser


@command_line
def main() -> int:
    arguments = make_parser().parse_args()
    is_directory = len(arguments.input) == 1 and os.path.isdir(arguments.input[0])
    prefixes = prefixes_in(arguments.input[0]) if is_directory else arguments.input
    surprise = order_surprise(prefixes) if is_directory else None
    if surprise is not None:
        print(f"note: {surprise}", file=sys.stderr)
    # Two processes that write the same prefix would mix their bytes.
    with output_lock(arguments.output_prefix):
        merged = merge(
            prefixes, arguments.output_prefix, multimodal=arguments.multimodal, overwrite=arguments.overwrite
        )
    print(
        f"wrote {merged.prefix}.bin and .idx: {len(prefixes)} datasets, {merged.documents} documents, "
        f"{merged.sequences} sequences, {merged.tokens} tokens ({merged.dtype})"
    )
    return 0
