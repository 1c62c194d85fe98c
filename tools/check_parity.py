#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Is a configuration the same run under several layouts? Tries it on this machine's CPU.

The program is megatron/cli/check_parity.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.check_parity import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
