#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Build the sample indices of a training run ahead of it, on one machine without a GPU.

The program is megatron/cli/build_dataset_cache.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.build_dataset_cache import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
