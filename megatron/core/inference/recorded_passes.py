# SPDX-License-Identifier: Apache-2.0
"""Passes that read one token of each text, recorded as CUDA graphs: one for each number of texts in a table.

A pass of fewer texts is padded to the next number. Texts that grow pass from a graph to another one, of twice the
tokens: what attention reads has one length in a graph. The first pass of such a form runs without, so that libraries
and kernels are loaded; the second is recorded, and launched from the recording, as are all after it.

In a recording: the layers, with collectives of tensor parallelism, and logits. Outside: the embedding, angles, what
stages send one another, the choice of tokens. Passes that read more than a token of any text, prompts and drafts, run
as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.device_graphs import Recorder, Recording, are_same, copy_structure, list_tensors, load
from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.plan.read import read_plan
from megatron.core.sequences.padded_call import PaddedCall
from megatron.core.sequences.state import HeldSequence, SequenceState
from megatron.core.transformer.layer_inputs import StageInputs

_SHORTEST = 256
"""Tokens that attention reads of each text in the first graphs."""
_RECORDED = {"attention", "latent_attention", "mlp"}


def choose_graph_sizes(most: int, count: int, distribution: str = "exponential") -> tuple[int, ...]:
    """The numbers of texts for which passes are recorded, rising, up to `most`: none where count is 0.

    exponential: `most`, and each half of the one after it, `count` in all, or down to 1 where that is -1; linear: as
    many with equal distances. Raises ConfigError for a negative count but -1.
    """
    if count < -1:
        raise ConfigError(f"--inference-dynamic-batching-num-cuda-graphs {count} must be at least 0, or -1 for any")
    wanted = most.bit_length() + 1 if count == -1 else min(count, most)
    if distribution == "linear":
        return tuple(-(-most * index // wanted) for index in range(1, wanted + 1))
    return tuple(sorted({-(-most // 2**index) for index in range(wanted)}))


def find_obstacle(core: Any) -> str | None:
    """Return why passes of a model cannot be recorded; None where they can."""
    if not isinstance(core, GPTModel) or type(core).forward is not GPTModel.forward:
        return "its forward is a program's"
    config = core.config
    kinds = {kind for layer in read_plan(config).layers for kind in layer.kinds} - _RECORDED
    if kinds:
        return f"layers with {', '.join(sorted(kinds))} decide on the host what they compute"
    if config.fp8 is not None or config.fp4 is not None:
        return "products in few bits have scales of all tokens of a pass, padding included"
    return "multi-token prediction goes on from one stage to the next" if core.states_in > 1 else None


@dataclass
class _Form:
    """Passes of one form."""

    call: PaddedCall
    fixed: tuple[Tensor, StageInputs] | None = None
    """Hidden states that enter the layers, and what these read beside them; None before the first pass."""
    recording: Recording[Tensor] | None = None
    memory: tuple[Tensor, ...] = ()
    """What the recording reads wherever it lay: weights, and keys and values of texts."""


class RecordedPasses:
    """A model's passes over the rows of one SequenceState."""

    def __init__(
        self, core: GPTModel, recorder: Recorder, sizes: tuple[int, ...], state: SequenceState, padding: HeldSequence
    ) -> None:
        """sizes: numbers of texts, rising. padding: a sequence with a page, into which the tokens of no text go."""
        self._core, self._recorder, self._padding = core, recorder, padding
        ranks = core.pg_collection.tp.size() if core.config.sequence_parallel else 1
        self.sizes = sorted({-(-size // ranks) * ranks for size in sizes})
        self._state, self._pool = state, recorder.open_pool()
        self._passes: dict[tuple[int, int], _Form] = {}
        self._device = next(core.parameters()).device
        self.replays = 0

    @property
    def recordings(self) -> int:
        """Forms of passes that were recorded."""
        return sum(known.recording is not None for known in self._passes.values())

    def serves(self, tokens: list[list[int]], state: SequenceState, wanted: list[int]) -> bool:
        """Return whether there is a graph for a pass that reads these tokens of a state's rows."""
        is_one_each = state is self._state and len(tokens) <= self.sizes[-1] and set(wanted) == {1}
        return is_one_each and all(len(new) == 1 for new in tokens)

    def begin(self) -> PaddedCall:
        """Take over a pass that was begun in the state; returns what the layers read of it."""
        state = self._state
        size = next(size for size in self.sizes if size >= len(state.rows))
        length = _SHORTEST
        while length < state.layout.longest:
            length *= 2
        form = (size, min(length, state.max_tokens))
        if form not in self._passes:
            self._passes[form] = _Form(PaddedCall(state, *form, self._device))
        self._now = self._passes[form]
        self._now.call.fill(self._padding)
        return self._now.call

    def run(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Make the pass that was begun, of tokens and positions [1, t] int64, padding included. Returns logits [1, t, v
        / tp], or hidden states on a stage before the last; the next pass may write over them."""
        core, known = self._core, self._now
        call = known.call
        hidden_states, inputs, *_ = core._preprocess(input_ids=ids, position_ids=positions, inference_context=call)
        if known.fixed is None:
            known.fixed = copy_structure((hidden_states, inputs))
            return self._compute(call, hidden_states, inputs)
        for fixed, tensor in zip(list_tensors(known.fixed), list_tensors((hidden_states, inputs)), strict=True):
            load(fixed, tensor)
        memory = (*core.parameters(), *core.buffers(), *self._state.list_memory())
        is_current = len(memory) == len(known.memory) and all(map(are_same, memory, known.memory))
        if known.recording is None or not is_current:
            known.recording = None  # its memory is free for the new one
            hidden_states, inputs = known.fixed
            with self._recorder.session():
                known.recording = self._recorder.record(lambda: self._compute(call, hidden_states, inputs), self._pool)
            known.memory = tuple(each.detach() for each in memory)
        known.recording.replay()
        self.replays += 1
        return known.recording.result

    def _compute(self, call: PaddedCall, hidden_states: Tensor, inputs: StageInputs) -> Tensor:
        core = self._core
        call.start()
        states, _ = core._run_decoder(hidden_states, inputs)
        return core.compute_logits(states) if core.post_process else states
