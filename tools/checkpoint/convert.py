#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Convert checkpoints by upstream's command line: the program is megatron/cli/convert_checkpoint.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli.convert_checkpoint import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
