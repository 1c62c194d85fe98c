#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Average the weights of several checkpoints of one run into a new checkpoint.

The program is megatron/cli/average_checkpoints.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli.average_checkpoints import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
