# SPDX-License-Identifier: Apache-2.0 (written by tools/write_stubs.py)
from megatron.hf.auto_bridge import AutoBridge as AutoBridge
from megatron.hf.image_text_bridge import ImageTextBridge as ImageTextBridge
from megatron.hf.weight_buckets import broadcast_buckets as broadcast_buckets, receive_buckets as receive_buckets, send_buckets as send_buckets, stream_weights as stream_weights
__all__ = ['AutoBridge', 'ImageTextBridge', 'broadcast_buckets', 'receive_buckets', 'send_buckets', 'stream_weights']
