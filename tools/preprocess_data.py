#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Turn text (.jsonl, .jsonl.gz, .jsonl.zst) into a token dataset for pretraining: PREFIX_KEY_document.bin and .idx.

The program is megatron/cli/preprocess_data.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.preprocess_data import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
