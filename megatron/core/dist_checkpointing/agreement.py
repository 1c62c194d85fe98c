# SPDX-License-Identifier: Apache-2.0
"""Agreement of processes on what one of them finds out: values and errors of the first process, and errors of any."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron.core.collectives import all_gather_object, broadcast_object
from megatron.core.errors import MegatronError, StorageError
from megatron.core.process_groups_config import Group

T = TypeVar("T")


def on_first_rank(group: Group, action: Callable[[], T]) -> T:
    """Do it on the group's first member; its result, or the error it raised, is everyone's."""
    # An error travels as a value: were it raised here, the other ranks would wait in the broadcast until it times out.
    result: tuple[T | None, BaseException | None] | None = None
    if group.rank() == 0:
        result = _attempt(action)
    value, error = broadcast_object(result, group)
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def on_every_rank(group: Group, action: Callable[[], T]) -> list[T]:
    """Do it everywhere; everyone's results in group order. The first error that anybody had is raised everywhere."""
    outcomes = all_gather_object(_attempt(action), group)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]  # type: ignore[misc]


def with_everyone(group: Group, action: Callable[[], T]) -> T:
    """Run it on every rank, and return the local result, which is not sent, once all have done it. The first error that
    anybody had is raised everywhere."""
    results: list[T] = []
    on_every_rank(group, lambda: results.append(action()))
    return results[0]


def _attempt(action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return action(), None
    except MegatronError as error:
        return None, error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        # The file's name is all that the other ranks will see of it.
        return None, StorageError(f"{where}{error.strerror or error}")
    except Exception as error:
        return None, error
