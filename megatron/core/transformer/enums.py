# SPDX-License-Identifier: Apache-2.0
"""Upstream's place for enumerations of layers; they are defined in megatron.core.enums."""

from __future__ import annotations

from megatron.core.enums import AttnBackend, AttnMaskType, LayerType, ModelType

__all__ = ["AttnBackend", "AttnMaskType", "LayerType", "ModelType"]
