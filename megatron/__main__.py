# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron`: what programs there are, and each of them by name."""

from __future__ import annotations

import sys

from megatron.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
