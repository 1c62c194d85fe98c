#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Check that token datasets are what the tokenizer makes of the text: the command line of preprocess_data.py again.

The program is megatron/cli/verify_tokenization.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.verify_tokenization import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
