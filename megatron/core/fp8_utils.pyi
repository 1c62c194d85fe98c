# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.fusions import correct_amax_history_if_needed as correct_amax_history_if_needed, get_fp8_context as get_fp8_context
