# SPDX-License-Identifier: Apache-2.0
"""Mixers with a state on gloo ranks against one process: output, input gradient and every parameter's gradient."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import all_gather_object, all_reduce
from megatron.core.context_parallel.sharding import shard_sequence
from megatron.core.mesh import RankGrid
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.placement import get_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.chunks import Inputs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNet2
from megatron.core.ssm.kimi_delta_attention import KimiDeltaAttention
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.pieces import Pieces
from megatron.core.ssm.short_convolution import ShortConvolution
from megatron.core.ssm.state_mixer import StateMixer, StateMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.parameters import initialise_parameters
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.parallel.harness import run_distributed
from tests.support.mixer_libraries import installed
from tests.support.pretend_groups import pretend
from tests.support.sequence_shards import join_sequence

HIDDEN, LENGTH = 72, 72
BOUNDS = [0, 1, 20, 36, 43, 54, 72]
"""Documents: one token, one that ends with a piece, one that ends inside of one. On two context-parallel ranks the
first has no piece that goes on with a document."""
KINDS: dict[str, tuple[type[StateMixer | ShortConvolution], dict[str, Any]]] = {
    "mamba": (MambaMixer, {"mamba_num_heads": 6, "mamba_head_dim": 10, "mamba_state_dim": 7, "mamba_num_groups": 2}),
    "gdn": (GatedDeltaNet, {"linear_num_key_heads": 2, "linear_num_value_heads": 6}),
    "gdn2": (GatedDeltaNet2, {"linear_num_key_heads": 2, "linear_num_value_heads": 6}),
    "short": (ShortConvolution, {"short_conv_bias": True, "short_conv_kernel_dim": 4}),
    "kda": (KimiDeltaAttention, {"linear_num_key_heads": 6, "linear_num_value_heads": 6, "linear_value_head_dim": 8}),
}
LAYOUTS = [{"tp": 2, "sp": 1}, {"cp": 2}, {"cp": 2, "heads": 1}, {"tp": 2, "cp": 2}, {"cp": 3, "heads": 1}]
"""Degrees of parallelism; heads: context-parallel ranks exchange tokens for heads where they can, else states."""
WIDTHS = {"linear_key_head_dim": 8, "linear_value_head_dim": 5}


def run_mixer(kind: str, sizes: dict[str, int], is_packed: bool) -> dict[str, Tensor]:
    """Output and gradients, put together from all ranks: by name, whole tensors."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    tp, cp = sizes.get("tp", 1), sizes.get("cp", 1)
    groups = ProcessGroupCollection.build(RankGrid(world, tp=tp, cp=cp), dist.get_rank() if world > 1 else 0)
    mixer_class, widths = KINDS[kind]
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=6, normalization="RMSNorm", init_method_std=0.2,
        tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel="sp" in sizes, **WIDTHS | widths,
    )  # fmt: skip
    submodules = StateMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    mixer = mixer_class(config, submodules, layer_number=1, pg_collection=groups)
    initialise_parameters(mixer, seed=5)
    torch.manual_seed(1)
    batch = 1 if is_packed else 2
    whole, weights = torch.randn(LENGTH, batch, HIDDEN), torch.randn(LENGTH, batch, HIDDEN)
    tp_rank, cp_rank = groups.tp.rank(), groups.cp.rank()

    def take(x: Tensor) -> Tensor:
        x = shard_sequence(x, cp_rank, cp)
        return x.chunk(tp)[tp_rank] if "sp" in sizes else x

    hidden = take(whole).clone().requires_grad_()
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor(BOUNDS)) if is_packed else None

    def moves_heads(pieces: Pieces, inputs: Inputs) -> bool:
        return "heads" in sizes and all(x.shape[2] % cp == 0 for x in inputs if x is not None)

    # Heads where they divide, or states, whatever is fewer bytes.
    with mock.patch.object(Pieces, "moves_heads", moves_heads):
        output, bias = mixer(hidden, packed_seq_params=packed)
    output = output if bias is None else output + bias
    (output * take(weights)).sum().backward()
    found = {"output": output.detach(), "input": hidden.grad}
    if "sp" in sizes:
        found = {name: torch.cat(all_gather_object(x, groups.tp)) for name, x in found.items()}
    found = {name: join_sequence(all_gather_object(x, groups.cp)) if cp > 1 else x for name, x in found.items()}
    for name, parameter in mixer.named_parameters():
        placement, grad = get_placement(parameter, name), parameter.grad
        for axis in placement.partial_grad_axes:
            all_reduce(grad, getattr(groups, axis))
        all_reduce(grad, groups.cp)
        found[name] = placement.join(all_gather_object(grad, groups.tp)) if placement.splits else grad
    return found


def run_all(sizes: dict[str, int]) -> dict[tuple[str, bool, str], Tensor]:
    """Every kind, with and without packed documents."""
    return {
        (kind, is_packed, name): x
        for kind in KINDS
        for is_packed in (False, True)
        for name, x in run_mixer(kind, sizes, is_packed).items()
    }


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, bool, str], Tensor]:
    """What one process computes."""
    return run_all({})


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_layout_computes_what_one_process_does(
    sizes: dict[str, int], expected: dict[tuple[str, bool, str], Tensor]
) -> None:
    found = run_distributed(run_all, sizes.get("tp", 1) * sizes.get("cp", 1), sizes)
    for key, x in expected.items():
        # Gradients of the decay are small differences of large sums.
        tolerance = 1e-4 if key[2] in ("A_log", "dt_bias") else 3e-6
        for of_rank in found:
            torch.testing.assert_close(
                of_rank[key],
                x,
                rtol=0,
                atol=tolerance * x.abs().max().item(),
                msg=lambda text, key=key: f"{key}: {text}",
            )


def run_with_libraries(sizes: dict[str, int]) -> tuple[dict[tuple[str, bool, str], Tensor], dict[str, int]]:
    """What `run_all` computes by stand-ins of the packages for a GPU, and their calls."""
    with installed("fla", "mamba_ssm", "causal_conv1d", on_cpu=True) as calls:
        return run_all(sizes), dict(calls)


@pytest.mark.parametrize("sizes", [{}, {"cp": 2, "heads": 1}], ids=str)
def test_libraries_are_called_for_what_they_compute(
    sizes: dict[str, int], expected: dict[tuple[str, bool, str], Tensor]
) -> None:
    world = sizes.get("cp", 1)
    ranks = run_distributed(run_with_libraries, world, sizes) if world > 1 else [run_with_libraries(sizes)]
    for found, calls in ranks:
        # With and without documents. A convolution that reads another rank's tokens, of 62 channels, or gdn2: our own.
        by_packages = {"scan": 2, "delta rule": 2, "kimi delta": 2}
        assert calls == by_packages | ({"convolution": 4} if world == 1 else {})
        for key, x in expected.items():
            tolerance = 1e-4 if key[2] in ("A_log", "dt_bias") else 3e-6
            atol = tolerance * x.abs().max().item()
            torch.testing.assert_close(found[key], x, rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("tokens", "heads", "expected"), [(16, 8, True), (64, 8, False), (16, 6, False)])
def test_the_fewer_bytes_are_exchanged(tokens: int, heads: int, expected: bool) -> None:
    """A token of a head is 2 x 16 numbers of query and key, 8 of value and of output and one of decay, on 4 ranks; a
    state 16 x (8 + 16) numbers."""
    query, value = torch.empty(2, tokens, heads, 16), torch.empty(2, tokens, heads, 8)
    pieces = Pieces(pretend(0, cp=4).cp, 8 * tokens, None, torch.device("cpu"))
    assert pieces.moves_heads(Inputs(query, query, value, value[..., 0])) == expected
