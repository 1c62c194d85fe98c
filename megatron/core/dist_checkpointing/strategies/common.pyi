# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.checkpoints import COMMON_STATE_FNAME as COMMON_STATE_FNAME, load_common as load_common, save_common as save_common
