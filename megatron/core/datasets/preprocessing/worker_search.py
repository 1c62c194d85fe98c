"""How many workers preprocess fastest on this machine: short runs whose output is thrown away."""

from __future__ import annotations

import dataclasses
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.core.datasets.preprocessing.job import PreprocessOptions, preprocess
from megatron.core.datasets.preprocessing.progress import Progress
from megatron.core.errors import ConfigError, StorageError
from megatron.core.tokenizers.base import Tokenizer


def find_fastest(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    counts: Sequence[int],
    max_documents: int,
    say: Callable[[str], None] = print,
) -> int:
    """Run the beginning of a job once with each number of workers, say how fast it was, and return the fastest.

    max_documents   documents of the input to encode, rounded up to half a megabyte of text
    Raises what `preprocess` raises; ConfigError for counts that cannot be.
    """
    trials = [dataclasses.replace(options, workers=count, max_documents=max_documents) for count in counts]
    problems = [problem for trial in trials for problem in trial.problems()]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    speeds: dict[int, float] = {}
    for trial in trials:
        directory = Path(options.output_prefix).parent
        try:
            with tempfile.TemporaryDirectory(prefix=".workers-", dir=directory) as folder:
                prefix = str(Path(folder) / "out")
                started_at = time.monotonic()
                done = preprocess(dataclasses.replace(trial, output_prefix=prefix), tokenizer, _quiet)
                speeds[trial.workers] = done.documents / (time.monotonic() - started_at)
        except FileNotFoundError as error:
            raise ConfigError(f"--output-prefix: there is no directory {directory}; create it") from error
        except OSError as error:
            raise StorageError(f"{directory}: {error.strerror}") from error
        say(f"--workers {trial.workers}: {speeds[trial.workers]:.1f} docs/s ({done.documents} documents)")
    return max(speeds, key=speeds.__getitem__)


def _quiet(size: int) -> Progress:
    return Progress(io.StringIO(), 1 << 60, size)
