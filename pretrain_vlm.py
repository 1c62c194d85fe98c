# SPDX-License-Identifier: Apache-2.0
"""Pretrain a model that reads images as a part of its text: pretrain_gpt.py, with further flags and other data.

See docs/images.md. Scripts of your own import parts of it from here, by upstream's names.
"""

from __future__ import annotations

from megatron.cli.train_images import main, run
from megatron.training.recipes.images import build_image_datasets as train_valid_test_datasets_provider
from megatron.training.recipes.images import build_image_model as model_provider
from megatron.training.recipes.images import forward_step

# Upstream's names, under which users' scripts import them from this file.
__all__ = ["forward_step", "main", "model_provider", "train_valid_test_datasets_provider"]

if __name__ == "__main__":
    run()
