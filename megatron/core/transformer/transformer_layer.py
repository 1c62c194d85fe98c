# SPDX-License-Identifier: Apache-2.0
"""One transformer layer: attention and MLP, each between its norms, each added to the residual stream x.

    pre-norm                x = x + attention(norm(x));               x = x + mlp(norm(x))
    norm_placement output   x = x + norm(attention(x));               x = x + norm(mlp(x))
    norm_placement both     x = x + norm(attention(norm(x)));         x = x + norm(mlp(norm(x)))
    parallel_residual       x = x + attention(norm(x)) + mlp(norm'(x))

with dropout on what is added. Sources: Xiong et al., 2020 (pre-norm); OLMo 2, 2025, section 3.3 (output); Ding et al.,
2021, section 3.1 (both, sandwich norm); GPT-J, 2021 and GPT-NeoX, 2022, section 2.1 (parallel).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import current_device
from megatron.core.errors import ConfigError
from megatron.core.inference_context import InferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.kept_activations import Recomputed, keep_as
from megatron.core.tensor_parallel.offloaded_activations import hold
from megatron.core.tensor_parallel.parameters import parameter_dtype
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.activation_policy import ActivationPolicy
from megatron.core.transformer.compilation import Compile, is_compiled
from megatron.core.transformer.cuda_graphs import Part, Passes
from megatron.core.transformer.fp8_layers import multiply_in_fp8
from megatron.core.transformer.layer_patterns import has_experts
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.rotary import Rotation
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerLayerSubmodules:
    """The parts of a layer: specs or classes. Of the norms those are built that norm_placement asks for."""

    input_layernorm: Any
    self_attention: Any
    pre_mlp_layernorm: Any
    mlp: Any
    post_self_attn_layernorm: Any = None
    post_mlp_layernorm: Any = None
    moe: Any = None
    """What takes the place of `mlp` in layers with experts."""


def uses_fused_bias_dropout(config: TransformerConfig) -> bool:
    """Whether bias, dropout and residual work in place; a compiler fuses the plain form itself, and a sum of two number
    formats needs memory of its own."""
    return config.bias_dropout_fusion and not is_compiled(config, "residual") and not config.fp32_residual_connection


class TransformerLayer(MegatronModule):
    """Attention and MLP with their norms, each added to the residual stream: [s, b, h] -> [s, b, h]."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        expected_config: Mapping[str, Any] | None = None,
    ) -> None:
        """layer_number: this layer in the whole model, counted from 1. expected_config: fields of the config that the
        layer's spec was made for; raises ConfigError where the config has other values."""
        super().__init__(config)
        for name, value in (expected_config or {}).items():
            if getattr(config, name) != value:
                raise ConfigError(
                    f"the layer spec was made with {name} {value!r}, the config says {getattr(config, name)!r}; "
                    f"give TransformerConfig({name}={value!r})"
                )
        groups = pg_collection if pg_collection is not None else ProcessGroupCollection.current()
        self.layer_number = layer_number
        # In the order of forward: gradient buckets follow the order of construction, and fill up in backward from the
        # end.
        self.input_layernorm = self._norm(submodules.input_layernorm, "input")
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=groups
        )
        self.post_self_attn_layernorm = self._norm(submodules.post_self_attn_layernorm, "output")
        self.pre_mlp_layernorm = self._norm(submodules.pre_mlp_layernorm, "input")
        is_dense = not has_experts(config, layer_number)
        if not is_dense:
            if submodules.moe is None:
                raise ConfigError("--num-experts needs a layer with experts; let the spec's layer have a part `moe`")
            self.mlp = build_module(submodules.moe, config=config, layer_number=layer_number, pg_collection=groups)
        else:
            self.mlp = build_module(submodules.mlp, config=config, pg_collection=groups)
        self.post_mlp_layernorm = self._norm(submodules.post_mlp_layernorm, "output")
        # With a float32 residual stream, what attention and MLP read is cast to the format of their weights.
        self.compute_dtype = parameter_dtype(config)
        policy = ActivationPolicy(config, has_experts=not is_dense)
        self.recomputes_attention_norm = policy.recomputes_attention_norm and self.input_layernorm is not None
        self.recomputes_mlp_norm = policy.recomputes_mlp_norm and self.pre_mlp_layernorm is not None
        self.recomputes_mlp = policy.recomputes_mlp
        self.mlp_chunks = config.mlp_chunks_for_training if is_dense else 1
        self.offload = policy.offload
        if config.few_bits_recipe is not None:
            self.multiply_in_few_bits(config, groups)
        self.bias_dropout_add = bias_dropout_add if uses_fused_bias_dropout(config) else bias_dropout_add_reference
        self.recorded: dict[str, Part] = {}  # what CUDA graphs launch of it, see record_parts
        self.is_recomputed_whole = False

    def multiply_in_few_bits(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        """Have the linear layers multiply in FP8 or FP4, where this layer is one that does."""
        if config.is_fp8_layer(self.layer_number):
            further = self.layer_number - config.num_layers
            number = self.layer_number - 1
            name = f"mtp.layers.{further - 1}.mtp_model_layer" if further > 0 else f"decoder.layers.{number}"
            self.fp8_products = multiply_in_fp8(self, config, groups, name)

    def open_pass(self) -> AbstractContextManager[Any]:
        """What a pass through all layers of a stage runs in; asked of the first of them. Nothing, here."""
        return nullcontext()

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compilation.py."""
        if not uses_fused_bias_dropout(self.config):
            self.bias_dropout_add = compiled(self.bias_dropout_add)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotation: Rotation | None = None,
        inference_context: InferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; attention_mask and packed_seq_params as in DotProductAttention, causal when None."""
        constants = (attention_mask, rotation, inference_context, packed_seq_params)
        if self.recorded:
            return self._run_recorded(hidden_states, constants)
        return self._run(hidden_states, *constants)

    def record_parts(self, passes: Passes, parts: Collection[str], *, is_recomputed: bool) -> None:
        """Let passes be recorded: of these parts (attn, mlp, moe_router), or of the whole layer where none is named.
        is_recomputed: whether of the whole layer only the input is kept."""
        if not parts:
            self.recorded["layer"] = passes.add(*self.children())
            self.is_recomputed_whole = is_recomputed
        if "attn" in parts:
            modules = (self.input_layernorm, self.self_attention, self.post_self_attn_layernorm)
            self.recorded["attn"] = passes.add(*(module for module in modules if module is not None))
        if "mlp" in parts and not has_experts(self.config, self.layer_number):
            modules = (self.pre_mlp_layernorm, self.mlp, self.post_mlp_layernorm)
            self.recorded["mlp"] = passes.add(*(module for module in modules if module is not None))

        routes = has_experts(self.config, self.layer_number) and getattr(self.mlp, "can_route_apart", False)
        if "moe_router" in parts and routes:
            router = self.mlp.router
            modules = (self.pre_mlp_layernorm, router, self.mlp.fc1_latent_proj)
            self.recorded["moe_router"] = passes.add(*(module for module in modules if module is not None))
            router.auxiliary_loss_scale.keep_address(current_device())

    def _run_recorded(self, hidden_states: Tensor, constants: tuple[Any, ...]) -> Tensor:
        """`_run` by the parts that are launched as CUDA graphs, in passes that have recordings of them."""
        whole, attention, mlp = (self.recorded.get(name) for name in ("layer", "attn", "mlp"))
        if whole is not None:
            again = functools.partial(checkpoint, self._run, False) if self.is_recomputed_whole else None
            output: Tensor = whole(self._run, (hidden_states,), constants, recorded=again)
            return output
        attended = (
            self._add_attention(hidden_states, *constants)
            if attention is None
            else attention(self._add_attention, (hidden_states,), constants)
        )
        inputs = (attended, hidden_states) if self.config.parallel_residual else (attended,)
        if "moe_router" in self.recorded:
            return self._add_experts(*inputs)
        result: Tensor = self._add_mlp(*inputs) if mlp is None else mlp(self._add_mlp, inputs)
        return result

    def _run(self, hidden_states: Tensor, *constants: Any) -> Tensor:
        output, bias, residual = self._attend(hidden_states, *constants)
        norm = self.pre_mlp_layernorm
        # One kernel then adds what attention returned to the residual stream and normalises the sum.
        if self._joins(norm, output, bias, residual):
            with self.offload("mlp_norm"):
                normed, residual = norm(output, bias=bias, residual=residual, returns_sum=True)
            return self._add_mlp_of(normed, residual, residual)
        attended = self._add(output, bias, residual)
        # In the parallel form the MLP does not see what attention added; both are added to one residual stream.
        return self._add_mlp(attended, hidden_states if self.config.parallel_residual else None)

    def _add_attention(self, layer_input: Tensor, *constants: Any) -> Tensor:
        return self._add(*self._attend(layer_input, *constants))

    def _attend(
        self,
        layer_input: Tensor,
        attention_mask: Tensor | None,
        rotation: Rotation | None,
        inference_context: InferenceContext | None,
        packed_seq_params: PackedSeqParams | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Attention's output, a bias and the residual: what is to be added."""
        normed, residual = self._enter(self.input_layernorm, layer_input, "attn_norm")
        with self._keep_or_normalise_again(self.recomputes_attention_norm, "attn_norm", normed, layer_input):
            output, bias = self.self_attention(normed, attention_mask, rotation, inference_context, packed_seq_params)
        return *self._finish(self.post_self_attn_layernorm, output, bias), residual

    def _add_mlp(self, attended: Tensor, layer_input: Tensor | None = None) -> Tensor:
        """layer_input: in the parallel form, in which the MLP reads what attention read, and its output is added to
        what attention left."""
        mlp_input = attended if layer_input is None else layer_input
        normed, residual = self._enter(self.pre_mlp_layernorm, mlp_input, "mlp_norm")
        return self._add_mlp_of(normed, residual if layer_input is None else attended, mlp_input)

    def _add_mlp_of(self, normed: Tensor, residual: Tensor, mlp_input: Tensor) -> Tensor:
        """mlp_input: what was normalised."""
        with self._keep_or_normalise_again(self.recomputes_mlp_norm, "mlp_norm", normed, mlp_input):
            output, bias = self._run_mlp_in_chunks(normed)
        return self._add(*self._finish(self.post_mlp_layernorm, output, bias), residual)

    def _add_experts(self, attended: Tensor, layer_input: Tensor | None = None) -> Tensor:
        """`_add_mlp` with the norm and the router apart."""
        mlp_input = attended if layer_input is None else layer_input
        normed, *routed = self.recorded["moe_router"](self._route, (mlp_input,))
        residual = attended
        if layer_input is None and self.pre_mlp_layernorm is not None:
            residual = self._choose_residual(normed, attended)
        output, bias = self.mlp(normed, self.mlp.take_routing(normed, routed))
        return self._add(*self._finish(self.post_mlp_layernorm, output, bias), residual)

    def _route(self, mlp_input: Tensor) -> tuple[Tensor, ...]:
        normed, _ = self._enter(self.pre_mlp_layernorm, mlp_input, "mlp_norm")
        return normed, *self.mlp.route(normed)

    def _norm(self, submodule: Any, place: str) -> Any:
        """The norm at the `input` or `output` of attention or MLP; None where the config has none."""
        if submodule is None or self.config.norm_placement not in (place, "both"):
            return None
        return build_module(submodule, self.config, self.config.hidden_size)

    def _run_mlp_in_chunks(self, normed: Tensor) -> Any:
        """The MLP's output [s, b, h] and its bias, in training of one stretch of tokens after the other."""
        if self.mlp_chunks == 1 or not self.training:
            return self._run_mlp(normed)
        parts = [self._run_mlp(part) for part in normed.chunk(self.mlp_chunks)]
        return torch.cat([output for output, _ in parts]), parts[0][1]

    def _run_mlp(self, normed: Tensor) -> Any:
        if not self.recomputes_mlp:
            return self.mlp(normed)
        # All that is kept is its input, which is that of the first product.
        with self.offload("mlp_fc1"):
            return checkpoint(self.mlp, False, normed)

    def _enter(self, norm: Any, hidden_states: Tensor, part: str) -> tuple[Tensor, Tensor]:
        """What attention or MLP reads, and the residual that its output is added to; [s, b, h] each. part: name of the
        norm where activations are offloaded."""
        if norm is None:
            return hidden_states.to(self.compute_dtype), hidden_states
        around_norm = not self.config.apply_residual_connection_post_layernorm
        with self.offload(part):
            if around_norm and isinstance(norm, Norm) and norm.can_join(hidden_states):
                normed, hidden_states = norm(hidden_states, returns_sum=True)
            else:
                normed = norm(hidden_states)
        return normed, self._choose_residual(normed, hidden_states)

    def _choose_residual(self, normed: Tensor, hidden_states: Tensor) -> Tensor:
        # As BERT and some early models had it: the normalised input, not the input itself, goes round attention or MLP.
        if not self.config.apply_residual_connection_post_layernorm:
            return hidden_states
        return normed.to(hidden_states.dtype)

    def _joins(self, norm: Any, output: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
        """Whether a norm takes over the sum before it: nothing is dropped, and it alone reads the sum beside what goes
        round it."""
        config = self.config
        is_alone = not (config.parallel_residual or config.apply_residual_connection_post_layernorm)
        is_plain_sum = config.bias_dropout_fusion and not (self.training and config.hidden_dropout > 0.0)
        return is_alone and is_plain_sum and isinstance(norm, Norm) and norm.can_join(output, bias, residual)

    def _keep_or_normalise_again(
        self, is_recomputed: bool, part: str, normed: Tensor, norm_input: Tensor
    ) -> AbstractContextManager[None]:
        """In which what reads the normalised hidden states keeps them for backward, or has them normalised again."""
        if not is_recomputed:
            return nullcontext()
        norm = self.input_layernorm if part == "attn_norm" else self.pre_mlp_layernorm
        # The norm's input waits for backward anyway: the norm itself and the residual stream need it.
        get_input = hold(part, norm_input)
        return keep_as(normed, Recomputed(lambda: norm(get_input())))

    def _finish(self, norm: Any, output: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What attention or MLP returned, normalised and scaled as configured: [s, b, h], and the bias that is still to
        be added."""
        scale = self.config.residual_multiplier
        # The bias belongs to what is normalised and scaled; otherwise it is added in the same pass as the residual.
        if norm is not None or scale != 1.0:
            output, bias = (output if bias is None else output + bias), None
            output = output if norm is None else norm(output)
            output = output if scale == 1.0 else output * scale
        return output, bias

    def _add(self, output: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """The residual stream behind attention or MLP; [s, b, h] each."""
        return self.bias_dropout_add(output, bias, residual, self.config.hidden_dropout, self.training)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool) -> Tensor:
    """residual + dropout(x + b) in x's memory, which must be the fresh output of a matrix product that nothing else
    keeps; x, residual [s, b, h], bias [h] or None, prob of dropping an element."""
    if bias is not None:
        x = x.add_(bias)
    # Dropout makes a tensor of its own and keeps its mask; without it the sum is all that happens.
    if training and prob > 0.0:
        x = F.dropout(x, p=prob)
    return x.add_(residual)


def bias_dropout_add_reference(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool) -> Tensor:
    """residual + dropout(x + b) out of place, in elementary operations; the arguments are those of
    `bias_dropout_add`."""
    if bias is not None:
        x = x + bias
    return residual + F.dropout(x, p=prob, training=training)
