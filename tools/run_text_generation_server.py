#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Answer over HTTP with a trained model, under upstream's name: the program is megatron/cli/serve.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.serve import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
