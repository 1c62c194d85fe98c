# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back. Nothing here imports torch: preprocessing starts in well under two seconds."""

from typing import TYPE_CHECKING

# Upstream's names, which upstream/table.py adds at run time, for type checkers.
if TYPE_CHECKING:
    from megatron.core.upstream.tokenizers import MegatronTokenizer as MegatronTokenizer
