# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (Su et al., "RoFormer", 2021): plain, and fused with the split of the packed projection.

Channels are rotated in pairs (x1, x2) by the angle position * frequency:

    y1 = x1 cos - x2 sin          half form (GPT-NeoX, Llama): x1, x2 are the two halves of the rotated channels
    y2 = x2 cos + x1 sin          interleaved (GPT-J): x1, x2 are even and odd channels

The gradient is the rotation by the opposite angle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.device import is_cpu
from megatron.core.kernels.launching import by_kernel


class Rotation(NamedTuple):
    """Rotation that positions give to queries and keys: cosines and sines of a stretch of positions, and how channels
    are paired; a layer without rotary positions may still have a factor on queries, and angles of no channels."""

    cos: Tensor
    """[s, rotated / 2] float32; [s, b, rotated / 2] where each sequence has other positions."""
    sin: Tensor
    """The same."""
    interleaved: bool
    query_scale: Tensor | None = None
    """[s, 1, 1, 1] float32, a factor on queries that goes with their positions; None for none."""

    @property
    def channels(self) -> int:
        """Channels of a head that are rotated; the rest stays as it is."""
        return 2 * int(self.cos.shape[-1])


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _angles(rotation: Rotation, x: Tensor) -> tuple[Tensor, Tensor]:
    own, every = rotation.cos.shape[:-1], (1,) * (x.dim() - rotation.cos.dim())
    shape = (*own, *every, rotation.cos.shape[-1])  # [s, 1 or b, 1, ..., rotated / 2]
    # Computed in float32 and rounded last: large positions times frequencies have no digits left in 16 bits.
    return rotation.cos.view(shape).to(x.dtype), rotation.sin.view(shape).to(x.dtype)


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the leading channels of x [s, ..., d]; elementary operations, out of place."""
    # With --rotary-percent below 1 the rest of a head carries no position.
    is_whole = rotation.channels == x.shape[-1]
    turned = x if is_whole else x[..., : rotation.channels]
    # The gradients of two chunks are put side by side, the gradients of two slices padded with zeros and added.
    x1, x2 = _pairs(turned, True) if rotation.interleaved else turned.chunk(2, dim=-1)
    cos, sin = _angles(rotation, x)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    if rotation.interleaved:
        turned = torch.stack((y1, y2), dim=-1).flatten(-2)  # [..., rotated / 2, 2] -> [..., rotated]
    else:
        turned = torch.cat((y1, y2), dim=-1)
    return turned if is_whole else torch.cat((turned, x[..., rotation.channels :]), dim=-1)


def _are_alike(x: Tensor, rotation: Rotation) -> bool:
    """Return whether all sequences have the same positions, as kernels take them."""
    return rotation.cos.dim() == 2


@by_kernel("megatron.core.kernels.rotary:rotate_heads", "x", fits=_are_alike)
def rotate_heads(x: Tensor, rotation: Rotation) -> Tensor:
    """`apply_rotary`, by a kernel where one runs."""
    return apply_rotary(x, rotation)


def _rotate_(x: Tensor, rotation: Rotation) -> None:
    """Rotate x [s, ..., d] in place."""
    x1, x2 = _pairs(x[..., : rotation.channels], rotation.interleaved)
    cos, sin = _angles(rotation, x)
    # One temporary: x1 is needed for y2, and is written over first.
    y2_part = x1 * sin
    x1.mul_(cos).addcmul_(x2, sin, value=-1)
    x2.mul_(cos).add_(y2_part)


def _rotate_back_into(target: Tensor, grad: Tensor, rotation: Rotation) -> None:
    """target = grad rotated by the opposite angle; both [s, ..., d]."""
    g1, g2 = _pairs(grad[..., : rotation.channels], rotation.interleaved)
    t1, t2 = _pairs(target[..., : rotation.channels], rotation.interleaved)
    cos, sin = _angles(rotation, grad)
    torch.mul(g1, cos, out=t1)
    t1.addcmul_(g2, sin)
    torch.mul(g2, cos, out=t2)
    t2.addcmul_(g1, sin, value=-1)
    target[..., rotation.channels :].copy_(grad[..., rotation.channels :])


def _split(packed: Tensor, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of [s, b, groups, heads_per_group + 2, d]: queries, keys and values, each with a head dimension."""
    return packed[..., :heads_per_group, :], packed[..., -2, :], packed[..., -1, :]


def _merge_heads(query: Tensor) -> Tensor:
    """[s, b, groups, heads_per_group, d] -> [s, b, heads, d]: a view with one head per group, a copy otherwise."""
    return query.squeeze(3) if query.shape[3] == 1 else query.flatten(2, 3)


def split_qkv(packed: Tensor, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the packed projection by elementary operations.

    packed: [s, b, groups, heads_per_group + 2, d]; what lies between a group's queries and its key is left out. Returns
    query [s, b, heads, d], key and value [s, b, groups, d].
    """
    query, key, value = _split(packed, heads_per_group)
    return _merge_heads(query), key, value


def split_and_rotate_reference(
    packed: Tensor, heads_per_group: int, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_qkv`, then `apply_rotary` on queries and keys."""
    if packed.shape[-2] == heads_per_group + 2:
        # As in `apply_rotary`: one cut, whose gradient is put together in one pass.
        queries, keys, values = packed.split((heads_per_group, 1, 1), dim=-2)
        query, key, value = _merge_heads(queries), keys.squeeze(-2), values.squeeze(-2)
    else:
        query, key, value = split_qkv(packed, heads_per_group)
    return (query, key, value) if rotation is None else (*rotate_queries_and_keys(query, key, rotation), value)


def rotate_queries_and_keys(query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """`apply_rotary` on query [s, b, n, d] and key [s, b, g, d]."""
    return apply_rotary(query, rotation), apply_rotary(key, rotation)


def rotate_by_kernel(query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """`rotate_queries_and_keys`, by a kernel for each where one runs."""
    return rotate_heads(query, rotation), rotate_heads(key, rotation)


class _SplitAndRotate(torch.autograd.Function):
    """Split the packed projection, and rotate queries and keys in place."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, heads_per_group: int, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Rotated in place although autograd knows the tensor: a matrix product does not keep its output for backward.
        packed = packed.detach()
        ctx.packed_shape, ctx.heads_per_group, ctx.rotation = packed.shape, heads_per_group, rotation
        if rotation is not None:
            query, key, _ = _split(packed, heads_per_group)
            _rotate_(query, rotation)
            _rotate_(key, rotation)
        return split_qkv(packed, heads_per_group)

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> Any:
        # The three gradients are written straight to their places in the packed one.
        packed = grad_query.new_empty(ctx.packed_shape)
        query, key, value = _split(packed, ctx.heads_per_group)
        grad_query = grad_query.unflatten(2, query.shape[2:4])  # [s, b, heads, d] -> [s, b, groups, heads_per_group, d]
        for target, grad in ((query, grad_query), (key, grad_key)):
            if ctx.rotation is None:
                target.copy_(grad)
            else:
                _rotate_back_into(target, grad, ctx.rotation)
        value.copy_(grad_value)
        return packed, None, None


@by_kernel(
    "megatron.core.kernels.rotary:split_and_rotate", "packed",
    fits=lambda packed, heads, rotation: rotation is not None and _are_alike(packed, rotation),
)  # fmt: skip
def split_and_rotate(packed: Tensor, heads_per_group: int, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
    """`split_qkv`, then `apply_rotary` on queries and keys, in the memory of `packed`, which is overwritten."""
    if torch.is_inference_mode_enabled() and is_cpu(packed):
        if rotation is not None:
            _rotate_(packed[..., :-1, :], rotation)  # a group's queries and its key lie side by side
        return split_qkv(packed, heads_per_group)
    result: tuple[Tensor, Tensor, Tensor] = _SplitAndRotate.apply(packed, heads_per_group, rotation)
    return result


# ---- latent attention: a part of each head is rotated, and key heads share that part


def join_latent_heads(
    query: Tensor, expanded: Tensor, positions: Tensor, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate, and put each key head together, by elementary operations.

    query [s, b, n, d + p], whose last p channels are rotated; expanded [s, b, n, d + dv], each head's key channels
    without position and its value; positions [s, b, 1, p], the key channels that all heads share. Returns query
    [s, b, n, d + p], key [s, b, n, d + p] and value [s, b, n, dv].
    """
    shared = positions.shape[-1]
    plain = query.shape[-1] - shared
    if rotation is not None:
        query = torch.cat((query[..., :plain], apply_rotary(query[..., plain:], rotation)), dim=-1)
        positions = apply_rotary(positions, rotation)
    positions = positions.expand(-1, -1, query.shape[2], -1)
    key = torch.cat((expanded[..., :plain], positions), dim=-1)
    # A copy: as a view it would keep the key channels next to it in memory until backward, a second time.
    return query, key, expanded[..., plain:].contiguous()


class _RotateAndJoin(torch.autograd.Function):
    """`join_latent_heads` that rotates queries in place, and writes each key once."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, expanded: Tensor, positions: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.rotation, ctx.plain = rotation, query.shape[-1] - positions.shape[-1]
        # Rotated in place although autograd knows the tensor: a matrix product does not keep its output for backward.
        query = query.detach()
        key = torch.empty_like(query)
        key[..., : ctx.plain] = expanded[..., : ctx.plain]
        key[..., ctx.plain :] = positions if rotation is None else apply_rotary(positions, rotation)
        if rotation is not None:
            _rotate_(query[..., ctx.plain :], rotation)
        return query, key, expanded[..., ctx.plain :].contiguous()

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> Any:
        rotation, plain = ctx.rotation, ctx.plain
        grad_expanded = torch.cat((grad_key[..., :plain], grad_value), dim=-1)
        grad_positions = grad_key[..., plain:].sum(dim=2, keepdim=True)
        if rotation is None:
            return grad_query, grad_expanded, grad_positions, None
        turned_query, turned_positions = torch.empty_like(grad_query), torch.empty_like(grad_positions)
        turned_query[..., :plain] = grad_query[..., :plain]
        _rotate_back_into(turned_query[..., plain:], grad_query[..., plain:], rotation)
        _rotate_back_into(turned_positions, grad_positions, rotation)
        return turned_query, grad_expanded, turned_positions, None


def _turns_all(query: Tensor, expanded: Tensor, positions: Tensor, rotation: Rotation | None) -> bool:
    return rotation is not None and rotation.channels == positions.shape[-1]


@by_kernel("megatron.core.kernels.latent_heads:rotate_and_join", "query", "expanded", fits=_turns_all)
def rotate_and_join_latent_heads(
    query: Tensor, expanded: Tensor, positions: Tensor, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`join_latent_heads` in the memory of `query`, which is overwritten."""
    result: tuple[Tensor, Tensor, Tensor] = _RotateAndJoin.apply(query, expanded, positions, rotation)
    return result
