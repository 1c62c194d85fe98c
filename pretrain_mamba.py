# SPDX-License-Identifier: Apache-2.0
"""The earlier name of pretrain_hybrid.py."""

from __future__ import annotations

from megatron.core.errors import say
from pretrain_hybrid import (
    forward_step,
    loss_func,
    main,
    model_provider,
    run,
    train,
    train_valid_test_datasets_provider,
)

__all__ = ["forward_step", "loss_func", "main", "model_provider", "train", "train_valid_test_datasets_provider"]

if __name__ == "__main__":
    say("note: pretrain_mamba.py is an earlier name of pretrain_hybrid.py")
    run(needs_letters=True)
