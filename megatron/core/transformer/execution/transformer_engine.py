# SPDX-License-Identifier: Apache-2.0
"""Transformer layers that compute by modules of NVIDIA's Transformer Engine.

A layer is built as it always is, with its parameters under their names and placements; then its parts get other ways to
compute, each a module of the package that is lent the layer's parameters for every call:

    norm + column-parallel projection      LayerNormLinear, which communicates as well
    other column- and row-parallel layers  Linear, which communicates as well
    norm + dense MLP                       LayerNormMLP, where it has the activation
    experts                                GroupedLinear
    core attention                         DotProductAttention, for the plain causal and bidirectional kinds

The package's modules are registered nowhere. So a checkpoint may be continued with and without them; of their internal
state it has the scales and largest values of `--fp8-recipe delayed` (`EngineScales`). What a layer asks for and the
package's modules cannot give stays with our implementation, whose numbers are the same except for rounding.

Only the package's public interface is used: constructors, calls, `autocast`, recipes; and for those scales a module's
`init_fp8_metadata` and `fp8_meta`, since the package's form of them (`get_extra_state`) is pickled. The oldest release
that `load_package` takes and the one that this was written for, 2.20, agree in it.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.core.device import current_device
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import Group, MeteredGroup, ProcessGroupCollection
from megatron.core.tensor_parallel.fp8_products import HasScales
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, LayerOutput, RowParallelLinear
from megatron.core.tensor_parallel.parameters import parameter_dtype
from megatron.core.tensor_parallel.products import CommunicationPlan, Product
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.core_attention.dot_product_attention import DotProductAttention
from megatron.core.transformer.core_attention.interface import AttentionBackend, AttentionInputs, AttentionOptions
from megatron.core.transformer.execution.branch_runner import Within
from megatron.core.transformer.execution.execution import Execution
from megatron.core.transformer.execution.transformer_engine_package import (
    build_recipe,
    find_obstacles,
    load_modules,
    load_package,
)
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import Experts
from megatron.core.transformer.moe.grouped_products import BatchedMatmul, ExpertByExpert, count_rows
from megatron.core.transformer.norms import LayerNorm, RMSNorm
from megatron.core.transformer.residual_branch import ResidualBranch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.weight_names import find_norm_class

_ACTIVATIONS = {"gelu_tanh": "gelu", "quick_gelu": "qgelu", "squared_relu": "srelu", "silu": "silu"}
"""Our activation -> the package's, which has GELU in its tanh form only."""
_GATED_ACTIVATIONS = {"gelu_tanh": "geglu", "quick_gelu": "qgeglu", "squared_relu": "sreglu", "silu": "swiglu"}


# ---- the package's modules, with our parameters


class EngineScales(HasScales):
    """Scales that a module of the package remembers with `--fp8-recipe delayed`, as buffers: the module's memory from
    its first call on. Zeros say that nothing is known."""

    def __init__(self, products: int, history_length: int) -> None:
        """products: matrix products of the module, each with three operands that have scales in forward, and two in
        backward."""
        super().__init__()
        self.products, device = products, current_device()
        for direction, operands in (("fwd", 3 * products), ("bwd", 2 * products)):
            shapes = {"scale": (operands,), "amax_history": (history_length, operands)}
            for name, shape in shapes.items():
                # Not in a state_dict, which has the same names with either implementation.
                self.register_buffer(f"engine_{name}_{direction}", torch.zeros(shape, device=device), persistent=False)

    @torch.no_grad()
    def join(self, module: Any) -> None:
        """Go on in the memory of a new module. Called within `autocast`."""
        module.init_fp8_metadata(num_gemms=self.products)
        for direction in ("fwd", "bwd"):
            state = module.fp8_meta[f"scaling_{direction}"]
            # The package begins with scales of 1. Chosen on the device, so that the host need not wait.
            is_known = self.get_buffer(f"engine_scale_{direction}") > 0
            for name in ("scale", "amax_history"):
                memory, key = getattr(state, name), f"engine_{name}_{direction}"
                memory.copy_(torch.where(is_known, self.get_buffer(key), memory))
                setattr(self, key, memory)


def _remember_scales(owner: nn.Module, config: TransformerConfig, products: int = 1) -> EngineScales | None:
    """Return what keeps the scales of a module that computes the layer `owner`, as a part of it; None without delayed
    ones."""
    if config.few_bits_recipe != "delayed":
        return None
    owner.engine_scales = EngineScales(products, config.fp8_amax_history_len)
    return owner.engine_scales


class _Lender:
    """Builds a module of the package when it is first called, and lends it parameters for each call."""

    def __init__(self, kind: str, scales: EngineScales | None, **arguments: Any) -> None:
        self.kind, self.scales, self.arguments = kind, scales, arguments
        self._module: nn.Module | None = None
        self._fuses: bool | None = None

    def call(self, parameters: dict[str, Tensor | None], *inputs: Any, accumulates: bool = False, **named: Any) -> Any:
        """Run the module's forward. parameters: its name for each -> ours; accumulates: whether weight gradients are to
        be added into main_grad, where weights have one."""
        matrices = [tensor for tensor in parameters.values() if tensor is not None and tensor.dim() > 1]
        fuses = accumulates and all(getattr(matrix, "main_grad", None) is not None for matrix in matrices)
        # Gradient buffers come after the layers are built, so that this is known only now.
        if self._module is None or self._fuses != fuses:
            self._module, self._fuses = self._build(fuses), fuses
            if self.scales is not None:
                self.scales.join(self._module)
        for name, tensor in parameters.items():
            if tensor is not None and getattr(self._module, name) is not tensor:
                # A parameter's place takes no plain tensor, such as one expert's part of a stack.
                delattr(self._module, name)
                setattr(self._module, name, tensor)
        return self._module(*inputs, **named)

    def _build(self, fuses: bool) -> nn.Module:
        # On the meta device the module's parameters take no memory and are not drawn; they are never used.
        module: nn.Module = getattr(load_modules(), self.kind)(
            fuse_wgrad_accumulation=fuses, device="meta", **self.arguments
        )
        return module


def _unwrap(group: Group) -> Any:
    """The torch.distributed group that the package communicates in; None for a single rank."""
    if group.size() == 1:
        return None
    return group.group if isinstance(group, MeteredGroup) else group


class _OwnTensor(torch.autograd.Function):
    """The same memory as a tensor that is no view: what follows a product works in place, in its memory, and autograd
    forbids that for views which another custom function has returned, as the package's do. They keep no output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


def _own(x: Tensor) -> Tensor:
    result: Tensor = _OwnTensor.apply(x)
    return result


def _norm_arguments(norm: LayerNorm | RMSNorm) -> dict[str, Any]:
    normalization = "LayerNorm" if isinstance(norm, LayerNorm) else "RMSNorm"
    return {"eps": norm.eps, "normalization": normalization, "zero_centered_gamma": norm.zero_centered}


def _norm_parameters(norm: LayerNorm | RMSNorm) -> dict[str, Tensor | None]:
    return {"layer_norm_weight": norm.weight, "layer_norm_bias": norm.bias if isinstance(norm, LayerNorm) else None}


def _leave_to_next(x: Tensor, *parameters: Any) -> Tensor:
    """A norm's operation where the linear layer after it normalises."""
    return x


class EngineLinear(CommunicationPlan):
    """A column- or row-parallel layer by Linear, with a norm before it by LayerNormLinear; collectives included."""

    def __init__(
        self,
        part: ColumnParallelLinear | RowParallelLinear,
        config: TransformerConfig,
        norm: LayerNorm | RMSNorm | None = None,
    ) -> None:
        """norm: whose operation becomes a part of this one; the module keeps its parameters."""
        assert part.weight is not None
        self.norm, ranks = norm, part.tp_group.size()
        is_column = isinstance(part, ColumnParallelLinear)
        outputs, inputs = part.weight.shape
        bias = part.bias is not None and not part.skip_bias_add and (is_column or ranks == 1)
        self._lender = _Lender(
            "Linear" if norm is None else "LayerNormLinear",
            _remember_scales(part, config),
            # Of all ranks together; counted from a rank's share, which may hold a copy of another rank's keys.
            in_features=inputs if is_column else inputs * ranks,
            out_features=outputs * ranks if is_column else outputs,
            sequence_parallel=config.sequence_parallel and ranks > 1,
            tp_group=_unwrap(part.tp_group),
            tp_size=ranks,
            bias=bias,
            params_dtype=parameter_dtype(config),
            parallel_mode="column" if is_column else "row",
            **({} if norm is None else _norm_arguments(norm)),
        )
        self._communicates = ranks > 1
        if norm is not None:
            norm.normalise = _leave_to_next

    @property
    def name(self) -> str:
        """See CommunicationPlan."""
        return "collectives by Transformer Engine" if self._communicates else ""

    def multiply(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As CommunicationPlan.multiply; with a norm, x is its input."""
        parameters = {"weight": weight, "bias": bias} | ({} if self.norm is None else _norm_parameters(self.norm))
        return _own(self._lender.call(parameters, x, accumulates=product.accumulates))


class EngineMLP:
    """A dense MLP and the norm before it by LayerNormMLP."""

    def __init__(self, mlp: MLP, norm: LayerNorm | RMSNorm, config: TransformerConfig) -> None:
        self.mlp, self.norm, group = mlp, norm, mlp.linear_fc1.tp_group
        names = _GATED_ACTIVATIONS if config.gated_linear_unit else _ACTIVATIONS
        self._lender = _Lender(
            "LayerNormMLP",
            _remember_scales(mlp, config, products=2),
            hidden_size=mlp.linear_fc1.input_size,
            ffn_hidden_size=mlp.linear_fc2.input_size,
            sequence_parallel=config.sequence_parallel and group.size() > 1,
            return_bias=mlp.linear_fc2.bias is not None,
            tp_group=_unwrap(group),
            tp_size=group.size(),
            bias=mlp.linear_fc1.bias is not None,
            activation=names[mlp.activation.name],
            params_dtype=parameter_dtype(config),
            set_parallel_mode=True,
            **_norm_arguments(norm),
        )
        norm.normalise = _leave_to_next

    def __call__(self, x: Tensor, inputs: LayerInputs, norm_input: Tensor) -> LayerOutput:
        """A body: what the norm reads [s, b, h] -> (output [s, b, h], bias [h] or None, which the caller adds)."""
        first, second = self.mlp.linear_fc1, self.mlp.linear_fc2
        parameters = {
            "fc1_weight": first.weight,
            "fc1_bias": first.bias,
            "fc2_weight": second.weight,
            "fc2_bias": second.bias,
            **_norm_parameters(self.norm),
        }
        output = self._lender.call(parameters, x, accumulates=first.product.accumulates)
        # The module's copy of the bias is ours, except for a cast: ours carries what gradients are known by.
        return (_own(output), None) if second.bias is None else (_own(output[0]), second.bias)


class EngineExperts(ExpertByExpert):
    """The products of all experts by GroupedLinear; rows are filled up where FP8 needs whole blocks of them."""

    name = "GroupedLinear of Transformer Engine"
    # A stack's gradient is put together by autograd: the module knows a parameter for each expert.
    by_autograd = True

    def __init__(self, part: Any, config: TransformerConfig, *, fills_blocks: bool) -> None:
        """part: the layer, with this rank's weights [experts, out, in]."""
        super().__init__(accumulates=False)
        self.fills_blocks, (self.experts, outputs, inputs) = fills_blocks, part.weight.shape
        self._lender = _Lender(
            "GroupedLinear",
            _remember_scales(part, config, products=self.experts),
            num_gemms=self.experts,
            in_features=inputs,
            out_features=outputs,
            bias=False,
            params_dtype=parameter_dtype(config),
        )

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """Rows of all experts [n, in] -> [n, out], differentiable."""
        assert bias is None and ends is not None, "an expert's bias is added outside, row by row"
        if not x.shape[0]:  # no rows for any expert of this rank; the graph still reaches its weights
            return x @ weight[0].t()
        rows = count_rows(ends)
        parameters: dict[str, Tensor | None] = {f"weight{index}": one for index, one in enumerate(weight.unbind())}
        if not self.fills_blocks:
            return _own(self._lender.call(parameters, x, rows))
        filled, filled_rows = load_modules().Fp8Padding(self.experts)(x, rows)
        y = self._lender.call(parameters, filled, filled_rows)
        return _own(load_modules().Fp8Unpadding(self.experts)(y, rows))


class EngineAttention(AttentionBackend):
    """Core attention by DotProductAttention, and by the plain backend for calls with a mask or with a cache."""

    name = "Transformer Engine"

    def __init__(self, plain: AttentionBackend, options: AttentionOptions) -> None:
        self.plain, self.options = plain, options
        self._modules: dict[tuple[int, ...], nn.Module] = {}

    @staticmethod
    def takes(backend: Any, options: AttentionOptions) -> bool:
        """Return whether layers with these options may have it. What is special stays with the backend that was chosen
        for it: sinks, bounded scores, chunks, exchanges among ranks, gradients that are the same in every run."""
        special = options.has_sinks or options.softcap is not None or options.chunk is not None
        special = special or options.query_key_layer_scaling or options.deterministic
        return isinstance(backend, AttentionBackend) and not special

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """See CoreAttention. Documents are computed all at once by the plain backend."""
        visible = inputs.visible
        divided = visible.documents is not None or visible.chunk is not None
        if divided or visible.mask is not None or inputs.query.shape[0] != inputs.key.shape[0]:
            return self.plain(inputs)
        return self.attend(inputs)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """See AttentionBackend."""
        query, key, value, visible = inputs.query, inputs.key, inputs.value, inputs.visible
        sizes = (query.shape[2], key.shape[2], query.shape[3], value.shape[3])
        if sizes not in self._modules:
            self._modules[sizes] = self._build(*sizes)
        module = self._modules[sizes].train(inputs.training)
        # Keys before a query's position, and after it; -1 for all.
        window = (-1 if visible.window is None else visible.window, 0 if visible.causal else -1)
        result: Tensor = module(
            query,
            key,
            value,
            qkv_format="sbhd",
            attn_mask_type="causal" if visible.causal else "no_mask",
            window_size=window,
        )
        return result

    def _build(self, heads: int, groups: int, width: int, value_width: int) -> nn.Module:
        module: nn.Module = load_modules().DotProductAttention(
            # Heads of this rank: nothing is communicated inside, and dropout draws from the stream around the call.
            heads,
            width if width == value_width else (width, value_width),
            num_gqa_groups=groups,
            attention_dropout=self.options.dropout,
            qkv_format="sbhd",
            layer_number=self.options.layer_number,
            softmax_scale=self.options.scale,
        )
        return module


# ---- a layer


class EngineExecution(Execution):
    """The execution of layers whose parts compute by Transformer Engine where its modules can."""

    def __init__(self, config: TransformerConfig) -> None:
        """Raises ConfigError for what `find_obstacles` finds, and as `load_package` does."""
        if obstacles := find_obstacles(config):
            raise ConfigError(obstacles)
        load_package()
        super().__init__(config)

    def equip(self, layer: Any, groups: ProcessGroupCollection) -> None:
        """See Execution."""
        super().equip(layer, groups)
        if self.config.few_bits_recipe is not None:
            enabled = layer.plan.low_precision
            layer.runners = (Within(functools.partial(self._round_operands, enabled), layer.runners),)

    def multiply_in_few_bits(self, layer: Any, groups: ProcessGroupCollection) -> None:
        """See Execution; here the package's modules round, as `open_pass` and runners tell them."""
        self.recipe, self.amax_group = build_recipe(self.config), _unwrap(groups.tp_dp_cp)

    def open_pass(self) -> AbstractContextManager[Any]:
        """See Execution: largest values are reduced once, where the outermost of these contexts ends."""
        return nullcontext() if self.config.few_bits_recipe is None else self._round_operands(True)

    def _round_operands(self, enabled: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = load_modules().autocast(
            enabled=enabled, recipe=self.recipe, amax_reduction_group=self.amax_group
        )
        return context

    def exchange_parts(self, layer: Any) -> None:
        """Exchange how the parts of a layer compute."""
        policy = self.policy
        for part in layer.modules():
            if isinstance(part, DotProductAttention):
                # Heads that backward is to compute again would be kept by the package as they are.
                if policy.recomputes("mla_up_proj") or not EngineAttention.takes(part.backend, part.options):
                    continue
                part.backend = EngineAttention(cast(AttentionBackend, part.backend), part.options)
            elif isinstance(part, Experts):
                self._give_grouped_products(part)
        # Overlap in chunks is made of our products.
        if self.config.tp_comm_overlap:
            return
        # As for such inputs of linear layers: those layers stay ours.
        keep_inputs = {"linear_fc1", "linear_qkv"} if policy.recomputes("layernorm") else set()
        if any("mlp_act" in part.recomputed for part in layer.modules() if isinstance(part, MLP)):
            keep_inputs.add("linear_fc2")
        fused: dict[str, LayerNorm | RMSNorm] = {}
        inside_mlp = False
        for branch in layer.branches:
            product = self._find_fused_product(branch, keep_inputs)
            if product == "linear_fc1" and self._takes_mlp(branch.parts["mlp"]):
                branch.body, inside_mlp = EngineMLP(branch.parts["mlp"], branch.norm, self.config), True
            elif product is not None:
                fused[f"{branch.name}.{product}"] = branch.norm
        self.fuses_norms = bool(fused) or inside_mlp
        for name, part in layer.named_modules():
            if inside_mlp and name.startswith("mlp."):
                continue
            if not isinstance(part, ColumnParallelLinear | RowParallelLinear) or part.weight is None:
                continue
            if name.rpartition(".")[2] not in keep_inputs:
                part.plan = EngineLinear(part, self.config, fused.get(name))

    def _find_fused_product(self, branch: ResidualBranch, keep_inputs: set[str]) -> str | None:
        """The linear layer that the norm before a branch becomes a part of; None where the norm stays apart."""
        config, module = self.config, branch.parts[branch.name]
        # Where the normalised input goes somewhere else, too, or changes its dtype, the norm stays apart.
        if config.apply_residual_connection_post_layernorm or config.fp32_residual_connection:
            return None
        if config.parallel_residual_shares_norm:
            return None
        product = {SelfAttention: "linear_qkv", MLP: "linear_fc1"}.get(type(module))
        is_plain = find_norm_class(branch.norm) in (LayerNorm, RMSNorm)
        return product if is_plain and product not in keep_inputs else None

    def _takes_mlp(self, mlp: MLP) -> bool:
        """Return whether the package's module computes what this MLP does, and nothing is asked for inside of it."""
        if "mlp_act" in mlp.recomputed or self.policy.recomputes("mlp") or self.policy.offloads_parts:
            return False
        plain = mlp.activation.clamp_value is None and mlp.activation.linear_offset == 0.0
        names = _GATED_ACTIVATIONS if self.config.gated_linear_unit else _ACTIVATIONS
        return plain and mlp.activation.interleave_size is None and mlp.activation.name in names

    def _give_grouped_products(self, experts: Experts) -> None:
        rounds = self.config.few_bits_recipe is not None
        for part in (experts.linear_fc1, experts.linear_fc2):
            keeps_input = part is experts.linear_fc2 and "moe_act" in experts.recomputed
            # Experts with as many rows each are one batched product, for which the host waits for nothing.
            if not keeps_input and (rounds or not isinstance(part.product, BatchedMatmul)):
                part.product = EngineExperts(part, self.config, fills_blocks=rounds)
