# SPDX-License-Identifier: Apache-2.0
"""Draw what rounding to 8 or 4 bits did in a run: linear layers from top to bottom, iterations from left to right.

The program is megatron/cli/draw_fp8.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.draw_fp8 import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
