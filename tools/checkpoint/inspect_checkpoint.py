#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint: its tensors as a tree, with shapes, number formats, bytes, norms, and the run's settings.

The program is megatron/cli/inspect_checkpoint.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli.inspect_checkpoint import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
