# SPDX-License-Identifier: Apache-2.0
"""Models from and to Hugging Face directories: weights, settings, tokenizer.

rows             one parameter of ours from theirs, and back, as its Row in the table of families says
tensor_files     their weights on disk: read and written tensor by tensor
settings         their config.json and our settings
checkpoints      our checkpoints as a converter reads and writes them
conversion       whole models in both directions, and the proof that the result is the source
auto_bridge      AutoBridge: the same from Python
entries          the parameters of a model, each with its tensors in the files
quantised        weights in FP8 and MXFP4, read as bfloat16
own_family       a family of the user's own
weight_stream    whole tensors out of a running model
weight_buckets   the same in buckets, to another process
running          what training reads and writes Hugging Face directories with
convert          the command line: python -m megatron.bridge.convert
"""

from __future__ import annotations

from typing import Any

__all__ = ["AutoBridge", "broadcast_buckets", "receive_buckets", "send_buckets", "stream_weights"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name == "AutoBridge":
        # Only now: the command line answers mistakes before torch is imported.
        from megatron.hf.auto_bridge import AutoBridge

        return AutoBridge
    if name in __all__:
        from megatron.hf.weight_buckets import broadcast_buckets, receive_buckets, send_buckets, stream_weights

        functions = (broadcast_buckets, receive_buckets, send_buckets, stream_weights)
        return {function.__name__: function for function in functions}[name]
    raise AttributeError(f"megatron.hf has no attribute {name!r}")
