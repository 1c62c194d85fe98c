# SPDX-License-Identifier: Apache-2.0
"""The process groups are upstream's: same members, same order, same order of groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.mesh import RankGrid
from megatron.core.process_groups_config import GROUP_AXES

DATA = Path(__file__).parent / "data" / "rank_groups.json"
CASES = json.loads(DATA.read_text())
SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "order": "order",
}
FIELDS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "MODEL_PARALLEL_GROUP": "mp",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos_embd",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_pp",
}
ALWAYS_SINGLE = {"GTP_WEIGHT_REMAT_GROUP", "EXPERT_GTP_WEIGHT_REMAT_GROUP"}
"""Groups of a feature that none of the cases uses; they have one member each and we have no name for them."""
EVERYONE = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
"""With one optimizer instance: all ranks, in an order that torch.distributed does not keep."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_groups_are_upstreams(case: dict) -> None:
    grid = RankGrid(case["world_size"], **{SIZES[name]: value for name, value in case["args"].items()})
    expected = case["result"]["groups"]
    assert set(expected) == set(FIELDS) | ALWAYS_SINGLE | {EVERYONE}
    for name, field in FIELDS.items():
        assert grid.groups(GROUP_AXES[field]) == expected[name], name
    assert [sorted(ranks) for ranks in expected[EVERYONE]] == grid.groups(GROUP_AXES["world"])
    for name in ALWAYS_SINGLE:
        assert expected[name] == [[rank] for rank in range(case["world_size"])]


def test_every_named_group_is_checked() -> None:
    assert set(FIELDS.values()) | {"world"} == set(GROUP_AXES)
