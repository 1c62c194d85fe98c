# SPDX-License-Identifier: Apache-2.0
"""Linear attention with the kernels for its states against the recurrence in float64, values and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.kernels.states import pass_backward, pass_forward
from megatron.core.ssm.chunks import Inputs
from megatron.core.ssm.linear_attention import attend, attend_step
from tests.kernels.harness import assert_close, compared, kernels_chosen, randn, run

TOKENS, GROUPS, HEADS = 40, 1, 2


def _recur(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for token in range(inputs.value.shape[1]):
        output, state = attend_step(inputs.map(lambda x, token=token: x[:, token]), state)  # type: ignore[misc]
        outputs.append(output)
    return torch.stack(outputs, dim=1), state


@compared
def states_of_linear_attention(device: str) -> None:
    """Of sums and of the delta rule, decay by head and by channel, three chunks, the last one not full; channels that
    are no power of two, and more columns than one program takes."""

    def draw(*shape: int) -> Tensor:
        return randn(*shape, dtype=torch.float32, device=device)

    for corrects, by_channel, (channels, width) in (
        (False, False, (7, 5)),
        (True, True, (70, 40)),
        (True, False, (16, 33)),
    ):
        of_head = (1, TOKENS, HEADS)
        decay = -draw(*of_head, *([channels] if by_channel else [])).abs()
        keys = [draw(1, TOKENS, GROUPS, channels) * channels**-0.5 for _ in range(2)]
        inputs = [*keys, draw(*of_head, width), decay, draw(*of_head).sigmoid(), draw(*of_head).sigmoid()]
        tensors = [*(inputs if corrects else inputs[:5]), draw(1, HEADS, channels, width)]
        expected = run(lambda *given: _recur(Inputs(*given[:-1]), given[-1]), [x.double() for x in tensors])
        with kernels_chosen() as launched:
            found = run(lambda *given: attend(Inputs(*given[:-1]), state=given[-1], chunk_size=16), tensors)
        # Backward finds the states again.
        assert launched.count(pass_backward) >= 1 and launched.count(pass_forward) == 2 * launched.count(pass_backward)
        assert_close(found, expected, 2e-5)
