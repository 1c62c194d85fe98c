# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.datasets.index_builders import compile_helpers as compile_helpers
