# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.upstream.layers import is_layer_window_attention as is_layer_window_attention
from megatron.core.upstream.process_tools import ensure_metadata_has_dp_cp_group as ensure_metadata_has_dp_cp_group
from megatron.core.upstream.sharded import make_sharded_tensors_for_checkpoint as make_sharded_tensors_for_checkpoint, sharded_state_dict_default as sharded_state_dict_default
from typing import Any, NoReturn
def toggle_cuda_graphs(*args: Any, **kwargs: Any) -> NoReturn: ...
