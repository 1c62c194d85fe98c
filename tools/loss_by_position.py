# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a trained model by the position of a token in its sequence: does a longer context help, or harm?

The program is megatron/cli/loss_by_position.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.loss_by_position import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
