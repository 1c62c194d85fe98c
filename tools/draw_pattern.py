# SPDX-License-Identifier: Apache-2.0
"""Draw the layers of a decoder of letters in their pipeline stages.

The program is megatron/cli/draw_pattern.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.draw_pattern import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
