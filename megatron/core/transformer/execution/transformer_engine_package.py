# SPDX-License-Identifier: Apache-2.0
"""The package Transformer Engine: whether it is there, its modules and recipes, and what settings it does not know."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch

from megatron.core.device import is_cpu
from megatron.core.errors import ConfigError
from megatron.core.optional_deps import require
from megatron.core.transformer.transformer_config import TransformerConfig

OLDEST = (2, 9)
"""The oldest release whose signatures have been compared with the calls made here."""
_FLAG = "--transformer-impl transformer_engine"


def load_package() -> Any:
    """Return the module transformer_engine. Raises ConfigError where it is missing, broken, or older than OLDEST."""
    package = require("transformer_engine", needed_by=_FLAG)
    require("transformer_engine.pytorch", needed_by=_FLAG)
    require("transformer_engine.common.recipe", needed_by=_FLAG)
    found = re.match(r"(\d+)\.(\d+)", package.__version__)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"{_FLAG} needs Transformer Engine {oldest} or newer, and {package.__version__} is installed; run: "
            f"pip install 'transformer-engine[pytorch]>={oldest}'"
        )
    return package


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Origin of the layers of a model."""

    is_engine: bool
    """True if they compute by Transformer Engine."""
    name: str
    """In words, for the log."""


def choose_implementation(asked: str, device: torch.device) -> Implementation:
    """Return what `--transformer-impl` comes to on a device. asked: local, transformer_engine or auto.

    A CPU has plain torch, whatever is asked. Raises ConfigError where Transformer Engine is asked for by name on a GPU
    and cannot be had.
    """
    if asked == "local":
        return Implementation(False, "plain torch")
    if is_cpu(device):
        return Implementation(False, "plain torch: Transformer Engine runs on GPUs only")
    try:
        package = load_package()
    except ConfigError as error:
        if asked != "auto":
            raise ConfigError(f"{error}; or give --transformer-impl local, which needs no package") from error
        return Implementation(False, f"plain torch: {error}")
    return Implementation(True, f"Transformer Engine {package.__version__}")


def find_obstacles(config: TransformerConfig) -> list[str]:
    """Say what the settings ask of FP8 or FP4 that layers of Transformer Engine do not do; a sentence each."""
    if config.few_bits_recipe is None:
        return []
    delayed = config.few_bits_recipe == "delayed"
    modules = set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()
    again = config.recompute_granularity == "full" or bool(modules - {"core_attn"})
    in_parts = bool(modules & {"layernorm", "mlp_act", "moe_act"})
    asked = (
        (config.fp8_emulation, "--fp8-emulation"),
        (bool(config.fp8_bf16_layers), "--fp8-bf16-layers"),
        (config.fp8_fallback_sqnr is not None, "--fp8-fallback-sqnr"),
        (config.log_fp8_stats, "--log-fp8-stats"),
        (not config.fp8_wgrad, "--no-fp8-wgrad"),
        (config.few_bits_recipe == "rowwise", "--fp8-recipe rowwise"),
        (delayed and config.fp8_interval > 1, "--fp8-interval above 1"),
        # A layer that is computed a second time would note its largest values a second time.
        (delayed and again, "--fp8-recipe delayed together with recomputation of linear layers"),
        # Its layers lie outside of the pass around which largest values are reduced once.
        (delayed and bool(config.mtp_num_layers), "--fp8-recipe delayed together with --mtp-num-layers"),
        (in_parts, "--recompute-modules layernorm, mlp_act or moe_act together with FP8 or FP4"),
        (config.tp_comm_overlap, "--tp-comm-overlap together with FP8 or FP4"),
    )
    remedy = "leave it out, or give --transformer-impl local"
    return [f"{_FLAG} does not know {what}; {remedy}" for is_asked, what in asked if is_asked]


def load_modules() -> Any:
    """Return transformer_engine.pytorch, which has the modules."""
    return require("transformer_engine.pytorch", needed_by=_FLAG)


def build_recipe(config: TransformerConfig) -> Any:
    """Build the package's recipe for the settings of FP8 or FP4."""
    recipes = require("transformer_engine.common.recipe", needed_by=_FLAG)
    name = config.few_bits_recipe
    if name == "nvfp4":
        return recipes.NVFP4BlockScaling()
    number_format = recipes.Format.HYBRID if config.fp8 == "hybrid" else recipes.Format.E4M3
    if name == "delayed":
        return recipes.DelayedScaling(
            margin=config.fp8_margin,
            fp8_format=number_format,
            amax_history_len=config.fp8_amax_history_len,
            amax_compute_algo=config.fp8_amax_compute_algo,
        )
    kinds = {
        "tensorwise": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }
    assert name in kinds, f"recipe {name} is refused with the other settings"
    return kinds[name](fp8_format=number_format)
