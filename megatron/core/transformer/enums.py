# SPDX-License-Identifier: Apache-2.0
"""Upstream's place for the attention enumerations; they are defined in megatron.core.enums."""

from __future__ import annotations

from megatron.core.enums import AttnBackend, AttnMaskType

__all__ = ["AttnBackend", "AttnMaskType"]
