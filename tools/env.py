# SPDX-License-Identifier: Apache-2.0
"""The environment variables of a training job on a network, each with its reason.

The program is megatron/cli/env.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.env import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
