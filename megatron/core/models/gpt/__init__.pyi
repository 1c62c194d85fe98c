# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.models.gpt.gpt_model import GPTModel as GPTModel
__all__ = ['GPTModel']
