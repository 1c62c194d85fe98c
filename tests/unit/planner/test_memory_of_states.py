# SPDX-License-Identifier: Apache-2.0
"""Memory that the backward of linear attention takes for itself: the planner's multiples, counted again."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.kernels import launching
from megatron.core.mesh import RankGrid
from megatron.core.plan.branch_kind import Tokens
from megatron.core.plan.kinds import find_kind
from megatron.core.plan.model_plan import Branch
from megatron.core.plan.state_exchange import StateInput
from megatron.core.plan.state_kinds import CHUNK
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import linear_attention
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNet2
from megatron.core.ssm.kimi_delta_attention import KimiDeltaAttention
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.state_mixer import get_state_mixer_spec
from megatron.core.transformer.spec_utils import build_module
from megatron.training.flags.read import examine
from megatron.training.launch.dry_recorder import DryRecorder, ready

FLAGS = """--hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --bf16
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --micro-batch-size 1 --global-batch-size 1 --lr 1e-4
    --train-iters 1 --linear-num-value-heads 12 --linear-num-key-heads 6 --linear-key-head-dim 96
    --linear-value-head-dim 128 --mamba-num-heads 24 --mamba-head-dim 64 --mamba-state-dim 96 --mamba-num-groups 4
    --hybrid-layer-pattern"""
HANDED_OVER = "--context-parallel-size 2 --seq-length 4096 --max-position-embeddings 4096"
SIZES = {
    "mamba": ("M", 24, 4, 96, 64), "gated_delta_net": ("G", 12, 6, 96, 128),
    "gated_delta_net_2": ("G --experimental-attention-variant gdn2", 12, 6, 96, 128),
    "kimi_delta": ("K --linear-num-key-heads 12 --linear-key-head-dim 128", 12, 12, 128, 128),
}  # fmt: skip
"""Kind -> its letter, heads, groups, and channels of a key and of a value; not those that the multiples come from."""
TOKENS = 2048
"""Of two pieces where states are handed over."""


@pytest.mark.parametrize("hands_over", [False, True])
@pytest.mark.parametrize("kind", SIZES)
def test_backward_takes_what_the_plan_says(kind: str, hands_over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    letter, heads, groups, key, value = SIZES[kind]
    # Beside the values are channels that a state before the piece would add.
    width, pieces = (value + key, 2) if hands_over else (value, 1)
    monkeypatch.setattr(linear_attention, "is_cpu", lambda x: False)
    recorder = DryRecorder(lambda tensor: None)
    with ready(recorder), monkeypatch.context() as within:
        # A GPU's kernel passes the states, whether this machine could build it or not.
        within.setattr(launching, "kernels_work", lambda device: True)

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(pieces, TOKENS // pieces, *shape, dtype=dtype, requires_grad=True)

        values = make(heads, width, dtype=torch.float32 if hands_over else torch.bfloat16)
        strength = make(heads, dtype=torch.float32 if kind == "mamba" else torch.bfloat16)
        decay, last = {
            "mamba": (make(heads, dtype=torch.float32), [strength, None]),
            "gated_delta_net": (make(heads, dtype=torch.float32), [strength, strength]),
            "gated_delta_net_2": (make(groups, key, dtype=torch.float32), [None, make(groups, key)]),
            "kimi_delta": (make(heads, key, dtype=torch.float32), [strength, strength]),
        }[kind]
        unit = None if kind == "mamba" else (1e-6, key**-0.5)
        state = torch.empty(key, width).expand(pieces, heads, key, width) if hands_over else None
        inputs = [make(groups, key), make(groups, key), values, decay, *last]
        output, final = linear_attention._Attention.apply(CHUNK, unit, state, None, *inputs)
        before = recorder.live_bytes
        recorder.restart()
        results = [output, final] if hands_over else [output]
        torch.autograd.backward(results, [torch.empty_like(result) for result in results])
    world = {"WORLD_SIZE": "2"} if hands_over else {}
    model = examine([*FLAGS.split(), *letter.split(), *(HANDED_OVER.split() if hands_over else [])], world).config.model
    planned = find_kind(kind).beside(model, Branch(kind), Tokens(TOKENS, TOKENS))
    # Less what is freed before: the output, and that behind its gate; what the state before a piece is multiplied by.
    freed = TOKENS * heads * (2 * 2 * value + (4 * key if hands_over else 0))
    assert planned + freed == pytest.approx(recorder.peak_bytes - before, rel=0.03)


@pytest.mark.parametrize("kind", SIZES)
def test_the_plan_knows_what_mixers_read(kind: str) -> None:
    """Of which they choose, and plans count, what context-parallel ranks send."""
    config = examine([*FLAGS.split(), *SIZES[kind][0].split()], {}).config.model
    mixer = {"mamba": MambaMixer, "gated_delta_net": GatedDeltaNet, "gated_delta_net_2": GatedDeltaNet2,
             "kimi_delta": KimiDeltaAttention}[kind]  # fmt: skip
    groups = ProcessGroupCollection.build_alone(RankGrid(1), 0)
    with FakeTensorMode():
        spec = get_state_mixer_spec(mixer)
        built = build_module(spec, config=config, layer_number=1, pg_collection=groups)
        inputs = built.sketch_inputs(8, 1, torch.bfloat16)
    found = [StateInput(x.shape[2], math.prod(x.shape[3:]), x.element_size()) for x in inputs if x is not None]
    list_inputs = find_kind(kind).inputs
    assert list_inputs is not None and list_inputs(config) == found
