#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Merge token datasets into one: PREFIX.bin and PREFIX.idx with the documents of all parts, one part after another.

The program is megatron/cli/merge_datasets.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.merge_datasets import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
