# SPDX-License-Identifier: Apache-2.0
"""Sections of a mixer's tensors, which upstream's files have one by one, make up the tensors."""

from __future__ import annotations

import pytest
import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor, SlicedTensor
from megatron.core.placement import Part, Placement, Split
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.checkpoint.layer_names import ask_for_sections

CONFIG = TransformerConfig(
    hybrid_layer_pattern="-MG", hidden_size=6, num_attention_heads=2, mamba_num_heads=4, mamba_head_dim=2,
    mamba_num_groups=2, mamba_state_dim=3, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=2,
    linear_value_head_dim=1,
)  # fmt: skip
SECTIONS = {
    "decoder.layers.1.mixer.in_proj.weight": {"z": 8, "x": 8, "B": 6, "C": 6, "dt": 4},
    "decoder.layers.1.mixer.conv1d.bias": {"x": 8, "B": 6, "C": 6},
    "decoder.layers.2.self_attention.in_proj.weight": {"query": 4, "key": 4, "value": 4, "z": 4, "beta": 4, "alpha": 4},
}


@pytest.mark.parametrize("prefix", ["", "optimizer.exp_avg."])
@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("is_sliced", [False, True])
def test_sections_make_up_the_tensor(prefix: str, name: str, rank: int | None, is_sliced: bool) -> None:
    sections = SECTIONS[name]
    rows, rest = sum(sections.values()), () if name.endswith("bias") else (6,)
    parts = tuple(Part(size, name=section) for section, size in sections.items())
    splits = () if rank is None else (Split(0, "tp", 2, rank, parts),)
    placement = Placement(name, (rows, *rest), splits=splits)
    full = torch.arange(float(torch.Size((rows, *rest)).numel())).view(rows, *rest)
    held = torch.zeros(placement.local_shape)
    if is_sliced:
        flat = torch.zeros(held.numel() - 5)
        tensor: ShardedTensor = SlicedTensor.from_slice(flat, 3, placement, prefix=prefix)
    else:
        tensor = ShardedTensor.from_placement(held, placement, prefix=prefix)
    asked = ask_for_sections(CONFIG, {tensor.key: tensor})
    assert [key.removeprefix(f"{prefix}{name}.") for key in asked] == list(sections)
    saved = dict(zip(asked, full.split(list(sections.values())), strict=True))
    for key, part in asked.items():
        assert part.key == key and part.global_shape == saved[key].shape
        for index, block in enumerate(part.blocks):
            part.block(index).copy_(saved[key][tuple(slice(at, at + length) for at, length in block.box)])
    # What the whole tensor's blocks say.
    for index, block in enumerate(tensor.blocks):
        assert torch.equal(tensor.block(index), full[tuple(slice(at, at + length) for at, length in block.box)])


def test_other_tensors_stay_as_they_are() -> None:
    tensor = ShardedTensor.whole("decoder.layers.0.mlp.linear_fc1.weight", torch.zeros(24, 6))
    assert ask_for_sections(CONFIG, {tensor.key: tensor}) == {tensor.key: tensor}
