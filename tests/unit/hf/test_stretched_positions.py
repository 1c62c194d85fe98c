# SPDX-License-Identifier: Apache-2.0
"""Positions stretched in another way: Gemma 3's larger models, and LongRoPE of Phi-3 and 4."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.sequences.state import SequenceState
from tests.support.gpt_models import read_config
from tests.support.huggingface_models import assert_each_flag_counts, assert_same_logits, list_flags, token_ids
from tests.support.run_flags import run_config
from tests.unit.training.recipes.test_model_families import GEMMA, make

transformers = pytest.importorskip("transformers")

LONG = {"short_factor": [1.0, 1.2, 1.5, 1.9], "long_factor": [2.0, 3.0, 5.5, 9.0]}
FLAGS = "--position-embedding-type rope --kv-channels 8 --num-attention-heads 4 --hidden-size 32"
FACTORS = "--longrope-short-factors 1 1 1 1 --longrope-long-factors 2 2 2 2"


def make_phi(**rope: Any) -> Any:
    """A tiny model for 16 tokens, stretched to 64."""
    positions = {"rope_type": "longrope", "rope_theta": 100.0, **LONG, **rope}
    return make("Phi3", original_max_position_embeddings=16, rope_parameters=positions)


def test_gemma3_with_a_factor_of_8() -> None:
    """As the published files of the larger ones say it: the layers without a window alone."""
    hf = make("Gemma3Text", **GEMMA, query_pre_attn_scalar=16, sliding_window=6, rope_theta=1000.0,
              rope_local_base_freq=100.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
              layer_types=["sliding_attention"] * 3 + ["full_attention"])  # fmt: skip
    assert_each_flag_counts(hf, list_flags(hf), "--rotary-seq-len-interpolation-factor", "--rotary-base-local")


@pytest.mark.flags(
    "--longrope-short-factors", "--longrope-long-factors", "--longrope-original-max-position-embeddings",
    "--longrope-magnitude",
)  # fmt: skip
@pytest.mark.parametrize("rope", [{}, {"attention_factor": 1.25}, {"factor": 3.0}], ids=str)
def test_phi_with_longrope(rope: dict[str, Any]) -> None:
    """Up to the original length, and beyond it."""
    hf = make_phi(**rope)
    flags = list_flags(hf)
    for length in (12, 16, 17, 48):
        assert_same_logits(hf, flags, length=length)
    others = [flag.replace("--longrope-short-factors 1 ", "--longrope-short-factors 1.5 ") for flag in flags]
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_logits(hf, others, length=12)
    assert_same_logits(hf, others, length=17)


def test_phi_with_part_of_each_head_rotated() -> None:
    hf = make_phi(short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 4.0, 6.0], partial_rotary_factor=0.75)
    for length in (12, 24):
        assert_same_logits(hf, list_flags(hf), length=length)


@torch.no_grad()
@pytest.mark.parametrize("room", [12, 24])
def test_a_cache_has_the_positions_of_the_longest_sequence_it_can_hold(room: int) -> None:
    """Keys are rotated when they are stored: those of a sequence that grows beyond the original length must have been
    rotated for it from the beginning."""
    hf = make_phi()
    model, ids = assert_same_logits(hf, list_flags(hf)), token_ids(room)
    positions, state = torch.arange(room).expand_as(ids), SequenceState(len(ids), room)
    steps = []
    for part in (slice(0, 7), *(slice(n, n + 1) for n in range(7, room))):
        state.begin([ids[:, part].shape[1]] * len(ids))
        steps.append(model(ids[:, part], positions[:, part], inference_context=state))
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids, positions), rtol=1e-5, atol=1e-5)


def test_what_longrope_needs() -> None:
    with pytest.raises(ConfigError, match="--longrope-short-factors needs --longrope-original-max-position-embeddings"):
        run_config(f"{FLAGS} {FACTORS}")
    more = f"{FLAGS} {FACTORS} --longrope-original-max-position-embeddings 16"
    with pytest.raises(ConfigError, match="--longrope-short-factors scales rotary frequencies, as --use-rope-scaling"):
        run_config(f"{more} --use-rope-scaling")
    hf = make_phi()
    with pytest.raises(ConfigError, match="--longrope-short-factors has 1 factors for 4 pairs of rotated channels"):
        assert_same_logits(hf, [f if "short" not in f else "--longrope-short-factors 1" for f in list_flags(hf)])
    assert read_config(more).model.longrope_long_factors == [2.0] * 4
