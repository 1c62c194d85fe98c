# SPDX-License-Identifier: Apache-2.0
"""One residual branch of a layer: x + dropout(scale * norm_out(f(norm(x)))), f being attention, an MLP or experts.

    enter    x -> what f reads, what the norm has read, and the residual that f's output is added to
    body     f
    leave    f's output -> x after the branch

Runners (execution/branch_runner.py) wrap the body, join a branch with the next one, or launch it as a graph. A branch
that is added in another way, such as to several residual streams that are mixed (hyper_connections.py), is a subclass
with other `enter` and `sum`: no one else looks into x or the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.operation_table import OperationWay
from megatron.core.tensor_parallel.layers import LayerOutput
from megatron.core.tensor_parallel.parameters import parameter_dtype
from megatron.core.transformer.compiled_regions import Compile, choose_form
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.transformer_config import TransformerConfig

Body = Callable[[Tensor, LayerInputs, Tensor], LayerOutput]
"""(normed [s, b, h], inputs of the layer, what was normalised [s, b, h]) -> (output [s, b, h], bias [h] or None)."""


def choose_residual_sum(config: TransformerConfig, device: torch.device | None = None) -> OperationWay:
    """Choose a way of adding bias and residual, with dropout; a sum of two dtypes needs new memory."""
    is_fused = config.bias_dropout_fusion and not config.fp32_residual_connection
    return choose_form(config, "residual", is_fused=is_fused, device=device).way


class ResidualBranch:
    """A view of a layer's parts: it holds no parameters, and keeps no layer alive."""

    def __init__(
        self,
        config: TransformerConfig,
        parts: Mapping[str, Any],
        kind: Literal["attention", "mlp", "moe"],
        names: tuple[str, str, str],
        multiplier: float = 1.0,
    ) -> None:
        """parts: modules of the layer by name, read in every call. names: of the norm before the body, of the body, and
        of the norm after it, whose parts may be missing. multiplier: of this branch, in addition to the config's."""
        self.config, self.parts, self.kind = config, parts, kind
        self.scale = config.residual_multiplier * multiplier
        self.norm_name, self.name, self.output_norm_name = names
        # With a float32 residual stream, what the body reads is cast to the format of its weights.
        self.compute_dtype = parameter_dtype(config)
        self.around_norm: Callable[[], AbstractContextManager[None]] = nullcontext
        self.body: Body = _Module(parts, self.name, sees_tokens=kind == "attention")
        way = choose_residual_sum(config)
        self.bias_dropout_add, self.is_fused = way.load(), way.is_fused

    @property
    def norm(self) -> Any:
        """The norm before the body; None without."""
        return self.parts.get(self.norm_name)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the branch calls."""
        found = (self.parts.get(name) for name in (self.norm_name, self.name, self.output_norm_name))
        return [module for module in found if module is not None]

    @property
    def joins(self) -> bool:
        """True where the norm of the next branch may take over the sum; False in a subclass with another `leave` or
        `enter`."""
        # Only the norm then reads the sum, in addition to what goes round it.
        is_alone = self.config.bias_dropout_fusion and not self.config.apply_residual_connection_post_layernorm
        return is_alone and isinstance(self.norm, Norm)

    @property
    def is_plain_sum(self) -> bool:
        """True where `leave` drops no element of the sum."""
        return not (self.parts[self.name].training and self.config.hidden_dropout > 0.0)

    def compile_regions(self, compiled: Compile[Any]) -> None:
        """See compiled_regions.py."""
        if not self.is_fused:
            self.bias_dropout_add = compiled(self.bias_dropout_add)

    def add(self, x: Tensor, inputs: LayerInputs, stream: Tensor | None = None) -> Tensor:
        """x [s, b, h] -> x after the branch. stream: what the output is added to instead, in a parallel layer."""
        normed, norm_input, residual = self.enter(x)
        output, bias = self.body(normed, inputs, norm_input)
        return self.leave(output, bias, residual if stream is None else stream)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Normalise x [s, b, h]: the body's input, the norm's input, and the residual that the output is added to."""
        norm = self.parts.get(self.norm_name)
        if norm is None:
            return x.to(self.compute_dtype), x, x
        with self.around_norm():
            # One kernel then sums the two gradients of x as well.
            around_norm = not self.config.apply_residual_connection_post_layernorm
            if around_norm and isinstance(norm, Norm) and norm.can_join(x):
                normed, residual = norm(x, returns_sum=True)
            else:
                normed, residual = norm(x), x
        return normed, x, self.choose_residual(normed, residual)

    def choose_residual(self, normed: Tensor, x: Tensor) -> Tensor:
        """The residual of an input that was normalised."""
        # As BERT and some early models had it: the normalised input, not the input itself, goes round the body.
        return normed.to(x.dtype) if self.config.apply_residual_connection_post_layernorm else x

    def finish(self, output: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The body's output normalised and scaled as configured, [s, b, h], and the bias that is still to be added."""
        norm, scale = self.parts.get(self.output_norm_name), self.scale
        # The bias belongs to what is normalised and scaled; otherwise it is added in the same pass as the residual.
        if norm is not None or scale != 1.0:
            output, bias = (output if bias is None else output + bias), None
            output = output if norm is None else norm(output)
            output = output if scale == 1.0 else output * scale
        return output, bias

    def leave(self, output: Tensor, bias: Tensor | None, residual: Any) -> Tensor:
        """The residual stream after the branch, [s, b, h]."""
        return self.sum(*self.finish(output, bias), residual)

    def sum(self, output: Tensor, bias: Tensor | None, residual: Any) -> Tensor:
        """Add a finished output, [s, b, h], and its bias to the residual stream."""
        training = self.parts[self.name].training
        return self.bias_dropout_add(output, bias, residual, self.config.hidden_dropout, training)


class _Module:
    """A module as the body of a branch. sees_tokens: it lets tokens see one another, and reads the layer's inputs."""

    def __init__(self, parts: Mapping[str, Any], name: str, *, sees_tokens: bool) -> None:
        self.parts, self.name, self.sees_tokens = parts, name, sees_tokens

    def __call__(self, normed: Tensor, inputs: LayerInputs, norm_input: Tensor) -> LayerOutput:
        output: LayerOutput = self.parts[self.name](normed, *(inputs if self.sees_tokens else ()))
        return output


class JoinedBranches:
    """Two branches, where one kernel adds what the first returned to the stream and normalises the sum."""

    def __init__(self, first: ResidualBranch, second: ResidualBranch) -> None:
        self.first, self.second = first, second

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        first, second = self.first, self.second
        normed, norm_input, residual = first.enter(x)
        output, bias = first.finish(*first.body(normed, inputs, norm_input))
        norm = second.norm
        if first.is_plain_sum and norm.can_join(output, bias, residual):
            with second.around_norm():
                normed, residual = norm(output, bias=bias, residual=residual, returns_sum=True)
            norm_input = residual
        else:
            normed, norm_input, residual = second.enter(first.sum(output, bias, residual))
        return second.leave(*second.body(normed, inputs, norm_input), residual)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool) -> Tensor:
    """residual + dropout(x + b) in x's memory, which must be the fresh output of a matrix product that nothing else
    keeps; x, residual [s, b, h], bias [h] or None, prob of dropping an element."""
    if bias is not None:
        x = x.add_(bias)
    # Dropout makes a new tensor and keeps its mask; without it the sum is all that happens.
    if training and prob > 0.0:
        x = F.dropout(x, p=prob)
    return x.add_(residual)


def bias_dropout_add_reference(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool) -> Tensor:
    """residual + dropout(x + b) out of place, in elementary operations; the arguments are as for `bias_dropout_add`."""
    if bias is not None:
        x = x + bias
    return residual + F.dropout(x, p=prob, training=training)
