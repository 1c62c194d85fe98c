# SPDX-License-Identifier: Apache-2.0
"""The recipe of a run: of the kind of model that the settings name, or of the functions of a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron.training.config.container import RunConfig
from megatron.training.recipes.gpt import build_gpt_recipe
from megatron.training.recipes.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from megatron.core.tokenizers.base import Tokenizer


def build_recipe(config: RunConfig, tokenizer: Tokenizer | None = None) -> Recipe:
    """The recipe of the settings' kind of model, which is GPT so far.

    tokenizer: built from the settings when None. Raises ConfigError or DataError for a vocabulary that cannot be used.
    """
    return build_gpt_recipe(config, tokenizer)


def wrap_providers(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    *,
    build_model: Callable[..., nn.Module] | None,
    build_datasets: Callable[[Any], Sequence[Any]],
    forward_step: Callable[..., Any],
    **further: Any,
) -> Recipe:
    """The recipe of a script that hands upstream's functions to `pretrain`: its model may be any module.

    Where the functions build a GPTModel, its operations are counted and described; about another model nothing is
    claimed. further: other fields of Recipe.
    """
    if build_model is not None:
        further["build_model"] = build_model
    # Starting from GPT's recipe keeps what a script does not hand over: tokenizer, sizes of the vocabulary, counting.
    return dataclasses.replace(
        build_recipe(config, tokenizer),
        build_datasets=build_datasets,
        forward_step=forward_step,
        **further,
    )
