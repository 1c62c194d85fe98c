# SPDX-License-Identifier: Apache-2.0
"""The parts of which a transformer layer is built, as its spec names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.weight_names import WeightNames


@dataclass
class TransformerLayerSubmodules:
    """The parts of a layer: specs or classes. Of the norms those are built that the plan asks for. A layer of one
    branch has either attention or an MLP."""

    input_layernorm: Any = None
    self_attention: Any = None
    self_attn_bda: Any = None
    pre_cross_attn_layernorm: Any = None
    cross_attention: Any = None
    cross_attn_bda: Any = None
    pre_mlp_layernorm: Any = None
    mlp: Any = None
    mlp_bda: Any = None
    post_self_attn_layernorm: Any = None
    post_mlp_layernorm: Any = None
    sharded_state_dict_keys_map: Mapping[str, str] = field(default_factory=dict)
    moe: Any = None
    """Spec in the place of `mlp` in layers with experts, where both are to be had from one spec."""
    other_kinds: Mapping[str, Any] = field(default_factory=dict)
    """Parts of further kinds of branches (core/plan/kinds.py), by name."""
    weight_names: WeightNames = "own"

    def problems(self) -> Iterator[str]:
        """A sentence for each part of upstream's that is asked for and does not exist here."""
        for name in ("pre_cross_attn_layernorm", "cross_attention", "cross_attn_bda"):
            if is_there(getattr(self, name)):
                yield f"TransformerLayer has no {name}: a layer attends to its own sequence; leave it out"
        for name in ("self_attn_bda", "mlp_bda"):
            # The layer chooses how dropout and residual are added; upstream's function says the same.
            if is_there(given := getattr(self, name)) and getattr(given, "__name__", "") != "get_bias_dropout_add":
                yield f"TransformerLayer has no {name} but get_bias_dropout_add; give that, or subclass ResidualBranch"
        if self.sharded_state_dict_keys_map:
            yield "sharded_state_dict_keys_map is not read: names in checkpoints do not depend on a spec; leave it out"


def builds(spec: Any, kind: type) -> bool:
    """Return True if a spec, or a class, builds modules of this kind."""
    module = getattr(spec, "module", spec)
    return isinstance(module, type) and issubclass(module, kind)


def is_there(part: Any) -> bool:
    """Return True if a spec names a part; upstream's identities stand for none."""
    return part is not None and not (isinstance(part, type) and issubclass(part, IdentityOp))
