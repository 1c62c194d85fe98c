#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a directory of checkpoints, and what to do about it. Changes nothing.

The program is megatron/cli/check_checkpoint.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli.check_checkpoint import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
