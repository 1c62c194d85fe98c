# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.sharded import apply_prefix_mapping as apply_prefix_mapping, replace_prefix_for_sharding as replace_prefix_for_sharding
