# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that any layout can load: each tensor is saved once, under its name in the whole model.

ShardedTensor (mapping)        a local tensor and its boxes in the full one, from a Placement
save_plan, tensor_reading      who writes which box; which saved boxes cover mine
torch_dist                     the file format of torch.distributed.checkpoint
async_save, snapshot,          saving beside training: host memory that is written by a thread or a process
writer_process
async_requests                 the same for users' training loops, with upstream's names
state_dicts                    save() and load() as upstream has them: nested dictionaries
manifest, directory, durable   complete or invisible; damage is found before anything is used
safe_pickle                    reading what others wrote without running it
"""

from __future__ import annotations

from megatron.core.lazy_names import load_when_used

_NAMES = {
    "ShardedObject": "sharded_object",
    "ShardedTensor": "mapping",
    "check_is_distributed_checkpoint": "state_dicts",
    "load": "state_dicts",
    "load_common_state_dict": "state_dicts",
    "load_content_metadata": "state_dicts",
    "load_tensors_metadata": "state_dicts",
    "save": "state_dicts",
}

__all__ = list(_NAMES)  # noqa: PLE0605
__getattr__ = load_when_used(__name__, _NAMES)
