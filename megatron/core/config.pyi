# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.functions import is_experimental_enabled as is_experimental_enabled, set_experimental_flag as set_experimental_flag
