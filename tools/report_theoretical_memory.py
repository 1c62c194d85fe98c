#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Memory of a training run by formula, before anything is started.

The program is megatron/cli/report_theoretical_memory.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.report_theoretical_memory import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
