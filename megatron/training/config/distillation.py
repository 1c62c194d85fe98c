# SPDX-License-Identifier: Apache-2.0
"""Distillation: the flags by which a teacher writes its likeliest tokens and a student learns from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config_base import CheckedConfig, flag
from megatron.core.setting import Needs, PathText

_SAVES = Needs("--logits-save-dir", lambda run: run.logits_save_dir is not None)
_LOADS = Needs("--logits-load-dir", lambda run: run.logits_load_dir is not None)


@dataclass(kw_only=True)
class DistillationConfig(CheckedConfig):
    """Learning from what another model finds likely."""

    usual_kind = "numerics"

    logits_save_dir: PathText | None = flag(None, metavar="DIR", kind="report")
    """Write which tokens the model finds likely at each place of the training data, and train nothing: the run of a
    teacher. It needs --logits-save-top-k."""
    logits_save_top_k: int | None = flag(None, minimum=1, metavar="K", needs=_SAVES)
    """Tokens that are kept at each place."""
    logits_save_top_p: float | None = flag(None, above=0.0, maximum=1.0, metavar="P", needs=_SAVES)
    """Of these only the likeliest that have the probability P together."""
    logits_save_top_p_min_k: int = flag(1, minimum=1, metavar="K", needs=_SAVES)
    """But at least so many."""
    logits_save_dtype: Literal["fp16", "bf16", "fp32"] = flag("fp16", needs=_SAVES)
    """Format of the log-probabilities."""
    logits_load_dir: PathText | None = flag(None, metavar="DIR")
    """Learn from what a teacher has written with --logits-save-dir: the run of a student, on the same data with the
    same tokenizer, in any order, batch size and layout."""
    logits_load_kd_loss_alpha: float = flag(1.0, minimum=0.0, maximum=1.0, needs=_LOADS)
    """Share of the divergence from the teacher in the loss; the rest is the language-model loss."""
    logits_load_ignore_errors: bool = flag(False, needs=_LOADS)
    """Train on samples that the teacher has not seen with the language-model loss alone; otherwise the first one ends
    the run with its place."""

    def problems(self) -> Iterator[str]:
        """Settings that exclude each other."""
        yield from super().problems()
        if self.logits_save_dir is not None and self.logits_save_top_k is None:
            yield "--logits-save-dir needs the tokens that are kept at each place; give --logits-save-top-k, such as 64"
        if self.logits_save_dir is not None and self.logits_load_dir is not None:
            yield "--logits-save-dir is for a teacher, --logits-load-dir for its student; give one of them"
