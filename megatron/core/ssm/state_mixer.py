# SPDX-License-Identifier: Apache-2.0
"""The frame of mixers whose state has a constant size: project, convolve, attend with decay, gate, project.

    hidden states [s, b, h] -> in_proj -> sections, of which the first or middle ones pass a short causal convolution
    -> queries, keys, values, decay -> linear attention (linear_attention.py) -> gate and norm -> out_proj -> [s, b, h]

Heads, and with them the sections of the projection, are divided over the tensor-parallel group. Under context
parallelism a rank computes its pieces of the sequence from the state that is handed over to them (pieces.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.auxiliary_loss import is_recomputing
from megatron.core.collectives import all_reduce
from megatron.core.device import current_device
from megatron.core.errors import ConfigError
from megatron.core.inference_context import InferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.placement import Part
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.ssm.chunks import Inputs
from megatron.core.ssm.convolution import CausalConvolution
from megatron.core.ssm.libraries import StateCall, StateLibrary, choose_states
from megatron.core.ssm.linear_attention import attend, attend_step
from megatron.core.ssm.pieces import Pieces, describe_pieces
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LayerOutput,
    RowParallelLinear,
    tensor_parallel_split,
)
from megatron.core.tensor_parallel.parameters import Initialiser, declare_parameter, parameter_dtype
from megatron.core.transformer.initialisers import input_initialiser, output_initialiser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class StateMixerSubmodules:
    """The two projections: specs or classes."""

    in_proj: Any
    out_proj: Any


class StateMixer(MegatronModule):
    """[s, b, h] -> [s, b, h] and no bias; a kind says its sections and the arithmetic between the projections."""

    title: ClassVar[str]
    """Name in messages."""
    convolved: ClassVar[Sequence[str]]
    """Sections that pass the convolution; neighbours."""
    library: ClassVar[type[StateLibrary] | None] = None
    """Functions of a package that compute its states on a GPU."""
    further_sections: Sequence[str] = ()
    """The last sections, where the first projection does not make them."""
    unit: tuple[float, float] | None = None
    """See `attend`."""

    @take_arguments(
        "config submodules d_model=@hidden_size d_conv=None conv_init=None expand=None A_init_range=None "
        "D_has_hdim=None rmsnorm=None norm_before_gate=None dt_min=None dt_max=None dt_init=None dt_scale=None "
        "dt_init_floor=None bias=None conv_bias=None chunk_size=None layer_number pg_collection pp_layer_offset=0 "
        "name=...",
        "a mixer's form is that of the config's mamba_... fields, and layer_number counts in the whole model",
    )
    def __init__(
        self,
        config: TransformerConfig,
        submodules: StateMixerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.layer_number = layer_number
        self.notes_states = False
        """True adds to `state_squares` in training."""
        self.state_squares: list[Tensor] = []
        """Of each microbatch the squares of the states that sequences end with, summed over the heads of this TP rank,
        [sequences]."""
        ranks = self.groups.tp.size()
        self.sections = self.list_sections()
        for name, size in self.sections.items():
            if size % ranks:
                raise ConfigError(
                    f"--tensor-model-parallel-size {ranks} does not divide the {size} channels of section {name} of "
                    f"{self.title}"
                )
        parts = [Part(size, name=name) for name, size in self.sections.items() if name not in self.further_sections]
        convolved = [part for part in parts if part.name in self.convolved]
        channels = sum(part.size for part in convolved)
        width, has_bias = self.convolution_form()
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(part.size for part in parts),
            config=config,
            init_method=input_initialiser(config),
            bias=self.has_projection_bias,
            parts=parts,
            tp_group=self.groups.tp,
        )
        self.conv1d = CausalConvolution(
            channels, width, config=config, parts=convolved, bias=has_bias, tp_group=self.groups.tp
        )
        self.build_parameters(submodules)
        _, (key_width, _) = self.state_shape
        self.states = choose_states(self.library, config, key_width, parameter_dtype(config), current_device())
        self.out_proj = build_module(
            submodules.out_proj,
            self.sections["z"],
            config.hidden_size,
            config=config,
            init_method=output_initialiser(config),
            bias=self.has_projection_bias,
            skip_bias_add=True,
            tp_group=self.groups.tp,
        )

    # ---- what a kind says

    @abstractmethod
    def list_sections(self) -> dict[str, int]:
        """The projected sections in order, and their channels in the whole model; `z` gates."""

    @abstractmethod
    def convolution_form(self) -> tuple[int, bool]:
        """Tokens that the convolution reads, and whether it has a bias."""

    @property
    def has_projection_bias(self) -> bool:
        """True if the two projections have biases."""
        return False

    @abstractmethod
    def build_parameters(self, submodules: StateMixerSubmodules) -> None:
        """Declare the parameters between the two projections, except for the convolution's."""

    def project(self, hidden_states: Tensor) -> Tensor:
        """[s, b, h] -> the sections of this rank, [s, b, channels]."""
        projected: Tensor = self.in_proj(hidden_states)[0]
        return projected

    @abstractmethod
    def prepare(self, section: dict[str, Tensor]) -> Inputs:
        """The inputs of linear attention, but [s, b, ...], from the sections [s, b, channels of this rank], of which
        some are convolved."""

    def find_rate(self) -> Tensor | None:
        """Return the factor of strength that gives the decay, [heads of this rank]; None where they are unrelated."""
        return None

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, tuple[int, int]]:
        """Heads of this rank, and channels of a key and of a value."""

    @abstractmethod
    def finish(self, output: Tensor, section: dict[str, Tensor]) -> Tensor:
        """Gate and normalise: [s, b, heads, V] -> [s, b, channels of z]."""

    # ---- the frame

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotation: object = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> LayerOutput:
        """[s, b, h] -> ([s, b, h], None); mask and rotation say nothing here: order is all that a state knows."""
        projected = self.project(hidden_states)
        if inference_context is not None:
            mixed = self._mix_with_state(projected, inference_context)
        else:
            pieces = describe_pieces(self.groups.cp, projected, packed_seq_params)
            mixed = pieces.join(self._mix(pieces.split(projected), pieces))
        output: LayerOutput = self.out_proj(mixed)
        return output

    def _mix(self, projected: Tensor, pieces: Pieces) -> Tensor:
        """Everything between the projections: [s, b, sections] -> [s, b, channels of z]."""
        section = self._divide(projected, lambda x: self.conv1d(x, pieces))
        output = self._attend(_by_sequences(self.prepare(section)), pieces)
        return self.finish(output.transpose(0, 1), section)

    def _mix_with_state(self, projected: Tensor, context: InferenceContext) -> Tensor:
        """The same in generation: the convolution's last inputs and the state of each sequence are kept in context."""
        heads, width = self.state_shape
        tail = projected.new_zeros(self.conv1d.width - 1, self.conv1d.weight.shape[0])
        state = projected.new_zeros(heads, *width, dtype=torch.promote_types(projected.dtype, torch.float32))
        tails, states = context.read_recurrent(self.layer_number, tail, state)
        parts = []
        for rows, x in context.layout.group(projected):  # [n, sequences of the run, sections]
            past = tails[rows].transpose(0, 1)  # [width - 1, sequences, channels]
            read: list[Tensor] = []

            def convolve(x: Tensor, past: Tensor = past, read: list[Tensor] = read) -> Tensor:
                read.append(x)
                return self.conv1d.convolve(x, past)

            section = self._divide(x, convolve)
            tails[rows] = torch.cat([past, *read])[1 - self.conv1d.width :].transpose(0, 1)
            inputs = _by_sequences(self.prepare(section))
            if x.shape[0] == 1:
                now = inputs.map(lambda y: y[:, 0])
                output, states[rows] = attend_step(now, states[rows], self.unit)
                output = output.unsqueeze(1)
            else:
                output, states[rows] = attend(inputs, state=states[rows], unit=self.unit)
            parts.append(self.finish(output.transpose(0, 1), section))
        context.write_recurrent(self.layer_number, tails, states)
        return context.layout.join(parts)

    def _attend(self, inputs: Inputs, pieces: Pieces) -> Tensor:
        rate = self.find_rate()
        if not pieces.is_divided:
            return self._attend_to_whole(StateCall(inputs, self.unit, pieces, rate))
        if pieces.moves_heads(inputs):
            rate = None if rate is None else pieces.take_own(rate)
            whole = StateCall(pieces.take_heads(inputs), self.unit, pieces, rate)
            return pieces.return_heads(self._attend_to_whole(whole))
        documents = pieces.list_documents()
        # Beside the outputs of each piece those that every channel of the unknown state before it would add.
        batch, tokens, heads, width = inputs.value.shape
        channels = inputs.key.shape[-1]
        values = F.pad(inputs.value.to(torch.promote_types(inputs.value.dtype, torch.float32)), (0, channels))
        unknown = torch.eye(channels, width + channels, device=values.device, dtype=values.dtype).roll(width, 1)
        outputs, final = attend(
            inputs._replace(value=values),
            state=unknown.expand(batch, heads, channels, width + channels),
            documents=None if documents is None else documents.repeat_interleave(batch // documents.shape[0], dim=0),
            unit=self.unit,
        )
        own, added = outputs.split([width, channels], dim=-1)
        state, last = pieces.hand_over(final, width)
        self._note(last, None)
        return (own + torch.einsum("bshk,bhkv->bshv", added, state)).to(inputs.value.dtype)

    def _attend_to_whole(self, call: StateCall) -> Tensor:
        output, state = self.states(call)
        self._note(state, call.pieces.group)
        return output

    @torch.no_grad()
    def _note(self, state: Tensor, sharers: Group | None) -> None:
        """Keep the squares of the states [b, heads, K, V] after sequences of a training step. sharers: ranks that have
        other heads; None where there are none outside the TP group."""
        if self.notes_states and self.training and not is_recomputing():
            squares = state.square().flatten(1).sum(1)
            if sharers is not None:
                all_reduce(squares, sharers)
            self.state_squares.append(squares)

    def sketch_inputs(self, tokens: int, batch: int, dtype: torch.dtype) -> Inputs:
        """The inputs of linear attention of so many tokens, [batch, tokens, heads, ...], of this rank; their values say
        nothing."""
        ranks = self.groups.tp.size()
        section = {
            name: torch.empty(tokens, batch, size // ranks, dtype=dtype, device=current_device())
            for name, size in self.sections.items()
        }
        return _by_sequences(self.prepare(section))

    def _divide(self, projected: Tensor, convolve: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The sections [s, b, channels of this rank] of [s, b, all of them]; neighbours are convolved together."""
        names, ranks = list(self.sections), self.groups.tp.size()
        first, last = names.index(self.convolved[0]), names.index(self.convolved[-1]) + 1
        sizes = [size // ranks for size in self.sections.values()]
        # Each split once: its gradient then is put together in one piece.
        parts = projected.split([*sizes[:first], sum(sizes[first:last]), *sizes[last:]], dim=-1)
        convolved = convolve(parts[first]).split(sizes[first:last], dim=-1)
        return dict(zip(names, [*parts[:first], *convolved, *parts[first + 1 :]], strict=True))

    def declare(
        self, size: int, init: Initialiser, *, is_divided: bool = True, dtype: torch.dtype | None = None
    ) -> torch.nn.Parameter:
        """A parameter with one number for each head or channel; divided over the TP group, or whole on each rank, whose
        gradient of it then is a partial sum. dtype: `parameter_dtype` when None."""
        group = self.groups.tp
        splits = tensor_parallel_split(0, group) if is_divided else ()
        partial = () if is_divided or group.size() == 1 else ("tp",)
        return declare_parameter(
            (size,), init=init, dtype=dtype or self.parameter_dtype, splits=splits, partial_grad_axes=partial
        )

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Of decay and norms."""
        return self.in_proj.weight.dtype  # type: ignore[no-any-return]


def _by_sequences(inputs: Inputs) -> Inputs:
    """[s, b, ...] -> [b, s, ...]."""
    return inputs.map(lambda x: x.transpose(0, 1))


def get_state_mixer_spec(mixer: type[StateMixer]) -> ModuleSpec:
    """Return the spec of a mixer with parallel linear layers."""
    return ModuleSpec(module=mixer, submodules=StateMixerSubmodules(ColumnParallelLinear, RowParallelLinear))


def log_uniform_decay(tensor: Tensor, generator: torch.Generator) -> None:
    """Logarithms of numbers uniform in [1, 16]: the speeds of decay that heads start with."""
    tensor.copy_(tensor.float().uniform_(1.0, 16.0, generator=generator).log_())


def step_sizes(tensor: Tensor, generator: torch.Generator) -> None:
    """Numbers whose softplus is between 0.001 and 0.1, uniform in its logarithm."""
    low, high = 1e-3, 1e-1
    drawn = torch.empty_like(tensor, dtype=torch.float32).uniform_(generator=generator)
    steps = (low * (high / low) ** drawn).clamp(min=1e-4)
    tensor.copy_(steps + torch.log(-torch.expm1(-steps)))
