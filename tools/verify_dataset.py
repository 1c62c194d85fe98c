#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Check token datasets and say what is in them: structure, token ids, checksums, statistics, the text of a document.

The program is megatron/cli/verify_dataset.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.verify_dataset import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
