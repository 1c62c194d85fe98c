# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.fusions import quick_gelu as quick_gelu
