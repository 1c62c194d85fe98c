# SPDX-License-Identifier: Apache-2.0
"""Average the weights of several checkpoints of one run into a new checkpoint.

    python tools/checkpoint/average.py --load checkpoints --last 3 --save averaged
    python tools/checkpoint/average.py --load checkpoints --iterations 100 200 300 --weights 1 2 4 --save weighted

The result has averaged weights, settings and tokenizer of the newest one, and no optimizer state: load it with
`--load averaged --finetune`, or with `--load averaged --no-load-optim --no-load-rng`. Every file is verified by its
checksum first. Tensors are read, averaged and written one after the other, so that no model is ever whole in memory.
"""

from __future__ import annotations

import argparse

from megatron.core.byte_progress import ByteProgress
from megatron.core.errors import ConfigError, command_line
from megatron.core.paths import explain_no_directory
from megatron.training.flags.argument import ProgramParser, path


def make_parser() -> ProgramParser:
    """Build the parser of the command line."""
    parser = ProgramParser(__doc__)
    parser.add_argument("--load", required=True, type=path, metavar="DIR", help="directory of the run's checkpoints")
    parser.add_argument("--save", required=True, type=path, metavar="DIR", help="directory for the new checkpoint")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--iterations", nargs="+", type=int, metavar="N", help="which checkpoints")
    chosen.add_argument("--last", type=int, metavar="COUNT", help="the newest COUNT checkpoints")
    parser.add_argument(
        "--weights", nargs="+", type=float, metavar="W", help="of each, oldest first with --last; alike"
    )
    return parser


def choose_iterations(arguments: argparse.Namespace) -> list[int]:
    """Return the iterations that were asked for, oldest first with --last. Raises ConfigError."""
    if arguments.iterations is not None:
        return list(arguments.iterations)
    from megatron.core.dist_checkpointing.directory import saved_iterations

    if problem := explain_no_directory(arguments.load):
        raise ConfigError(f"--load {arguments.load} {problem}; give the directory of the run's checkpoints")
    saved = saved_iterations(arguments.load)
    if not 2 <= arguments.last <= len(saved):
        raise ConfigError(
            f"--last {arguments.last}: {arguments.load} holds {len(saved)} checkpoint{'s' * (len(saved) != 1)}; "
            + (f"give a number from 2 to {len(saved)}" if len(saved) > 1 else "an average takes 2 or more")
        )
    return sorted(saved[: arguments.last])


@command_line
def main() -> int:
    arguments = make_parser().parse_args()
    iterations = choose_iterations(arguments)
    # torch is loaded only now: --help and a mistyped flag need none.
    from megatron.training.checkpoint.averaging import average_checkpoints, count_work_bytes

    with ByteProgress("averaging", count_work_bytes(arguments.load, iterations)) as progress:
        made = average_checkpoints(arguments.load, iterations, arguments.weights, arguments.save, progress.add)
    print(
        f"saved the average of {len(iterations)} checkpoints as {made}; load it with --load {arguments.save} --finetune"
    )
    return 0
