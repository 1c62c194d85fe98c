# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: layers after the decoder that predict tokens further ahead, and train it to look ahead.

    x_0 = decoder(embedding of t_i), normalised                   output layer -> t_{i+1}: the language-model loss
    x_k = layer_k( W [norm(embedding of t_{i+k}) ; norm(x_{k-1})] ), normalised     output layer -> t_{i+k+1}: loss k

for each depth k = 1, 2, ...; embedding and output layer are the model's. Source: DeepSeek-V3, 2024, section 2.2,
equations 21 to 25; x_0 is read after the decoder's final norm, as upstream has it. With several residual streams X
(hyper_connections.py; DeepSeek-V4) depths pass those on, before their sum at the end, separate for each depth:

    X_k = layer_k( V norm(embedding of t_{i+k}) + W norm(X_{k-1}[n]) for each stream n );    x_k = sum(X_k), normalised

The losses are never returned: they hang on x_0 and get their gradient when the language-model loss comes through there
(auxiliary_loss.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.auxiliary_loss import AuxiliaryLossScale, attach_auxiliary_loss, is_recomputing
from megatron.core.collectives import all_reduce
from megatron.core.context_parallel.sharding import list_pieces_of_rank, shard_sequence
from megatron.core.plan.read import read_plan
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.sequences.token_layout import TokenLayout
from megatron.core.taken_arguments import take_arguments
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.execution.execution import Execution
from megatron.core.transformer.execution.fp8_layers import multiply_in_fp8
from megatron.core.transformer.hyper_connections import contract, declare_end, link_branches
from megatron.core.transformer.initialisers import input_initialiser
from megatron.core.transformer.layer_inputs import StageInputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.state_mixing import StateMixing
from megatron.core.transformer.transformer_block import TransformerBlock, choose_inputs, open_random_stream
from megatron.core.transformer.transformer_config import TransformerConfig

# Put here by a table of upstream's names; declared for type checkers.
MTPLossAutoScaler: Any
MTPLossLoggingHelper: Any
get_mtp_layer_offset: Any
get_mtp_ranks: Any
mtp_on_this_rank: Any
roll_tensor: Any

# ---- tokens, one place earlier


class TokenShift:
    """Moves what belongs to the tokens of a sequence one place towards its beginning, document by document.

        tokens        a b c | d e f g          two documents, packed into one sequence
        shifted       b c 0 | e f g 0

    sequence: the ranks that share it, each with two pieces (context_parallel/sharding.py); the first token of a piece
    comes from the rank that has it. A new object for each microbatch, whose documents it knows.
    """

    def __init__(self, sequence: Group, documents: TokenLayout | None = None) -> None:
        self.sequence = sequence
        self.ends: Tensor | None = None
        """True if a document ends with this rank's token, bool [s]; None where the sequence is not packed."""
        if documents is not None:
            ends = torch.zeros(documents.length, dtype=torch.bool)
            ends[torch.tensor(documents.bounds[1:]) - 1] = True
            self.ends = shard_sequence(ends, sequence.rank(), sequence.size())

    def __call__(self, x: Tensor) -> Tensor:
        """[b, s, ...] -> [b, s, ...], zero where a document ends. Gradients go back to the token they come from."""
        pieces = x.chunk(2, dim=1) if self.sequence.size() > 1 else (x,)
        following = self._find_following(pieces)
        shifted = torch.cat(
            [part for piece, first in zip(pieces, following, strict=True) for part in (piece[:, 1:], first[:, None])], 1
        )
        if self.ends is None:
            return shifted
        return shifted.masked_fill(self.ends.to(x.device).view(-1, *[1] * (x.dim() - 2)), 0)

    def _find_following(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """For each of our pieces what follows its last token, [b, ...]; zeros after the sequence."""
        zeros = torch.zeros_like(pieces[0][:, 0])
        ranks = self.sequence.size()
        if ranks == 1:
            return [zeros]
        # Of every piece only the first token: whole sequences need not travel.
        own = torch.stack([piece[:, 0] for piece in pieces])  # [2, b, ...]
        gathered = gather_from_sequence_parallel_region(own, group=self.sequence)
        places = [piece for rank in range(ranks) for piece in list_pieces_of_rank(rank, ranks)]
        firsts = dict(zip(places, gathered.unbind(), strict=True))
        return [firsts.get(piece + 1, zeros) for piece in list_pieces_of_rank(self.sequence.rank(), ranks)]


# ---- the layers


@dataclass
class MultiTokenPredictionLayerSubmodules:
    """The parts of one depth: specs or classes."""

    enorm: Any
    hnorm: Any
    eh_proj: Any
    mtp_model_layer: Any
    """A transformer layer."""
    layer_norm: Any


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """layer_specs: a ModuleSpec for each layer with separate weights."""

    layer_specs: list[ModuleSpec]


class MultiTokenPredictionLayer(MegatronModule):
    """One depth: the embedding of a further token joins the hidden states, and a transformer layer follows."""

    eh_proj: Any
    e_proj: Any
    h_proj: Any

    @take_arguments(
        "config submodules layer_number vp_stage=... pg_collection mtp_layer_pattern=None hybrid_submodules=None "
        "mamba_submodules=None name=...",
        "layers follow from the config's plan",
    )
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """layer_number: the depth, counted from 1. In the whole model the transformer layer inside is counted on from
        the decoder's last one, whose kind it has (core/plan)."""
        super().__init__(config)
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        assert config.hidden_size is not None
        self.layer_number, self.tp_group = layer_number, groups.tp
        layer = read_plan(config).depth(layer_number)[0]
        self.rotary_kind = layer.options.rotary
        self.enorm = build_module(submodules.enorm, config, config.hidden_size)
        self.hnorm = build_module(submodules.hnorm, config, config.hidden_size)
        for name in ("eh_proj",) if config.num_streams is None else ("e_proj", "h_proj"):
            projection = build_module(
                submodules.eh_proj,
                config.hidden_size * (2 if name == "eh_proj" else 1),
                config.hidden_size,
                config=config,
                init_method=input_initialiser(config),
                bias=False,
                gather_output=True,
                tp_group=groups.tp,
            )
            setattr(self, name, projection)
            if layer.low_precision:
                of_name = multiply_in_fp8(projection, config, groups, f"mtp.layers.{layer_number - 1}.{name}")
                setattr(self, "fp8_products" if name == "eh_proj" else f"fp8_products_of_{name}", of_name)
        self.mtp_model_layer = build_module(
            submodules.mtp_model_layer, config=config, layer_number=layer.number, pg_collection=groups
        )
        if not isinstance(self.mtp_model_layer, TransformerBlock):
            link_branches([self.mtp_model_layer], config)
        self.end_names = tuple(end := declare_end(config))
        for name, parameter in end.items():
            self.register_parameter(name, parameter)
        self.final_layernorm = build_module(submodules.layer_norm, config, config.hidden_size)
        self.execution = Execution(config)

    def forward(self, hidden_states: Tensor, decoder_input: Tensor, inputs: StageInputs) -> Tensor:
        """Hidden states of the depth before, and the embedding of the MTP tokens, [s, b, h] each -> [s, b, h]; of n
        residual streams all, [s, b, n h] -> [s, b, n h], for `finish`."""
        run = functools.partial(self._run, inputs=inputs)
        # A cache must not be written to twice.
        if not self.execution.recomputes_prediction or inputs.inference_context is not None:
            return run(hidden_states, decoder_input)
        result: Tensor = checkpoint(
            run, self.execution.divides_unit_inputs, hidden_states, decoder_input, tp_group=self.tp_group
        )
        return result

    def _run(self, hidden_states: Tensor, decoder_input: Tensor, *, inputs: StageInputs) -> Tensor:
        if self.config.num_streams is None:
            joined = torch.cat([self.enorm(decoder_input), self.hnorm(hidden_states)], dim=-1)  # [s, b, 2 h]
            hidden_states, _ = self.eh_proj(joined)
        else:
            of_token, _ = self.e_proj(self.enorm(decoder_input))
            length, sequences, _ = hidden_states.shape
            # All streams are tokens of one product.
            of_streams, _ = self.h_proj(self.hnorm(hidden_states.reshape(length, -1, self.config.hidden_size)))
            hidden_states = (of_streams.unflatten(1, (sequences, -1)) + of_token.unsqueeze(2)).flatten(2)
        if self.config.sequence_parallel:
            # The projection has gathered the sequence to multiply it by its part of the columns.
            hidden_states = scatter_to_sequence_parallel_region(hidden_states, self.tp_group)
        if self.config.fp32_residual_connection:
            hidden_states = hidden_states.float()
        # A depth of several layers, in letters, gives each its angles.
        several = isinstance(self.mtp_model_layer, TransformerBlock)
        layer_inputs = inputs if several else choose_inputs(inputs, self.rotary_kind)
        hidden_states = self.mtp_model_layer(hidden_states, *layer_inputs)
        return hidden_states if self.config.num_streams is not None else self.finish(hidden_states)

    def finish(self, hidden_states: Tensor) -> Tensor:
        """The output of `forward` [s, b, n h] as the output layer reads it, [s, b, h]."""
        if self.config.num_streams is not None:
            hidden_states = contract(hidden_states, self.config, [getattr(self, name) for name in self.end_names])
        normalised: Tensor = self.final_layernorm(hidden_states)
        return normalised


class MultiTokenPredictionBlock(MegatronModule):
    """All depths, one after the other: [s, b, h] -> a list of [s, b, h], one for each further token."""

    @take_arguments(
        "config spec vp_stage=... pg_collection mtp_layer_pattern=None mtp_num_depths=@mtp_num_layers "
        "hybrid_submodules=None mamba_submodules=None name=...",
        "layers follow from the config's plan",
    )
    def __init__(
        self,
        config: TransformerConfig,
        spec: ModuleSpec | MultiTokenPredictionBlockSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        submodules: MultiTokenPredictionBlockSubmodules | None = None,
    ) -> None:
        """spec: get_gpt_mtp_block_spec()'s, or the submodules alone."""
        super().__init__(config)
        submodules = submodules or (spec.submodules if isinstance(spec, ModuleSpec) else spec)
        assert submodules is not None
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.tp_group = groups.tp
        self.layers = nn.ModuleList(
            build_module(spec, config=config, layer_number=number, pg_collection=groups)
            for number, spec in enumerate(submodules.layer_specs, start=1)
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        embedding: Callable[[Tensor, Tensor], Tensor],
        shift: TokenShift,
        inputs: StageInputs,
    ) -> list[Tensor]:
        """input_ids, position_ids: [b, s] int64, of the tokens that the decoder has read. hidden_states: its output
        after the final norm, [s, b, h], or all residual streams, [s, b, n h]. embedding: the model's, (input_ids,
        position_ids) -> [s, b, h]."""
        detaches, found = self.config.detaches_prediction, []
        if detaches:
            hidden_states = hidden_states.detach()
        mixing = StateMixing(input_ids, shift.sequence, shift) if self.config.mtp_hsm and self.training else None
        for depth in range(self.config.mtp_num_layers or 0):
            input_ids = shift(input_ids)
            decoder_input = embedding(input_ids, position_ids)
            if mixing is not None:
                hidden_states = self._mix(hidden_states, mixing)
            with open_random_stream(self.config, self.training, self.tp_group):
                decoder_input = decoder_input.detach() if detaches else decoder_input
                hidden_states = self.compute_depth(depth + 1, hidden_states, decoder_input, inputs)
            streams = self.config.num_streams is not None
            found.append(self._layer(depth + 1).finish(hidden_states) if streams else hidden_states)
        return found

    def _mix(self, hidden_states: Tensor, mixing: StateMixing) -> Tensor:
        if not self.config.sequence_parallel:
            return mixing.mix(hidden_states.transpose(0, 1)).transpose(0, 1)
        # A token may continue from one that another rank has; all ranks mix alike.
        whole = gather_from_sequence_parallel_region(hidden_states, False, self.tp_group)
        mixed = mixing.mix(whole.transpose(0, 1)).transpose(0, 1)
        return scatter_to_sequence_parallel_region(mixed, self.tp_group)

    def compute_depth(self, depth: int, hidden_states: Tensor, decoder_input: Tensor, inputs: StageInputs) -> Tensor:
        """One depth, counted from 1: hidden states of the depth before, and the embedding of the tokens `depth` places
        later, [s, b, h] each -> [s, b, h]."""
        states: Tensor = self._layer(depth)(hidden_states, decoder_input, inputs)
        return states

    def _layer(self, depth: int) -> MultiTokenPredictionLayer:
        # One layer for all depths with mtp_use_repeated_layer.
        return self.layers[(depth - 1) % len(self.layers)]  # type: ignore[return-value]


# ---- the losses


class MultiTokenPredictionLoss(MegatronModule):
    """Attaches the MTP losses to the hidden states of the language-model loss, and sums them up for the log.

    Their weight is mtp_loss_scaling_factor / depths, each being a mean over the tokens of a microbatch that count.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.auxiliary_loss_scale = AuxiliaryLossScale()
        self._sums: Tensor | None = None
        self._guesses: list[Tensor] = []
        """The likeliest tokens of the logits that a depth makes, int64 [b, ranks, positions] each."""

    def watch(
        self, compute_logits: Callable[[Tensor], Tensor], groups: ProcessGroupCollection
    ) -> Callable[[Tensor], Tensor]:
        """The function, [s, b, h] -> [s, b, v / tp], of whose logits `attach` is to count the right guesses."""
        self._guesses = []
        ranks = groups.tp.size() if self.config.sequence_parallel else 1

        def compute(hidden_states: Tensor) -> Tensor:
            logits = compute_logits(hidden_states)
            if self.training and not is_recomputing():
                guesses = find_likeliest(logits.detach(), groups.tp)
                self._guesses.append(guesses.t().unflatten(1, (ranks, -1)))
            return logits

        return compute

    def attach(
        self, hidden_states: Tensor, depth: int, losses: Tensor, labels: Tensor, loss_mask: Tensor, sequence: Group
    ) -> Tensor:
        """The hidden states [s, b, h], whose backward also runs the backward of this depth's losses.

        depth: counted from 0. losses [b, s] float32, of each token; labels, loss_mask [b, s], which of them count.
        sequence: the ranks that share the sequence.
        """
        depths = self.config.mtp_num_layers
        assert depths is not None
        loss_sum, num_tokens = (losses * loss_mask).sum(), loss_mask.sum().float()
        if self.training and not is_recomputing():
            right = torch.cat(self._guesses, dim=2).flatten(1) == labels
            self._add(depth, torch.stack([loss_sum.detach(), num_tokens, (right * loss_mask).sum().float()]))
        share = loss_sum * (self.config.mtp_loss_scaling_factor / depths)
        if not self.config.calculate_per_token_loss:
            if sequence.size() > 1:
                # A mean over the whole sequence, of which each rank has a part.
                all_reduce(num_tokens, sequence)
            share = share / num_tokens.clamp(min=1)
        return attach_auxiliary_loss(hidden_states, share, self.auxiliary_loss_scale)

    def _add(self, depth: int, sums: Tensor) -> None:
        if self._sums is None:
            self._sums = sums.new_zeros(self.config.mtp_num_layers or 0, 3)
        self._sums[depth] += sums

    def take_sums(self) -> Tensor | None:
        """For each depth the sum of its losses in training, how many tokens they are of, and how many of these were the
        likeliest ones, float32 [depths, 3], since the last call; None where there was no microbatch."""
        taken, self._sums = self._sums, None
        return taken


def find_likeliest(logits: Tensor, group: Group) -> Tensor:
    """Token of the largest logit, of equal ones the first: [s, b, v / tp] -> int64 [s, b], the same on every rank."""
    own, place = logits.max(-1)
    if group.size() == 1:
        return place
    largest = own.clone()
    all_reduce(largest, group, op="max")
    vocab = logits.shape[-1]
    tokens = (place + group.rank() * vocab).masked_fill(own < largest, vocab * group.size())
    all_reduce(tokens, group, op="min")
    return tokens
