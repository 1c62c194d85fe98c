# SPDX-License-Identifier: Apache-2.0
"""Models from and to Hugging Face directories: weights, settings, tokenizer.

rows             one parameter of ours from theirs, and back, as its Row in the table of families says
tensor_files     their weights on disk: read and written tensor by tensor
settings         their config.json and our settings
checkpoints      our checkpoints as a converter reads and writes them
conversion       whole models in both directions, and the proof that the result is the source
auto_bridge      AutoBridge: the same from Python
image_text_bridge    models that read images and text, both ways
vision_towers    the table of their parts that see images
entries          the parameters of a model, each with its tensors in the files
quantised        weights in FP8 and MXFP4, read as bfloat16
own_family       a user's family
weight_stream    full tensors out of a running model
weight_buckets   the same in buckets, to another process
running          what training reads and writes Hugging Face directories with
convert          the command line: python -m megatron.bridge.convert
"""

from __future__ import annotations

from megatron.core.lazy_names import load_when_used

# Only when used: the command line answers mistakes before torch is imported.
_NAMES = {
    "AutoBridge": "auto_bridge",
    "ImageTextBridge": "image_text_bridge",
    "broadcast_buckets": "weight_buckets",
    "receive_buckets": "weight_buckets",
    "send_buckets": "weight_buckets",
    "stream_weights": "weight_buckets",
}

__all__ = list(_NAMES)  # noqa: PLE0605
__getattr__ = load_when_used(__name__, _NAMES)
