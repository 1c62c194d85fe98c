# SPDX-License-Identifier: Apache-2.0
"""--eval-tasks: scores of the model in training in tasks of lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import sys

import torch

from megatron.core.errors import say
from megatron.core.inference.engine import Engine, EngineSettings
from megatron.core.inference.harness_tasks import HarnessTasks, list_scores
from megatron.training.config.training import ValidationConfig
from megatron.training.run import Run

_STEP_TOKENS = 4096


class TasksInTraining:
    """The tasks, done once for each iteration that is evaluated.

    Every process does the same: where the model is divided, each of them is needed.
    """

    def __init__(self, config: ValidationConfig) -> None:
        """Raises ConfigError for tasks that the harness does not have, and without the harness."""
        assert config.eval_tasks is not None
        self._tasks = HarnessTasks(
            config.eval_tasks, config.eval_tasks_path, limit=config.eval_tasks_limit, flag="--eval-tasks",
            path_flag="--eval-tasks-path",
        )  # fmt: skip
        self._iteration: int | None = None
        self._failed = False

    def measure(self, run: Run) -> dict[str, float]:
        """Scores by task and measure; nothing where this iteration's are known already.

        What fails, such as data that cannot be loaded, is no error: a warning says so once.
        """
        if self._failed or self._iteration == run.progress.iteration:
            return {}
        self._iteration = run.progress.iteration
        # Every length would be one more shape to compile for, or to run through code for any shape.
        eagerly = torch.compiler.set_stance("force_eager") if run.config.model.compile else contextlib.nullcontext()
        try:
            with eagerly:
                return list_scores(self._tasks.run(self._open_engine(run), run.recipe.tokenizer)["results"])
        except Exception as error:
            self._failed = True
            if run.is_first_rank:
                what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                say(f"warning: --eval-tasks: tasks are left out, training goes on ({what})", sys.stderr)
            return {}

    def _open_engine(self, run: Run) -> Engine:
        (chunk,) = run.model
        longest = run.recipe.max_sequence_length or run.config.data.seq_length
        assert longest is not None
        room = 2 * max(longest, _STEP_TOKENS)
        settings = EngineSettings(longest, capacity_tokens=room, max_step_tokens=_STEP_TOKENS)
        return Engine(chunk, settings, vocab_size=run.recipe.vocab_size)
