# SPDX-License-Identifier: Apache-2.0
"""Upstream's globals, for users' scripts: what the run that pretrain() is in was given.

A facade: nothing inside megatron/ imports it. Code of ours is handed its config.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.core.timers import Timers
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.arguments import as_namespace
from megatron.training.current_run import CurrentRun

# Put here by a table of upstream's names; declared for type checkers.
_build_tokenizer: Any
set_args: Any
set_global_variables: Any
unset_global_variables: Any

T = TypeVar("T")


def get_args() -> Namespace:
    """Return every setting of the run as an attribute with upstream's name, including the script's flags. Raises
    RuntimeError outside of pretrain()."""
    if CurrentRun.args is None:
        # Made when first asked for: most runs never need the namespace.
        args = as_namespace(_present(CurrentRun.config, "get_args"))
        vars(args).update(CurrentRun.additions)
        CurrentRun.show(args=args)
    return _present(CurrentRun.args, "get_args")


def get_tokenizer() -> Tokenizer:
    """The run's tokenizer. Raises RuntimeError outside of pretrain()."""
    return _present(CurrentRun.tokenizer, "get_tokenizer")


def get_timers() -> Timers:
    """The run's timers: `with get_timers()("my-part", log_level=2): ...`. Raises RuntimeError outside of pretrain()."""
    return _present(CurrentRun.timers, "get_timers")


def get_tensorboard_writer() -> None:
    """Return None: a run writes its log itself (--tensorboard-dir); a user's loop makes its writer."""


def get_wandb_writer() -> None:
    """None, as above (--wandb-project)."""


def get_one_logger() -> None:
    """None: there is no such service."""


def get_adlr_autoresume() -> None:
    """None: there is no such service."""


def get_signal_handler() -> None:
    """None: --exit-signal-handler is watched by pretrain()'s loop."""


def print_rank_0(message: object, rank: int | None = None) -> None:
    """Print on the first rank only. rank: this process's, where torch.distributed cannot be asked yet."""
    # Before the groups exist, and in a run of one process, there is only one rank to print.
    if rank == 0 or (rank is None and (not dist.is_initialized() or dist.get_rank() == 0)):
        print(message, flush=True)


def _present(value: T | None, name: str) -> T:
    if value is None:
        raise RuntimeError(f"{name}() was called outside of a run; call it from the functions handed to pretrain()")
    return value
