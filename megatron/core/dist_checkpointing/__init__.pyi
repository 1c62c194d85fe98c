# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.core.dist_checkpointing.mapping import ShardedTensor as ShardedTensor
from megatron.core.dist_checkpointing.sharded_object import ShardedObject as ShardedObject
from megatron.core.dist_checkpointing.state_dicts import check_is_distributed_checkpoint as check_is_distributed_checkpoint, load as load, load_common_state_dict as load_common_state_dict, load_content_metadata as load_content_metadata, load_tensors_metadata as load_tensors_metadata, save as save
__all__ = ['ShardedObject', 'ShardedTensor', 'check_is_distributed_checkpoint', 'load', 'load_common_state_dict', 'load_content_metadata', 'load_tensors_metadata', 'save']
