# SPDX-License-Identifier: Apache-2.0
"""Draw how evenly a run's experts were chosen: layers from top to bottom, iterations from left to right.

The program is megatron/cli/draw_experts.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.draw_experts import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
