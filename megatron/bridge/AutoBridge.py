# SPDX-License-Identifier: Apache-2.0
"""The class behind `from megatron.bridge import AutoBridge` where NVIDIA's Megatron-Bridge is not installed.

A namespace package has no attributes, so the statement imports a module of that name, and finds the class in its place.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from megatron.hf.auto_bridge import AutoBridge

cast(Any, sys.modules)[__name__] = AutoBridge
