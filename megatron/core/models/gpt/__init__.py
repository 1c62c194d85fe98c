# SPDX-License-Identifier: Apache-2.0
"""GPT: decoder-only language models.

Names of upstream, imported when they are asked for; inside megatron/ import the defining module.
"""

from __future__ import annotations

from megatron.core.lazy_names import load_when_used

_DEFINED_IN = {
    "GPTModel": "gpt_model",
}
__all__ = list(_DEFINED_IN)
__getattr__ = load_when_used(__name__, _DEFINED_IN)
