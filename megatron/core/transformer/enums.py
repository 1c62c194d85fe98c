# SPDX-License-Identifier: Apache-2.0
"""Upstream's place for enumerations of layers; they are defined in megatron.core.enums."""

from __future__ import annotations

from typing import Any

from megatron.core.enums import AttnBackend, AttnMaskType, LayerType, ModelType

# Put here by a table of upstream's names; declared for type checkers.
InferenceCudaGraphScope: Any

__all__ = ["AttnBackend", "AttnMaskType", "LayerType", "ModelType"]
