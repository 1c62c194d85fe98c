# SPDX-License-Identifier: Apache-2.0
"""Try a cluster's command line on this machine: the same kind of run with tiny sizes and made-up data.

The program is megatron/cli/launch.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.launch import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
