# SPDX-License-Identifier: Apache-2.0
"""GPTModel: embedding, transformer layers, output layer and loss, or one pipeline stage's part of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from megatron.core.device import current_device
from megatron.core.enums import ModelType
from megatron.core.errors import ConfigError
from megatron.core.inference_context import InferenceContext
from megatron.core.models.common.embeddings.attention_temperature import AttentionTemperature
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_choice import build_rotary_embeddings
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.models.common.language_module import LanguageModule
from megatron.core.models.gpt.upstream_arguments import check_arguments, refuse_arguments, refuse_schedule_plan
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.plan.stages import build_pipeline_layout, find_embedding_use, fit_virtual_stages
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.parameters import initialise_parameters, parameter_dtype
from megatron.core.transformer.adapters import add_adapters
from megatron.core.transformer.layer_inputs import StageInputs, read_stage_inputs
from megatron.core.transformer.moe.router import tell_tokens
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLoss, TokenShift
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class GPTModel(LanguageModule):
    """Decoder-only transformer (Radford et al., 2018), GPT-2 or Llama style as its config says."""

    block_type: ClassVar[Callable[..., TransformerBlock]] = TransformerBlock

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        logit_dtype: torch.dtype | None = None,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: ModuleSpec | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        """Upstream's signature.

        vocab_size: with padding. max_sequence_length: of learned positions. pre_process, post_process: this stage has
        the embedding, the output layer. parallel_output: logits stay split over the vocabulary. mtp_block_spec: of
        multi-token prediction (`get_gpt_mtp_block_spec`), built on the stage where it lies.
        """
        super().__init__(config, pg_collection)
        check_arguments(fp16_lm_cross_entropy, position_embedding_type)
        if config.sequence_parallel and not scatter_embedding_sequence_parallel:
            raise ConfigError("scatter_embedding_sequence_parallel=False is not supported; leave it out")
        own = (None, torch.float32) if config.logit_dtype == "fp32" else (None, parameter_dtype(config))
        if logit_dtype not in own:
            raise ConfigError(f"logit_dtype {logit_dtype} is the config's to say: give it logit_dtype='fp32'")
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.vp_stage, self.model_type = vp_stage, ModelType.encoder_or_decoder
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type, self.logit_scale = position_embedding_type, config.logit_scale
        # Set by the pipeline before each forward, because upstream's forward has no argument for it.
        self._input_tensor: Tensor | None = None
        self._embedding_elsewhere: tuple[LanguageModelEmbedding, ...] = ()
        embedding_holders = self._find_place_in_pipeline(vp_stage)
        _check_prediction(config, mtp_block_spec, position_embedding_type, is_here=self.predicts_further)
        # Angles are computed, not drawn or loaded: they have values also where the parameters have no memory yet.
        with torch.device(current_device()):
            self.rotary_pos_emb, self.local_rotary_pos_emb = build_rotary_embeddings(
                config,
                position_embedding_type,
                rotary_percent,
                (seq_len_interpolation_factor, rotary_base),
                (rope_scaling, rope_scaling_factor, config.rope_scaling_high_freq_factor),
            )
            has_rotary = self.rotary_pos_emb is not None
            self.temperature = AttentionTemperature.from_config(config) if has_rotary else None
        with torch.device("meta" if config.init_model_with_meta_device else current_device()):
            if (pre_process or self.predicts_further) and self.embedding_owner_chunk is None:
                self.embedding = self._build_embedding(embedding_holders)
            self.decoder = self.block_type(
                config,
                transformer_layer_spec,
                post_process=post_process,
                pg_collection=self.pg_collection,
                vp_stage=vp_stage,
            )
            if self.predicts_further and mtp_block_spec is not None:
                self.mtp = build_module(mtp_block_spec, config=config, pg_collection=self.pg_collection)
            if post_process:
                if config.mtp_num_layers is not None:
                    self.mtp_loss = MultiTokenPredictionLoss(config)
                self.output_layer = self.build_output_layer(
                    vocab_size,
                    is_tied=share_embeddings_and_output_weights,
                    has_embedding=self._finds_embedding,
                    parallel_output=parallel_output,
                )
        # Last, when the whole tree of modules exists: initial numbers depend on the parameters' global names.
        self._initialise()

    def _find_place_in_pipeline(self, vp_stage: int | None) -> int:
        """Find what this chunk shares with others; returns how many processes of the pipeline hold the embedding."""
        pp, chunk, config = self.pg_collection.pp, vp_stage or 0, self.config
        shape, is_tied = fit_virtual_stages(config, pp), self.share_embeddings_and_output_weights
        stage = shape.index(pp.rank(), chunk)
        self.states_in = config.count_states_between_stages(shape)[stage - 1] if stage else 1
        """Hidden states that come from the stage before: one, or one and one for each MTP depth."""
        self.predicts_further = build_pipeline_layout(config, shape)[stage].has_prediction
        """True if the layers of multi-token prediction lie here."""
        self.reuses_end_weights = is_tied or config.mtp_num_layers is not None or config.loss_chunk_size is not None
        """True if embedding or output layer are used more than once in a forward pass."""
        use = find_embedding_use(config, shape, is_tied=is_tied)
        needs_embedding = self.pre_process or self.predicts_further or (is_tied and self.post_process)
        owner = use.owner_chunk.get(pp.rank(), chunk)
        self.embedding_owner_chunk: int | None = owner if needs_embedding and owner != chunk else None
        """The earlier chunk of this process whose word embedding this one shares: in a V the loss is on the first
        process, with the embedding, and tied weights are one tensor. None where this chunk needs none, or has one."""
        self._finds_embedding = self.pre_process or self.predicts_further or self.embedding_owner_chunk is not None
        return len(use.ranks)

    def _build_embedding(self, holders: int) -> LanguageModelEmbedding:
        """This stage's embedding. holders: how many processes of the pipeline have one, whose gradients are summed."""
        embedding = LanguageModelEmbedding(
            self.config, self.vocab_size, self.max_sequence_length,
            position_embedding_type=self.position_embedding_type, tp_group=self.pg_collection.tp,
        )  # fmt: skip
        if holders > 1:
            # The first stage's counts in norms and checkpoints; the one next to multi-token prediction is its copy.
            self.share_gradient(embedding.word_embeddings.weight, is_copy=not self.pre_process)
        return embedding

    def _initialise(self) -> None:
        """Name and fill the parameters as the config says, and freeze those that --freeze-base-for-mtp does not train,
        all but the layers of multi-token prediction, or --lora-rank, all but adapters."""
        on_cpu, draw = self.config.use_cpu_initialization, self.config.perform_initialization
        add_adapters(self, self.config)
        initialise_parameters(self, seed=self.config.seed, draw_on_cpu=on_cpu, draw=draw)
        self.is_frozen = self.config.freeze_base_for_mtp and self.config.mtp_num_layers is not None
        for name, parameter in self.named_parameters():
            if self.is_frozen and not name.startswith("mtp."):
                parameter.requires_grad_(False)

    build_schedule_plan = refuse_schedule_plan

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Hidden states [s, b, h] from the previous stage, for the next forward call."""
        self._input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The weight that embedding and output layer share, or on the last stage its copy; None where it is neither."""
        embedding = self._find_embedding()
        if embedding is not None:
            return embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def _find_embedding(self) -> LanguageModelEmbedding | None:
        """This chunk's embedding, or an earlier chunk's on this process; None where there is neither."""
        if self._embedding_elsewhere:
            return self._embedding_elsewhere[0]
        return cast("LanguageModelEmbedding | None", self._modules.get("embedding"))

    def share_embedding_of(self, chunk: GPTModel) -> None:
        """Share the embedding of an earlier chunk on this process, which stays its owner."""
        # In a tuple, so that this module does not register it as a child.
        self._embedding_elsewhere = (chunk.embedding,)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: Mapping[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: InferenceContext | None = None,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        is_spec_decode: bool | None = None,
        mtp_kwargs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Loss of every token [b, s] float32 when there are labels, else logits [b, s, v].

        input_ids, position_ids, labels: [b, s] int64; with the config's mrope_section position_ids may be [3, b, s], of
        time, height and width. attention_mask: bool [b or 1, 1, s, s], True where a position may
        not be seen; causal when None. With context parallelism s is this rank's tokens (context_parallel/sharding.py),
        and a mask has all keys: [b or 1, 1, s, s * cp]. decoder_input: hidden states [s, b, h] in place of the
        embedding. loss_mask: [b, s], tokens that count in the losses of multi-token prediction, all when None; the
        caller weights the language-model loss, and only that is returned. packed_seq_params: the
        documents that are packed into one sequence (b = 1), in place of a mask; with context parallelism bounds in the
        whole sequence. In generation only what `inference_context.layout` wants has logits, but with sequence
        parallelism. runtime_gather_output: logits whole on every rank. inference_params: the former name of
        inference_context. Raises ConfigError for extra_block_kwargs, padding_mask, is_spec_decode and mtp_kwargs, which
        do not exist here. On a stage without output layer: hidden states [s, b, h].
        """
        if extra_block_kwargs or padding_mask is not None or is_spec_decode or mtp_kwargs:
            refuse_arguments(
                extra_block_kwargs=extra_block_kwargs, padding_mask=padding_mask, is_spec_decode=is_spec_decode,
                mtp_kwargs=mtp_kwargs,
            )  # fmt: skip
        inference_context = inference_params if inference_context is None else inference_context
        if inference_context is not None and self.pg_collection.cp.size() > 1:
            raise ConfigError(
                f"text cannot be generated with --context-parallel-size {self.pg_collection.cp.size()}: the cache "
                "holds whole sequences; use 1"
            )
        hidden_states, rotary, *_ = self._preprocess(
            input_ids=input_ids, position_ids=position_ids, decoder_input=decoder_input,
            inference_context=inference_context, packed_seq_params=packed_seq_params, padding_mask=None,
        )  # fmt: skip
        if isinstance(rotary, StageInputs):
            inputs = rotary._replace(attention_mask=attention_mask)
        else:  # an override's
            inputs = read_stage_inputs(
                rotary, self.config.rotates_neighbours, attention_mask=attention_mask,
                inference_context=inference_context, packed_seq_params=packed_seq_params,
            )  # fmt: skip
        further: list[Tensor] = []
        if self.states_in > 1 and decoder_input is None:
            hidden_states, *further = hidden_states.to(parameter_dtype(self.config)).chunk(self.states_in)
        hidden_states, streams = self._run_decoder(hidden_states, inputs)
        more: dict[str, Any] = {"rotary_pos_cos": None, "rotary_pos_sin": None}  # upstream's overrides ask for both
        more |= {} if self.config.mtp_num_layers is None else {"further": further}
        more |= {} if streams is None else {"streams": streams}
        output: Tensor = self._postprocess(
            hidden_states=hidden_states, input_ids=input_ids, position_ids=position_ids, labels=labels,
            packed_seq_params=packed_seq_params, runtime_gather_output=runtime_gather_output, rotary_pos_emb=inputs,
            loss_mask=loss_mask, attention_mask=attention_mask, inference_context=inference_context, **more,
        )  # fmt: skip
        return output

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        decoder_input: Tensor | None = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, StageInputs, None, None, None, Tensor | None]:
        """Return what enters the decoder, [s, b, h], and what its layers read in addition, in upstream's order:
        (decoder input, rotary_pos_emb, rotary_pos_cos, rotary_pos_sin, sequence_len_offset, padding mask).

        Programs override it, or hand the second to `decoder(rotary_pos_emb=...)`. An override may give upstream's
        angles [s, 1, 1, channels] in its place. On stages after multi-token prediction the input has all depths, one
        below the other.
        """
        if packed_seq_params is None and decoder_input is None:  # positions start again at each packed document
            longest = input_ids.shape[1] * self.pg_collection.cp.size()
            self._check_length(longest if inference_context is None else inference_context.layout.longest)
        states = 1 if decoder_input is not None else self.states_in
        hidden_states = self._hidden_states_in(input_ids, position_ids, decoder_input)
        sequence = self._find_sequence(packed_seq_params)
        length = self._sequence_length(hidden_states, sequence) // states
        inputs = self._list_layer_inputs(hidden_states, length, inference_context, packed_seq_params, sequence)
        sections, angles = self.config.mrope_section, self.rotary_pos_emb
        if sections and isinstance(angles, MultimodalRotaryEmbedding) and getattr(position_ids, "ndim", 2) == 3:
            inputs = inputs._replace(rotation=angles.build_rotation_at(cast(Tensor, position_ids), sections))
        return hidden_states, inputs, None, None, None, padding_mask

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor | None,
        labels: Tensor | None,
        rotary_pos_emb: StageInputs,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        mtp_in_postprocess: bool | None = None,
        loss_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inference_params: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        extra_block_kwargs: Mapping[str, Any] | None = None,
        inference_context: InferenceContext | None = None,
        *,
        is_spec_decode: bool | None = None,
        further: Sequence[Tensor] = (),
        streams: Tensor | None = None,
    ) -> Tensor:
        """Losses or logits of the decoder's output [s, b, h], or what the next stage gets; arguments as in `forward`.

        Programs override it, with upstream's arguments in upstream's order. rotary_pos_emb: from `_preprocess`.
        mtp_in_postprocess, decoder_input, attention_mask, inference_params: nothing follows from them here. further:
        for each depth of multi-token prediction its hidden states, from an earlier stage. streams: all residual streams
        of the output, [s, b, n h], where there are several. Raises ConfigError for the others, which do not exist here.
        """
        others = rotary_pos_cos, rotary_pos_sin, sequence_len_offset
        if any(x is not None for x in others) or extra_block_kwargs or is_spec_decode:
            refuse_arguments(
                rotary_pos_cos=rotary_pos_cos, rotary_pos_sin=rotary_pos_sin, sequence_len_offset=sequence_len_offset,
                extra_block_kwargs=extra_block_kwargs, is_spec_decode=is_spec_decode,
            )  # fmt: skip
        sequence, shift = self._find_sequence(packed_seq_params), None
        if self.config.mtp_num_layers is not None and inference_context is None:
            length = self._sequence_length(hidden_states, sequence)
            shift = TokenShift(sequence, None if packed_seq_params is None else packed_seq_params.layout(length))
        # A call for logits needs no MTP tokens; the next stage expects them in any case.
        if self.predicts_further and shift is not None and (labels is not None or not self.post_process):
            states = hidden_states if streams is None else streams
            further = self.mtp(input_ids, position_ids, states, self._find_embedding(), shift, rotary_pos_emb)
        if not self.post_process:
            return hidden_states if not further else self._join_states([hidden_states, *further])
        if labels is None:
            # With sequence parallelism these are a rank's share of the tokens: the caller takes from logits.
            if inference_context is not None and not self.config.sequence_parallel:
                hidden_states = inference_context.layout.take_wanted(hidden_states)
            logits = self.compute_logits(hidden_states)
            if not runtime_gather_output or logits.shape[-1] == self.vocab_size:
                return logits
            return gather_from_tensor_model_parallel_region(logits, self.pg_collection.tp)
        if shift is not None:
            hidden_states = self._attach_further_losses(hidden_states, further, labels, loss_mask, shift)
        return self.compute_loss_of_states(labels, hidden_states, self._compute_logits)

    def _find_sequence(self, packed_seq_params: PackedSeqParams | None) -> Group:
        """Return the ranks that share the sequence; with hybrid context parallelism every batch has another group."""
        if packed_seq_params is not None and packed_seq_params.cp_group is not None:
            return packed_seq_params.cp_group
        return self.pg_collection.cp

    def _list_layer_inputs(
        self,
        hidden_states: Tensor,
        length: int,
        inference_context: InferenceContext | None,
        packed_seq_params: PackedSeqParams | None,
        sequence: Group,
    ) -> StageInputs:
        """Return what layers read in addition to hidden states [s, b, h] of a full sequence of `length` tokens, or in
        generation of the tokens of the context's layout."""
        device = hidden_states.device
        layout = None if inference_context is None else inference_context.layout
        longest = 0 if inference_context is None else inference_context.max_tokens
        # Packed documents keep angles that grow through all of them: scores depend on distances only.
        rotation, local_rotation = (
            None if angles is None else angles.build_rotation(length, device, sequence, layout, longest)
            for angles in (self.rotary_pos_emb, self.local_rotary_pos_emb)
        )
        if packed_seq_params is not None:
            assert hidden_states.shape[1] == 1, f"a packed batch is one sequence, not {hidden_states.shape[1]}"
            # Wrong bounds are refused, and right ones read from their device, before the first layer.
            layout = packed_seq_params.layout(length)
        unrotated = None
        if self.temperature is not None:
            unrotated = self.temperature.build_rotation(length, device, sequence, layout)
            if self.temperature.in_all_layers:
                rotation, local_rotation = (
                    None if each is None else each._replace(query_scale=unrotated.query_scale)
                    for each in (rotation, local_rotation)
                )
        return StageInputs(None, rotation, inference_context, local_rotation, packed_seq_params, unrotated)

    def _list_own_inputs(self, hidden_states: Tensor, inference_context: InferenceContext) -> StageInputs:
        sequence = self.pg_collection.cp
        length = self._sequence_length(hidden_states, sequence)
        return self._list_layer_inputs(hidden_states, length, inference_context, None, sequence)

    def _run_decoder(self, hidden_states: Tensor, inputs: StageInputs) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> [s, b, h], on the last stage after the final norm, and all residual streams [s, b, n h] that it
        is made of, where multi-token prediction goes on from them."""
        output: Tensor = self.decoder(hidden_states, *inputs)
        return (self.decoder.finish(output), output) if self.decoder.leaves_streams else (output, None)

    def compute_states(self, input_ids: Tensor, position_ids: Tensor, inference_context: InferenceContext) -> Tensor:
        """In generation: hidden states [s, b, h] after the final norm of these tokens [b, s], in the context's layout.
        `compute_logits` makes logits of them; the model is whole, on one process."""
        self._check_length(inference_context.layout.longest)
        hidden_states = self._hidden_states_in(input_ids, position_ids, None)
        inputs = self._list_own_inputs(hidden_states, inference_context)
        states, _ = self._run_decoder(hidden_states, inputs)
        return states

    def compute_further_states(
        self, depth: int, hidden_states: Tensor, input_ids: Tensor, inference_context: InferenceContext
    ) -> Tensor:
        """In generation: one depth of multi-token prediction, counted from 1.

        hidden_states: [s, b, h] of the depth before, of `compute_states` for the first. input_ids: [b, s], the tokens
        `depth` places after theirs. inference_context: a state of only this depth, which holds the positions before
        them. Returns [s, b, h], of which `compute_logits` makes logits of the tokens after those.
        """
        embedding = self._find_embedding()
        assert embedding is not None, "this stage has multi-token prediction, and so the embedding"
        inputs = self._list_own_inputs(hidden_states, inference_context)
        # Positions are rotary here, or none: the embedding has none to add.
        further: Tensor = self.mtp.compute_depth(depth, hidden_states, embedding(input_ids, input_ids), inputs)
        return further

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[s, b, h] -> [b, s, v]."""
        return self._compute_logits(hidden_states).transpose(0, 1).contiguous()

    def _compute_logits(self, hidden_states: Tensor, *, detaches_weight: bool = False) -> Tensor:
        """[s, b, h] -> [s, b, v / tp]. detaches_weight: the output layer gets no gradient."""
        # Handed over in each call, because the output layer of a tied model has no weight.
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if detaches_weight:
            weight = self.output_layer.weight if weight is None else weight
            assert weight is not None, "one of the two has it"
            weight = weight.detach()
        if self.logit_scale != 1.0:
            hidden_states = hidden_states * self.logit_scale  # cheaper here than on the logits
        logits: Tensor = self.output_layer(hidden_states, weight)[0]
        bound = self.config.final_logit_softcapping
        # Before the loss and before sampling alike: it is a part of the model.
        return logits if bound is None else bound * torch.tanh(logits / bound)

    def _attach_further_losses(
        self, hidden_states: Tensor, further: Sequence[Tensor], labels: Tensor, loss_mask: Tensor | None,
        shift: TokenShift,
    ) -> Tensor:  # fmt: skip
        """Return the hidden states for the language-model loss, whose backward also runs the MTP losses' backward.
        further: hidden states of each depth, [s, b, h]."""
        mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
        for depth, states in enumerate(further):
            labels, mask = shift(labels), shift(mask)
            compute_logits = partial(self._compute_logits, detaches_weight=self.config.detaches_prediction)
            watched = self.mtp_loss.watch(compute_logits, self.pg_collection)
            losses = self.compute_loss_of_states(labels, states, watched)
            hidden_states = self.mtp_loss.attach(hidden_states, depth, losses, labels, mask, shift.sequence)
        return hidden_states

    def _join_states(self, states: list[Tensor]) -> Tensor:
        """Return what goes to the stage of the loss: hidden states of all depths, one below the other, [(1 + depths) s,
        b, h], in the dtype that stages exchange."""
        joined = torch.cat(states)
        return joined.float() if self.config.fp32_residual_connection else joined

    def _hidden_states_in(self, input_ids: Tensor, position_ids: Tensor | None, decoder_input: Tensor | None) -> Tensor:
        """The decoder's input [s, b, h]; where multi-token prediction lies on an earlier stage, with its hidden states
        of each depth below, as they are exchanged."""
        if self.config.moe_n_hash_layers:
            tell_tokens(self.decoder, input_ids)
        if decoder_input is not None:
            return decoder_input
        if self.pre_process:
            hidden_states: Tensor = self.embedding(input_ids, position_ids)
            if (self.config.lora_rank or (self.is_frozen and not self.post_process)) and torch.is_grad_enabled():
                # What the next stage sends back has to lead somewhere, and so do parts that are computed again.
                hidden_states.requires_grad_()
            return hidden_states
        assert self._input_tensor is not None, "this stage has no embedding; call set_input_tensor() first"
        return self._input_tensor

    def _check_length(self, length: int) -> None:
        has_positions = self.pre_process and self.position_embedding_type == "learned_absolute"
        if has_positions and length > self.max_sequence_length:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than --max-position-embeddings "
                f"{self.max_sequence_length}; raise it, or shorten the sequence"
            )

    def _sequence_length(self, hidden_states: Tensor, sequence: Group) -> int:
        """Tokens of the whole sequence: with sequence or context parallelism each rank holds a part of them."""
        parts = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        return int(hidden_states.shape[0]) * parts * sequence.size()


def _check_prediction(
    config: TransformerConfig, spec: ModuleSpec | None, position_embedding_type: str, *, is_here: bool
) -> None:
    """Raises ConfigError for multi-token prediction that cannot be built. is_here: whether this chunk has it."""
    problems = list(config.prediction_problems(position_embedding_type))
    if is_here and spec is None:
        problems.append(
            f"mtp_num_layers {config.mtp_num_layers} needs the layers of multi-token prediction; give GPTModel "
            "mtp_block_spec=get_gpt_mtp_block_spec(config, layer_spec)"
        )
    if problems:
        raise ConfigError(problems)
