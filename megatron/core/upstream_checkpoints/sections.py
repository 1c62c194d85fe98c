# SPDX-License-Identifier: Apache-2.0
"""Sections of state mixers in upstream's files: the rows of a mixer's first projection and of its convolution.

    here                     mixer.in_proj.weight [z; x; B; C; dt], a tensor-parallel rank its heads' rows of each
    upstream's torch_dist    mixer.in_proj.weight.z, .x, .B, .C, .dt, each a tensor by itself
    upstream's torch         as here, a rank's part in a file

The kinds of layers have the sections (core/plan/state_kinds.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from megatron.core.errors import CheckpointError
from megatron.core.plan.branch_kind import BranchKind, Config
from megatron.core.plan.state_kinds import GATED_DELTA_NET, GATED_DELTA_NET_2, MAMBA

_DIVIDED = re.compile(r"(?:.*\.)?(?P<module>mixer|self_attention)\.(?:in_proj\.weight|conv1d[._](?:weight|bias))")
_FORMS = {"gdn2": GATED_DELTA_NET_2}
KNOWN_KINDS = (MAMBA, GATED_DELTA_NET, GATED_DELTA_NET_2)
"""Kinds with sections that upstream has, too."""


def has_sections(name: str) -> bool:
    """Return True for a tensor that is made of a mixer's sections."""
    return _DIVIDED.fullmatch(name) is not None


def list_rows(kind: BranchKind, config: Config, name: str) -> dict[str, int]:
    """Return the rows of each section of a tensor for which `has_sections`, in order. config: of TransformerConfig's
    names."""
    assert kind.sections is not None, f"{kind.name} has no sections"
    sections = kind.sections(config)
    return {part: sections[part] for part in kind.convolved} if ".conv1d" in name else sections


def find_rows(name: str, args: Mapping[str, Any]) -> dict[str, int]:
    """Return the same only by upstream's settings; nothing for other tensors.

    Raises CheckpointError where the settings do not say how large they are.
    """
    found = _DIVIDED.fullmatch(name)
    if found is None:
        return {}
    form = str(args.get("experimental_attention_variant"))
    kind = MAMBA if found["module"] == "mixer" else _FORMS.get(form, GATED_DELTA_NET)
    try:
        return list_rows(kind, SimpleNamespace(**args), name)
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{name}: upstream's settings do not say the sizes of its sections ({error})") from None


def group_sections(names: Iterable[str], args: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tensors of which some of `names` are sections, each with the names of all of its sections in order."""
    wholes = {name.rpartition(".")[0] for name in names}
    return {
        whole: [f"{whole}.{section}" for section in find_rows(whole, args)] for whole in wholes if has_sections(whole)
    }
