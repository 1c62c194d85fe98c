# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine before a run, and under torchrun of all its machines: `python -m megatron doctor`."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core import device
from megatron.core.errors import ConfigError, TemporaryError
from megatron.training.launch.launch import read_launch
from megatron.training.launch.machine_checks import judge, measure_machine, write_table


def check_machines(save: Path | None, *, as_json: bool) -> int:
    """Measure, compare, print; returns 0 where all is good and 1 where a check failed, on every rank alike.

    Raises ConfigError or TemporaryError (which have other exit codes) where it could not look.
    """
    launch = read_launch(os.environ)
    if save is not None and not save.is_dir():
        raise ConfigError(f"--save {save} is no directory; make it, or name the file system by another one")
    if launch.world_size > 1:
        try:
            dist.init_process_group(device.choose_backend(device.current_device()))
        except (RuntimeError, ValueError) as error:
            raise TemporaryError(f"the ranks did not meet: {' '.join(str(error).split())[:200]}") from error
    try:
        own = measure_machine(launch, save)
        measured: list[Any] = [own]
        if launch.world_size > 1:
            measured = [None] * launch.world_size
            dist.all_gather_object(measured, own)
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
    checks = list(judge(measured))
    if launch.rank == 0:
        if as_json:
            content = {"checks": [asdict(check) for check in checks], "ranks": [asdict(m) for m in measured]}
            print(json.dumps(content, indent=1))
        else:
            print(write_table(checks))
    return int(not all(check.is_good for check in checks))
