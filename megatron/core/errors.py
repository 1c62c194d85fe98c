# SPDX-License-Identifier: Apache-2.0
"""Errors that are meant for the user: one sentence each, and the exit code that goes with it.

| class          | exit code | meaning                                                        |
|----------------|-----------|----------------------------------------------------------------|
| ConfigError    | 2         | a flag, a config file or an environment variable               |
| TopologyError  | 2         | a layout that cannot exist on this number of processes         |
| DataError      | 2         | a corpus, a tokenizer, a .bin/.idx dataset, an index cache     |
| CheckpointError| 2         | a checkpoint that is missing, damaged or of another model      |
| MemoryShortageError | 2    | more memory than the device or the machine has                 |
| StorageError   | 74        | the disk: full, failing, read-only (EX_IOERR)                  |
| TemporaryError | 75        | worth starting again: a lost peer, --save in use (EX_TEMPFAIL) |
| DriftError     | 75        | replicas of a weight differ: starting again loads equal ones   |
| NonFiniteError | 17        | a loss or a gradient became NaN or infinite                    |
| RerunError     | 16        | worth starting again elsewhere: is it the device or the model? |
| CrashError     | 70        | a process crashed, for example with SIGSEGV                    |

Bugs of ours stay ordinary exceptions with their traceback.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

_RUN_OUT = {
    errno.EMFILE: "raise the limit with ulimit -n",
    errno.ENFILE: "the machine has too many files open",
    errno.ENOSPC: "free some space, in /dev/shm as well",
    errno.EDQUOT: "free some space of this user's",
}
"""Numbers of the system's errors for what has run out, and what helps."""


class MegatronError(Exception):
    """An error whose text is meant for the user: what, where, found, expected, remedy."""

    exit_code = 2
    questions_state = False
    """The weights themselves may be wrong, so that they are not saved on account of the error."""


class ConfigError(MegatronError):
    """One or several settings that cannot be used; every problem is listed at once."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("; ".join(self.problems))


class UnknownFieldError(ConfigError, TypeError):
    """An argument that a config class has no field for; Python's own error for it is a TypeError."""


class UnsupportedError(MegatronError, NotImplementedError):
    """A name of upstream's was called that exists here only so that programs can import it."""


class TopologyError(ConfigError):
    """A parallel layout that cannot exist on this number of processes."""


class DataError(MegatronError):
    """Unusable input data, tokenizer files, datasets or caches."""


class CheckpointError(MegatronError):
    """A checkpoint that is missing, damaged, or does not fit the model."""


class MemoryShortageError(MegatronError):
    """The settings ask for more memory than there is; starting again as it is would only repeat it."""


class StorageError(MegatronError):
    """Storage failed while reading or writing (full, read-only, input/output error)."""

    exit_code = 74


class TemporaryError(MegatronError):
    """The job can be started again as it is: a peer was lost or did not answer, another run has the directory."""

    exit_code = 75


class PreflightError(MegatronError):
    """A machine of the job has failed a check before the first step; on others the same command may be right."""

    exit_code = 1


class DriftError(TemporaryError):
    """Replicas that must hold the same weights do not; the last checkpoint is from before."""

    questions_state = True


class NonFiniteError(MegatronError):
    """A loss or a gradient is not a number; starting again as it is would only repeat it. iteration: in which it became
    so, counted from 1; None for the one under way. is_explained: it has been looked for the first such value."""

    exit_code = 17
    questions_state = True

    def __init__(self, sentence: str, iteration: int | None = None, *, is_explained: bool = False) -> None:
        self.iteration, self.is_explained = iteration, is_explained
        super().__init__(sentence)


class RerunError(MegatronError):
    """A result is wrong, and wrong again when it is computed again; another device is to say which of them errs."""

    exit_code = 16
    questions_state = True


class CrashError(MegatronError):
    """A process of ours was ended by the system for what it did (SIGSEGV, SIGABRT, ...): a bug of this program or of a
    library, which starting again as it is would only repeat."""

    exit_code = 70  # EX_SOFTWARE


def say(text: str, stream: TextIO | None = None) -> None:
    """Print text on standard output, or another stream, at once. A log that cannot be written (a closed pipe, a full
    disk) ends nothing: the text is dropped."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(text, file=stream, flush=True)


# By the text: numpy's and torch's allocators have nothing else in common, and neither is imported here.
_REFUSED_BYTES = (
    re.compile(r"DefaultCPUAllocator: .*you tried to allocate ([0-9]+) bytes"),
    re.compile(r"Tried to allocate ([0-9.]+ [KMGT]i?B)"),
    re.compile(r"Unable to allocate ([0-9.]+ [KMGTPE]iB)"),
)


# PyTorch's allocators, the driver, cuBLAS, and NCCL, which does not say how much it asked for.
_SHORTAGE = (
    "CUDA out of memory", "DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",
)  # fmt: skip


def explain_refused_memory(error: BaseException) -> str | None:
    """Return what an allocator was asked for and did not give, in words: `274.9 GB`; None for any other error."""
    # numpy's class is a MemoryError, torch's a RuntimeError.
    if not isinstance(error, MemoryError | RuntimeError):
        return None
    text = str(error)
    for pattern in _REFUSED_BYTES:
        if match := pattern.search(text):
            return format_bytes(int(match[1])) if match[1].isdigit() else match[1]
    is_shortage = isinstance(error, MemoryError) or any(words in text for words in _SHORTAGE)
    return "more memory" if is_shortage else None


def count_refused_bytes(error: BaseException) -> float | None:
    """The same as a number; None where the allocator does not say it."""
    match = re.match(r"([0-9.]+) ([KMGTPE]?)(i?)(B|bytes)$", explain_refused_memory(error) or "")
    if match is None:
        return None
    power = " KMGTPE".index(match[2] or " ")
    return float(match[1]) * float(1024 if match[3] else 1000) ** power


def format_bytes(number: float) -> str:
    """A number of bytes for people, in powers of 1000: `1.5 TB`."""
    for unit in ("bytes", "KB", "MB", "GB", "TB", "PB"):
        if number < 1000:
            return f"{number:.0f} bytes" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} EB"


def report_error(error: MegatronError) -> None:
    """Print `error: …`, one line for each problem, on standard error."""
    for line in _format_error(error):
        say(line, sys.stderr)


def _format_error(error: BaseException) -> list[str]:
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    if not isinstance(error, MegatronError):
        problems = [f"{type(error).__name__}: {error}"]
    # One line for each, whatever is in it, because programs read these line by line.
    return [f"error: {' '.join(problem.split())}" for problem in problems]


def tell_launcher(error: BaseException, delay_seconds: float = 0.0) -> None:
    """Leave what ends this process where torchrun looks for it (the file TORCHELASTIC_ERROR_FILE), so that its report
    has the sentence as the root cause: of several processes the earliest one's sentence, which counts as so much later.
    The first error of a process stays; without torchrun nothing is written."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    when = str(int(time.time() + delay_seconds))
    content = {"message": "\n".join(_format_error(error)), "extraInfo": {"timestamp": when}}
    with contextlib.suppress(OSError):
        Path(f"{path}.part").write_text(json.dumps({"message": content}), encoding="utf-8")
        os.replace(f"{path}.part", path)


@contextlib.contextmanager
def _telling_launcher() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        tell_launcher(_explain(error) or error)
        raise


def _explain(error: Exception) -> MegatronError | None:
    """Return an error whose sentence says which resource has run out; None for any other error."""
    if isinstance(error, OSError) and error.errno in _RUN_OUT:
        remedy = _RUN_OUT[error.errno]
        return StorageError(
            f"{error.filename or 'a file or socket'} cannot be opened or written: {error.strerror}; {remedy}"
        )
    refused = explain_refused_memory(error)
    if refused is None:
        return None
    return MemoryShortageError(f"out of memory: {refused} could not be had; ask for less at once")


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Inside, warnings that this library gives are shown as programs say theirs; others as Python shows them."""
    ours, usual = str(Path(__file__).resolve().parents[1]) + os.sep, warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if not os.path.realpath(filename).startswith(ours):
            return usual(message, category, filename, lineno, line)
        return f"warning: {' '.join(str(message).split())}\n"

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = usual


def command_line(main: Callable[[], int | None]) -> Callable[[], int]:
    """Wrap a program's `main`: a MegatronError, or an allocator's refusal, becomes its `error:` line and exit code,
    without a traceback; a warning of ours becomes its `warning:` line, without the line of code that gave it.

    `MEGATRON_TRACEBACK=1` (or `--traceback`) shows the traceback as well. A closed output pipe ends the program
    quietly. Whatever ends it is told to torchrun, too.
    """

    @functools.wraps(main)
    def wrapped() -> int:
        try:
            with _plain_warnings(), _telling_launcher():
                return main() or 0
        except BrokenPipeError:
            # Python flushes stdout when it exits and would complain about the closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (MegatronError, MemoryError, RuntimeError, OSError) as error:
            # Not from parsed arguments: they may be what is wrong.
            if "--traceback" in sys.argv or os.environ.get("MEGATRON_TRACEBACK") == "1":
                raise
            known = error if isinstance(error, MegatronError) else _explain(error)
            if known is None:
                raise
            report_error(known)
            return known.exit_code
        except KeyboardInterrupt as interrupt:
            # A run that Ctrl-C has ended in order has said so itself, and hands on its words.
            if not interrupt.args:
                say("interrupted", sys.stderr)
            # 128 + SIGINT, which is what a shell reports.
            return 130

    return wrapped
