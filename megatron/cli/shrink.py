# SPDX-License-Identifier: Apache-2.0
"""Try a cluster's command line on this machine: the same kind of run with tiny sizes and made-up data.

WORLD_SIZE=64 python tools/shrink.py --preset llama3-70b --tensor-model-parallel-size 8 ...
WORLD_SIZE=64 python tools/shrink.py --print ...        prints the small command line instead of running it
"""

from __future__ import annotations

import os
import shlex
import sys

from megatron.cli.train import find_program
from megatron.core.errors import command_line
from megatron.training.flags.shrink import shrink


@command_line
def main() -> int:
    """Print the small command line, and run it."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    only_prints = arguments[0] == "--print"
    words, processes = shrink(arguments[only_prints:], os.environ)
    launcher = find_program("tools/launch.py", "megatron.cli.launch")
    command = [sys.executable, *launcher, "--standalone", f"--nproc_per_node={processes}", *find_program(), *words]
    print(shlex.join(["python", *command[1:]]), flush=True)
    if not only_prints:
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment.pop("WORLD_SIZE", None)
        os.execve(sys.executable, command, environment)
    return 0
