# SPDX-License-Identifier: Apache-2.0
"""A kind of layer of your own: a mixer whose output is a decayed sum of all tokens so far, one decay for each channel.

    python examples/custom_mixer.py --hybrid-layer-pattern S-S* <other flags of pretrain_gpt.py>

It trains under every layout that divides channels, layers or samples, and generates from a state of constant size.
See docs/extending.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.errors import ConfigError  # noqa: E402
from megatron.core.plan.branch_kind import BranchKind, Counts, count_norm, keep_input  # noqa: E402
from megatron.core.plan.kinds import register_kind  # noqa: E402
from megatron.core.tensor_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    tensor_parallel_split,
)
from megatron.core.tensor_parallel.parameters import declare_parameter, parameter_dtype  # noqa: E402
from megatron.core.transformer.initialisers import input_initialiser, output_initialiser  # noqa: E402
from megatron.core.transformer.layer_inputs import LayerInputs  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402


class DecayedSum(MegatronModule):
    """s_t = sigmoid(decay) * s_(t-1) + W_in x_t, y_t = W_out s_t."""

    def __init__(self, config: Any, layer_number: int, pg_collection: Any) -> None:
        super().__init__(config)
        if pg_collection.cp.size() > 1:
            raise ConfigError("--context-parallel-size divides a sequence, and a decayed sum needs all of it; use 1")
        self.layer_number = layer_number
        size, common = config.hidden_size, {"config": config, "bias": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(size, size, init_method=input_initialiser(config), **common)
        self.decay = declare_parameter(
            (size,), dtype=parameter_dtype(config), splits=tensor_parallel_split(0, pg_collection.tp)
        )
        self.out_proj = RowParallelLinear(size, size, init_method=output_initialiser(config), **common)

    def forward(self, hidden_states: Tensor, *inputs: Any) -> tuple[Tensor, None]:
        """[s, b, h] -> [s, b, h]; inputs: the fields of LayerInputs."""
        x, given = self.in_proj(hidden_states)[0], LayerInputs(*inputs)
        context, packed, zeros = given.inference_context, given.packed_seq_params, x.new_zeros(x.shape[2])
        # Generation keeps a state of each sequence from call to call; documents that share a row begin from nothing.
        if context is not None:
            layout, (states,) = context.layout, context.read_recurrent(self.layer_number, zeros)
        elif packed is not None:
            layout = packed.layout(len(x))
            states = zeros.expand(len(layout.new), -1)
        else:
            return self.out_proj(self.scan(x, torch.zeros_like(x[0]))[0])
        sums, last = zip(*(self.scan(part, states[rows]) for rows, part in layout.group(x)), strict=True)
        if context is not None:
            context.write_recurrent(self.layer_number, torch.cat(last))
        return self.out_proj(layout.join(sums))

    def scan(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The sums after each token [s, b, channels], from a state [b, channels] on, and the last one."""
        decay, sums = torch.sigmoid(self.decay), []
        for token in x:
            state = decay * state + token
            sums.append(state)
        return torch.stack(sums), state


DECAYED_SUM = BranchKind(
    name="decayed_sum",
    letter="S",
    attribute="mixer",  # the module's name in a layer and in checkpoints: decoder.layers.0.mixer.decay
    count=lambda config, branch: Counts(2 * config.hidden_size**2, replicated=count_norm(config)),
    kept=lambda config, branch, tokens: keep_input(config, branch, tokens, "attn_norm", "qkv_linear"),
    state="per sequence",
    spec=DecayedSum,
)
register_kind(DECAYED_SUM)

if __name__ == "__main__":
    from megatron.cli.train import run

    run()
