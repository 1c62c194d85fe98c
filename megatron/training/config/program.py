# SPDX-License-Identifier: Apache-2.0
"""Flags of the program itself: what to do with the settings, rather than a setting of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import PathText


@dataclass(kw_only=True)
class ProgramFlags(CheckedConfig):
    """The program."""

    usual_kind = "report"

    config: PathText | None = flag(None, metavar="FILE.yaml")
    """Read flags from a YAML file: flag names as keys, with - or _. The command line wins."""
    preset: str | None = flag(None, metavar="NAME")
    """Take the model's flags from a published model: llama3-8b, qwen3-30b-a3b, ... Flags that are given win. `list`
    shows all, with their numbers of parameters."""
    preset_layout: bool = False
    """Take the layout recommended for --preset on so many processes: parallel sizes, sequence parallelism, the
    distributed optimizer with its overlaps, and where it must be, recomputation. Flags that are given win. `--preset
    list` shows for how many GPUs there are layouts, and multiples of them."""
    tuning: Literal["full", "lora", "dpo", "distillation"] | None = flag(None)
    """Settings of fine-tuning that suit most models: learning rate and schedule, bf16, the distributed optimizer, and
    what the way needs, such as --lora-rank. A note says which; flags that are given win."""
    print_config: bool = False
    """Check all flags for WORLD_SIZE processes, print every value with its source, and stop before touching data."""
    traceback: bool = False
    """Show where in the code an error was raised."""
    version: bool = False
    """Print the version and stop."""
