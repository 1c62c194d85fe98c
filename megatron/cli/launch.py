# SPDX-License-Identifier: Apache-2.0
"""Start the training in several processes: torchrun, but for its last words.

    python -m megatron launch --nproc_per_node 8 -- FLAGS                   flags of pretrain_gpt.py
    python -m megatron launch --nproc_per_node 8 my_script.py ARGUMENTS     your script

torchrun's options come before -- (torchrun --help lists them). Where torchrun ends with a table of exit
codes, this ends with the sentence that says what went wrong, and with the exit code of the process that failed first.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from megatron.cli.train import find_program
from megatron.core.errors import ConfigError, TemporaryError, command_line, say

if TYPE_CHECKING:
    import argparse

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read torchrun's command line, with pretrain_gpt.py in place of `--`. Raises ConfigError."""
    from torch.distributed.run import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; give torchrun's options, then -- and the flags of the training")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    words = list(argv)
    if "--" in words:
        at = words.index("--")
        words[at : at + 1] = find_program()
    return parser.parse_args(words)


def describe_failure(rank: int, failure: ProcessFailure) -> list[str]:
    """Return the lines that say why a process failed: its sentences, or how it ended."""
    message = failure.message
    if isinstance(message, dict):
        text = str(message.get("message"))
        return text.splitlines() if text.startswith("error: ") else [f"error: rank {rank}: {text}"]
    if failure.exitcode < 0:
        shortage = "; the system does so when memory is short" if failure.exitcode == -signal.SIGKILL else ""
        return [f"error: rank {rank} was ended by {failure.signal_name()}{shortage}"]
    return [f"error: rank {rank} ended with exit code {failure.exitcode}; what it printed is above"]


@command_line
def main() -> int:
    """Start the processes, wait for them, and say why the first one failed."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 0
    # As torchrun does, with a banner.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments = parse_arguments(sys.argv[1:])

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    try:
        run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        for line in describe_failure(rank, failure):
            say(line, sys.stderr)
        # A shell's way to say which signal it was.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        say(f"error: the launcher was told to end by {error.sigval.name}", sys.stderr)
        return 128 + error.sigval
    except ValueError as error:
        raise ConfigError(f"{error}; see torchrun --help") from error
    except (RendezvousError, DistError) as error:
        raise TemporaryError(f"the nodes did not find each other: {error}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
