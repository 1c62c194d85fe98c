# SPDX-License-Identifier: Apache-2.0
"""The fastest micro-batch, recomputation and kernels of a configuration, found by trying them on the device at hand.

The program is megatron/cli/autotune.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.autotune import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
