# SPDX-License-Identifier: Apache-2.0
"""Draw a pipeline schedule: what each rank computes when, how long it idles, how many microbatches it holds.

The program is megatron/cli/draw_schedule.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.draw_schedule import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
