# SPDX-License-Identifier: Apache-2.0
"""Our model against a tiny random Hugging Face model: same logits (float32, 1e-5) from the same weights.

The table of families (megatron/training/recipes/families.py) says the rest: the flags follow from the model's
config.json, the weights from the file that transformers writes. Another family is an entry there and one test:

    hf = randomised(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12)))
    assert_same_logits(hf, list_flags(hf))

Nothing may be left over on either side, so that a forgotten bias is found. What our model has is also written back by
the same rows, and must be their file again.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.hf.rows import join, list_names, read_part, split, split_name
from megatron.training.recipes.families import find_family
from megatron.training.recipes.family import Family, Row, find_row
from megatron.training.recipes.family_flags import build_flags
from megatron.training.recipes.gpt import build_gpt_model
from megatron.training.recipes.hf_config import LENGTH as LIMIT
from megatron.training.recipes.hf_config import keep_stored_prediction
from tests.support.gpt_models import read_config

VOCABULARY, LENGTH = 96, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
"""Arguments of a Hugging Face config."""


def randomised(model: nn.Module, seed: int = 1) -> nn.Module:
    """Weights so large that every part matters: matrices keep their input's size, vectors lie around their first
    value (1 for a norm, 0 for a bias)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(noise * param.shape[-1] ** -0.5 if param.dim() > 1 else param + 0.2 * noise)
    return model.eval()


def list_flags(hf_model: nn.Module) -> list[str]:
    """The flags of a model, by the table of families."""
    # transformers' models have no layers of multi-token prediction, whatever their config says.
    config = keep_stored_prediction(hf_model.config.to_dict(), ())
    return build_flags(find_family(config["model_type"]), config)


def without(flags: Sequence[str], *names: str) -> list[str]:
    """The flags but those of these names, each of which must be there."""
    for name in names:
        assert any(flag.split()[0] == name for flag in flags), f"{name} is not among {flags}"
    return [flag for flag in flags if flag.split()[0] not in names]


# ---- a whole file


def saved_tensors(hf_model: nn.Module) -> dict[str, Tensor]:
    """What transformers writes to disk, under the names of the published checkpoints."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as directory:
        hf_model.save_pretrained(directory)
        assert json.loads((Path(directory) / "config.json").read_text())["model_type"] == hf_model.config.model_type
        return load_file(Path(directory) / "model.safetensors")


def convert(model: GPTModel, family: Family, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict from their file. Fails when a tensor of theirs is not used, or would be written back otherwise."""
    state, used, config = {}, set(), model.config
    for ours, value in model.state_dict().items():
        row = find_row(family, ours)
        assert row is not None, f"no row of the family {family.name} gives {ours}"
        names = list_names(row, ours, config)
        used |= {split_name(name)[0] for of_one in names for name in of_one}
        is_stack = ".experts." in ours and "{expert}" not in row.theirs[0]  # in one tensor for all experts
        sources = [[read_part(theirs.__getitem__, name) for name in of_one] for of_one in names]
        if is_stack:
            sources = [list(of_one) for of_one in zip(*sources[0], strict=True)]
        parts = [join(row, config, tensors) for tensors in sources]
        state[ours] = torch.stack(parts) if ".experts." in ours else parts[0]
        assert state[ours].shape == value.shape, f"{ours}: {tuple(state[ours].shape)} instead of {tuple(value.shape)}"
        for tensors, part in zip(sources, parts, strict=True):
            for source, tensor in zip(tensors, split(row, config, part), strict=True):
                assert torch.equal(tensor, source), f"{names} would be written back otherwise"
    tied = {"lm_head.weight"} if model.share_embeddings_and_output_weights else set()
    unused = sorted(set(theirs) - used - tied)
    assert not unused, f"tensors that no row of the family {family.name} reads: {unused}"
    return state


def converted(hf_model: nn.Module, flags: Sequence[str], family: Family | None = None) -> GPTModel:
    """Our model of these flags with the weights of `hf_model`."""
    # Without a length in theirs, ours has none of consequence.
    length = [] if any(LIMIT in flag for flag in flags) else [f"{LIMIT} {LENGTH}"]
    config = read_config(" ".join([*flags, *length, f"--seq-length {LENGTH}"]))
    model = build_gpt_model(config, hf_model.config.vocab_size)
    model.load_state_dict(convert(model, family or find_family(hf_model.config.model_type), saved_tensors(hf_model)))
    return model.eval()


def replace_rows(family: Family, *rows: Row) -> Family:
    """The family with these rows in place of its own for the same parameters."""
    kept = [row for row in family.rows if row.ours not in {other.ours for other in rows}]
    return dataclasses.replace(family, rows=(*kept, *rows))


def token_ids(length: int = LENGTH) -> Tensor:
    """int64 [2, length]."""
    return torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def logits_of(model: GPTModel, ids: Tensor) -> Tensor:
    """[b, s, v]."""
    logits: Tensor = model(ids, torch.arange(ids.shape[1]).expand_as(ids))
    return logits


def _cast(model: GPTModel, dtype: torch.dtype) -> GPTModel:
    for module in model.modules():
        for branch in getattr(module, "branches", ()):
            branch.compute_dtype = dtype  # what attention without a norm before it reads
    return model.to(dtype)


@torch.no_grad()
def assert_same_logits(
    hf_model: nn.Module,
    flags: Sequence[str],
    family: Family | None = None,
    *,
    tolerance: float = 1e-5,
    length: int = LENGTH,
    allows_rounding: bool = False,
) -> GPTModel:
    """Logits of every position of two sequences; returns our model. tolerance: of the largest logit. allows_rounding:
    more where the logits are as far from our model's in float64, so that float32 cannot say them better.

    hf_model: a ...ForCausalLM in float32. flags: `list_flags` of it, possibly changed. family: by default
    that of its model_type.
    """
    model, ids = converted(hf_model, flags, family), token_ids(length)
    expected = hf_model(input_ids=ids, use_cache=False).logits
    largest = expected.abs().max().item()
    assert largest > 0.5, "logits so small that anything would be close"
    difference = (logits_of(model, ids) - expected).abs().max().item()
    bound = tolerance * max(1.0, largest)
    if allows_rounding and bound < difference < 1e-3 * largest:
        # Norms of heads make much of what nearly cancelled, in transformers as here.
        bound = max(bound, 4 * (logits_of(_cast(model, torch.float64), ids) - expected).abs().max().item())
        _cast(model, torch.float32)
    assert difference <= bound, f"logits up to {largest:.2f} differ by {difference:.2e}"
    return model


def assert_each_flag_counts(hf_model: nn.Module, flags: Sequence[str], *names: str) -> None:
    """Same logits with the flags, and other logits when any of those of these names is left out."""
    assert_same_logits(hf_model, flags, allows_rounding=True)
    for name in names:
        others = without(flags, name)
        try:
            assert_same_logits(hf_model, others)
        except AssertionError as error:
            assert "differ by" in str(error), f"without {name}: {error}"
        else:
            raise AssertionError(f"the logits are the same without {name}")
