# SPDX-License-Identifier: Apache-2.0
"""Which package computes a mixer on a GPU, why none does, and what the log says of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.ssm.describe import describe_mixers
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNet2
from megatron.core.ssm.kimi_delta_attention import KimiDeltaAttention
from megatron.core.ssm.libraries import choose_convolution, choose_states
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.pieces import Pieces
from megatron.core.ssm.state_mixer import StateMixer, StateMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.mixer_libraries import installed
from tests.support.pretend_groups import pretend

GPU = torch.device("cuda")
PACKAGES = ("fla", "mamba_ssm", "causal_conv1d")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking a GPU for its kernels takes a GPU."""
    monkeypatch.setattr("megatron.core.ssm.libraries.kernels_work", lambda device: device == GPU)


def config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **settings)


def name_states(
    mixer: type[StateMixer], key_width: int = 64, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> str:
    return choose_states(mixer.library, config(**settings), key_width, dtype, GPU).name


def test_packages_are_chosen_on_a_gpu() -> None:
    with installed(*PACKAGES):
        assert name_states(GatedDeltaNet) == "flash-linear-attention, chunk_gated_delta_rule"
        assert name_states(KimiDeltaAttention) == "flash-linear-attention, chunk_kda"
        assert name_states(MambaMixer, dtype=torch.float32) == "mamba-ssm, mamba_chunk_scan_combined"
        # No package has its rule.
        assert name_states(GatedDeltaNet2) == (
            "chunks of 64 tokens by products of PyTorch, states from one to the next by one kernel each way"
        )
        library, name = choose_convolution(config(), 64, 4, GPU)
        assert library is not None and name == "causal-conv1d, causal_conv1d_fn"
        for mixer in (GatedDeltaNet, KimiDeltaAttention, MambaMixer):
            own = choose_states(mixer.library, config(), 64, torch.bfloat16, torch.device("cpu"))
            assert own.name == "chunks of 64 tokens by products of PyTorch"
        assert choose_convolution(config(), 64, 4, torch.device("cpu"))[0] is None


@pytest.mark.parametrize(
    ("mixer", "options", "reason"),
    [
        (GatedDeltaNet, {"dtype": torch.float32}, "not by flash-linear-attention: it does not take float32"),
        (KimiDeltaAttention, {"key_width": 320}, "it takes keys of at most 256 channels"),
        (MambaMixer, {"dtype": torch.float64}, "not by mamba-ssm: it does not take float64"),
        (MambaMixer, {"attention_backend": "local"}, "not by mamba-ssm: --attention-backend local"),
        (GatedDeltaNet, {"attention_backend": "unfused"}, "--attention-backend unfused"),
        (GatedDeltaNet, {"deterministic_mode": True}, "--deterministic-mode"),
    ],
)
def test_the_log_says_why_a_package_is_not_used(mixer: type[StateMixer], options: dict[str, Any], reason: str) -> None:
    with installed(*PACKAGES):
        assert reason in name_states(mixer, **options)


def test_packages_that_are_not_there_end_no_run() -> None:
    with installed("fla"):
        missing = name_states(MambaMixer)
        assert "needs the Python package mamba_ssm, which is not installed" in missing and "chunks of 64" in missing
        assert "causal_conv1d, which is not installed" in choose_convolution(config(), 64, 4, GPU)[1]


@pytest.mark.parametrize(("channels", "width", "reason"), [(62, 4, "multiples of 8"), (64, 5, "2 to 4 tokens")])
def test_convolutions_that_the_package_does_not_take(channels: int, width: int, reason: str) -> None:
    with installed(*PACKAGES):
        library, name = choose_convolution(config(), channels, width, GPU)
    assert library is None and reason in name


NEMOTRON_H_8B = TransformerConfig(
    num_layers=1, hidden_size=4096, num_attention_heads=32, mamba_num_heads=128, mamba_head_dim=64, mamba_state_dim=128,
    mamba_num_groups=8, bf16=True, params_dtype=torch.bfloat16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (8192, "tokens exchanged for heads, 4.85 MB a layer (states would be 25.2 MB)"),
        (131072, "states handed over, 25.2 MB a layer (heads would be 77.6 MB)"),
    ],
)
def test_the_log_says_what_context_parallel_ranks_send(tokens: int, said: str) -> None:
    groups = pretend(0, cp=8)
    described = describe_mixers(NEMOTRON_H_8B, [MambaMixer], groups, tokens, 1)
    assert described["states over context-parallel ranks"] == said
    # Layers decide by the same function.
    with FakeTensorMode(), torch.no_grad():
        submodules = StateMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
        mixer = MambaMixer(NEMOTRON_H_8B, submodules, layer_number=1, pg_collection=groups)
        inputs = mixer.sketch_inputs(tokens // 16, 2, torch.bfloat16)
    assert Pieces(groups.cp, tokens, None, torch.device("cpu")).moves_heads(inputs) == said.startswith("tokens")


def test_kinds_that_differ_are_named() -> None:
    settings: dict[str, Any] = {
        "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    described = describe_mixers(config(**settings), [GatedDeltaNet, GatedDeltaNet2], pretend(0, cp=2), 4096, 2)
    assert "do not divide 3 heads" in described["states over context-parallel ranks"]
    with installed(*PACKAGES, on_cpu=True):
        described = describe_mixers(config(**settings), [GatedDeltaNet, GatedDeltaNet2], pretend(0), 4096, 2)
    assert described["states"] == (
        "a gated delta net: flash-linear-attention, chunk_gated_delta_rule; "
        "a gated delta net of the second form: chunks of 64 tokens by products of PyTorch"
    )
