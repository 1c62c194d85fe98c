# SPDX-License-Identifier: Apache-2.0
"""Settings that only a GPU can follow and that change no number: what a run on the CPU does instead.

Each is declared with its field (`flag(gpu=NeedsGPU(...))`), so that a launch script for GPUs also runs on a laptop.
What would change numbers is refused where it is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.setting import NeedsGPU
from megatron.training.config.container import Fields, RunConfig
from megatron.training.config.run_groups import groups_of_fields, list_settings


def describe_gpu_needs(config: RunConfig) -> list[str]:
    """A sentence for each setting that has another effect, or none, on the CPU."""
    return [f"{config.say(name)} needs a GPU; without one, {wish.otherwise}" for name, wish in _find_wishes(config)]


def replace_gpu_settings(config: RunConfig) -> list[str]:
    """Put what a run on the CPU uses in the place of such settings, in `config` itself; the sentences about them.

    In place, because the recipe of a run already holds the settings when the device becomes known.
    """
    found, sentences = list(_find_wishes(config)), describe_gpu_needs(config)
    for _, wish in found:
        for name, value in wish.instead.items():
            setattr(getattr(config, groups_of_fields()[name]), name, value)
    return sentences


def _find_wishes(config: RunConfig) -> Iterator[tuple[str, NeedsGPU]]:
    fields = Fields(config, frozenset())
    for _, setting in list_settings():
        yield from ((setting.dest, wish) for wish in setting.gpu if wish.asked(fields))
