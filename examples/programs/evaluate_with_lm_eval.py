# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness on a checkpoint, by its own `megatron_lm` model, with its own command line.

    export MEGATRON_PATH=CHECKOUT
    python examples/programs/evaluate_with_lm_eval.py --model megatron_lm --tasks arc_easy \
        --model_args load=CHECKPOINTS,tokenizer_model=TOKENIZER,seq_length=2048

With a GPU this is `python -m lm_eval` and nothing else. That model names a GPU and bf16 by itself; without a GPU both
are replaced here from outside, so that a checkpoint can be evaluated anywhere, in float32.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("MEGATRON_PATH", str(ROOT))
sys.path.insert(0, os.environ["MEGATRON_PATH"])

from lm_eval.models import megatron_lm  # noqa: E402


class TorchWithoutGPU:
    """The package torch, where `torch.device("cuda:0")` is the CPU."""

    cuda = SimpleNamespace(current_device=lambda: 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, name: str) -> torch.device:
        """The CPU, whatever the name."""
        return torch.device("cpu")


def replace_gpu() -> None:
    """Let megatron_lm run without a GPU: its device is the CPU, and --bf16 is taken off its flags."""
    from megatron.training import arguments

    parse = arguments.parse_and_validate_args

    def parse_without_bf16(*args: Any, **kwargs: Any) -> Any:
        sys.argv.remove("--bf16")
        return parse(*args, **kwargs)

    arguments.parse_and_validate_args = parse_without_bf16
    megatron_lm.torch = TorchWithoutGPU()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        replace_gpu()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
