# SPDX-License-Identifier: Apache-2.0
"""Memory that the backward of linear attention takes for itself: the planner's multiples, counted again."""

from __future__ import annotations

import pytest
import torch

from megatron.core.kernels import launching
from megatron.core.plan.branch_kind import Tokens
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import Branch
from megatron.core.plan.state_kinds import CHUNK
from megatron.core.ssm import linear_attention
from megatron.training.flags.read import examine
from megatron.training.launch.dry_recorder import DryRecorder, ready

FLAGS = """--hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --bf16
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --micro-batch-size 1 --global-batch-size 1 --lr 1e-4
    --train-iters 1 --linear-num-value-heads 12 --linear-num-key-heads 6 --linear-key-head-dim 96
    --linear-value-head-dim 128 --mamba-num-heads 24 --mamba-head-dim 64 --mamba-state-dim 96 --mamba-num-groups 4
    --hybrid-layer-pattern"""
SIZES = {"mamba": ("M", 24, 4, 96, 64), "gated_delta_net": ("G", 12, 6, 96, 128), "kimi_delta": ("K", 12, 12, 128, 128)}
"""Kind -> its letter, heads, groups, and channels of a key and of a value; not those that the multiples come from."""


@pytest.mark.parametrize("kind", SIZES)
def test_backward_takes_what_the_plan_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    letter, heads, groups, key, value = SIZES[kind]
    tokens = 1024
    monkeypatch.setattr(linear_attention, "is_cpu", lambda x: False)
    recorder = DryRecorder(lambda tensor: None)
    with ready(recorder), monkeypatch.context() as within:
        # A GPU's kernel passes the states, whether this machine could build it or not.
        within.setattr(launching, "kernels_work", lambda device: True)

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(1, tokens, *shape, dtype=dtype, requires_grad=True)

        by_channel = (key,) if kind == "kimi_delta" else ()
        inputs = [make(groups, key), make(groups, key), make(heads, value)]
        inputs.append(make(heads, *by_channel, dtype=torch.float32))
        corrects = kind != "mamba"
        inputs += [make(heads), make(heads)] if corrects else [None, None]  # type: ignore[list-item]
        unit = (1e-6, key**-0.5) if corrects else None
        output, _ = linear_attention._Attention.apply(CHUNK, unit, None, None, *inputs)
        before = recorder.live_bytes
        recorder.restart()
        output.backward(torch.empty_like(output))
    config = examine([*FLAGS.split(), letter], {}).config.model
    planned = find_kind(kind).beside(config, Branch(kind), Tokens(tokens, tokens))
    assert planned == pytest.approx(recorder.peak_bytes - before, rel=0.03)
