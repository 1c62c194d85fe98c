# SPDX-License-Identifier: Apache-2.0
"""Keep a training alive: start it, and by the way it ends decide whether to start it again.

    python examples/complete/fault_tolerant.py --save CHECKPOINTS --nproc-per-node 8 -- <flags of pretrain_gpt.py>

Before each start the checkpoints are examined and the one to resume from is named. A lost peer, a time-out or a
killed process is a reason to start again, at growing intervals and only so often without progress; a mistake in the
flags, a loss that is no number or a full disk is none. SIGTERM and SIGINT are handed on: the run finishes its step,
saves, and this program ends with it. The exit code is that of the last attempt.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.core.errors import ConfigError, TemporaryError, command_line  # noqa: E402

WORTH_ANOTHER_TRY = {75, 1}
"""Exit codes: a lost peer, or a process that was killed; torchrun's own code, which hides that of the process."""


def read_progress(save: Path) -> int:
    """The iteration of the newest checkpoint; 0 where there is none."""
    try:
        return int((save / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0


def is_refused(log: Path) -> str | None:
    """The first sentence of an attempt that torchrun's exit code hides, where starting again would only repeat it."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("error:") and not any(word in line for word in ("rank ", "lost", "connection")):
            return line
    return None


def examine_checkpoints(save: Path) -> None:
    """Health check: print what is wrong with the directory; --load passes damaged checkpoints over by itself."""
    if any(save.glob("iter_*")):
        subprocess.run([sys.executable, ROOT / "tools/checkpoint/doctor.py", str(save), "--quick"], check=False)


class Supervisor:
    """One attempt after the other."""

    def __init__(self, command: Sequence[str], save: Path, attempts: int, pause_seconds: float) -> None:
        self.command, self.save, self.attempts, self.pause_seconds = command, save, attempts, pause_seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.is_stopping = False

    def hand_on(self, number: int, frame: FrameType | None) -> None:
        """Emergency: whoever ends this program wants the run to save."""
        self.is_stopping = True
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)

    def run(self) -> int:
        """Until the run is done, is refused, or makes no progress any more; returns the last exit code."""
        signal.signal(signal.SIGTERM, self.hand_on)
        signal.signal(signal.SIGINT, self.hand_on)
        fruitless = 0
        while True:
            examine_checkpoints(self.save)
            before = read_progress(self.save)
            print(f"supervisor: starting from iteration {before}", flush=True)
            code = self._attempt()
            reached = read_progress(self.save)
            print(f"supervisor: ended with exit code {code} at iteration {reached}", flush=True)
            refused = is_refused(self.log) if code == 1 else None
            if code == 0 or self.is_stopping or code not in WORTH_ANOTHER_TRY or refused:
                return 2 if refused else code
            fruitless = 0 if reached > before else fruitless + 1
            if fruitless >= self.attempts:
                raise TemporaryError(
                    f"{fruitless} attempts in a row have not reached another checkpoint than iteration {reached}; "
                    f"the last output is in {self.log}"
                )
            # Twice as long after each attempt without progress: a node that is coming back needs time.
            time.sleep(self.pause_seconds * 2**fruitless)

    @property
    def log(self) -> Path:
        """Of the last attempt."""
        return self.save / "last_attempt.log"

    def _attempt(self) -> int:
        self.save.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert self.process.stdout is not None
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            code = self.process.wait()
        # A process that something else has killed, such as a system short of memory, has the signal's negative number.
        return 75 if code < 0 else code


def main() -> int:
    """Read the flags of this program, put the others behind those of every attempt, and run."""
    own, _, flags = (list(part) for part in split_arguments(sys.argv[1:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, required=True, help="directory of checkpoints, to save to and resume from")
    parser.add_argument("--nproc-per-node", type=int, default=0, help="processes by torchrun; 0: one, without torchrun")
    parser.add_argument("--attempts", type=int, default=3, help="attempts in a row without a new checkpoint (3)")
    parser.add_argument("--pause", type=float, default=10.0, metavar="SECONDS", help="before the next attempt (10)")
    arguments = parser.parse_args(own)
    if not flags:
        raise ConfigError("there are no flags of pretrain_gpt.py; give them behind --")
    launcher = [sys.executable]
    if arguments.nproc_per_node:
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={arguments.nproc_per_node}", "--standalone"]
    resuming = ["--save", str(arguments.save), "--load", str(arguments.save), "--exit-signal-handler"]
    command = [*launcher, str(ROOT / "pretrain_gpt.py"), *flags, *resuming]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return Supervisor(command, arguments.save, arguments.attempts, arguments.pause).run()


def split_arguments(argv: Sequence[str]) -> tuple[Sequence[str], str, Sequence[str]]:
    """What stands before and behind the first --."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], "--", argv[place + 1 :]


if __name__ == "__main__":
    sys.exit(command_line(main)())
