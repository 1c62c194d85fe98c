# SPDX-License-Identifier: Apache-2.0
"""Upstream's names for decoders that a pattern of letters describes; the model is GPTModel (models/gpt)."""
