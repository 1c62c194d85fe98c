# SPDX-License-Identifier: Apache-2.0
"""The layers of one pipeline stage, and after the last of them the final norm."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.core.device_graphs import Recorder
from megatron.core.errors import ConfigError
from megatron.core.plan.model_plan import LayerPlan, RotaryKind
from megatron.core.plan.read import read_plan
from megatron.core.plan.stages import find_content_of_stage
from megatron.core.process_groups_config import Group, ProcessGroupCollection
from megatron.core.tensor_parallel.offloaded_activations import offload
from megatron.core.tensor_parallel.random import checkpoint, model_parallel_stream
from megatron.core.transformer.execution.cuda_graphs import Passes
from megatron.core.transformer.execution.execution import Execution
from megatron.core.transformer.hyper_connections import contract, declare_end, expand, link_branches
from megatron.core.transformer.layer_inputs import LayerInputs, StageInputs, read_stage_inputs
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.sparse_attention import link_choosers
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

# Put here by a table of upstream's names; declared for type checkers.
get_num_layers_to_build: Any
get_transformer_layer_offset: Any


@dataclass
class TransformerBlockSubmodules:
    """The parts of a stage: a spec for each of its layers, and the final norm's class, which only one stage builds."""

    layer_specs: list[ModuleSpec]
    layer_norm: Any = build_norm


class TransformerBlock(MegatronModule):
    """The layers of one pipeline stage, one after the other: [s, b, h] -> [s, b, h]."""

    final_norm_name: ClassVar[str] = "final_layernorm"
    pre_process = True

    def __init__(
        self,
        config: TransformerConfig,
        spec: ModuleSpec | TransformerBlockSubmodules,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        """spec: of one layer, or of each of this stage's (ConfigError for another number of them).
        pre_process: False takes hidden states from set_input_tensor() in place of those given to forward.
        post_process: the last stage, which holds the final norm, unless multi-token prediction comes between."""
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        self.input_tensor: Tensor | None = None
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        content = find_content_of_stage(config, groups.pp, vp_stage)
        layers = read_plan(config).decoder[content.layers.start : content.layers.stop]
        specs = spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec] * len(layers)
        if len(specs) != len(layers):
            raise ConfigError(
                f"the block spec has {len(specs)} layers, this stage has {len(layers)}; make it by "
                "get_gpt_decoder_block_spec(config, vp_stage=...) on the stage's own process"
            )
        build_final_norm = spec.layer_norm if isinstance(spec, TransformerBlockSubmodules) else build_norm
        ends_decoder = post_process if config.mtp_num_layers is None else content.ends_decoder
        has_norm = post_layer_norm and ends_decoder and build_final_norm is not None
        self._assemble(layers, specs, groups, build_final_norm if has_norm else None)
        self._build_ends(begins=content.has_embedding, ends=ends_decoder)

    def _assemble(
        self, layers: Sequence[LayerPlan], specs: Sequence[Any], groups: ProcessGroupCollection, build_final_norm: Any
    ) -> None:
        """Build the layers, each from its spec, and the final norm, if there is one."""
        config = self.config
        # Indices from 0 in this stage's ModuleList; numbers from 1, and names, are the full model's.
        self.first_layer = layers[0].number - 1 if layers else 0
        self.rotary_kinds = [layer.options.rotary for layer in layers]
        self.tp_group = groups.tp
        self.layers = nn.ModuleList(
            build_module(of_layer, config=config, layer_number=layer.number, pg_collection=groups)
            for of_layer, layer in zip(specs, layers, strict=True)
        )
        link_choosers(self.layers)
        link_branches([*self.layers], config)
        # Of the first layer, so that a kind of layer may replace it; a user's own layer may have none.
        first = self.layers[0] if layers else None
        self.execution = first.execution if isinstance(first, TransformerLayer) else Execution(config)
        # Decided once, when the stage is built: how layers are grouped does not change between steps.
        self.units = self.execution.divide_layers(len(layers))
        self.offloader = self.execution.build_offloader(groups.pp.rank())
        assert config.hidden_size is not None
        norm = None if build_final_norm is None else build_module(build_final_norm, config, config.hidden_size)
        setattr(self, self.final_norm_name, norm)
        self.passes: Passes | None = None

    def _build_ends(self, *, begins: bool, ends: bool) -> None:
        """Build what makes several residual streams before the decoder's first layer, and one behind its last one, if
        they are here."""
        has_streams = self.config.num_streams is not None
        self.expands, self.contracts = begins and has_streams, ends and has_streams
        self.leaves_streams = self.contracts and self.config.mtp_num_layers is not None
        """True if `finish` is called by itself: multi-token prediction goes on from the streams before it."""
        self.end_names = tuple(end := declare_end(self.config) if self.contracts else {})
        for name, parameter in end.items():
            self.register_parameter(name, parameter)

    def set_input_tensor(self, input_tensor: Tensor) -> None:
        """Hand over what the stage before has sent, [s, b, h], for a block without pre_process."""
        self.input_tensor = input_tensor

    def record_layers(self, recorder: Recorder) -> None:
        """From the end of the warm-up steps on, launch training's forward and backward by recordings; see
        cuda_graphs.py."""
        self.passes = self.execution.open_passes(recorder)
        for layers, is_recomputed in self.units:
            for index in layers:
                layer = self.layers[index]
                if isinstance(layer, TransformerLayer):
                    layer.execution.record(layer, self.passes, is_recomputed=is_recomputed)

    def finish_step(self, groups: ProcessGroupCollection) -> None:
        """See `finalize_model_grads`."""
        if self.passes is not None:
            self.passes.finish_step()

    def global_parameter_name(self, name: str) -> str:
        """layers.0.mlp -> layers.8.mlp where this stage begins with the model's ninth layer."""
        if not name.startswith("layers."):
            return name
        number, _, rest = name.removeprefix("layers.").partition(".")
        return f"layers.{int(number) + self.first_layer}.{rest}"

    def forward(self, hidden_states: Tensor, *inputs: Any, **named: Any) -> Tensor:
        """[s, b, h], or a WrappedTensor of it -> [s, b, h]; inputs: the fields of StageInputs, or by name what
        upstream's block takes."""
        if not self.pre_process:
            assert self.input_tensor is not None, "this stage takes hidden states of another; call set_input_tensor()"
            hidden_states = self.input_tensor
        elif not isinstance(hidden_states, Tensor):
            hidden_states = hidden_states.unwrap()
        if "rotary_pos_emb" in named:
            shared = read_stage_inputs(interleaved=self.config.rotates_neighbours, **named)
        else:
            shared = StageInputs(*inputs, **named)
        if self.expands:
            hidden_states = expand(hidden_states, self.config)
        # Angles are computed once for each step and shared by all layers, instead of in each layer.
        constants = (shared.attention_mask, shared.rotation, shared.local_rotation, shared.unrotated)
        caches = shared.inference_context is not None
        trains = self.training and torch.is_grad_enabled()
        passes = self.passes if trains and not caches and shared.packed_seq_params is None else None
        offloading = nullcontext() if self.offloader is None else self.offloader.open_pass()
        recording = nullcontext(constants) if passes is None else passes.open(hidden_states, constants)
        # One stream around all layers: switching it inside would copy the generator's state for each dropout.
        with (
            open_random_stream(self.config, self.training, self.tp_group),
            offloading,
            self.execution.open_pass(),
            recording as (mask, rotation, local, unrotated),
        ):
            recorded = shared._replace(
                attention_mask=mask, rotation=rotation, local_rotation=local, unrotated=unrotated
            )
            for layers, is_recomputed in self.units:
                # Mask, angles and documents come along in the closure: hidden states alone have gradients.
                unit = functools.partial(self.run_layers, layers, recorded)
                is_repeated = passes is not None and passes.is_replaying  # by the recordings themselves
                # A cache must not be written to twice.
                if not is_recomputed or caches or is_repeated:
                    hidden_states = unit(hidden_states)
                    continue
                with offload("attn_norm"):
                    hidden_states = checkpoint(
                        unit, self.execution.divides_unit_inputs, hidden_states, tp_group=self.tp_group
                    )
                if self.offloader is not None:
                    self.offloader.end_layer()
        return hidden_states if self.leaves_streams else self.finish(hidden_states)

    def finish(self, hidden_states: Tensor) -> Tensor:
        """The stage's end: on the last stage one of all residual streams, and the final norm."""
        if self.contracts:
            hidden_states = contract(hidden_states, self.config, [getattr(self, name) for name in self.end_names])
        norm = getattr(self, self.final_norm_name)
        return hidden_states if norm is None else norm(hidden_states)

    def run_layers(self, indices: range, shared: StageInputs, hidden_states: Tensor) -> Tensor:
        """Run layers of this stage, counted from 0: [s, b, h] -> [s, b, h]."""
        layers = [*self.layers]  # indexing them one by one takes as long as a norm
        for index in indices:
            with nullcontext() if self.offloader is None else self.offloader.layer(index):
                hidden_states = layers[index](hidden_states, *choose_inputs(shared, self.rotary_kinds[index]))
        return hidden_states


def choose_inputs(inputs: StageInputs, rotary: RotaryKind) -> LayerInputs:
    """Choose the inputs of a layer with such rotary angles from its stage's inputs."""
    rotations = {"global": inputs.rotation, "local": inputs.local_rotation, "none": inputs.unrotated}
    return LayerInputs(inputs.attention_mask, rotations[rotary], inputs.inference_context, inputs.packed_seq_params)


def open_random_stream(config: TransformerConfig, training: bool, tp_group: Group) -> AbstractContextManager[None]:
    """The stream that dropout inside of layers draws from: with sequence parallelism ranks hold different tokens, so
    that it differs from rank to rank."""
    draws = training and max(config.hidden_dropout, config.attention_dropout, config.lora_dropout) > 0.0
    return model_parallel_stream(tp_group.size()) if draws and config.sequence_parallel else nullcontext()
