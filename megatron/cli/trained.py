# SPDX-License-Identifier: Apache-2.0
"""The model of a checkpoint for a program that uses one, on one process or divided over the ranks of a job.

Under torchrun every process runs the program and holds its part of the model; only rank 0 prints.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.core.errors import ConfigError, TemporaryError
from megatron.training.flags.argument import path
from megatron.training.launch.launch import read_launch

if TYPE_CHECKING:
    from megatron.training.checkpoint.trained_model import TrainedModel

_LAYOUT_FLAGS = {
    "--tensor-model-parallel-size": "processes that share each layer",
    "--pipeline-model-parallel-size": "stages of layers",
    "--expert-model-parallel-size": "processes that share the experts of a layer",
    "--expert-tensor-parallel-size": "processes that share each expert (those of a layer)",
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that name a checkpoint and say how processes share its model."""
    add = parser.add_argument_group("the model").add_argument
    add("--load", metavar="DIR", required=True, type=path, help="directory of checkpoints, or one iter_ directory")
    add("--ckpt-step", metavar="N", type=int, help="iteration to load (the latest)")
    add("--bf16", action="store_true", help="compute in bfloat16: half the memory; rounding may decide between tokens")
    for name, text in _LAYOUT_FLAGS.items():
        add(name, metavar="N", type=int, help=f"under torchrun: {text}")


def read_layout(arguments: argparse.Namespace) -> dict[str, int]:
    """The layout of the command line, by fields of TransformerConfig. Raises ConfigError."""
    names = {flag: flag.removeprefix("--").replace("-", "_") for flag in _LAYOUT_FLAGS}
    found = {name: getattr(arguments, name) for name in names.values() if getattr(arguments, name) is not None}
    problems = [f"{flag} {found[name]} must be at least 1" for flag, name in names.items() if found.get(name, 1) < 1]
    if problems:
        raise ConfigError(problems)
    return found


def read_world_size() -> int:
    """The number of processes of the job."""
    return read_launch(os.environ).world_size


def speaks() -> bool:
    """Return True on the process that prints, writes and listens."""
    return read_launch(os.environ).rank == 0


@contextlib.contextmanager
def open_model(arguments: argparse.Namespace) -> Iterator[TrainedModel]:
    """The model, with the other processes of the job; raises TemporaryError where one of these is lost.

    Standard output of those that do not speak is dropped meanwhile.
    """
    # torch takes seconds to import: mistakes in the command line are found before that.
    from megatron.core.tensor_parallel.packed_products import pack_weights
    from megatron.training.checkpoint.trained_model import load_trained_model, read_trained_config
    from megatron.training.launch.initialize import explain_lost_peer, initialize, shut_down

    choice: dict[str, Any] = {"bf16": arguments.bf16, "layout": read_layout(arguments)}
    ranks = read_world_size()
    if ranks == 1 and not choice["layout"]:
        trained = load_trained_model(arguments.load, arguments.ckpt_step, **choice)
        pack_weights(trained.model)
        yield trained
        return
    config = read_trained_config(arguments.load, arguments.ckpt_step, ranks=ranks, **choice)
    process = None
    with contextlib.ExitStack() as stack:
        if not speaks():
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        try:
            process = initialize(config)
            trained = load_trained_model(arguments.load, arguments.ckpt_step, groups=process.groups, **choice)
            pack_weights(trained.model)
            yield trained
        except RuntimeError as error:
            problem = explain_lost_peer(error, process.presence if process is not None else None)
            if problem is None:
                raise
            raise TemporaryError(problem) from error
        sys.stdout.flush()
    # Only after success: with a peer gone, leaving the groups in order would wait for it.
    shut_down()
