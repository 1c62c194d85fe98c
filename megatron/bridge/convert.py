# SPDX-License-Identifier: Apache-2.0
"""The command `python -m megatron.bridge.convert` of users' documents: megatron/hf/convert.py.

megatron/bridge/ has no __init__.py, so that NVIDIA's Megatron-Bridge, whose name this is, can be installed beside it.
"""

from __future__ import annotations

import sys

from megatron.hf.convert import main

if __name__ == "__main__":
    sys.exit(main())
