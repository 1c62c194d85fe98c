"""RunConfig: each setting is declared once, and settings that earlier releases saved still load."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path

from megatron.training.config.container import RunConfig, group_classes

SAVED = Path(__file__).parent / "data" / "saved_settings.json"
# Fields of two classes that are two things, and which.
TWO_THINGS = {
    "bf16": "of the layers; of the parameters that an optimizer is given, which knows no model",
    "fp16": "likewise",
}


def test_no_field_is_declared_twice() -> None:
    groups = defaultdict(list)
    for group, config_class in group_classes().items():
        for field in dataclasses.fields(config_class):
            groups[field.name].append(group)
    assert {name for name, declared in groups.items() if len(declared) > 1} == set(TWO_THINGS)


def test_settings_of_earlier_releases_load() -> None:
    """Recorded before seed, positions, windows and experts had one place each."""
    config = RunConfig.from_dict(json.loads(SAVED.read_text()))
    model = config.model
    assert (model.seed, model.compile, model.window_size, model.window_attn_skip_freq) == (77, False, (7, 0), 4)
    assert (model.position_embedding_type, model.no_rope_freq) == ("rope", 2)
    assert (model.num_moe_experts, model.moe_layer_freq) == (4, [0, 0, 1, 1])
    assert model.moe_router_load_balancing_type == ["aux_loss", "seq_aux_loss"]
    assert model.moe_aux_loss_coeff == [0.1, 0.2]
    assert model.activation_func == "silu" and model.gated_linear_unit and config.optimizer.bf16
    assert RunConfig.from_dict(config.to_dict()) == config
