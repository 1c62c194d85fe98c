# SPDX-License-Identifier: Apache-2.0
"""Packages that one may do without: the only place that asks whether they are there.

tiktoken = require("tiktoken", needed_by="--tokenizer-type TikTokenizer")
if available("transformer_engine"): ...
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from megatron.core.errors import ConfigError

OPTIONAL: dict[str, str] = {
    "PIL": "pillow",
    "annotated_types": "annotated-types",
    "causal_conv1d": "causal-conv1d",
    "deep_ep": "deep_ep",
    "fla": "flash-linear-attention",
    "flash_attn": "flash-attn",
    "fsspec": "fsspec",
    "jinja2": "jinja2",
    "lm_eval": "lm-eval",
    "mamba_ssm": "mamba-ssm",
    "matplotlib": "matplotlib",
    "nltk": "nltk",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pynvml": "nvidia-ml-py",
    "rich": "rich",
    "safetensors": "safetensors",
    "starlette": "starlette",
    "tiktoken": "tiktoken",
    "tqdm": "tqdm",
    "transformer_engine": "transformer-engine[pytorch]",
    "transformers": "transformers",
    "triton": "triton",
    "uvicorn": "uvicorn",
    "wandb": "wandb",
    "zstandard": "zstandard",
}
"""Import name -> what to give `pip install`. No other file of megatron/ imports these; a test keeps that so."""


def available(name: str) -> bool:
    """Return whether the package (or submodule, such as "torch.utils.tensorboard") is installed; does not import it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def require(name: str, *, needed_by: str) -> Any:
    """Import and return a package.

    needed_by: what the user asked for, as the error says it: a flag with its value, or a tool.
    Raises ConfigError that says how to install it, or what went wrong inside it.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        package = name.partition(".")[0]
        if not available(package):
            pip_name = OPTIONAL.get(package, package)
            raise ConfigError(
                f"{needed_by} needs the Python package {package}, which is not installed; run: pip install '{pip_name}'"
            ) from error
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{needed_by} needs the Python package {name}, which fails to import ({problem})") from error
