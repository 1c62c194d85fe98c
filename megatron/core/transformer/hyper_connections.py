# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: n residual streams X [n, h] of a token in place of one, which every branch mixes.

    f    = flatten(X) / root mean square                               [n h]
    z    = W f                                                         n values pre, n post, n^2 of the matrix, by rows
    pre  = sigmoid(a_1 z + b),  post = 2 sigmoid(a_2 z + b)            [n] each
    M    = Sinkhorn(a_3 z + b)                                         [n, n], rows and columns with the sum 1
    u    = sum over n of pre[n] X[n];   y = F(norm(u))                 F: attention, an MLP, experts
    X'   = post y + mixed streams

The embedding is copied to all streams, and the last layer's streams become one before the final norm. Two forms:

|                   | HyperConnection                             | MeanConnection                                |
|-------------------|---------------------------------------------|-----------------------------------------------|
| flag              | --enable-hyper-connections                  | --enable-mhc-connections                      |
| mixed streams [k] | sum over j of M[j, k] X[j]                  | sum over j of M[k, j] X[j]                    |
| Sinkhorn          | softmax of rows + e, columns first, e in    | rows, then columns, in each of t rounds;      |
|                   | each divisor; t - 1 further rounds          | divisors of at least e                        |
| pre               | + e                                         |                                               |
| mean square       | sqrt(mean + norm epsilon)                   | sqrt(mean) + e                                |
| at the end        | a sum with learned weights, as `pre`        | the mean                                      |
| dtype             | float32, results in the streams'            | the model's                                   |

with e = 1e-6. Sources: DeepSeek-V4, 2026 (the first); Xie et al., 2025, mHC (the projection); upstream's main branch of
September 2026 (the second). Streams are side by side in one tensor, [s, b, n h]; with sequence parallelism a rank has
its tokens' streams.

With --mhc-recompute-layer-num streams between the branches of some layers are not kept: backward mixes them again from
the streams before the first of these layers and the outputs of the branches, which are there anyway.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.kept_activations import Way, keep_as
from megatron.core.tensor_parallel.parameters import (
    Initialiser,
    declare_parameter,
    ones,
    parameter_dtype,
    xavier_uniform,
    zeros,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.residual_branch import ResidualBranch
from megatron.core.transformer.transformer_config import TransformerConfig

_TINY = 1e-6


class Streams(NamedTuple):
    """The streams that a branch has read, and what becomes of them."""

    tokens: Tensor
    """[t, n, h]: t tokens."""
    post: Tensor
    """[t, n, 1]: each stream's factor on the branch's output."""
    mixing: Tensor
    """[t, n, n]: row k has the weights of all streams in stream k."""
    made_of: MixedAgain | None = None
    """What backward makes the tokens of, where it does not find them."""

    def waiting(self) -> AbstractContextManager[None]:
        """In this block the tokens are kept for backward as `made_of` says."""
        return nullcontext() if self.made_of is None else keep_as(self.tokens, self.made_of)


class HyperConnection(MegatronModule):
    """Mixture of the residual streams that one branch reads, and of those that it leaves behind."""

    dtype = torch.float32
    offset = _TINY

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        assert config.num_streams is not None
        self.streams = count = config.num_streams
        rows = count * (count + 2)
        self.mapping_proj = nn.Module()
        self.mapping_proj.weight = _declare(config, self.dtype, (rows, config.stream_width), xavier_uniform)
        # Three parameters, as they are in upstream's checkpoints.
        factor = _fill_with(config.mhc_init_gating_factor)
        self.alpha_pre, self.alpha_post, self.alpha_res = (_declare(config, self.dtype, (1,), factor) for _ in range(3))
        self.bias = _declare(config, self.dtype, (rows,), zeros)

    def forward(self, x: Tensor) -> tuple[Tensor, Streams]:
        """x [s, b, n h] -> what the branch's norm reads, [s, b, h], and what becomes of the streams."""
        tokens = x.reshape(-1, self.streams, x.shape[-1] // self.streams)
        parameters = (self.alpha_pre, self.alpha_post, self.alpha_res, self.bias)
        u, post, mixing = _Reading.apply(tokens, self.mapping_proj.weight, self.weigh, *parameters)
        return u.view(*x.shape[:-1], -1), Streams(tokens, post.to(x.dtype), mixing.to(x.dtype))

    def weigh(
        self, products: Tensor, mean_square: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """W x of each token, [n (n + 2), t], its mean square [t], and the parameters -> pre [t, 1, n], post [t, n, 1]
        and the mixing matrix [t, n, n]."""
        # Tokens are last: sums over a few streams are then sums of long vectors. Normalised behind the product, which
        # then needs no normalised copy of the streams.
        count, z = self.streams, products * self.invert_root(mean_square).to(products.dtype)
        (pre, post, matrix), (bias_pre, bias_post, bias_matrix) = (
            each.split([count, count, count * count]) for each in (z, bias.unsqueeze(1))
        )
        pre = torch.sigmoid(alpha_pre * pre + bias_pre) + self.offset
        post = 2 * torch.sigmoid(alpha_post * post + bias_post)
        matrix = self.project((alpha_res * matrix + bias_matrix).unflatten(0, (count, count)))
        # Batches of small products are fast where rows lie one behind the other.
        return pre.t().contiguous().unsqueeze(1), post.t().contiguous().unsqueeze(2), self.orient(matrix).contiguous()

    def invert_root(self, mean_square: Tensor) -> Tensor:
        """Factors [t] that normalise tokens, of their mean squares."""
        return invert_root(mean_square, self.config.layernorm_epsilon)

    def project(self, logits: Tensor) -> Tensor:
        """[n, n, t] -> matrices [n, n, t] whose rows and columns have the sum 1 (Sinkhorn and Knopp, 1967)."""
        projected: Tensor = _Sinkhorn.apply(
            logits.softmax(1) + _TINY, (0, *(1, 0) * (self.config.mhc_sinkhorn_iterations - 1)), False
        )
        return projected

    def orient(self, matrix: Tensor) -> Tensor:
        """Projected matrices [n, n, t] -> [t, n, n] as in `Streams`."""
        return matrix.permute(2, 1, 0)


class MeanConnection(HyperConnection):
    """The same in the form of upstream's main branch."""

    offset = 0.0

    def __init__(self, config: TransformerConfig) -> None:
        self.dtype = parameter_dtype(config)
        super().__init__(config)

    def invert_root(self, mean_square: Tensor) -> Tensor:
        return 1 / (mean_square.sqrt() + _TINY)

    def project(self, logits: Tensor) -> Tensor:
        matrix = torch.exp(logits - logits.amax(1, keepdim=True))
        projected: Tensor = _Sinkhorn.apply(matrix, (1, 0) * self.config.mhc_sinkhorn_iterations, True)
        return projected

    def orient(self, matrix: Tensor) -> Tensor:
        return matrix.permute(2, 0, 1)


class HyperConnectedBranch(ResidualBranch):
    """A branch between residual streams: x is [s, b, n h]."""

    @property
    def connection(self) -> HyperConnection:
        """Its mixture of the streams, a part of its layer."""
        found: HyperConnection = self.parts[name_connection(self.name)]
        return found

    @property
    def modules(self) -> list[nn.Module]:
        return [self.connection, *super().modules]

    @property
    def joins(self) -> bool:
        return False

    before: HyperConnectedBranch | None = None
    """The branch whose streams this one reads, where they are not kept."""
    hands_on = False
    """True if the next branch asks what its streams are made of."""
    made: tuple[weakref.ref[Tensor], MixedAgain] | None = None
    """The streams that it has just made, and what of, until the next branch asks."""

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor, Streams]:
        made_of = None
        if self.before is not None and self.before.made is not None:
            (made, found), self.before.made = self.before.made, None
            made_of = found if made() is x else None  # kept, if somebody put something in between
        with nullcontext() if made_of is None else keep_as(x, made_of):
            u, streams = self.connection(x)
        streams = streams._replace(made_of=made_of)
        if self.norm is None:
            return u.to(self.compute_dtype), u, streams
        with self.around_norm():
            return self.norm(u), u, streams

    def sum(self, output: Tensor, bias: Tensor | None, residual: Any) -> Tensor:
        """The streams behind the branch, [s, b, n h]; dropout is of what the output adds to each of them."""
        output = output if bias is None else output + bias
        rows = output.reshape(-1, 1, output.shape[-1]).to(residual.tokens.dtype)
        drops = self.parts[self.name].training and self.config.hidden_dropout > 0.0
        dropped = None
        with residual.waiting():
            mixed = torch.bmm(residual.mixing, residual.tokens)
            if drops:
                share = self.config.hidden_dropout
                added, kept = torch.native_dropout(torch.bmm(residual.post, rows), share, train=True)
                mixed, dropped = mixed.add_(added), (kept, 1 / (1 - share))
            else:
                mixed = mixed.baddbmm_(residual.post, rows)
        x = mixed.view(*output.shape[:-1], -1)
        if self.hands_on and x.requires_grad:
            self.made = weakref.ref(x), MixedAgain(residual, rows, dropped)
        return x


class MixedAgain(Way):
    """Streams behind a branch, which backward mixes again, with those before them where these are missing, too."""

    def __init__(self, read: Streams, rows: Tensor, dropped: tuple[Tensor, float] | None) -> None:
        """read: the streams before the branch. rows [t, 1, h]: its output. dropped: where elements of what it adds are
        kept, bool [t, n, h], and the factor on these."""
        self.before: MixedAgain | Tensor = read.tokens.detach() if read.made_of is None else read.made_of
        self.mixing, self.post, self.rows = read.mixing.detach(), read.post.detach(), rows.detach()
        self.dropped = dropped
        self.tokens: Tensor | None = None

    def pack(self, value: Tensor) -> None:
        """Hold nothing."""

    def unpack(self, waiting: Any, shape: Sequence[int]) -> Tensor:
        """Mix the streams, and all before them, which backward needs next and which go with it."""
        missing: list[MixedAgain] = []
        place: MixedAgain | Tensor = self
        while isinstance(place, MixedAgain) and place.tokens is None:
            missing.append(place)
            place = place.before
        tokens = place.tokens if isinstance(place, MixedAgain) else place
        assert tokens is not None
        with torch.no_grad():
            for each in reversed(missing):
                tokens = each.tokens = each._mix(tokens)
        return tokens.view(shape)

    def _mix(self, tokens: Tensor) -> Tensor:
        mixed = torch.bmm(self.mixing, tokens)
        if self.dropped is None:
            return mixed.baddbmm_(self.post, self.rows)
        kept, factor = self.dropped
        return mixed.add_(torch.bmm(self.post, self.rows).mul_(kept).mul_(factor))


def link_branches(layers: Sequence[Any], config: TransformerConfig) -> None:
    """Let branches of layers that follow each other on a stage leave out the streams between them, in units of
    --mhc-recompute-layer-num layers."""
    number = config.mhc_recompute_layer_num
    if number is None:
        return
    for first in range(0, len(layers), number):
        branches = [branch for layer in layers[first : first + number] for branch in getattr(layer, "branches", ())]
        for before, branch in itertools.pairwise(branches):
            before.hands_on, branch.before = True, before


def name_connection(branch: str) -> str:
    """The name of a branch's connection in a layer, as upstream has it; branch: the name of its body."""
    return f"{branch}_hyper_connection"


def choose_connection(config: TransformerConfig) -> type[HyperConnection]:
    """Return the form that the settings ask for."""
    return HyperConnection if config.enable_hyper_connections else MeanConnection


# ---- both ends of the decoder


def expand(x: Tensor, config: TransformerConfig) -> Tensor:
    """The same in all streams: [s, b, h] -> [s, b, n h]."""
    assert config.num_streams is not None
    return x.repeat(1, 1, config.num_streams)


def declare_end(config: TransformerConfig) -> dict[str, nn.Parameter]:
    """Declare what the sum behind the last layer learns, by upstream's names; nothing where it is a mean."""
    if not config.enable_hyper_connections:
        return {}
    count, dtype = config.num_residual_streams, HyperConnection.dtype
    return {
        "hc_head_fn": _declare(config, dtype, (count, config.stream_width), xavier_uniform),
        "hc_head_base": _declare(config, dtype, (count,), zeros),
        "hc_head_scale": _declare(config, dtype, (1,), ones),
    }


def contract(x: Tensor, config: TransformerConfig, end: Sequence[Tensor]) -> Tensor:
    """Make one of all streams: [s, b, n h] -> [s, b, h]. end: the parameters of `declare_end`, in its order."""
    assert config.num_streams is not None
    streams = x.unflatten(-1, (config.num_streams, -1))
    if not end:
        return streams.mean(-2)
    weight, base, scale = end

    def weigh(products: Tensor, mean_square: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor]:
        z = products * invert_root(mean_square, config.layernorm_epsilon)
        return ((torch.sigmoid(scale * z + base.unsqueeze(1)) + _TINY).t().unsqueeze(1),)

    (u,) = _Reading.apply(streams.flatten(0, 1), weight, weigh, base, scale)
    return u.view(*x.shape[:-1], -1)


# ---- operations


def invert_root(mean_square: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean square + epsilon)."""
    return torch.rsqrt(mean_square + epsilon)


class _Sinkhorn(torch.autograd.Function):
    """Matrices [n, n, t] divided by their sums over these dimensions in turn: sums of at least e where is_bounded, else
    with e added. Many small operations: the gradient of y = x / s is written out, (g - sum of g y) / s."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, dims: Sequence[int], is_bounded: bool) -> Tensor:
        kept = []
        for dim in dims:
            total = matrix.sum(dim, keepdim=True)
            divisor = total.clamp_(min=_TINY) if is_bounded else total.add_(_TINY)
            matrix = matrix / divisor
            kept += [matrix, divisor]
        ctx.save_for_backward(*kept)
        ctx.dims, ctx.is_bounded = dims, is_bounded
        return matrix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, grad = ctx.saved_tensors, grad.contiguous()  # tokens last, as in the matrices
        for dim, matrix, divisor in zip(reversed(ctx.dims), kept[-2::-2], kept[::-2], strict=True):
            of_sum = (grad * matrix).sum(dim, keepdim=True)
            if ctx.is_bounded:
                of_sum *= divisor > _TINY  # a bound stays where it is
            grad = grad.sub(of_sum).div_(divisor)
        return grad, None, None


class _Reading(torch.autograd.Function):
    """A weighted sum of each token's streams [t, n, h], [t, 1, h], with what else `weigh` finds.

    weigh: (weight [rows, n h] times each token [rows, t], its mean square [t], *parameters) -> weights [t, 1, n] of the
    sum, and more. Backward computes it again: of a token nothing is kept but itself, the products and the mean.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weigh: Callable[..., Any], *parameters: Tensor) -> Any:
        rows = x.flatten(1)
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        mean_square = torch.linalg.vector_norm(rows, dim=-1, dtype=wide).square_().div_(rows.shape[-1])
        products = weight @ rows.to(weight.dtype).t()
        ctx.save_for_backward(x, weight, products, mean_square, *parameters)
        ctx.weigh = weigh
        pre, *others = weigh(products, mean_square, *parameters)
        return torch.bmm(pre.to(x.dtype), x), *others

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> Any:
        x, weight, *given = ctx.saved_tensors
        with torch.enable_grad():
            given = [tensor.detach().requires_grad_() for tensor in given]
            found = ctx.weigh(*given)
            of_pre = torch.bmm(grad, x.mT).to(found[0].dtype)
            of_products, of_mean, *of_parameters = torch.autograd.grad(found, given, (of_pre, *grads))
        rows = x.flatten(1).to(weight.dtype)
        of_weight = of_products @ rows if ctx.needs_input_grad[1] else None
        # One buffer for the three ways of the gradient.
        of_x = (of_products.t() @ weight).addcmul_(rows, (of_mean * (2 / rows.shape[-1])).to(weight.dtype).unsqueeze(1))
        of_x = of_x.to(x.dtype).view(x.shape).baddbmm_(found[0].detach().to(x.dtype).mT, grad)
        return of_x, of_weight, None, *of_parameters


def _fill_with(value: float) -> Initialiser:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.fill_(value)

    return fill


def _declare(config: TransformerConfig, dtype: torch.dtype, shape: tuple[int, ...], init: Initialiser) -> nn.Parameter:
    # With sequence parallelism each rank mixes only its tokens.
    partial = ("tp",) if config.sequence_parallel else ()
    return declare_parameter(shape, init=init, dtype=dtype, partial_grad_axes=partial)
