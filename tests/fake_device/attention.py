# SPDX-License-Identifier: Apache-2.0
"""Core attention on the fake device, forward and backward: `python -m tests.fake_device.attention LIBRARY` writes what
each kind of it asked of the device as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from tests.fake_device.device import install, leave

LENGTH, EARLIER, HEADS, GROUPS, WIDTH = 65536, 512, 16, 4, 128
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "documents": {}, "chunks": {"attention_chunk_size": 300}, "window": {"window_size": (127, 0)},
    "sinks": {"softmax_type": "learnable"}, "earlier keys": {}, "new token": {}, "latent": {},
    "float32 documents": {"bf16": False, "params_dtype": "float32"}, "ring": {"context_parallel_size": 2},
    "ring of documents": {"context_parallel_size": 2},
    "ring with a window": {"context_parallel_size": 2, "window_size": (40000, 0)},
    # Ways that a trial has chosen.
    "latent by cuDNN": {"attention_way": "cuDNN with two widths"},
    "latent by flash 3": {"attention_way": "flash attention 3"}, "latent by flex": {"attention_way": "flex attention"},
    "latent documents by flash 4": {"attention_way": "flash attention 4"},
    "documents by flex": {"attention_way": "flex attention"},
    "window by flex": {"attention_way": "flex attention", "window_size": (127, 0)},
    "ring of latent heads by flash 3": {"attention_way": "flash attention 3", "context_parallel_size": 2},
}  # fmt: skip
BOUNDS = (0, 1, LENGTH // 3, LENGTH // 3 + 1, 2 * LENGTH // 3, LENGTH)


def main() -> None:
    """Print kind -> {name, kernels, waits, bytes} of rank 0."""
    install(Path(sys.argv[1]))
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.core_attention import flash, flex
    from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import TransformerConfig
    from tests.fake_device.recorder import Recorder, replace_operations

    forward = flash.run_forward

    def run_forward(q: Any, k: Any, v: Any, call: Any) -> Any:
        """Packages return what is as wide as the values, which torch does not know of tensors without values."""
        result = forward(q, k, v, call)
        return result._replace(out=q.new_empty(*q.shape[:-1], v.shape[-1]))

    class Flex(torch.autograd.Function):
        """A compiled kernel of no time."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.save_for_backward(q, k, v)
            flex_calls.append((q.shape[-1], v.shape[-1]))
            return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return tuple(torch.empty_like(x) for x in ctx.saved_tensors)

    flex_calls: list[tuple[int, int]] = []
    flash.run_forward = run_forward
    # Made on the host, of values; the CPU's tests have it.
    flex.build_block_mask = lambda *of: None
    flex.run_flex = lambda q, k, v, blocks, scale, softcap: Flex.apply(q, k, v)
    replace_operations()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    answers = {}
    for kind, options in KINDS.items():
        given = {"bf16": True, "params_dtype": "bfloat16"} | options
        dtype = getattr(torch, given.pop("params_dtype"))
        config = TransformerConfig(
            num_layers=1, hidden_size=2048, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=WIDTH,
            attention_dropout=0.0, params_dtype=dtype, **given,
        )  # fmt: skip
        groups = ProcessGroupCollection.single()
        if "ring" in kind:
            groups = dataclasses.replace(groups, cp=dist.group.WORLD)
        packed = None
        if "documents" in kind:
            packed = PackedSeqParams(cu_seqlens_q=torch.tensor(BOUNDS))
            packed.layout(LENGTH)  # read before values are gone
        ranks = 2 if "ring" in kind else 1
        queries = {"earlier keys": LENGTH - EARLIER, "new token": 1}.get(kind, LENGTH)
        shapes = [(queries, HEADS, WIDTH), (LENGTH, GROUPS, WIDTH), (LENGTH, GROUPS, 64 if "latent" in kind else WIDTH)]
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda", 0), Recorder() as recorder:
            core = DotProductAttention(config, 1, pg_collection=groups)
            own = [torch.empty(s // ranks, 1, n, d, dtype=dtype, requires_grad=True) for s, n, d in shapes]
            recorder.restart()
            before = recorder.live_bytes
            with contextlib.redirect_stdout(sys.stderr):
                output = core(*own, packed_seq_params=packed)
                output.backward(torch.empty_like(output))
            answers[kind] = {
                "name": core.backend.name, "kernels": dict(recorder.kernels), "waits": dict(recorder.count_waits()),
                "flex": [flex_calls.pop() for _ in range(len(flex_calls))],
                "bytes": recorder.peak_bytes - before,
            }  # fmt: skip
    print(json.dumps(answers))
    leave()


if __name__ == "__main__":
    main()
