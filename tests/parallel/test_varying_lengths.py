# SPDX-License-Identifier: Apache-2.0
"""Microbatches of a step that differ in length: pipeline stages tell each other the shape of what they send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.stacked_parameters import list_parameters
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.parallel.harness import run_distributed

LENGTHS = ([5, 11], [7], [2, 3, 9], [16])
"""Of the documents in each microbatch."""


def forward_step(batches: Any, model: Any) -> Any:
    lengths = next(batches)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = (torch.arange(int(bounds[-1])) * 5 % 31).unsqueeze(0)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds,
                             max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))  # fmt: skip
    output = model(tokens, None, None, labels=tokens, packed_seq_params=packed)

    def loss_func(output: Tensor) -> Any:
        return output.sum() / 16, {"loss": output.detach().sum()}

    return output, loss_func


def train(pp: int, varies: bool, chunks: int | None = None) -> dict[str, Tensor]:
    """Gradients of this process's parameters after one step, whole ones of a name in the whole model."""
    groups = parallel_state.initialize_model_parallel(1, pp)
    config = TransformerConfig(
        num_layers=4, hidden_size=24, num_attention_heads=6, hidden_dropout=0.0, attention_dropout=0.0,
        pipeline_model_parallel_size=pp, variable_seq_lengths=varies, num_virtual_stages_per_pipeline_rank=chunks,
    )  # fmt: skip
    model = [
        GPTModel(
            config, get_gpt_layer_local_spec(), 31, 32, position_embedding_type="rope", vp_stage=chunk,
            pre_process=groups.is_first_stage and not chunk,
            post_process=groups.is_last_stage and chunk in (None, (chunks or 1) - 1),
        )
        for chunk in (range(chunks) if chunks else [None])
    ]  # fmt: skip
    losses = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(LENGTHS) for _ in model], model=model,
        num_microbatches=len(LENGTHS), seq_length=1, micro_batch_size=1,
    )  # fmt: skip
    found = {p.placement.name: p.grad for chunk in model for _, p in list_parameters(chunk)}  # type: ignore[attr-defined]
    return found | {"loss": torch.stack([entry["loss"] for entry in losses])} if losses else found


@pytest.mark.parametrize("chunks", [None, 2])
def test_lengths_vary_in_a_pipeline(chunks: int | None) -> None:
    (expected,) = run_distributed(train, 1, 1, False)
    stages = run_distributed(train, 2, 2, True, chunks)
    found = {**stages[0], **stages[1]}
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
