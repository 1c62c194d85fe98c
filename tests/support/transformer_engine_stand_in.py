# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's modules by their definition, in plain torch, to put in its place where there is no GPU.

    engine = install(monkeypatch)      # notes what was built and called

Signatures are those of the package, as far as our layers may use them (SIGNATURES, facts of release 2.20.2); what they
pass beside them is a TypeError. What the package refuses is refused here: tensors and weights of two number formats,
matrices that do not fit, positions of a mask that nobody knows. Which recipe was open is noted for each module. Of
rounding it has that of inputs and output gradients with delayed scales, whose state is laid out and updated as the
package's (`fp8_meta`, when the outermost autocast and a backward pass end).
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.execution import transformer_engine_package as engine_package

VERSION = "2.20.2"
_LINEAR = (
    "in_features", "out_features", "sequence_parallel", "fuse_wgrad_accumulation", "tp_group", "tp_size",
    "get_rng_state_tracker", "init_method", "bias", "return_bias", "params_dtype", "parallel_mode", "parameters_split",
    "device", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_name",
    "delay_wgrad_compute", "symmetric_ar_type",
)  # fmt: skip
_NORM = ("eps", "normalization", "zero_centered_gamma", "return_layernorm_output", "return_layernorm_output_gathered")
SIGNATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Linear": ((*_LINEAR, "rng_tracker_name", "save_original_input"), ("inp", "is_first_microbatch")),
    "LayerNormLinear": ((*_LINEAR, *_NORM), ("inp", "is_first_microbatch")),
    "LayerNormMLP": (
        (
            "hidden_size", "ffn_hidden_size", "eps", "sequence_parallel", "return_bias", "get_rng_state_tracker",
            "tp_group", "tp_size", "init_method", "bias", "normalization", "activation", "output_layer_init_method",
            "fuse_wgrad_accumulation", "params_dtype", "return_layernorm_output", "return_layernorm_output_gathered",
            "seq_length", "micro_batch_size", "set_parallel_mode", "zero_centered_gamma", "device",
        ),
        ("inp", "is_first_microbatch"),
    ),
    "GroupedLinear": (
        (
            "num_gemms", "in_features", "out_features", "sequence_parallel", "fuse_wgrad_accumulation", "tp_group",
            "tp_size", "get_rng_state_tracker", "rng_tracker_name", "init_method", "bias", "return_bias",
            "params_dtype", "parallel_mode", "device",
        ),
        ("inp", "m_splits", "is_first_microbatch"),
    ),
    "DotProductAttention": (
        (
            "num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout", "qkv_format",
            "attn_mask_type", "window_size", "sequence_parallel", "tp_size", "get_rng_state_tracker", "tp_group",
            "layer_number", "attention_type", "cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type",
            "softmax_scale", "softmax_type",
        ),
        (
            "query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format", "cu_seqlens_q",
            "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv",
            "attn_mask_type", "window_size",
        ),
    ),
    "Fp8Padding": (("num_gemms", "align_size"), ("inp", "m_splits")),
    "Fp8Unpadding": (("num_gemms", "align_size"), ("inp", "m_splits")),
    "DelayedScaling": (("margin", "fp8_format", "amax_history_len", "amax_compute_algo"), ()),
    "Float8CurrentScaling": (("fp8_format",), ()),
    "Float8BlockScaling": (("fp8_format",), ()),
    "MXFP8BlockScaling": (("fp8_format",), ()),
    "NVFP4BlockScaling": ((), ()),
    "autocast": (("enabled", "calibrating", "recipe", "amax_reduction_group"), ()),
}  # fmt: skip
"""Name -> names that its constructor, and its forward, know; in the package's order as far as arguments have none."""


@dataclass
class Engine:
    """What was asked of the package."""

    built: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Modules, with the arguments of their constructors."""
    ran: list[tuple[str, Any]] = field(default_factory=list)
    """Modules that were called, with the recipe that was open, or None."""
    passes: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of every autocast."""
    open: list[Any] = field(default_factory=list)
    metas: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """The recipe and the scales of every module with delayed ones."""
    ends_backward: bool = False

    def update_scales(self, key: str) -> None:
        """The next scales of all modules, and room for the next largest values."""
        for (_, has), meta in self.metas:
            state = meta[key]
            amax = state.amax_history.amax(0) if has["amax_compute_algo"] == "max" else state.amax_history[0]
            largest = 448.0 if key == "scaling_fwd" or has["fp8_format"].name == "E4M3" else 57344.0
            state.scale.copy_(torch.where(amax > 0, largest / amax / 2 ** has["margin"], state.scale))
            state.amax_history.copy_(state.amax_history.roll(-1, 0))
            state.amax_history[0] = 0

    def end_backward(self) -> None:
        """What the package does behind a backward pass."""
        self.ends_backward = False
        self.update_scales("scaling_bwd")

    def kinds(self) -> set[str]:
        """Names of the modules that were called."""
        return {kind for kind, _ in self.ran}


def install(monkeypatch: pytest.MonkeyPatch, version: str = VERSION) -> Engine:
    """Put it in the package's place, on whatever device tensors are; returns what is asked of it from now on."""
    engine = Engine()
    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    common, recipes = (
        types.ModuleType("transformer_engine.common"),
        types.ModuleType("transformer_engine.common.recipe"),
    )
    package.__version__ = version  # type: ignore[attr-defined]
    for kind in (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, DotProductAttention, Fp8Padding, Fp8Unpadding):
        setattr(pytorch, kind.__name__, type(kind.__name__, (kind,), {"engine": engine}))

    @contextmanager
    def autocast(*args: Any, **named: Any) -> Iterator[None]:
        arguments = bind("autocast", 0, args, named)
        engine.passes.append(arguments | {"depth": len(engine.open)})
        engine.open.append(arguments["recipe"] if arguments["enabled"] else None)
        try:
            yield
        finally:
            engine.open.pop()
            if arguments["enabled"] and not engine.open and torch.is_grad_enabled():
                engine.update_scales("scaling_fwd")

    pytorch.autocast = autocast  # type: ignore[attr-defined]
    recipes.Format = enum.Enum("Format", ["E4M3", "HYBRID"])  # type: ignore[attr-defined]
    for name in (name for name in SIGNATURES if name.endswith("Scaling")):
        setattr(recipes, name, lambda *args, name=name, **named: (name, bind(name, 0, args, named)))
    package.pytorch, package.common, common.recipe = pytorch, common, recipes  # type: ignore[attr-defined]
    for module in (package, pytorch, common, recipes):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # Where the engine_package asks for a GPU.
    monkeypatch.setattr(engine_package, "is_cpu", lambda device: False)
    return engine


def bind(kind: str, place: int, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name. place: 0 for the constructor, 1 for forward. Raises TypeError for what it does not have."""
    names = SIGNATURES[kind][place]
    if unknown := named.keys() - set(names):
        raise TypeError(f"{kind} has no arguments {sorted(unknown)}")
    return {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **named}


# ---- modules


class _Module(nn.Module):
    engine: Engine
    products = 1

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__()
        self.kind = type(self).__name__
        self.has = bind(self.kind, 0, args, named)
        self.engine.built.append((self.kind, self.has))
        self.fp8_meta: dict[str, Any] = {}
        self.build()

    def build(self) -> None:
        """Make the parameters."""

    def forward(self, *args: Any, **named: Any) -> Any:
        arguments = bind(self.kind, 1, args, named)
        self.engine.ran.append((self.kind, self.engine.open[-1] if self.engine.open else None))
        self.init_fp8_metadata(self.products)
        x = args[0]
        for name, parameter in self.named_parameters():
            assert parameter.dtype == x.dtype, f"{name} is {parameter.dtype}, the input {x.dtype}"
        result = self.compute(arguments)
        return _View.apply(result) if isinstance(result, Tensor) else (_View.apply(result[0]), *result[1:])

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Make the scales, where the recipe that is open has delayed ones."""
        recipe = self.engine.open[-1] if self.engine.open else None
        if self.fp8_meta or recipe is None or recipe[0] != "DelayedScaling":
            return
        for key, operands in (("scaling_fwd", 3 * num_gemms), ("scaling_bwd", 2 * num_gemms)):
            history = torch.zeros(recipe[1]["amax_history_len"], operands)
            self.fp8_meta[key] = types.SimpleNamespace(scale=torch.ones(operands), amax_history=history)
        self.engine.metas.append((recipe, self.fp8_meta))

    def compute(self, arguments: dict[str, Any]) -> Any:
        """Run forward."""
        raise NotImplementedError

    def add(self, name: str, *shape: int) -> None:
        """A parameter, where the constructor says."""
        memory = torch.empty(*shape, dtype=self.has["params_dtype"], device=self.has["device"])
        self.register_parameter(name, nn.Parameter(memory))

    def add_norm(self, width: int) -> None:
        """What a norm has."""
        self.add("layer_norm_weight", width)
        self.layer_norm_bias = None
        if self.has["normalization"] == "LayerNorm":
            del self.layer_norm_bias
            self.add("layer_norm_bias", width)

    def normalise(self, x: Tensor) -> Tensor:
        """The norm in front."""
        weight = self.layer_norm_weight + (1.0 if self.has["zero_centered_gamma"] else 0.0)
        if self.layer_norm_bias is None:
            return F.rms_norm(x, weight.shape, weight, self.has["eps"])
        return F.layer_norm(x, weight.shape, weight, self.layer_norm_bias, self.has["eps"])

    def multiply(self, x: Tensor, weight: Tensor, number: int = 0) -> Tensor:
        """X W^T, whose weight gradient goes into main_grad where it was asked to. number: of the module's products."""
        assert x.shape[-1] == weight.shape[-1], f"{self.kind}: input {tuple(x.shape)}, weight {tuple(weight.shape)}"
        x = _Round.apply(x, self.fp8_meta["scaling_fwd"], 3 * number) if self.fp8_meta else x
        y = _Accumulate.apply(x, weight) if self.has["fuse_wgrad_accumulation"] else F.linear(x, weight)
        return _RoundGrad.apply(y, self.fp8_meta["scaling_bwd"], 2 * number, self.engine) if self.fp8_meta else y

    def enter(self, x: Tensor) -> Tensor:
        """The collective of a column-parallel layer."""
        group = self.has["tp_group"]
        return x if group is None else _Enter.apply(x, group, self.has["sequence_parallel"])

    def leave(self, y: Tensor) -> Tensor:
        """The collective of a row-parallel layer."""
        group = self.has["tp_group"]
        return y if group is None else _Leave.apply(y, group, self.has["sequence_parallel"])


class Linear(_Module):
    """Y = X W^T + b, column- or row-parallel."""

    def build(self) -> None:
        ranks = self.has["tp_size"] if self.has["tp_group"] is None else dist.get_world_size(self.has["tp_group"])
        by_column, by_row = self.has["parallel_mode"] == "column", self.has["parallel_mode"] == "row"
        outputs = self.has["out_features"] // (ranks if by_column else 1)
        inputs = self.has["in_features"] // (ranks if by_row else 1)
        self.shape = torch.Size((outputs, inputs))
        self.add("weight", outputs, inputs)
        if self.has["bias"]:
            self.add("bias", outputs)

    def compute(self, arguments: dict[str, Any]) -> Tensor:
        assert self.weight.shape == self.shape
        x = arguments["inp"]
        y = self.multiply(self.enter(x) if self.has["parallel_mode"] == "column" else x, self.weight)
        y = self.leave(y) if self.has["parallel_mode"] == "row" else y
        return y + self.bias if self.has["bias"] else y


class LayerNormLinear(Linear):
    """A norm, and the linear layer behind it."""

    def build(self) -> None:
        super().build()
        self.add_norm(self.has["in_features"])

    def compute(self, arguments: dict[str, Any]) -> Tensor:
        return super().compute(arguments | {"inp": self.normalise(arguments["inp"])})


class LayerNormMLP(_Module):
    """A norm, and the MLP behind it."""

    products = 2

    def build(self) -> None:
        assert self.has["set_parallel_mode"]
        width, inner = self.has["hidden_size"], self.has["ffn_hidden_size"] // self.has["tp_size"]
        gated = self.has["activation"] in ("geglu", "qgeglu", "sreglu", "swiglu")
        self.gated, outputs = gated, 2 * inner if gated else inner
        self.add("fc1_weight", outputs, width)
        self.add("fc2_weight", width, inner)
        if self.has["bias"]:
            self.add("fc1_bias", outputs)
            self.add("fc2_bias", width)
        self.add_norm(width)

    def compute(self, arguments: dict[str, Any]) -> Any:
        inner = self.multiply(self.enter(self.normalise(arguments["inp"])), self.fc1_weight)
        inner = inner + self.fc1_bias if self.has["bias"] else inner
        act = _ACTIVATIONS[self.has["activation"]]
        if self.gated:
            gate, up = inner.chunk(2, -1)
            inner = act(gate) * up
        else:
            inner = act(inner)
        y = self.leave(self.multiply(inner, self.fc2_weight, 1))
        return (y, self.fc2_bias) if self.has["return_bias"] else y


class GroupedLinear(_Module):
    """A linear layer for each expert."""

    def build(self) -> None:
        self.products = self.has["num_gemms"]
        for index in range(self.products):
            self.add(f"weight{index}", self.has["out_features"], self.has["in_features"])

    def compute(self, arguments: dict[str, Any]) -> Tensor:
        x, rows = arguments["inp"], arguments["m_splits"]
        assert len(rows) == self.has["num_gemms"] and sum(rows) == len(x)
        parts = [self.multiply(part, getattr(self, f"weight{i}"), i) for i, part in enumerate(x.split(rows))]
        return torch.cat(parts)


class Fp8Padding(_Module):
    """Rows of each expert filled up with zeros to a multiple of 16."""

    def compute(self, arguments: dict[str, Any]) -> tuple[Tensor, list[int]]:
        rows = [-(-count // 16) * 16 for count in arguments["m_splits"]]
        parts = zip(arguments["inp"].split(arguments["m_splits"]), rows, strict=True)
        return torch.cat([F.pad(part, (0, 0, 0, count - len(part))) for part, count in parts]), rows


class Fp8Unpadding(_Module):
    """The inverse of Fp8Padding."""

    def compute(self, arguments: dict[str, Any]) -> Tensor:
        rows = arguments["m_splits"]
        parts = arguments["inp"].split([-(-count // 16) * 16 for count in rows])
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


class DotProductAttention(_Module):
    """Attention by its definition: [s, b, n, d] -> [s, b, n * dv]."""

    def compute(self, arguments: dict[str, Any]) -> Tensor:
        query, key, value = (arguments[f"{name}_layer"] for name in ("query", "key", "value"))
        assert arguments["qkv_format"] == "sbhd" and arguments["attn_mask_type"] in ("causal", "no_mask")
        widths = self.has["kv_channels"]
        assert (query.shape[2], key.shape[2]) == (self.has["num_attention_heads"], self.has["num_gqa_groups"])
        assert (query.shape[3], value.shape[3]) == (widths if isinstance(widths, tuple) else (widths, widths))
        heads = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(heads, 2), value.repeat_interleave(heads, 2)
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.has["softmax_scale"]
        distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
        hidden = (
            distance < 0 if arguments["attn_mask_type"] == "causal" else torch.zeros_like(distance, dtype=torch.bool)
        )
        if arguments["window_size"] is not None:
            before, behind = arguments["window_size"]
            hidden = hidden | ((distance > before) & (before >= 0)) | ((-distance > behind) & (behind >= 0))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        weights = F.dropout(weights, self.has["attention_dropout"], self.training)
        return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


_TANH_GELU = nn.GELU(approximate="tanh")
_ACTIVATIONS: dict[str, Any] = {
    "gelu": _TANH_GELU, "geglu": _TANH_GELU, "silu": F.silu, "swiglu": F.silu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x), "qgeglu": lambda x: x * torch.sigmoid(1.702 * x),
    "srelu": lambda x: F.relu(x).square(), "sreglu": lambda x: F.relu(x).square(),
}  # fmt: skip


# ---- in autograd


def _round(x: Tensor, state: Any, place: int, dtype: torch.dtype) -> Tensor:
    state.amax_history[0, place] = torch.maximum(state.amax_history[0, place], x.detach().abs().max().float())
    largest, scale = torch.finfo(dtype).max, state.scale[place]
    return ((x.float() * scale).clamp(-largest, largest).to(dtype).float() / scale).to(x.dtype)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Any, place: int) -> Tensor:
        return _round(x, state, place, torch.float8_e4m3fn) if x.numel() else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class _RoundGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, state: Any, place: int, engine: Engine) -> Tensor:
        ctx.given = state, place, engine
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        state, place, engine = ctx.given
        if not engine.ends_backward:
            engine.ends_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(engine.end_backward)  # type: ignore[attr-defined]
        return (_round(grad, state, place, torch.float8_e5m2) if grad.numel() else grad), None, None, None


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        weight.main_grad += grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad @ weight, None


def _gather(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _sum(x: Tensor, group: Any, scatters: bool) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)] if scatters else x


class _View(torch.autograd.Function):
    """The package's functions return views, in which autograd lets nobody work in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone().view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, by_sequence: bool) -> Tensor:
        ctx.given = group, by_sequence
        return _gather(x, group) if by_sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum(grad, *ctx.given), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any, by_sequence: bool) -> Tensor:
        ctx.given = group, by_sequence
        return _sum(y, group, by_sequence)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, by_sequence = ctx.given
        return _gather(grad, group) if by_sequence else grad, None, None
